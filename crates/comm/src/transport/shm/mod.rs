//! Collectives over shared memory: ranks read and write each other's buffers in place.
//!
//! Each rank has one arena, a sealed memfd that all peers map when the group is made. It holds the rank's
//! [board], two stages, and the buffers made by [`Group::buffer`](crate::Group::buffer); a buffer is known to
//! the peers by its offset alone. An operation goes like this:
//!
//! - *Short vectors, control data, barriers*: a rank copies its bytes into one of its stages, posts the
//!   operation on its board and waits until all have posted; then it reads all stages. Stages alternate, and
//!   no rank gets two operations ahead of another, so one synchronisation is enough.
//! - *Long vectors*: a rank posts where its buffer lies and waits until all have posted. In an all-reduce it
//!   then reduces its [`owned_range`] of all buffers, piece by piece in cache, and writes each piece into all
//!   buffers; in a broadcast it copies from the root's buffer. It waits again until all have finished.
//!
//! # Safety of the memory
//! This module holds the crate's only unsafe code. Every other process that maps an arena is a member of
//! the same job that runs this same code under the same user; between the two synchronisations of an
//! operation the memory is divided as above, and outside of them a buffer is touched by its owner only.
//! Offsets and lengths read from a board are checked before use, and seals keep a peer from shrinking what is
//! mapped.

#![allow(unsafe_code)]

mod arena;
mod board;
mod mapping;

pub(crate) use arena::{Arena, Region};
use mapping::Mapping;
pub(crate) use mapping::PeerArena;

use crate::buffer::{CacheLine, Memory, Storage};
use crate::control::Control;
use crate::element::{finish_mean, reduce_into};
use crate::engine::{Call, Cost, Payload};
use crate::group::CONTROL_BYTES_MAX;
use crate::transport::Transport;
use crate::{CommError, GroupOptions, Operation};
use board::Board;
use std::ops::Range;
use std::sync::Arc;
use trireme_base::{DType, Rank, ReduceOp};
use trireme_schedule::collective::{Side, Term, canonical_terms, num_partials, owned_range};

/// Where things lie in an arena: the board, then two stages, then buffers.
const BOARD_BYTES: usize = 4096;
const STAGE_BYTES: usize = 1 << 20;
const BUFFERS_START: usize = BOARD_BYTES + 2 * STAGE_BYTES;
const _: () = assert!(STAGE_BYTES >= CONTROL_BYTES_MAX && STAGE_BYTES >= GroupOptions::SHORT_BYTES_LIMIT);

pub(crate) struct SharedMemory {
    rank: Rank,
    arena: Arc<Arena>,
    /// The arenas of the others, `None` for this rank.
    peers: Vec<Option<PeerArena>>,
    short_bytes_max: usize,
    piece_bytes: usize,
    terms: Vec<Term>,
    /// The stack on which `terms` work, one piece each.
    partials: Vec<CacheLine>,
}

impl SharedMemory {
    /// Takes the mapped arena of each peer, in rank order, `None` for this rank.
    pub(crate) fn new(
        rank: Rank,
        arena: Arc<Arena>,
        peers: Vec<Option<PeerArena>>,
        options: &GroupOptions,
    ) -> Result<Self, CommError> {
        let world_size = peers.len();
        let piece_bytes = options.chunk_bytes.next_multiple_of(size_of::<CacheLine>());
        Ok(SharedMemory {
            rank,
            arena,
            peers,
            short_bytes_max: options.short_bytes_max,
            piece_bytes,
            terms: canonical_terms(world_size),
            partials: CacheLine::zeroed(num_partials(world_size) * piece_bytes)?,
        })
    }

    fn world_size(&self) -> usize {
        self.peers.len()
    }

    /// The arena of any rank.
    fn arena_of(&self, rank: usize) -> &Mapping {
        self.peers[rank].as_ref().map_or(self.arena.mapping(), PeerArena::mapping)
    }

    fn board(&self, rank: usize) -> &Board {
        self.arena_of(rank).board()
    }

    /// Posts the operation, waits for everyone to post theirs, and compares.
    fn meet(
        &self,
        call: &Call,
        location: usize,
        control: &mut Control,
        cost: &mut Cost,
    ) -> Result<(), CommError> {
        self.board(self.rank.0).post(call, location as u64);
        self.await_all(Board::POSTED, call, control, cost)?;
        for rank in self.others() {
            self.board(rank).compare(call, self.rank, Rank(rank))?;
        }
        Ok(())
    }

    /// Says that this rank has finished its part, and waits for everyone to say so.
    fn finish(&self, call: &Call, control: &mut Control, cost: &mut Cost) -> Result<(), CommError> {
        self.board(self.rank.0).finish(call);
        self.await_all(Board::FINISHED, call, control, cost)
    }

    fn await_all(
        &self,
        phase: u32,
        call: &Call,
        control: &mut Control,
        cost: &mut Cost,
    ) -> Result<(), CommError> {
        self.others().try_for_each(|rank| self.board(rank).wait(phase, call, control, cost))
    }

    fn others(&self) -> impl Iterator<Item = usize> {
        let own = self.rank.0;
        (0..self.world_size()).filter(move |&rank| rank != own)
    }

    fn gather_blocks(
        &mut self,
        call: &Call,
        blocks: &mut [Vec<u8>],
        control: &mut Control,
        cost: &mut Cost,
    ) -> Result<(), CommError> {
        self.fill_stage(call, &blocks[self.rank.0]);
        self.meet(call, blocks[self.rank.0].len(), control, cost)?;
        for rank in self.others() {
            let bytes = self.board(rank).location(call);
            let bytes_max = CONTROL_BYTES_MAX;
            if bytes > bytes_max as u64 {
                return Err(CommError::ControlDataTooLong { rank: Rank(rank), bytes, bytes_max });
            }
            blocks[rank] = self.stage(rank, call, bytes as usize).to_vec();
            cost.payload_bytes += bytes;
        }
        Ok(())
    }

    fn staged(
        &mut self,
        call: &Call,
        storage: &mut Storage,
        control: &mut Control,
        cost: &mut Cost,
    ) -> Result<(), CommError> {
        let vector = storage.bytes_mut();
        self.fill_stage(call, vector);
        self.meet(call, 0, control, cost)?;
        let num_bytes = vector.len();
        match call.operation {
            Operation::AllReduce { op, dtype, .. } => {
                let mut partials = std::mem::take(&mut self.partials);
                for piece in pieces(0..num_bytes, self.piece_bytes) {
                    let source = |rank: Rank| &self.stage(rank.0, call, num_bytes)[piece.clone()];
                    let result = self.reduce(&mut partials, (dtype, op), source);
                    vector[piece.clone()].copy_from_slice(result);
                }
                self.partials = partials;
                cost.payload_bytes += (num_bytes * (self.world_size() - 1)) as u64;
            }
            Operation::Broadcast { root, .. } if root != self.rank => {
                vector.copy_from_slice(self.stage(root.0, call, num_bytes));
                cost.payload_bytes += num_bytes as u64;
            }
            _ => {}
        }
        Ok(())
    }

    fn direct(
        &mut self,
        call: &Call,
        storage: &Storage,
        control: &mut Control,
        cost: &mut Cost,
    ) -> Result<(), CommError> {
        let Memory::Shared(region) = storage.memory() else {
            return Err(CommError::ForeignBuffer { operation: call.operation });
        };
        let num_bytes = storage.bytes().len();
        self.meet(call, region.offset(), control, cost)?;
        match call.operation {
            Operation::AllReduce { op, dtype, len } => {
                let granule = size_of::<CacheLine>() / dtype.size();
                let owned = owned_range(self.rank, self.world_size(), len, granule);
                let owned = owned.start * dtype.size()..owned.end * dtype.size();
                self.reduce_owned(call, owned.clone(), num_bytes, (dtype, op))?;
                cost.payload_bytes += (2 * owned.len() * (self.world_size() - 1)) as u64;
            }
            Operation::Broadcast { root, .. } if root != self.rank => {
                let from = self.vector_of(root.0, call, num_bytes)?;
                let to = self.vector_of(self.rank.0, call, num_bytes)?;
                // SAFETY: both point to `num_bytes` bytes of different mappings; the root only reads its
                // vector until all have finished, and nobody but this rank touches its own.
                unsafe { std::ptr::copy_nonoverlapping(from, to, num_bytes) };
                cost.payload_bytes += num_bytes as u64;
            }
            _ => {}
        }
        self.finish(call, control, cost)
    }

    /// Reduces the bytes in `owned` of all ranks' vectors and writes the result into all of them.
    fn reduce_owned(
        &mut self,
        call: &Call,
        owned: Range<usize>,
        num_bytes: usize,
        reduction: (DType, ReduceOp),
    ) -> Result<(), CommError> {
        for rank in 0..self.world_size() {
            self.vector_of(rank, call, num_bytes)?;
        }
        let mut partials = std::mem::take(&mut self.partials);
        for piece in pieces(owned, self.piece_bytes) {
            let place = |rank: usize| {
                let vector = self.vector_of(rank, call, num_bytes).expect("all places were checked");
                vector.wrapping_add(piece.start)
            };
            // SAFETY: the vector's bytes are mapped as long as `self` is, and between the
            // synchronisations only this rank touches the bytes of `piece`, here only to read.
            let source =
                |rank: Rank| unsafe { std::slice::from_raw_parts(place(rank.0).cast_const(), piece.len()) };
            let result = self.reduce(&mut partials, reduction, source);
            for rank in 0..self.world_size() {
                // SAFETY: as above; no slice of the piece is alive any more, and `result` lies on the heap.
                unsafe { std::ptr::copy_nonoverlapping(result.as_ptr(), place(rank), piece.len()) };
            }
        }
        self.partials = partials;
        Ok(())
    }

    /// Reduces one piece of every rank in the canonical order.
    fn reduce<'a, 'b>(
        &self,
        partials: &'a mut [CacheLine],
        (dtype, op): (DType, ReduceOp),
        source: impl Fn(Rank) -> &'b [u8],
    ) -> &'a [u8] {
        let partials: &mut [u8] = bytemuck::cast_slice_mut(partials);
        let num_bytes = source(self.rank).len();
        let mut depth = 0;
        for term in &self.terms {
            let (below, above) = partials.split_at_mut(depth * self.piece_bytes);
            match *term {
                Term::Load(rank) => {
                    above[..num_bytes].copy_from_slice(source(rank));
                    depth += 1;
                }
                Term::Reduce(rank) => {
                    let top = &mut below[(depth - 1) * self.piece_bytes..][..num_bytes];
                    reduce_into(top, source(rank), dtype, op, Side::Left);
                }
                Term::Combine => {
                    let (left, right) = below.split_at_mut((depth - 1) * self.piece_bytes);
                    let left = &mut left[(depth - 2) * self.piece_bytes..][..num_bytes];
                    reduce_into(left, &right[..num_bytes], dtype, op, Side::Left);
                    depth -= 1;
                }
            }
        }
        let result = &mut partials[..num_bytes];
        finish_mean(result, dtype, op, self.world_size());
        result
    }

    /// Where the vector of `rank` lies, as its board says.
    fn vector_of(&self, rank: usize, call: &Call, num_bytes: usize) -> Result<*mut u8, CommError> {
        let refuse = || call.protocol(Rank(rank), "its buffer lies outside of its arena");
        let start = usize::try_from(self.board(rank).location(call)).map_err(|_| refuse())?;
        let arena = self.arena_of(rank);
        let is_inside = start >= BUFFERS_START
            && start.is_multiple_of(size_of::<CacheLine>())
            && start.checked_add(num_bytes).is_some_and(|end| end <= arena.len());
        if is_inside { Ok(arena.at(start, num_bytes)) } else { Err(refuse()) }
    }

    fn stage(&self, rank: usize, call: &Call, num_bytes: usize) -> &[u8] {
        let start = self.arena_of(rank).at(stage_start(call), num_bytes);
        // SAFETY: the bytes are mapped as long as `self` is; their owner wrote them before it posted, and
        // does not again before this rank has posted its next operation.
        unsafe { std::slice::from_raw_parts(start.cast_const(), num_bytes) }
    }

    fn fill_stage(&self, call: &Call, bytes: &[u8]) {
        let stage = self.arena.mapping().at(stage_start(call), bytes.len());
        // SAFETY: this rank's stage for operations of this parity, which the peers finished reading before
        // they posted the operation before this one; `bytes` lies on the heap or in a buffer.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), stage, bytes.len()) };
    }
}

fn stage_start(call: &Call) -> usize {
    BOARD_BYTES + (call.sequence % 2) as usize * STAGE_BYTES
}

fn pieces(range: Range<usize>, piece_bytes: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(piece_bytes).map(move |start| start..end.min(start + piece_bytes))
}

impl Transport for SharedMemory {
    fn execute(
        &mut self,
        call: &Call,
        payload: &mut Payload,
        control: &mut Control,
        cost: &mut Cost,
    ) -> Result<(), CommError> {
        match payload {
            Payload::Nothing => self.meet(call, 0, control, cost),
            Payload::Blocks(blocks) => self.gather_blocks(call, blocks, control, cost),
            Payload::Vector(storage) if storage.bytes().len() <= self.short_bytes_max => {
                self.staged(call, storage, control, cost)
            }
            Payload::Vector(storage) => self.direct(call, storage, control, cost),
        }
    }

    fn abandon(&mut self) {
        self.arena.retire();
    }
}
