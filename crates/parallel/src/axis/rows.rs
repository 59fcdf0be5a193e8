//! Variable all-to-all: every rank sends a different number of rows to every other rank.

use super::{DtypeExchanges, Result, lock};
use crate::error::ParallelError;
use crate::memory::{Pool, WaitTracker};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use trireme_base::{AxisRank, DType, Pending, Rank};
use trireme_comm::{Buffer, Untyped, Work};
use trireme_tensor::tape::{ExchangedRuns, PendingExchange};
use trireme_tensor::{Device, View, ViewMut};

/// Maximum number of messages of one exchange in flight, in each direction: 16 MiB each way. A single round may exceed it.
const MESSAGES_MAX: usize = 64;

/// Size in bytes of a message from one rank to another, with even loads, below which rows are exchanged hierarchically by host. For
/// messages this short, the number of messages across hosts is assumed to cost more than their bytes. The threshold was not measured on a
/// network between hosts.
const HIERARCHICAL_BYTES_MAX: usize = 64 << 10;

/// Minimum number of ranks per host for a hierarchical exchange of rows. With fewer ranks, hardly any messages would be saved.
const HIERARCHICAL_RANKS_MIN: usize = 4;

/// An exchange of rows in flight. It runs in rounds, each with at most one piece from every rank to every other rank.
pub(super) struct RowExchange {
    runs: ExchangedRuns,
    /// Length of a buffer in elements: one piece, or with `is_hierarchical` the pieces for all other ranks.
    buffer_len: usize,
    is_hierarchical: bool,
    /// Buffers that are not in flight. At its start, an exchange takes all buffers that it may need, so that its memory use does not depend
    /// on the number of rows.
    free: Vec<Pending<Buffer<Untyped>>>,
    rounds_in_flight: usize,
    num_rounds: usize,
    next_round: usize,
    /// The transfers in flight, each with its round.
    in_flight: VecDeque<(usize, Transfer)>,
}

enum Transfer {
    /// A piece sent to another rank.
    Send(Work<Buffer<Untyped>>),
    /// A piece from another rank. `part` is its range among all elements that rank `from` sends to this rank.
    Receive { work: Work<Buffer<Untyped>>, from: usize, part: Range<usize> },
    /// The pieces of all ranks in one hierarchical exchange.
    Hierarchical(Work<(Buffer<Untyped>, Buffer<Untyped>)>),
}

const fn piece_len(dtype: DType) -> usize {
    (256 << 10) / dtype.size()
}

/// Returns the part of `len` elements that is sent in a round.
fn piece(dtype: DType, len: usize, round: usize) -> Range<usize> {
    (round * piece_len(dtype)).min(len)..((round + 1) * piece_len(dtype)).min(len)
}

impl DtypeExchanges {
    /// Implements [`AxisOps::start_rows`](trireme_tensor::tape::AxisOps::start_rows). Rows are sent in pieces of fixed size, so that the
    /// memory of the group does not depend on the number of rows. The number of rounds in flight is one more than evenly distributed rows
    /// need, within the limit of [`MESSAGES_MAX`].
    pub(super) fn start_rows(
        &self,
        device: &Device,
        runs: ExchangedRuns,
        values: View<'_>,
    ) -> Result<PendingExchange> {
        let (group, degree) = (self.pool().group(), self.axis_rank().degree);
        let hosts = group.hosts();
        let has_many = hosts.ranks_per_host().is_some_and(|num_ranks| num_ranks >= HIERARCHICAL_RANKS_MIN);
        let is_short = runs.even_len * self.dtype().size() < HIERARCHICAL_BYTES_MAX;
        let is_hierarchical = hosts.num_hosts() > 1 && has_many && is_short;
        let room = runs.len_max.next_power_of_two().clamp(256, piece_len(self.dtype()));
        let room = self.row_buffer_len.fetch_max(room, Ordering::Relaxed).max(room);
        let [even, most] = [runs.even_len, runs.len_max].map(|len| len.div_ceil(piece_len(self.dtype())));
        let rounds_in_flight = (even + 1).min(most).min(MESSAGES_MAX / (degree - 1)).max(1);
        let (buffer_len, num_buffers) = if is_hierarchical {
            ((degree - 1) * room, 2 * rounds_in_flight)
        } else {
            (room, 2 * (degree - 1) * rounds_in_flight)
        };
        let mut free = Vec::with_capacity(num_buffers);
        for _ in 0..num_buffers {
            free.push(self.pool().take_buffer(buffer_len)?);
        }
        let num_rounds = runs.lens.iter().max().map_or(0, |len| len.div_ceil(piece_len(self.dtype())));
        let mut started = RowExchange {
            runs,
            buffer_len,
            is_hierarchical,
            free,
            rounds_in_flight,
            num_rounds,
            next_round: 0,
            in_flight: VecDeque::with_capacity(num_buffers),
        };
        while started.next_round < started.num_rounds.min(rounds_in_flight) {
            self.start_round(device, &mut started, values);
        }
        Ok(PendingExchange(lock(&self.rows).insert(started)))
    }

    /// Implements [`AxisOps::send_rest`](trireme_tensor::tape::AxisOps::send_rest).
    pub(super) fn send_rest(
        &self,
        device: &Device,
        exchange: &PendingExchange,
        values: View<'_>,
        mut result: ViewMut<'_>,
        waiting: &mut WaitTracker,
    ) -> Result<()> {
        let mut rows = lock(&self.rows);
        let started = &mut rows[exchange.0];
        self.copy_own_rows(device, &started.runs, values, result.reborrow());
        while started.next_round < started.num_rounds {
            let end = started.next_round - started.rounds_in_flight + 1;
            self.finish_rounds_before(device, started, end, result.reborrow(), waiting)?;
            self.start_round(device, started, values);
        }
        Ok(())
    }

    /// Implements [`AxisOps::finish_rows`](trireme_tensor::tape::AxisOps::finish_rows).
    pub(super) fn finish_rows(
        &self,
        device: &Device,
        PendingExchange(number): PendingExchange,
        result: ViewMut<'_>,
        waiting: &mut WaitTracker,
    ) -> Result<()> {
        let mut started = lock(&self.rows).remove(number);
        let end = started.num_rounds;
        assert_eq!(started.next_round, end, "all was sent");
        self.finish_rounds_before(device, &mut started, end, result, waiting)?;
        let RowExchange { free, buffer_len, .. } = started;
        free.into_iter().for_each(|buffer| self.pool().release_buffer(buffer_len, buffer));
        Ok(())
    }

    /// Copies the rows that stay on this rank.
    fn copy_own_rows(
        &self,
        device: &Device,
        runs: &ExchangedRuns,
        values: View<'_>,
        mut result: ViewMut<'_>,
    ) {
        let own = self.axis_rank().rank;
        let mut next = 0;
        for run in &runs.received[own] {
            let range = next..next + run.len();
            next = range.end;
            for (at, source) in ExchangedRuns::within(&runs.sent[own], range) {
                let len = [source.len()].into();
                device.copy(values.part(source.start, len), result.reborrow().into_part(run.start + at, len));
            }
        }
    }

    fn start_round(&self, device: &Device, started: &mut RowExchange, values: View<'_>) {
        if started.is_hierarchical {
            self.start_hierarchical_round(device, started, values);
        } else {
            self.start_messages(device, started, values);
        }
        started.next_round += 1;
    }

    /// Starts a round: sends a piece to every other rank that still gets rows, and receives the pieces of other ranks. In each iteration of
    /// the loop, every rank sends to a different rank.
    fn start_messages(&self, device: &Device, started: &mut RowExchange, values: View<'_>) {
        let AxisRank { rank, degree } = self.axis_rank();
        let (round, len) = (started.next_round, started.buffer_len);
        let group = self.pool().group();
        for distance in 1..degree {
            let (to, from) = ((rank + distance) % degree, (rank + degree - distance) % degree);
            let part =
                |from: usize, to: usize| piece(self.dtype(), started.runs.lens[from * degree + to], round);
            let (sent, received) = (part(rank, to), part(from, rank));
            if !sent.is_empty() {
                let (mut buffer, num_sent) = (started.take_buffer(), sent.len());
                started.copy_in((self.pool(), device), values, to, sent, &mut buffer, 0);
                let work = group.send_first(self.pool().pass_on(device, buffer, len), num_sent, Rank(to));
                started.in_flight.push_back((round, Transfer::Send(work)));
            }
            if !received.is_empty() {
                let buffer = self.pool().pass_on(device, started.take_buffer(), len);
                let work = group.receive_first(buffer, received.len(), Rank(from));
                started.in_flight.push_back((round, Transfer::Receive { work, from, part: received }));
            }
        }
    }

    /// Starts a round in one hierarchical exchange: sends the pieces for all other ranks, and receives their pieces.
    fn start_hierarchical_round(&self, device: &Device, started: &mut RowExchange, values: View<'_>) {
        let AxisRank { rank, degree } = self.axis_rank();
        let round = started.next_round;
        let lens: Arc<[usize]> =
            started.runs.lens.iter().map(|&len| piece(self.dtype(), len, round).len()).collect();
        let (mut input, mut at) = (started.take_buffer(), 0);
        for to in 0..degree {
            let part = piece(self.dtype(), started.runs.lens[rank * degree + to], round);
            let num_sent = part.len();
            started.copy_in((self.pool(), device), values, to, part, &mut input, at);
            at += num_sent;
        }
        let [input, output] = [input, started.take_buffer()]
            .map(|buffer| self.pool().pass_on(device, buffer, started.buffer_len));
        let work = self.pool().group().all_to_all_variable_by_hosts(input, output, lens);
        started.in_flight.push_back((round, Transfer::Hierarchical(work)));
    }

    /// Waits for the pieces of the rounds before `end`, and copies received pieces to `result`.
    fn finish_rounds_before(
        &self,
        device: &Device,
        started: &mut RowExchange,
        end: usize,
        mut result: ViewMut<'_>,
        waiting: &mut WaitTracker,
    ) -> Result<()> {
        let (AxisRank { rank, degree }, len) = (self.axis_rank(), started.buffer_len);
        while started.in_flight.front().is_some_and(|(round, _)| *round < end) {
            let (round, transfer) = started.in_flight.pop_front().expect("there is one");
            match transfer {
                Transfer::Send(work) => {
                    let buffer = waiting.wait_on_device(work, self.dtype(), len, device)?;
                    started.return_buffer(device, buffer);
                }
                Transfer::Receive { work, from, part } => {
                    let mut buffer = waiting.wait_on_device(work, self.dtype(), len, device)?;
                    started.copy_out((self.pool(), device), &mut buffer, 0, from, part, result.reborrow());
                    started.return_buffer(device, buffer);
                }
                Transfer::Hierarchical(work) => {
                    let (input, output) = waiting.wait(work)?;
                    let (mut output, mut at) = (output.into_memory().map_err(ParallelError::from)?, 0);
                    for from in 0..degree {
                        let part = piece(self.dtype(), started.runs.lens[from * degree + rank], round);
                        let num_received = part.len();
                        started.copy_out(
                            (self.pool(), device),
                            &mut output,
                            at,
                            from,
                            part,
                            result.reborrow(),
                        );
                        at += num_received;
                    }
                    started.return_buffer(device, input.into_memory().map_err(ParallelError::from)?);
                    started.return_buffer(device, output);
                }
            }
        }
        Ok(())
    }
}

impl RowExchange {
    fn take_buffer(&mut self) -> Pending<Buffer<Untyped>> {
        self.free.pop().expect("there are buffers for as many rounds as are in flight")
    }

    /// Returns a buffer to `free`. Issued kernels may still read it.
    fn return_buffer(&mut self, device: &Device, buffer: Pending<Buffer<Untyped>>) {
        device.wait_for(&buffer.event());
        self.free.push(buffer);
    }

    /// Copies `part` of the elements that are sent to rank `to` into a buffer, starting at element `at` of the buffer.
    fn copy_in(
        &self,
        (pool, device): (&Pool, &Device),
        values: View<'_>,
        to: usize,
        part: Range<usize>,
        buffer: &mut Pending<Buffer<Untyped>>,
        at: usize,
    ) {
        for (place, run) in ExchangedRuns::within(&self.runs.sent[to], part) {
            let values = values.part(run.start, [run.len()].into());
            pool.copy_in(device, values, buffer, (at + place) * values.dtype().size());
        }
    }

    /// Copies `part` of the elements that are received from rank `from` out of a buffer, starting at element `at` of the buffer.
    fn copy_out(
        &self,
        (pool, device): (&Pool, &Device),
        buffer: &mut Pending<Buffer<Untyped>>,
        at: usize,
        from: usize,
        part: Range<usize>,
        mut result: ViewMut<'_>,
    ) {
        for (place, run) in ExchangedRuns::within(&self.runs.received[from], part) {
            let result = result.reborrow().into_part(run.start, [run.len()].into());
            pool.copy_out(device, buffer, (at + place) * result.dtype().size(), result);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::GroupAxis;
    use super::*;
    use trireme_tensor::tape::{AxisOps, Runs};
    use trireme_tensor::{Category, DeviceOptions, Tensor};
    use trireme_testkit::run_ranks_on;

    const PIECE: usize = piece_len(DType::F32);

    /// Returns the number of elements that rank `from` sends to rank `to`: more pieces than are in flight at a time, fewer, or none.
    fn len(from: usize, to: usize, many: usize) -> usize {
        [[100, many, 0, 2], [3, 0, 9, many / 2], [1, 1, 1, 0], [0, 0, 7, 1]][from % 4][(to + from / 4) % 4]
    }

    fn value(from: usize, to: usize, index: usize) -> f32 {
        (from * 1000 + to * 100 + index % 97) as f32
    }

    /// Runs two overlapping exchanges, and one that sends the rows back. `memory` is the expected peak in bytes. `by_hosts` is whether the
    /// exchanges must be hierarchical.
    fn exchange(hosts: &[usize], even_len: usize, memory: usize, by_hosts: bool) {
        let (degree, many) = (hosts.len(), 7 * PIECE + 5);
        run_ranks_on(hosts, |group| {
            let device = Device::cpu(DeviceOptions { num_threads: 1, ..DeviceOptions::default() }).unwrap();
            let (rank, group) = (group.rank().0, Arc::new(group));
            let axis = GroupAxis::new(&group, &device);
            let after = |end: &mut usize, len: usize| -> Runs {
                *end += len;
                // If there are two or more elements, they form two runs, the last part first.
                let (start, middle) = (*end - len, *end - len / 2);
                [middle..*end, start..middle].into_iter().filter(|run| !run.is_empty()).collect()
            };
            let (mut sent_end, mut received_end) = (0, 0);
            let runs = ExchangedRuns {
                sent: (0..degree).map(|to| after(&mut sent_end, len(rank, to, many))).collect(),
                received: (0..degree).map(|from| after(&mut received_end, len(from, rank, many))).collect(),
                lens: (0..degree * degree)
                    .map(|index| (index / degree, index % degree))
                    .map(|(from, to)| if from == to { 0 } else { len(from, to, many) })
                    .collect(),
                even_len,
                len_max: 8 * PIECE,
            };
            let empty = |len: usize| device.empty([len].into(), DType::F32, Category::Activations);
            let [mut values, mut back] = [sent_end; 2].map(|len| empty(len).unwrap());
            let mut results = [received_end; 2].map(|len| empty(len).unwrap());
            let mut all = vec![0.0; sent_end];
            for (to, runs) in runs.sent.iter().enumerate() {
                let places = runs.iter().cloned().flatten();
                places.enumerate().for_each(|(index, place)| all[place] = value(rank, to, index));
            }
            device.upload(&all, values.view_mut());
            let send = |values: &Tensor, runs: &ExchangedRuns| {
                axis.start_rows(&device, runs.clone(), values.view()).unwrap()
            };
            let finish = |exchange, values: &Tensor, result: &mut Tensor| {
                axis.send_rest(&device, &exchange, values.view(), result.view_mut()).unwrap();
                axis.finish_rows(&device, exchange, result.view_mut()).unwrap();
            };
            let [first, second] = [(); 2].map(|()| send(&values, &runs));
            finish(first, &values, &mut results[0]);
            let other = send(&results[0], &runs.clone().reversed());
            finish(second, &values, &mut results[1]);
            finish(other, &results[0], &mut back);
            let [found, again] = results.each_ref().map(|result| device.read::<f32>(result.view()).unwrap());
            assert_eq!(found, again);
            for (from, runs) in runs.received.iter().enumerate() {
                let places = runs.iter().cloned().flatten().enumerate();
                let is_right = |(index, place): (usize, usize)| found[place] == value(from, rank, index);
                assert!(places.clone().all(is_right), "rank {rank} has something else from {from}");
            }
            assert_eq!(device.read::<f32>(back.view()).unwrap(), all);
            assert_eq!(device.memory().usage(Category::Communication).peak, memory);
            assert_eq!(group.statistics().message_bytes == 0, by_hosts);
        });
    }

    #[test]
    fn uneven_rows_use_the_memory_of_even_rows() {
        // Two exchanges at a time, each with two pieces to and from each of the two other ranks.
        exchange(&[0; 3], PIECE, 2 * (2 * 2 * 2) * (256 << 10), false);
        // Hierarchical exchanges and messages take the same memory.
        for hosts in [[0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 0, 1, 0, 1, 0, 1]] {
            for (even_len, by_hosts) in [(100, true), (PIECE, false)] {
                exchange(&hosts, even_len, 2 * (2 * 2 * 7) * (256 << 10), by_hosts);
            }
        }
    }
}
