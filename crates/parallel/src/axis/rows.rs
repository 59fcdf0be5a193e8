//! Rows that every rank sends to every other one, as many as there are.

use super::Lane;
use crate::error::ParallelError;
use crate::stored::Stored;
use crate::waiting::Waiting;
use std::collections::VecDeque;
use std::ops::Range;
use trireme_base::{AxisPlace, Pending, Rank};
use trireme_comm::{Buffer, Work};
use trireme_tensor::tape::{ExchangedRuns, PendingExchange};
use trireme_tensor::{Device, View, ViewMut};

/// Messages to other ranks, and from them, that an exchange has under way at a time, unless a round has more: 16 MiB each way.
const MESSAGES_MAX: usize = 64;

/// An exchange of rows that was started.
pub(super) struct StartedRows<T> {
    runs: ExchangedRuns,
    /// Elements of the memory of a piece.
    room: usize,
    /// Memory for pieces that are not under way. An exchange has memory for as many as there may be, so that it depends on no load.
    free: Vec<Pending<Buffer<T>>>,
    rounds_under_way: usize,
    num_rounds: usize,
    next_round: usize,
    under_way: VecDeque<Piece<T>>,
}

/// A part of the rows that a rank sends to another one, and one of those that it receives from one, in a round.
struct Piece<T> {
    round: usize,
    sent: Option<Work<Buffer<T>>>,
    received: Option<Received<T>>,
}

struct Received<T> {
    work: Work<Buffer<T>>,
    from: usize,
    /// Which elements, of all that the rank sends.
    part: Range<usize>,
}

impl<T> Piece<T> {
    /// Elements of a piece.
    const LEN_MAX: usize = (256 << 10) / size_of::<T>();

    /// Rounds in which so many elements travel.
    fn num_rounds(len: usize) -> usize {
        len.div_ceil(Self::LEN_MAX)
    }

    /// The elements, of those of some runs, that travel in a round.
    fn range(runs: &[Range<usize>], round: usize) -> Option<Range<usize>> {
        let (start, len) = (round * Self::LEN_MAX, ExchangedRuns::num_elements(runs));
        (start < len).then(|| start..len.min(start + Self::LEN_MAX))
    }
}

impl<T: Stored> Lane<T> {
    /// As [`AxisOps::start_rows`](trireme_tensor::tape::AxisOps::start_rows): piece by piece, so that what lies in memory of the group does not depend on how many
    /// rows there are. If loads are even, all pieces are under way at once, and one more between two ranks.
    pub(super) fn start_rows(
        &self,
        device: &Device,
        runs: ExchangedRuns,
        values: View<'_>,
    ) -> Result<PendingExchange, ParallelError> {
        let AxisPlace { rank, degree } = self.place();
        let room = runs.most.next_power_of_two().clamp(256, Piece::<T>::LEN_MAX);
        let [even, most] = [runs.even, runs.most].map(Piece::<T>::num_rounds);
        let rounds_under_way = (even + 1).min(most).min(MESSAGES_MAX / (degree - 1)).max(1);
        let num_messages = 2 * (degree - 1) * rounds_under_way;
        let mut free = Vec::with_capacity(num_messages);
        for _ in 0..num_messages {
            free.push(self.memory.pool().take_buffer(room)?);
        }
        let all = runs.sent.iter().chain(&runs.received).enumerate();
        let others = all.filter(|(index, _)| index % degree != rank).map(|(_, runs)| runs);
        let num_rounds = others.map(|runs| Piece::<T>::num_rounds(ExchangedRuns::num_elements(runs))).max();
        let mut started = StartedRows {
            runs,
            room,
            free,
            rounds_under_way,
            num_rounds: num_rounds.unwrap_or(0),
            next_round: 0,
            under_way: VecDeque::with_capacity(num_messages),
        };
        while started.next_round < started.num_rounds.min(rounds_under_way) {
            self.start_round(device, &mut started, values);
        }
        Ok(PendingExchange::new(self.rows.put(started)))
    }

    /// As [`AxisOps::send_rest`](trireme_tensor::tape::AxisOps::send_rest).
    pub(super) fn send_rest(
        &self,
        device: &Device,
        exchange: &PendingExchange,
        (values, mut result): (View<'_>, ViewMut<'_>),
        waiting: &mut Waiting,
    ) -> Result<(), ParallelError> {
        let mut started = self.rows.take(exchange.number());
        self.keep_own(device, &started.runs, (values, result.reborrow()));
        while started.next_round < started.num_rounds {
            let round = started.next_round - started.rounds_under_way;
            self.finish_rounds(device, &mut started, round, result.reborrow(), waiting)?;
            self.start_round(device, &mut started, values);
        }
        self.rows.put_back(exchange.number(), started);
        Ok(())
    }

    /// As [`AxisOps::finish_rows`](trireme_tensor::tape::AxisOps::finish_rows).
    pub(super) fn finish_rows(
        &self,
        device: &Device,
        exchange: &PendingExchange,
        result: ViewMut<'_>,
        waiting: &mut Waiting,
    ) -> Result<(), ParallelError> {
        let mut started = self.rows.take(exchange.number());
        let last = started.num_rounds;
        assert_eq!(started.next_round, last, "all was sent");
        self.finish_rounds(device, &mut started, last, result, waiting)?;
        started.free.into_iter().for_each(|buffer| self.memory.pool().give_buffer(started.room, buffer));
        Ok(())
    }

    /// Copies what stays on this rank.
    fn keep_own(&self, device: &Device, runs: &ExchangedRuns, (values, mut result): (View<'_>, ViewMut<'_>)) {
        let own = self.place().rank;
        let mut next = 0;
        for run in &runs.received[own] {
            let range = next..next + run.len();
            next = range.end;
            for (at, own) in ExchangedRuns::within(&runs.sent[own], range) {
                let len = [own.len()].into();
                device.copy(values.part(own.start, len), result.reborrow().into_part(run.start + at, len));
            }
        }
    }

    /// Sends a piece to every other rank that gets one in the next round, and receives those of others. Ranks send to different ones at a time.
    fn start_round(&self, device: &Device, started: &mut StartedRows<T>, values: View<'_>) {
        let AxisPlace { rank, degree } = self.place();
        let StartedRows { runs, room, free, next_round: round, under_way, .. } = started;
        let group = self.memory.pool().group();
        let mut take = || free.pop().expect("there is memory for the pieces of so many rounds");
        for distance in 1..degree {
            let (to, from) = ((rank + distance) % degree, (rank + degree - distance) % degree);
            let sent = Piece::<T>::range(&runs.sent[to], *round).map(|part| {
                let (mut buffer, len) = (take(), part.len());
                for (at, run) in ExchangedRuns::within(&runs.sent[to], part) {
                    let values = values.part(run.start, [run.len()].into());
                    device.download_later(values, &mut buffer, at * size_of::<T>());
                }
                group.send_first(Buffer::pending(buffer, *room), len, Rank(to))
            });
            let received = Piece::<T>::range(&runs.received[from], *round).map(|part| {
                let buffer = Buffer::pending(take(), *room);
                Received { work: group.receive_first(buffer, part.len(), Rank(from)), from, part }
            });
            if sent.is_some() || received.is_some() {
                under_way.push_back(Piece { round: *round, sent, received });
            }
        }
        started.next_round += 1;
    }

    /// Waits for the pieces of rounds up to `last`, and brings them where they belong.
    fn finish_rounds(
        &self,
        device: &Device,
        started: &mut StartedRows<T>,
        last: usize,
        mut result: ViewMut<'_>,
        waiting: &mut Waiting,
    ) -> Result<(), ParallelError> {
        let room = started.room;
        while started.under_way.front().is_some_and(|piece| piece.round <= last) {
            let piece = started.under_way.pop_front().expect("there is one");
            if let Some(Received { work, from, part }) = piece.received {
                let mut buffer = waiting.wait_on_device(work, room, device)?;
                for (at, run) in ExchangedRuns::within(&started.runs.received[from], part) {
                    let result = result.reborrow().into_part(run.start, [run.len()].into());
                    device.upload_later(&mut buffer, at * size_of::<T>(), result);
                }
                device.wait_for(&buffer.event());
                started.free.push(buffer);
            }
            if let Some(work) = piece.sent {
                let buffer = waiting.wait_on_device(work, room, device)?;
                device.wait_for(&buffer.event());
                started.free.push(buffer);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::GroupAxis;
    use super::*;
    use std::sync::Arc;
    use trireme_tensor::tape::{AxisOps, Runs};
    use trireme_tensor::{Category, DeviceOptions, Tensor};
    use trireme_testkit::run_ranks;

    const DEGREE: usize = 3;

    /// Elements of rank `from` for rank `to`: more pieces than are under way at a time, fewer, and none.
    fn len(from: usize, to: usize) -> usize {
        [[100, 7 * Piece::<f32>::LEN_MAX + 5, 0], [3, 0, Piece::<f32>::LEN_MAX], [1, 1, 1]][from][to]
    }

    fn value(from: usize, to: usize, index: usize) -> f32 {
        (from * 1000 + to * 100 + index % 97) as f32
    }

    /// Two exchanges that overlap, there and back.
    #[test]
    fn uneven_rows_come_in_the_memory_of_even_ones() {
        run_ranks(DEGREE, |group| {
            let device = Device::cpu(DeviceOptions { num_threads: 1, ..DeviceOptions::default() }).unwrap();
            let rank = group.rank().0;
            let axis = GroupAxis::new(&Arc::new(group), &device);
            let after = |end: &mut usize, len: usize| -> Runs {
                *end += len;
                // Two runs where there is more than one element, the last part first.
                let (start, middle) = (*end - len, *end - len / 2);
                [middle..*end, start..middle].into_iter().filter(|run| !run.is_empty()).collect()
            };
            let (mut sent_end, mut received_end) = (0, 0);
            let runs = ExchangedRuns {
                sent: (0..DEGREE).map(|to| after(&mut sent_end, len(rank, to))).collect(),
                received: (0..DEGREE).map(|from| after(&mut received_end, len(from, rank))).collect(),
                even: Piece::<f32>::LEN_MAX,
                most: 8 * Piece::<f32>::LEN_MAX,
            };
            let empty =
                |len: usize| device.empty([len].into(), trireme_base::DType::F32, Category::Activations);
            let (mut values, mut result) = (empty(sent_end).unwrap(), empty(received_end).unwrap());
            let mut back = empty(sent_end).unwrap();
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
            finish(first, &values, &mut result);
            let other = send(&result, &runs.clone().reversed());
            finish(second, &values, &mut result);
            finish(other, &result, &mut back);
            let found = device.read::<f32>(result.view());
            for (from, runs) in runs.received.iter().enumerate() {
                let places = runs.iter().cloned().flatten().enumerate();
                let is_right = |(index, place): (usize, usize)| found[place] == value(from, rank, index);
                assert!(places.clone().all(is_right), "rank {rank} has something else from {from}");
            }
            assert_eq!(device.read::<f32>(back.view()), all);
            // Two at a time, each with two pieces to and from each of two others.
            let taken = device.memory().usage(Category::Communication).peak;
            assert_eq!(taken, 2 * (2 * 2 * 2) * (256 << 10));
        });
    }
}
