//! Collectives over shared memory: the ranks of one host read and write each other's memory in place.
//!
//! Each process has one arena, a sealed memfd that its peers on the host map. The arena holds the buffers of
//! [`Group::buffer`](crate::Group::buffer) and, for each group, an [`Area`]: the state that the rank publishes to its peers (its [board]),
//! two staging buffers (stages), and the rings of the group's [links](super::link). The members synchronize at barriers. Operations run in
//! one of three ways:
//!
//! - *Short vectors, control data and barrier operations*: a rank copies the data that its peers need into one of its stages, posts the
//!   operation on its board and waits until all have posted. Then it [pulls] from all stages. Stages alternate, and no rank gets two
//!   operations ahead of another, so one barrier is enough.
//! - *Long vectors in arenas*: a rank posts the location of its vector and waits until all have posted. It then pulls from the vectors
//!   themselves. In an all-reduce, each rank reduces only its [own range] and writes each piece to all vectors. A second barrier ends the
//!   operation.
//! - *Long vectors in private memory* go through the stages by windows, with one barrier per window, or two in an all-reduce of three or
//!   more members.
//!
//! # Safety of the memory
//! Every other process that maps an arena belongs to the same job, runs this same code and has the same user. Between the barriers of an
//! operation, the memory is divided as described above. Outside of an operation, only its owner accesses a buffer: peers access it after
//! its owner has posted it, and have finished when its owner leaves the last barrier.
//!
//! So a vector is represented by a [`VectorRef`], which borrows its buffer exclusively but holds only its address: a reference would
//! promise that no other process accesses the bytes. References exist only where that is true: to a vector outside of
//! [`SharedMemory::execute`], and to inputs that no rank writes to until the reference has ended ([`reducer`]).
//!
//! Offsets and lengths from a board are checked before use, and seals keep a peer from shrinking memory that is mapped.
//!
//! [pulls]: pull::pulls
//! [own range]: trireme_schedule::collective::owned_range

#![allow(unsafe_code)]

mod area;
mod arena;
mod atomics;
mod board;
mod copy;
mod direct;
mod futex;
mod mapping;
#[cfg(all(test, feature = "loom"))]
mod models;
mod pull;
mod reducer;
mod ring;
mod ring_memory;
mod staged;
#[cfg(test)]
mod tests;
mod view;

pub(crate) use area::{Area, area_bytes};
pub(crate) use arena::{Arena, Region};
pub(crate) use mapping::PeerArena;
pub(crate) use ring::{Corrupt, RingReceiver, RingSender};

use crate::backoff::Backoff;
use crate::buffer::{Memory, Storage};
use crate::call::Call;
use crate::control::Control;
use crate::transport::check_control_bytes;
use crate::{CommError, GroupOptions, Operation};
use board::{Location, Post};
use reducer::Reducer;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;
use trireme_base::Rank;
use trireme_schedule::collective::CollectiveKind;
use view::View;

/// The ranks of a group on this host, called members, and the memory through which they communicate.
pub(crate) struct SharedMemory {
    /// Index of this rank among the members.
    own: usize,
    /// The members, by ascending rank.
    members: Vec<Rank>,
    areas: Vec<Area>,
    arena: Arc<Arena>,
    /// Keeps the memory of this rank's area allocated.
    _own_area: Arc<Region>,
    short_bytes_max: usize,
    reducer: Reducer,
    backoff: Backoff,
    num_barriers: u32,
    num_staged: usize,
    posts: Vec<Post>,
    inputs: Vec<View>,
    outputs: Vec<View>,
}

/// A vector on this rank, or a part of one. Peers access its memory during [`SharedMemory::execute`].
pub(crate) struct VectorRef<'a> {
    start: *mut u8,
    len: usize,
    /// Offset in the arena of the group's buffers. `None` for other memory.
    offset: Option<usize>,
    borrow: PhantomData<&'a mut [u8]>,
}

/// The vectors of an operation on this rank: an input, and an output unless the operation is in place.
pub(crate) struct Operands<'a> {
    pub(crate) input: VectorRef<'a>,
    pub(crate) output: Option<VectorRef<'a>>,
}

impl Operands<'_> {
    fn reborrow(&mut self) -> Operands<'_> {
        Operands { input: self.input.reborrow(), output: self.output.as_mut().map(VectorRef::reborrow) }
    }
}

impl<'a> VectorRef<'a> {
    /// Memory that only this process maps.
    pub(crate) fn private(bytes: &'a mut [u8]) -> Self {
        VectorRef { start: bytes.as_mut_ptr(), len: bytes.len(), offset: None, borrow: PhantomData }
    }

    /// A buffer of a group that allocates its buffers in `arena`.
    pub(crate) fn new(storage: &'a mut Storage, arena: Option<&Arc<Arena>>) -> Self {
        let offset = match (&storage.memory, arena) {
            (Memory::Shared(region), Some(arena)) if region.is_in(arena) => Some(region.offset()),
            _ => None,
        };
        VectorRef { start: storage.as_mut_ptr(), len: storage.num_bytes(), offset, borrow: PhantomData }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The bytes of the vector. Not available while an operation in shared memory uses it.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: `self` borrows these bytes exclusively from their owner, so no other code of this process has a reference. Peers access
        // them only during `SharedMemory::execute`, which posts them and returns after the last barrier of the operation. `execute` takes
        // the `VectorRef` or a reborrow of it, so it does not run while the reference exists. After a failure, of which peers may not know
        // yet, the vector is dropped, and its bytes are not accessed.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }

    /// A range of the vector's bytes.
    ///
    /// # Panics
    /// If the range is not inside the vector.
    pub(crate) fn part(&mut self, range: Range<usize>) -> VectorRef<'_> {
        VectorRef {
            start: self.view(0).bytes(&range),
            len: range.len(),
            offset: self.offset.map(|offset| offset + range.start),
            borrow: PhantomData,
        }
    }

    fn reborrow(&mut self) -> VectorRef<'_> {
        self.part(0..self.len)
    }

    /// A view of this vector as the part of a full vector that starts at byte `first`.
    fn view(&self, first: usize) -> View {
        View::at(self.start, first..first + self.len)
    }
}

impl SharedMemory {
    /// Creates the state of member `own`. `areas` are in the order of `members`.
    pub(crate) fn new(
        own: usize,
        members: Vec<Rank>,
        areas: Vec<Area>,
        arena: Arc<Arena>,
        own_area: Arc<Region>,
        options: &GroupOptions,
    ) -> Result<Self, CommError> {
        let num_members = members.len();
        Ok(SharedMemory {
            own,
            members,
            areas,
            arena,
            _own_area: own_area,
            short_bytes_max: options.short_bytes_max,
            reducer: Reducer::new(num_members, options.chunk_bytes)?,
            backoff: Backoff::new(),
            num_barriers: 0,
            num_staged: 0,
            posts: vec![Post::STAGED; num_members],
            inputs: Vec::with_capacity(num_members),
            outputs: Vec::with_capacity(num_members),
        })
    }

    pub(crate) fn num_members(&self) -> usize {
        self.members.len()
    }

    /// Stops the reuse of this rank's freed memory, because peers may still write to it.
    pub(crate) fn abandon(&mut self) {
        self.arena.retire();
    }

    /// Returns when all members have arrived.
    pub(crate) fn barrier(&mut self, call: &Call, control: &mut Control) -> Result<(), CommError> {
        self.post_and_synchronize(call, Post::STAGED, control)
    }

    /// Gathers a few bytes of every member on all members.
    pub(crate) fn gather_blocks(
        &mut self,
        call: &Call,
        blocks: &mut [Vec<u8>],
        control: &mut Control,
    ) -> Result<(), CommError> {
        let bytes = &blocks[self.own];
        let length = bytes.len() as u64;
        let stage_number = self.next_stage();
        let stage = self.areas[self.own].stage(stage_number, HEAD_BYTES + bytes.len());
        // SAFETY: this rank's stage of this turn, which the peers finished reading before they arrived at the last barrier; `bytes` is on
        // the heap.
        unsafe {
            std::ptr::copy_nonoverlapping(length.to_ne_bytes().as_ptr(), stage, HEAD_BYTES);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), stage.add(HEAD_BYTES), bytes.len());
        }
        self.post_and_synchronize(call, Post::STAGED, control)?;
        for member in self.others() {
            let mut length = [0; HEAD_BYTES];
            let head = self.areas[member].stage(stage_number, HEAD_BYTES);
            // SAFETY: the owner wrote it before it arrived, and does not write it again before this rank arrives at the next barrier.
            unsafe { std::ptr::copy_nonoverlapping(head.cast_const(), length.as_mut_ptr(), HEAD_BYTES) };
            let len = check_control_bytes(self.members[member], u64::from_ne_bytes(length))?;
            let mut block = vec![0; len];
            let stage = self.areas[member].stage(stage_number, HEAD_BYTES + block.len());
            // SAFETY: as above.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    stage.add(HEAD_BYTES).cast_const(),
                    block.as_mut_ptr(),
                    block.len(),
                );
            }
            blocks[member] = block;
            control.call_statistics.payload_bytes += len as u64;
        }
        Ok(())
    }

    /// Executes the operation of the call, or one phase of it among the members. `operation` numbers its root and blocks by member index.
    pub(crate) fn execute(
        &mut self,
        call: &Call,
        operation: Operation,
        operands: Operands<'_>,
        control: &mut Control,
    ) -> Result<(), CommError> {
        let (dtype, len) = operation.elements();
        if len * dtype.size() <= self.short_bytes_max {
            return self.staged(call, operation, operands, control);
        }
        self.post_and_synchronize(call, post_of(operation, &operands), control)?;
        if !self.collect_views(call, operation)? {
            return self.staged(call, operation, operands, control);
        }
        match operation.reduction() {
            Some(op) if !operation.output_is_block() => {
                self.reduce_owned(dtype, op, len, operation.root(), &mut control.call_statistics);
            }
            None if operation.is(CollectiveKind::AllToAll) && operands.output.is_none() => {
                self.swap_blocks(dtype, len, &mut control.call_statistics);
            }
            _ => self.pull_from_vectors(operation, operands, &mut control.call_statistics),
        }
        self.synchronize(call, control)
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let own = self.own;
        (0..self.members.len()).filter(move |&member| member != own)
    }

    fn next_stage(&mut self) -> usize {
        self.num_staged += 1;
        self.num_staged
    }

    /// Posts the operation, waits until all members have posted theirs, and compares them.
    fn post_and_synchronize(
        &mut self,
        call: &Call,
        post: Post,
        control: &mut Control,
    ) -> Result<(), CommError> {
        self.areas[self.own].board().post(self.num_barriers.wrapping_add(1), call, post);
        self.synchronize(call, control)?;
        for member in 0..self.members.len() {
            let board = self.areas[member].board();
            self.posts[member] =
                board.read(self.num_barriers, call, self.members[self.own], self.members[member])?;
        }
        Ok(())
    }

    /// Waits until all members have arrived at the next barrier. Makes visible all memory that they wrote before.
    fn synchronize(&mut self, call: &Call, control: &mut Control) -> Result<(), CommError> {
        self.num_barriers = self.num_barriers.wrapping_add(1);
        self.areas[self.own].board().arrive(self.num_barriers);
        for member in self.others() {
            self.areas[member].board().wait(self.num_barriers, call, &mut self.backoff, control)?;
        }
        Ok(())
    }
}

/// The locations of the operands, to be posted.
fn post_of(operation: Operation, operands: &Operands<'_>) -> Post {
    let locate = |vector: &VectorRef<'_>, is_block: bool| match vector.offset {
        Some(offset) if is_block => Location::Block(offset),
        Some(offset) => Location::Vector(offset),
        None => Location::Private,
    };
    match &operands.output {
        None => {
            let location = locate(&operands.input, false);
            Post { input: location, output: location }
        }
        Some(output) => Post {
            input: locate(&operands.input, operation.input_is_block()),
            output: locate(output, operation.output_is_block()),
        },
    }
}

/// Bytes of the length field in front of a member's control data.
const HEAD_BYTES: usize = 8;
