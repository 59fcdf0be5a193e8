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
/// - how many choices of each expert each rank has, and, behind those of the last one, 1 for each expert that all ranks have copies of (`[degree + 1, num_experts]`);
/// - where the rows of each of this rank's experts begin, and where the last ones end (`[own_experts + 1]`);
/// - where the rows of each rank begin among those (`[own_experts * degree + 1]`): rows are ordered by expert, and those of an expert by the rank
///   that has sent them. There are none of experts that all ranks have copies of.
///
/// Ranks have equally many experts, in their order.
///
/// Cost: the host reads the numbers of choices of this rank, and one all-gather of `4 num_experts` bytes a rank.
#[derive(Debug)]
pub struct GatherLoads(pub ExpertExchange);

/// How rows travel to the experts of all ranks, and back.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertExchange {
    /// Experts of all ranks.
    pub num_experts: usize,
    /// That of [`GroupRows`](crate::tape::GroupRows).
    pub capacity: Option<Capacity>,
    /// In how many parts the rows for a rank travel, each for some of its experts; at most as many as it has. One part travels while another one is computed.
    pub num_chunks: usize,
    /// How many experts all ranks have [copies](crate::tape::ReplicatedExperts) of, of this layer: their rows do not travel.
    pub num_replicated: usize,
    /// What tells the layer from others: the first parameter of its experts on this rank.
    pub layer: ParameterId,
}

/// Begins to send rows, ordered by expert (`[1, num_choices, cols]`), to the ranks that have their experts, and passes them on: [`OwnExperts`](super::OwnExperts)
/// receives them. What is computed in between does not wait for what travels, forward and backward. The other inputs are the first output of
/// [`GatherLoads`] and the last one of [`GroupRows`](crate::tape::GroupRows), of which only the shape is read.
///
/// Cost: the host reads the numbers of choices. Rows are copied from where they are to what is sent.
#[derive(Debug)]
pub struct DispatchRows(pub ExpertExchange);

/// Waits for the rows that [`OwnExperts`](super::OwnExperts) returns, which begin to travel there. The inputs are its output, the first output of [`GatherLoads`], and the
/// choice at each place on this rank, of which only the shape is read.
///
/// Cost: as [`DispatchRows`], from what comes to where it belongs.
#[derive(Debug)]
pub struct ReturnRows(pub ExpertExchange);

/// How many choices of each expert each rank has, and which rows that makes.
pub(super) struct Loads {
    /// One rank's after the other.
    numbers: Vec<u32>,
    /// Whether all ranks have copies of each expert.
    is_replicated: Vec<bool>,
    place: AxisPlace,
    exchange: ExpertExchange,
    /// Choices of this rank.
    num_choices: usize,
    /// Rows that there is memory for of one rank's choices of an expert; `None` for as many as come.
    rows_per_expert: Option<usize>,
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
            true => self.even_numbers(places).collect(),
            false => cx.device().read::<u32>(starts).windows(2).map(|pair| pair[1] - pair[0]).collect(),
        };
        let numbers = cx.expert_axis().gather_numbers(&own)?;
        let replicated = cx.replicated_experts();
        let is_replicated = replicated.of_layer(self.layer, self.num_experts, self.num_replicated);
        if self.num_replicated > 0 && cx.is_recording() && !cx.device().is_counting() {
            replicated.count(self.layer, &is_replicated, &numbers);
        }
        Ok(self.loads(cx, places, |_| (numbers, is_replicated)))
    }

    /// Reads the numbers of choices of all ranks from the device: the first output of [`GatherLoads`].
    pub(super) fn read(self, cx: &OperationContext<'_>, numbers: View<'_>, places: Shape) -> Loads {
        self.loads(cx, places, |device| {
            let mut numbers: Vec<u32> = device.read(numbers);
            let flags = numbers.split_off(numbers.len() - self.num_experts);
            (numbers, flags.into_iter().map(|flag| flag == 1).collect())
        })
    }

    /// On a device that only counts, experts have equally many choices, and ranks have copies of the first ones.
    fn loads(
        self,
        cx: &OperationContext<'_>,
        places: Shape,
        found: impl FnOnce(&Device) -> (Vec<u32>, Vec<bool>),
    ) -> Loads {
        let (place, num_choices, device) = (cx.expert_axis().place(), places.num_elements(), cx.device());
        let is_counting = device.is_counting();
        let (numbers, is_replicated) = if is_counting {
            let numbers = iter::repeat_n(self.even_numbers(places), place.degree).flatten().collect();
            (numbers, (0..self.num_experts).map(|expert| expert < self.num_replicated).collect())
        } else {
            found(device)
        };
        let rows_per_expert =
            self.most(places).or(is_counting.then(|| num_choices.div_ceil(self.num_experts)));
        Loads { numbers, is_replicated, place, exchange: self, num_choices, rows_per_expert }
    }

    /// The most choices of this rank that an expert takes, if they are bounded.
    fn most(self, places: Shape) -> Option<usize> {
        self.capacity.map(|capacity| capacity.num_rows(places, self.num_experts))
    }

    /// Choices of each expert, if all have equally many.
    fn even_numbers(self, places: Shape) -> impl Iterator<Item = u32> + Clone {
        let (num_choices, most) = (places.num_elements(), self.most(places).unwrap_or(usize::MAX));
        let before = move |expert: usize| expert * num_choices / self.num_experts;
        (0..self.num_experts).map(move |expert| (before(expert + 1) - before(expert)).min(most) as u32)
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

    /// The choices on rank `from` of an expert of rank `of`, whose rows travel.
    fn number(&self, from: usize, of: usize, expert: usize) -> usize {
        let expert = of * self.num_own() + expert;
        if self.is_replicated[expert] { 0 } else { self.choices(from, expert) }
    }

    /// The choices on a rank of an expert.
    fn choices(&self, from: usize, expert: usize) -> usize {
        self.numbers[from * self.exchange.num_experts + expert] as usize
    }

    /// Ranks, and which this one is.
    pub(super) fn place(&self) -> AxisPlace {
        self.place
    }

    /// The experts that all ranks have copies of: the rank that has them, and their number there.
    pub(super) fn replicated(&self) -> impl Iterator<Item = (usize, usize)> {
        let all = self.is_replicated.iter().enumerate().filter(|(_, is)| **is);
        all.map(|(expert, _)| (expert / self.num_own(), expert % self.num_own()))
    }

    /// This rank's rows of each of them, among those of all its choices.
    pub(super) fn replicated_rows(&self) -> impl Iterator<Item = Range<usize>> {
        let mut end = 0;
        let rows = (0..self.exchange.num_experts).map(move |expert| {
            end += self.choices(self.place.rank, expert);
            end - self.choices(self.place.rank, expert)..end
        });
        rows.zip(&self.is_replicated).filter(|(_, is)| **is).map(|(rows, _)| rows)
    }

    /// Rows that there is memory for, of those.
    pub(super) fn replicated_room(&self) -> usize {
        match self.rows_per_expert {
            Some(rows) => (self.exchange.num_replicated * rows).min(self.num_choices),
            None => self.replicated_rows().map(|rows| rows.len()).sum(),
        }
    }

    /// Choices on this rank that no expert takes.
    pub(super) fn num_dropped(&self) -> usize {
        let experts = 0..self.exchange.num_experts;
        self.num_choices - experts.map(|expert| self.choices(self.place.rank, expert)).sum::<usize>()
    }

    /// Rows that come from all ranks for a chunk of this rank's experts.
    pub(super) fn num_rows(&self, chunk: &Range<usize>) -> usize {
        let numbers = chunk.clone().flat_map(|expert| (0..self.place.degree).map(move |from| (from, expert)));
        numbers.map(|(from, expert)| self.number(from, self.place.rank, expert)).sum()
    }

    /// Rows that there is memory for, for a chunk of this rank's experts. With a capacity they depend on no load: as many as the experts can take from all ranks, or as
    /// those can have.
    fn room(&self, chunk: &Range<usize>) -> usize {
        match self.rows_per_expert {
            Some(rows) => self.place.degree * (chunk.len() * rows).min(self.num_choices),
            None => self.num_rows(chunk),
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
                let run = after(&mut end, self.choices(rank, of * self.num_own() + expert));
                let travels = chunk.contains(&expert) && self.number(rank, of, expert) > 0;
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
                runs.push(after(&mut end, self.number(from, rank, expert)));
            }
        }
        let even = self.num_choices.div_ceil(self.exchange.num_experts) * chunk.len() * cols;
        let len = |from: usize, to: usize| -> usize {
            if from == to { 0 } else { chunk.clone().map(|expert| self.number(from, to, expert)).sum() }
        };
        let lens = (0..degree).flat_map(|from| (0..degree).map(move |to| (from, to)));
        let lens = lens.map(|(from, to)| len(from, to) * cols).collect();
        ExchangedRuns { sent, received, lens, even, most: self.num_choices * cols }
    }

    /// Where the rows of each own expert begin, and of each rank among them.
    fn starts(&self) -> [Vec<u32>; 2] {
        let (mut starts, mut segments) = (vec![0], vec![0]);
        let mut end = 0;
        for expert in 0..self.num_own() {
            for from in 0..self.place.degree {
                end += self.number(from, self.place.rank, expert) as u32;
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
        let (device, shape) = (cx.device(), [loads.place.degree + 1, self.0.num_experts]);
        let [starts, segments] = loads.starts();
        let flags = loads.is_replicated.iter().map(|&is| u32::from(is));
        let numbers: Vec<u32> = loads.numbers.iter().copied().chain(flags).collect();
        let made = [
            upload(device, &numbers, &shape)?,
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
