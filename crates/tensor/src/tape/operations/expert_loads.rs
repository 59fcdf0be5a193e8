//! How many choices of each expert each rank has, and which rows travel for that.

use super::expert_exchange::ExpertExchange;
use crate::device::Result;
use crate::shape::Shape;
use crate::tape::{ExchangedRuns, OperationContext, Runs};
use crate::tensor::View;
use smallvec::SmallVec;
use std::iter;
use std::ops::Range;
use trireme_base::AxisPlace;

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
    pub(super) fn gather(self, cx: &OperationContext<'_>, starts: View<'_>, places: Shape) -> Result<Loads> {
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

    /// The table, as [`read`](ExpertExchange::read) reads it, and its shape.
    pub(super) fn table(&self) -> (Vec<u32>, [usize; 2]) {
        let flags = self.is_shadowed.iter().map(|&is| u32::from(is)).chain([0; NUM_OTHERS]);
        let table = self.table.iter().copied().chain(flags).collect();
        (table, [self.place.degree + 1, self.exchange.row_len()])
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
    pub(super) fn starts(&self) -> [Vec<u32>; 2] {
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
