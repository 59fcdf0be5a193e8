//! Numbers of choices of each expert on each rank, and the rows that are exchanged for them.

use super::expert_exchange::ExpertExchange;
use crate::device::Result;
use crate::shape::Shape;
use crate::tape::{ExchangedRuns, OperationContext, Runs};
use crate::view::View;
use smallvec::SmallVec;
use std::iter;
use std::ops::Range;
use trireme_base::AxisRank;

/// Number of entries in a row of the table after the entries of the experts: the total number of choices, and the maximum per expert.
const NUM_TOTALS: usize = 2;

/// The number of choices of each expert on each rank, and the row ranges that follow from them.
pub(super) struct Loads {
    /// The rows of the table that belong to ranks, without the last row.
    table: Vec<u32>,
    /// Whether each expert is shadowed.
    is_shadowed: Vec<bool>,
    axis_rank: AxisRank,
    exchange: ExpertExchange,
    /// Whether buffers have room for the maximum number of rows: with a capacity, or on a counting device, where loads are even. Otherwise,
    /// they have room for the actual rows only.
    is_bounded: bool,
}

impl ExpertExchange {
    /// All-gathers the numbers of choices of each expert. `places` is the shape of this rank's choices.
    pub(super) fn gather(self, cx: &OperationContext<'_>, starts: View<'_>, places: Shape) -> Result<Loads> {
        let own: Vec<u32> = if cx.device().is_counting() {
            self.even_row(places)
        } else {
            let starts = cx.device().read::<u32>(starts)?;
            let numbers = starts.windows(2).map(|pair| pair[1] - pair[0]);
            numbers.chain(self.totals(places)).collect()
        };
        let table = cx.expert_axis_ops().gather_numbers(&own)?;
        let shadowed = cx.shadowed_experts();
        let is_shadowed = shadowed.of_layer(self.layer, self.num_experts, self.num_shadowed);
        if cx.is_recording() {
            table.chunks_exact(own.len()).for_each(|row| shadowed.count(self.layer, row));
        }
        Ok(self.loads(cx, table, is_shadowed))
    }

    /// Reads the table, the first output of [`GatherLoads`](super::GatherLoads), from the device. On a counting device, loads are even and
    /// the first experts are shadowed.
    pub(super) fn read(self, cx: &OperationContext<'_>, table: View<'_>, places: Shape) -> Result<Loads> {
        if cx.device().is_counting() {
            let rows = iter::repeat_n(self.even_row(places), cx.expert_axis_ops().axis_rank().degree);
            let is_shadowed = (0..self.num_experts).map(|expert| expert < self.num_shadowed);
            return Ok(self.loads(cx, rows.flatten().collect(), is_shadowed.collect()));
        }
        let mut table: Vec<u32> = cx.device().read(table)?;
        let flags = table.split_off(table.len() - self.row_len());
        let is_shadowed = flags[..self.num_experts].iter().map(|&flag| flag == 1).collect();
        Ok(self.loads(cx, table, is_shadowed))
    }

    fn loads(self, cx: &OperationContext<'_>, table: Vec<u32>, is_shadowed: Vec<bool>) -> Loads {
        let is_bounded = self.capacity.is_some() || cx.device().is_counting();
        Loads { table, is_shadowed, axis_rank: cx.expert_axis_ops().axis_rank(), exchange: self, is_bounded }
    }

    fn row_len(self) -> usize {
        self.num_experts + NUM_TOTALS
    }

    /// Returns the last two numbers of this rank's row.
    fn totals(self, places: Shape) -> [u32; NUM_TOTALS] {
        let most = self.capacity.map(|capacity| capacity.num_rows(places, self.num_experts));
        [places.num_elements(), most.unwrap_or(places.num_elements())].map(|number| number as u32)
    }

    /// Returns a rank's row at even loads, limited by the capacity.
    fn even_row(self, places: Shape) -> Vec<u32> {
        let [num_choices, most] = self.totals(places);
        let before = |expert: usize| (expert * num_choices as usize / self.num_experts) as u32;
        let numbers = (0..self.num_experts).map(|expert| (before(expert + 1) - before(expert)).min(most));
        // The same buffer size for every expert.
        let room = match self.capacity {
            Some(_) => most,
            None => num_choices.div_ceil(self.num_experts as u32),
        };
        numbers.chain([num_choices, room]).collect()
    }
}

impl Loads {
    fn num_own(&self) -> usize {
        self.exchange.num_experts / self.axis_rank.degree
    }

    /// Returns this rank's experts in each chunk, in order.
    pub(super) fn chunks(&self) -> impl DoubleEndedIterator<Item = Range<usize>> + ExactSizeIterator + use<> {
        let num_own = self.num_own();
        let num_chunks = self.exchange.num_chunks.clamp(1, num_own);
        (0..num_chunks).map(move |chunk| chunk * num_own / num_chunks..(chunk + 1) * num_own / num_chunks)
    }

    /// Returns the table that [`read`](ExpertExchange::read) reads, and its shape.
    pub(super) fn table(&self) -> (Vec<u32>, [usize; 2]) {
        let flags = self.is_shadowed.iter().map(|&is| u32::from(is)).chain([0; NUM_TOTALS]);
        let table = self.table.iter().copied().chain(flags).collect();
        (table, [self.axis_rank.degree + 1, self.exchange.row_len()])
    }

    /// Returns a rank's number of choices of an expert, by the expert's index over all ranks.
    fn num_choices_on(&self, rank: usize, expert: usize) -> usize {
        self.row(rank)[expert] as usize
    }

    fn row(&self, rank: usize) -> &[u32] {
        &self.table[rank * self.exchange.row_len()..][..self.exchange.row_len()]
    }

    /// Returns the maximum over all ranks of the total number of choices, and of the number of rows per expert that buffers hold.
    fn totals_max(&self) -> [usize; NUM_TOTALS] {
        let of_ranks = |other: usize| {
            let numbers =
                (0..self.axis_rank.degree).map(|rank| self.row(rank)[self.exchange.num_experts + other]);
            numbers.max().expect("there are ranks") as usize
        };
        [of_ranks(0), of_ranks(1)]
    }

    fn num_choices(&self) -> usize {
        self.row(self.axis_rank.rank)[self.exchange.num_experts] as usize
    }

    /// Returns the number of rows that rank `from` sends for an expert of rank `owner`, by the expert's index there; 0 if the expert is
    /// shadowed.
    fn num_rows_for(&self, from: usize, owner: usize, own_expert: usize) -> usize {
        let expert = owner * self.num_own() + own_expert;
        if self.is_shadowed[expert] { 0 } else { self.num_choices_on(from, expert) }
    }

    /// Returns the place on the expert axis.
    pub(super) fn axis_rank(&self) -> AxisRank {
        self.axis_rank
    }

    /// Returns the rank and the index on that rank of each shadowed expert.
    pub(super) fn shadowed(&self) -> impl Iterator<Item = (usize, usize)> {
        let all = self.is_shadowed.iter().enumerate().filter(|(_, is)| **is);
        all.map(|(expert, _)| (expert / self.num_own(), expert % self.num_own()))
    }

    /// Returns this rank's rows of each shadowed expert among the rows of all its choices.
    pub(super) fn shadowed_rows(&self) -> impl Iterator<Item = Range<usize>> {
        let mut end = 0;
        let rows = (0..self.exchange.num_experts).map(move |expert| {
            end += self.num_choices_on(self.axis_rank.rank, expert);
            end - self.num_choices_on(self.axis_rank.rank, expert)..end
        });
        rows.zip(&self.is_shadowed).filter(|(_, is)| **is).map(|(rows, _)| rows)
    }

    /// Returns the number of rows for which the buffer of the shadowed experts has room.
    pub(super) fn shadowed_buffer_rows(&self) -> usize {
        let [num_choices, rows_per_expert] = self.totals_max();
        if self.is_bounded {
            (self.exchange.num_shadowed * rows_per_expert).min(num_choices)
        } else {
            self.shadowed_rows().map(|rows| rows.len()).sum()
        }
    }

    /// Returns the number of this rank's choices that were dropped.
    pub(super) fn num_dropped(&self) -> usize {
        let experts = 0..self.exchange.num_experts;
        self.num_choices()
            - experts.map(|expert| self.num_choices_on(self.axis_rank.rank, expert)).sum::<usize>()
    }

    /// Returns the number of rows that all ranks send for a chunk of this rank's experts.
    pub(super) fn num_rows(&self, chunk: &Range<usize>) -> usize {
        let numbers =
            chunk.clone().flat_map(|expert| (0..self.axis_rank.degree).map(move |from| (from, expert)));
        numbers.map(|(from, expert)| self.num_rows_for(from, self.axis_rank.rank, expert)).sum()
    }

    /// Returns the number of rows for which the buffer of a chunk of this rank's experts has room. With a capacity, it does not depend on
    /// the loads: it is the number of rows that the experts can accept from all ranks, or the number of ranks times the maximum number of
    /// choices of a rank if that is smaller.
    pub(super) fn buffer_rows(&self, chunk: &Range<usize>) -> usize {
        let [num_choices, rows_per_expert] = self.totals_max();
        if self.is_bounded {
            self.axis_rank.degree * (chunk.len() * rows_per_expert).min(num_choices)
        } else {
            self.num_rows(chunk)
        }
    }

    /// Returns the buffer range of a chunk of this rank's experts within the buffer of all chunks.
    pub(super) fn rows(&self, chunk: &Range<usize>) -> Range<usize> {
        let before = self.chunks().take_while(|other| other.end <= chunk.start);
        let first = before.map(|other| self.buffer_rows(&other)).sum();
        first..first + self.buffer_rows(chunk)
    }

    /// Returns the elements, in rows of `cols`, that ranks send for a chunk of each rank's experts. Sent rows are ordered by expert;
    /// received rows by expert, then by source rank.
    pub(super) fn runs(&self, cols: usize, chunk: &Range<usize>) -> ExchangedRuns {
        let AxisRank { rank, degree } = self.axis_rank;
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
        // All ranks must agree on the size of buffers and on the number of rounds of messages.
        let [num_choices, _] = self.totals_max();
        let even_len = num_choices.div_ceil(self.exchange.num_experts) * chunk.len() * cols;
        let len = |from: usize, to: usize| -> usize {
            if from == to { 0 } else { chunk.clone().map(|expert| self.num_rows_for(from, to, expert)).sum() }
        };
        let lens = (0..degree).flat_map(|from| (0..degree).map(move |to| (from, to)));
        let lens = lens.map(|(from, to)| len(from, to) * cols).collect();
        ExchangedRuns { sent, received, lens, even_len, len_max: num_choices * cols }
    }

    /// Returns the first row of each of this rank's experts, and of each source rank within them, followed by the end.
    pub(super) fn starts(&self) -> [Vec<u32>; 2] {
        let (mut starts, mut segments) = (vec![0], vec![0]);
        let mut end = 0;
        for expert in 0..self.num_own() {
            for from in 0..self.axis_rank.degree {
                end += self.num_rows_for(from, self.axis_rank.rank, expert) as u32;
                segments.push(end);
            }
            starts.push(end);
        }
        [starts, segments]
    }
}
