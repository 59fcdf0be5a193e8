//! Rows that every rank sends to every other one, as many as there are.

use super::Lane;
use crate::error::ParallelError;
use crate::stored::Stored;
use crate::waiting::Waiting;
use std::collections::VecDeque;
use std::iter;
use std::ops::Range;
use trireme_base::{AxisPlace, Rank};
use trireme_comm::{Buffer, Work};
use trireme_tensor::tape::{ExchangedRuns, Runs};
use trireme_tensor::{Device, View, ViewMut};

/// Rounds of pieces that are under way at a time, at most.
const ROUNDS_MAX: usize = 4;

/// Messages to other ranks that are under way at a time, unless a round has more.
const MESSAGES_MAX: usize = 8;

/// A part of the rows that a rank sends to another one, and one of those that it receives from one, in a round; with the elements of their memory.
struct Piece<T> {
    round: usize,
    sent: Option<(Work<Buffer<T>>, usize)>,
    received: Option<Received<T>>,
}

struct Received<T> {
    work: Work<Buffer<T>>,
    room: usize,
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

    /// The elements, of so many, that travel in a round.
    fn range(len: usize, round: usize) -> Option<Range<usize>> {
        let start = round * Self::LEN_MAX;
        (start < len).then(|| start..len.min(start + Self::LEN_MAX))
    }

    /// Elements of the memory of the first piece of so many: one of a few numbers, so that it is used again.
    fn room(len: usize) -> usize {
        len.next_power_of_two().clamp(256, Self::LEN_MAX)
    }
}

fn num_elements(runs: &[Range<usize>]) -> usize {
    runs.iter().map(Range::len).sum()
}

impl<T: Stored> Lane<T> {
    /// As [`AxisOps::exchange_rows`](trireme_tensor::tape::AxisOps::exchange_rows): piece by piece, a few at a time, so that what lies in memory of the group does not
    /// depend on how many rows there are.
    pub(super) fn exchange_rows(
        &self,
        device: &Device,
        runs: &ExchangedRuns,
        (values, mut result): (View<'_>, ViewMut<'_>),
        waiting: &mut Waiting,
    ) -> Result<(), ParallelError> {
        let AxisPlace { rank, degree } = self.place();
        let ExchangedRuns { sent, received, most } = match runs.sent.is_empty() {
            true => {
                &even(degree, [values.shape(), result.shape()].map(|shape| shape.num_elements()), runs.most)
            }
            false => runs,
        };
        self.keep_own(device, (&sent[rank], values), (&received[rank], result.reborrow()));
        let room = Piece::<T>::room(*most);
        let rounds_under_way = ROUNDS_MAX.min((MESSAGES_MAX / (degree - 1)).max(1));
        let num_messages = 2 * (degree - 1) * rounds_under_way.min(Piece::<T>::num_rounds(*most));
        self.memory.pool().reserve(num_messages, room)?;
        let others = sent.iter().chain(received).enumerate().filter(|(index, _)| index % degree != rank);
        let num_rounds =
            others.map(|(_, runs)| Piece::<T>::num_rounds(num_elements(runs))).max().unwrap_or(0);
        let mut under_way: VecDeque<Piece<T>> = VecDeque::with_capacity(num_messages);
        for round in 0..num_rounds + rounds_under_way {
            // What was started so many rounds ago has had time to come.
            while under_way.front().is_some_and(|piece| piece.round + rounds_under_way <= round) {
                let piece = under_way.pop_front().expect("there is one");
                self.finish_piece(device, piece, (received, result.reborrow()), waiting)?;
            }
            // Ranks send to different ones at a time.
            for distance in 1..degree {
                let (to, from) = ((rank + distance) % degree, (rank + degree - distance) % degree);
                let part = |runs: &Runs| Piece::<T>::range(num_elements(runs), round);
                let out = part(&sent[to])
                    .map(|part| self.send_piece(device, (values, &sent[to]), part, (to, room)));
                let back = part(&received[from]).map(|part| self.receive_piece(from, part, room));
                let (sent, received) = (out.transpose()?, back.transpose()?);
                if sent.is_some() || received.is_some() {
                    under_way.push_back(Piece { round, sent, received });
                }
            }
        }
        Ok(())
    }

    /// Copies what stays on this rank.
    fn keep_own(
        &self,
        device: &Device,
        (sent, values): (&[Range<usize>], View<'_>),
        (received, mut result): (&[Range<usize>], ViewMut<'_>),
    ) {
        let mut next = 0;
        for run in received {
            let range = next..next + run.len();
            next = range.end;
            for (at, own) in ExchangedRuns::within(sent, range) {
                let len = [own.len()].into();
                device.copy(values.part(own.start, len), result.reborrow().into_part(run.start + at, len));
            }
        }
    }

    fn send_piece(
        &self,
        device: &Device,
        (values, runs): (View<'_>, &[Range<usize>]),
        part: Range<usize>,
        (to, room): (usize, usize),
    ) -> Result<(Work<Buffer<T>>, usize), ParallelError> {
        let (pool, len) = (self.memory.pool(), part.len());
        let room = room.max(Piece::<T>::room(len));
        let parts = ExchangedRuns::within(runs, part);
        let buffer = pool.send_parts(
            device,
            parts.map(|(at, run)| (values.part(run.start, [run.len()].into()), at)),
            room,
        )?;
        Ok((pool.group().send_first(buffer, len, Rank(to)), room))
    }

    fn receive_piece(
        &self,
        from: usize,
        part: Range<usize>,
        room: usize,
    ) -> Result<Received<T>, ParallelError> {
        let pool = self.memory.pool();
        let room = room.max(Piece::<T>::room(part.len()));
        let buffer = Buffer::pending(pool.take_buffer(room)?, room);
        let work = pool.group().receive_first(buffer, part.len(), Rank(from));
        Ok(Received { work, room, from, part })
    }

    /// Waits for a piece, and brings it where it belongs.
    fn finish_piece(
        &self,
        device: &Device,
        piece: Piece<T>,
        (received, mut result): (&[Runs], ViewMut<'_>),
        waiting: &mut Waiting,
    ) -> Result<(), ParallelError> {
        let pool = self.memory.pool();
        if let Some(Received { work, room, from, part }) = piece.received {
            let mut buffer = waiting.wait_on_device(work, room, device)?;
            for (at, run) in ExchangedRuns::within(&received[from], part) {
                let result = result.reborrow().into_part(run.start, [run.len()].into());
                device.upload_later(&mut buffer, at * size_of::<T>(), result);
            }
            device.wait_for(&buffer.event());
            pool.give_buffer(room, buffer);
        }
        if let Some((work, room)) = piece.sent {
            let buffer = waiting.wait_on_device(work, room, device)?;
            device.wait_for(&buffer.event());
            pool.give_buffer(room, buffer);
        }
        Ok(())
    }
}

/// Runs on a device that only counts: each rank has as much for every one.
fn even(degree: usize, [sent, received]: [usize; 2], most: usize) -> ExchangedRuns {
    let runs = |len: usize| {
        let part = len / degree;
        (0..degree).map(|rank| iter::once(rank * part..(rank + 1) * part).collect()).collect()
    };
    ExchangedRuns { sent: runs(sent), received: runs(received), most }
}
