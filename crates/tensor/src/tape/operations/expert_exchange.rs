//! Rows of tokens on their way to the ranks that have their experts, and back (Lepikhin et al., "GShard", 2020, section 3.3), without padding.

use super::experts::Capacity;
use crate::device::{Device, DeviceError};
use crate::parameter_table::ParameterId;
use crate::shape::Shape;
use crate::tape::{
    BackwardContext, ExchangedRuns, ForwardContext, Operation, OperationContext, ReadBy, Runs,
    has_no_gradient,
};
use crate::tensor::{Tensor, View};
use smallvec::SmallVec;
use std::iter;
use std::ops::{Range, RangeInclusive};
use trireme_base::{AxisPlace, DType};

/// Tells all ranks of the expert axis how many choices each expert has. The inputs are the first and the last output of [`GroupRows`](crate::tape::GroupRows); of the
/// last one only the shape is read. The outputs, all u32, are:
///
/// - a table (`[degree + 1, num_experts + 2]`): a row of each rank, with how many choices of each expert it has, how many it has in all, and how many of them an expert takes at most; and
///   a row with 1 for each expert that is [shadowed](crate::tape::ShadowedExperts) and 0 for the others;
/// - where the rows of each of this rank's experts begin, and where the last ones end (`[own_experts + 1]`);
/// - where the rows of each rank begin among those (`[own_experts * degree + 1]`): rows are ordered by expert, and those of an expert by the rank
///   that has sent them. Shadowed experts have none.
///
/// Ranks have equally many experts, in their order.
///
/// Ranks may have different numbers of tokens.
///
/// Cost: the host reads the numbers of choices of this rank, and one all-gather of `4 (num_experts + 2)` bytes a rank.
#[derive(Debug)]
pub struct GatherLoads(pub ExpertExchange);

/// How rows travel to the experts of all ranks, and back.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertExchange {
    /// Experts of all ranks.
    pub num_experts: usize,
    /// That of [`GroupRows`](crate::tape::GroupRows).
    pub capacity: Option<Capacity>,
    /// In how many chunks the rows for a rank travel, each for some of its experts; at most as many as it has. One chunk travels while another one is computed.
    pub num_chunks: usize,
    /// How many experts of this layer are [shadowed](crate::tape::ShadowedExperts): their rows do not travel.
    pub num_shadowed: usize,
    /// What tells the layer from others: the first parameter of its experts on this rank.
    pub layer: ParameterId,
}

/// Starts to send the first chunk of rows, ordered by expert (`[1, num_choices, cols]`), to the ranks that have their experts, and passes the rows on to
/// [`OwnExperts`](super::OwnExperts). What is computed between the two does not wait for what travels, forward and backward. The other inputs are the first output of
/// [`GatherLoads`] and the last one of [`GroupRows`](crate::tape::GroupRows), of which only the shape is read.
///
/// Cost: the host reads the numbers of choices. Rows are copied from where they are to what is sent.
#[derive(Debug)]
pub struct DispatchRows(pub ExpertExchange);

/// Waits for the last chunk of rows that [`OwnExperts`](super::OwnExperts) sends back. The inputs are its output (`[1, num_choices, cols]`), the first output of
/// [`GatherLoads`], and the last one of [`GroupRows`](crate::tape::GroupRows), of which only the shape is read. The output has the shape of the first input.
///
/// Cost: as [`DispatchRows`], from what comes to where it belongs.
#[derive(Debug)]
pub struct ReturnRows(pub ExpertExchange);

/// Numbers in a row of the table, beside those of experts: of all choices, and of those that an expert takes at most.
const NUM_OTHERS: usize = 2;

/// How many choices of each expert each rank has, and which rows that makes.
pub(super) struct Loads {
    /// The rows of ranks of the table.
    table: Vec<u32>,
    /// Of each expert.
    is_shadowed: Vec<bool>,
    place: AxisPlace,
    exchange: ExpertExchange,
    /// Whether experts have memory for as many rows as they can get, or as even loads have on a device that only counts; else for as many as come.
    is_bounded: bool,
}

impl ExpertExchange {
    /// Tells all ranks how many choices this one has of each expert; `places` are those of its choices.
    fn gather(
        self,
        cx: &OperationContext<'_>,
        starts: View<'_>,
        places: Shape,
    ) -> Result<Loads, DeviceError> {
        let own: Vec<u32> = match cx.device().is_counting() {
            true => self.even_row(places),
            false => {
                let starts = cx.device().read::<u32>(starts);
                let numbers = starts.windows(2).map(|pair| pair[1] - pair[0]);
                numbers.chain(self.totals(places)).collect()
            }
        };
        let table = cx.expert_axis().gather_numbers(&own)?;
        let shadowed = cx.shadowed_experts();
        let is_shadowed = shadowed.of_layer(self.layer, self.num_experts, self.num_shadowed);
        if cx.is_recording() {
            table.chunks_exact(own.len()).for_each(|row| shadowed.count(self.layer, row));
        }
        Ok(self.loads(cx, table, is_shadowed))
    }

    /// Reads the table from the device: the first output of [`GatherLoads`]. On a device that only counts, experts have equally many choices, and the first experts are
    /// shadowed.
    pub(super) fn read(self, cx: &OperationContext<'_>, table: View<'_>, places: Shape) -> Loads {
        if cx.device().is_counting() {
            let rows = iter::repeat_n(self.even_row(places), cx.expert_axis().place().degree);
            let is_shadowed = (0..self.num_experts).map(|expert| expert < self.num_shadowed);
            return self.loads(cx, rows.flatten().collect(), is_shadowed.collect());
        }
        let mut table: Vec<u32> = cx.device().read(table);
        let flags = table.split_off(table.len() - self.row_len());
        self.loads(cx, table, flags[..self.num_experts].iter().map(|&flag| flag == 1).collect())
    }

    fn loads(self, cx: &OperationContext<'_>, table: Vec<u32>, is_shadowed: Vec<bool>) -> Loads {
        let is_bounded = self.capacity.is_some() || cx.device().is_counting();
        Loads { table, is_shadowed, place: cx.expert_axis().place(), exchange: self, is_bounded }
    }

    /// Numbers in a row of the table.
    fn row_len(self) -> usize {
        self.num_experts + NUM_OTHERS
    }

    /// The last numbers of this rank's row.
    fn totals(self, places: Shape) -> [u32; NUM_OTHERS] {
        let most = self.capacity.map(|capacity| capacity.num_rows(places, self.num_experts));
        [places.num_elements(), most.unwrap_or(places.num_elements())].map(|number| number as u32)
    }

    /// The row of a rank on which all experts have equally many choices, as far as they take them.
    fn even_row(self, places: Shape) -> Vec<u32> {
        let [num_choices, most] = self.totals(places);
        let before = |expert: usize| (expert * num_choices as usize / self.num_experts) as u32;
        let numbers = (0..self.num_experts).map(|expert| (before(expert + 1) - before(expert)).min(most));
        // Memory is for as many rows of each expert as of any other.
        let room = match self.capacity {
            Some(_) => most,
            None => num_choices.div_ceil(self.num_experts as u32),
        };
        numbers.chain([num_choices, room]).collect()
    }
}

impl Loads {
    fn num_own(&self) -> usize {
        self.exchange.num_experts / self.place.degree
    }

    /// This rank's experts of each chunk, in order.
    pub(super) fn chunks(&self) -> impl DoubleEndedIterator<Item = Range<usize>> + ExactSizeIterator + use<> {
        let num_own = self.num_own();
        let num_chunks = self.exchange.num_chunks.clamp(1, num_own);
        (0..num_chunks).map(move |chunk| chunk * num_own / num_chunks..(chunk + 1) * num_own / num_chunks)
    }

    /// How many choices a rank has of an expert, by its number among those of all ranks.
    fn num_choices_on(&self, rank: usize, expert: usize) -> usize {
        self.row(rank)[expert] as usize
    }

    fn row(&self, rank: usize) -> &[u32] {
        &self.table[rank * self.exchange.row_len()..][..self.exchange.row_len()]
    }

    /// Of a rank, which has most: all choices, and the rows of an expert that there is memory for.
    fn totals_max(&self) -> [usize; NUM_OTHERS] {
        let of_ranks = |other: usize| {
            let numbers =
                (0..self.place.degree).map(|rank| self.row(rank)[self.exchange.num_experts + other]);
            numbers.max().expect("there are ranks") as usize
        };
        [of_ranks(0), of_ranks(1)]
    }

    /// Choices of this rank.
    fn num_choices(&self) -> usize {
        self.row(self.place.rank)[self.exchange.num_experts] as usize
    }

    /// How many rows rank `from` has for an expert of rank `owner`, by its number there: none if the expert is shadowed.
    fn num_rows_for(&self, from: usize, owner: usize, own_expert: usize) -> usize {
        let expert = owner * self.num_own() + own_expert;
        if self.is_shadowed[expert] { 0 } else { self.num_choices_on(from, expert) }
    }

    /// Ranks, and which this one is.
    pub(super) fn axis_place(&self) -> AxisPlace {
        self.place
    }

    /// The shadowed experts: the rank that has each, and its number there.
    pub(super) fn shadowed(&self) -> impl Iterator<Item = (usize, usize)> {
        let all = self.is_shadowed.iter().enumerate().filter(|(_, is)| **is);
        all.map(|(expert, _)| (expert / self.num_own(), expert % self.num_own()))
    }

    /// This rank's rows of each of them, among those of all its choices.
    pub(super) fn shadowed_rows(&self) -> impl Iterator<Item = Range<usize>> {
        let mut end = 0;
        let rows = (0..self.exchange.num_experts).map(move |expert| {
            end += self.num_choices_on(self.place.rank, expert);
            end - self.num_choices_on(self.place.rank, expert)..end
        });
        rows.zip(&self.is_shadowed).filter(|(_, is)| **is).map(|(rows, _)| rows)
    }

    /// Rows that there is memory for, of those.
    pub(super) fn shadowed_room(&self) -> usize {
        let [num_choices, rows_per_expert] = self.totals_max();
        match self.is_bounded {
            true => (self.exchange.num_shadowed * rows_per_expert).min(num_choices),
            false => self.shadowed_rows().map(|rows| rows.len()).sum(),
        }
    }

    /// Choices on this rank that no expert takes.
    pub(super) fn num_dropped(&self) -> usize {
        let experts = 0..self.exchange.num_experts;
        self.num_choices() - experts.map(|expert| self.num_choices_on(self.place.rank, expert)).sum::<usize>()
    }

    /// Rows that come from all ranks for a chunk of this rank's experts.
    pub(super) fn num_rows(&self, chunk: &Range<usize>) -> usize {
        let numbers = chunk.clone().flat_map(|expert| (0..self.place.degree).map(move |from| (from, expert)));
        numbers.map(|(from, expert)| self.num_rows_for(from, self.place.rank, expert)).sum()
    }

    /// Rows that there is memory for, for a chunk of this rank's experts. With a capacity they depend on no load: as many as the experts can take from all ranks, or as
    /// those can have.
    pub(super) fn room(&self, chunk: &Range<usize>) -> usize {
        let [num_choices, rows_per_expert] = self.totals_max();
        match self.is_bounded {
            true => self.place.degree * (chunk.len() * rows_per_expert).min(num_choices),
            false => self.num_rows(chunk),
        }
    }

    /// The rows that there is memory for, of a chunk of this rank's experts, among those of all chunks.
    pub(super) fn rows(&self, chunk: &Range<usize>) -> Range<usize> {
        let before = self.chunks().take_while(|other| other.end <= chunk.start);
        let first = before.map(|other| self.room(&other)).sum();
        first..first + self.room(chunk)
    }

    /// The elements, of rows of `cols`, that ranks send for a chunk of each rank's experts. Those sent are ordered by expert; those received by expert, and for each by the rank
    /// that has sent them.
    pub(super) fn runs(&self, cols: usize, chunk: &Range<usize>) -> ExchangedRuns {
        let AxisPlace { rank, degree } = self.place;
        let after = |end: &mut usize, len: usize| {
            *end += len * cols;
            *end - len * cols..*end
        };
        let mut end = 0;
        let sent = (0..degree).map(|of| {
            let mut runs = Runs::new();
            for expert in 0..self.num_own() {
                let run = after(&mut end, self.num_choices_on(rank, of * self.num_own() + expert));
                let travels = chunk.contains(&expert) && self.num_rows_for(rank, of, expert) > 0;
                match runs.last_mut() {
                    Some(last) if travels && last.end == run.start => last.end = run.end,
                    _ if travels => runs.push(run),
                    _ => {}
                }
            }
            runs
        });
        let sent = sent.collect();
        let mut received: SmallVec<[Runs; 8]> = (0..degree).map(|_| Runs::new()).collect();
        let mut end = self.rows(chunk).start * cols;
        for expert in chunk.clone() {
            for (from, runs) in received.iter_mut().enumerate() {
                runs.push(after(&mut end, self.num_rows_for(from, rank, expert)));
            }
        }
        // What ranks take memory for, and in how many rounds they send, must be the same on all of them.
        let [num_choices, _] = self.totals_max();
        let even_len = num_choices.div_ceil(self.exchange.num_experts) * chunk.len() * cols;
        let len = |from: usize, to: usize| -> usize {
            if from == to { 0 } else { chunk.clone().map(|expert| self.num_rows_for(from, to, expert)).sum() }
        };
        let lens = (0..degree).flat_map(|from| (0..degree).map(move |to| (from, to)));
        let lens = lens.map(|(from, to)| len(from, to) * cols).collect();
        ExchangedRuns { sent, received, lens, even_len, len_max: num_choices * cols }
    }

    /// Where the rows of each own expert begin, and of each rank among them.
    fn starts(&self) -> [Vec<u32>; 2] {
        let (mut starts, mut segments) = (vec![0], vec![0]);
        let mut end = 0;
        for expert in 0..self.num_own() {
            for from in 0..self.place.degree {
                end += self.num_rows_for(from, self.place.rank, expert) as u32;
                segments.push(end);
            }
            starts.push(end);
        }
        [starts, segments]
    }
}

fn upload(device: &Device, numbers: &[u32], shape: &[usize]) -> Result<Tensor, DeviceError> {
    let mut tensor = device.activation_of(Shape::new(shape), DType::U32)?;
    device.upload(numbers, tensor.view_mut());
    Ok(tensor)
}

impl Operation for GatherLoads {
    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<(), DeviceError> {
        let loads = self.0.gather(cx, cx.input(0), cx.input(1).shape())?;
        let (device, shape) = (cx.device(), [loads.place.degree + 1, self.0.row_len()]);
        let [starts, segments] = loads.starts();
        let flags = loads.is_shadowed.iter().map(|&is| u32::from(is)).chain([0; NUM_OTHERS]);
        let table: Vec<u32> = loads.table.iter().copied().chain(flags).collect();
        let made = [
            upload(device, &table, &shape)?,
            upload(device, &starts, &[starts.len()])?,
            upload(device, &segments, &[segments.len()])?,
        ];
        made.into_iter().for_each(|numbers| cx.output(numbers));
        Ok(())
    }

    fn num_inputs(&self) -> RangeInclusive<usize> {
        2..=2
    }

    has_no_gradient!();
}

impl Operation for DispatchRows {
    fn num_inputs(&self) -> RangeInclusive<usize> {
        3..=3
    }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<(), DeviceError> {
        let loads = self.0.read(cx, cx.input(1), cx.input(2).shape());
        let first = loads.chunks().next().expect("ranks have experts");
        let runs = loads.runs(cx.input(0).shape().cols(), &first);
        let exchange = cx.expert_axis().start_rows(cx.device(), runs, cx.input(0))?;
        cx.leave_rows_under_way(exchange);
        let rows = cx.take_or_copy_input(0)?;
        cx.output(rows);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<(), DeviceError> {
        let (exchange, mut grad) = (cx.take_rows_under_way(), cx.take_output_grad());
        cx.expert_axis().finish_rows(cx.device(), exchange, grad.view_mut())?;
        cx.add_grad(0, grad)
    }

    fn reads_input(&self, _: usize) -> ReadBy {
        ReadBy::NEITHER
    }

    fn takes_positions(&self) -> bool {
        true
    }
}

impl Operation for ReturnRows {
    fn num_inputs(&self) -> RangeInclusive<usize> {
        3..=3
    }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<(), DeviceError> {
        let (exchange, mut rows) = (cx.take_rows_under_way(), cx.take_or_copy_input(0)?);
        cx.expert_axis().finish_rows(cx.device(), exchange, rows.view_mut())?;
        cx.output(rows);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<(), DeviceError> {
        let loads = self.0.read(cx, cx.input(1), cx.input_shape(2));
        let last = loads.chunks().next_back().expect("ranks have experts");
        let runs = loads.runs(cx.grad().shape().cols(), &last);
        let exchange = cx.expert_axis().start_rows(cx.device(), runs, cx.grad())?;
        cx.leave_rows_under_way(exchange);
        cx.pass_grad(0);
        Ok(())
    }

    fn reads_input(&self, input: usize) -> ReadBy {
        if input == 1 { ReadBy::INPUT_HALF } else { ReadBy::NEITHER }
    }

    fn takes_positions(&self) -> bool {
        true
    }
}
