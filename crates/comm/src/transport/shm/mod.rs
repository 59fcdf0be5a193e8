//! Collectives over shared memory: ranks of one host read and write each other's memory in place.
//!
//! Each process has one arena, a sealed memfd that the peers of its host map. It holds the buffers made by
//! [`Group::buffer`](crate::Group::buffer) and, for each group, an [`Area`]: a [board], two stages and
//! the rings of the group's [links](super::link). An operation goes like this:
//!
//! - *Short vectors, control data, barriers*: a rank copies what its peers need into one of its stages, posts the
//!   operation on its board and waits until all have posted; then it [pulls] from all stages. Stages alternate,
//!   and no rank gets two operations ahead of another, so one meeting is enough.
//! - *Long vectors in arenas*: a rank posts where its vector lies and waits until all have posted. It then pulls from
//!   the vectors themselves. In an all-reduce, where all need everything, it reduces only its [own range] and
//!   writes each piece into all vectors. It meets the others again when it has finished.
//! - *Long vectors in private memory* go through the stages by windows, one meeting each.
//!
//! # Safety of the memory
//! Every other process that maps an arena is a member of the same job that runs this same code under the same user. Between the
//! meetings of an operation the memory is divided as above. Outside of an operation only its owner touches a buffer: peers touch
//! it after its owner has posted it, and have finished when its owner has left the last meeting.
//!
//! So a vector is a [`Slot`] here, which borrows its buffer exclusively but holds its address only: a reference would promise that
//! nobody else touches the bytes. References exist where that is true: to a buffer or slot outside of [`SharedMemory::execute`],
//! and to inputs that nobody writes to until the reference has ended ([`reducer`]).
//!
//! Offsets and lengths read from a board are checked before use, and seals keep a peer from shrinking what is mapped.
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
mod place;
mod pull;
mod reducer;
mod ring;
mod staged;
#[cfg(test)]
mod tests;
mod view;

pub(crate) use area::{Area, area_bytes};
pub(crate) use arena::{Arena, Region};
pub(crate) use mapping::PeerArena;
pub(crate) use ring::{Corrupt, RingReceiver, RingSender};

use crate::buffer::{Memory, Storage};
use crate::call::Call;
use crate::control::Control;
use crate::patience::Patience;
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

/// The group's ranks that share this rank's host, and the memory through which they meet.
pub(crate) struct SharedMemory {
    /// Which member this rank is.
    own: usize,
    /// The members, by ascending rank.
    members: Vec<Rank>,
    areas: Vec<Area>,
    arena: Arc<Arena>,
    /// Keeps the own area's memory.
    _own_area: Arc<Region>,
    short_bytes_max: usize,
    reducer: Reducer,
    patience: Patience,
    num_meetings: u32,
    num_staged: usize,
    posts: Vec<Post>,
    inputs: Vec<View>,
    outputs: Vec<View>,
}

/// A vector on this rank, or a part of one. Peers touch its memory while [`SharedMemory::execute`] has it.
pub(crate) struct Slot<'a> {
    start: *mut u8,
    len: usize,
    /// Where it begins in the arena that buffers of the group lie in; unset elsewhere.
    offset: Option<usize>,
    borrow: PhantomData<&'a mut [u8]>,
}

/// The elements of an operation on this rank: an input, and where the result goes if that is another place.
pub(crate) struct Operands<'a> {
    pub(crate) input: Slot<'a>,
    pub(crate) output: Option<Slot<'a>>,
}

impl Operands<'_> {
    fn reborrow(&mut self) -> Operands<'_> {
        Operands { input: self.input.reborrow(), output: self.output.as_mut().map(Slot::reborrow) }
    }
}

impl<'a> Slot<'a> {
    /// Memory that is this process's own.
    pub(crate) fn private(bytes: &'a mut [u8]) -> Self {
        Slot { start: bytes.as_mut_ptr(), len: bytes.len(), offset: None, borrow: PhantomData }
    }

    /// A buffer of a group whose buffers lie in `arena`.
    pub(crate) fn new(storage: &'a mut Storage, arena: Option<&Arc<Arena>>) -> Self {
        let offset = match (&storage.memory, arena) {
            (Memory::Shared(region), Some(arena)) if region.is_in(arena) => Some(region.offset()),
            _ => None,
        };
        Slot { start: storage.start(), len: storage.len(), offset, borrow: PhantomData }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Its bytes, between the operations in shared memory.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the slot borrows these bytes exclusively from their owner, so nobody else of this process has a reference.
        // Peers touch them during `SharedMemory::execute` only: it posts them, and returns after the meeting that ends
        // the operation. It borrows the slot itself, so it does not run while the reference lives. After a failure, which
        // peers may not know of yet, the vector is dropped, and nobody asks for its bytes.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }

    /// Some bytes of it.
    ///
    /// # Panics
    /// If they are not all there.
    pub(crate) fn part(&mut self, range: Range<usize>) -> Slot<'_> {
        Slot {
            start: self.view(0).bytes(&range),
            len: range.len(),
            offset: self.offset.map(|offset| offset + range.start),
            borrow: PhantomData,
        }
    }

    fn reborrow(&mut self) -> Slot<'_> {
        self.part(0..self.len)
    }

    /// Its bytes as those of a whole vector from byte `first` on.
    fn view(&self, first: usize) -> View {
        View::at(self.start, first..first + self.len)
    }
}

impl SharedMemory {
    /// Takes the members' areas, in the order of `members`, of which this rank is the `own`-th.
    pub(crate) fn new(
        own: usize,
        members: Vec<Rank>,
        areas: Vec<Area>,
        (arena, own_area): (Arc<Arena>, Arc<Region>),
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
            patience: Patience::new(),
            num_meetings: 0,
            num_staged: 0,
            posts: vec![Post::STAGED; num_members],
            inputs: Vec::with_capacity(num_members),
            outputs: Vec::with_capacity(num_members),
        })
    }

    pub(crate) fn num_members(&self) -> usize {
        self.members.len()
    }

    /// From now on no memory of this rank is given out twice: peers may still write to what was dropped.
    pub(crate) fn abandon(&mut self) {
        self.arena.retire();
    }

    /// Returns when all members have come.
    pub(crate) fn barrier(&mut self, call: &Call, control: &mut Control) -> Result<(), CommError> {
        self.meet_with(call, Post::STAGED, control)
    }

    /// Gives every member a few bytes of every member.
    pub(crate) fn gather_blocks(
        &mut self,
        call: &Call,
        blocks: &mut [Vec<u8>],
        control: &mut Control,
    ) -> Result<(), CommError> {
        let bytes = &blocks[self.own];
        let length = bytes.len() as u64;
        let turn = self.next_stage();
        let stage = self.areas[self.own].stage(turn, HEAD_BYTES + bytes.len());
        // SAFETY: this rank's stage of this turn, which the peers finished reading before they came to the last
        // meeting; `bytes` lies on the heap.
        unsafe {
            std::ptr::copy_nonoverlapping(length.to_ne_bytes().as_ptr(), stage, HEAD_BYTES);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), stage.add(HEAD_BYTES), bytes.len());
        }
        self.meet_with(call, Post::STAGED, control)?;
        for member in self.others() {
            let mut length = [0; HEAD_BYTES];
            let head = self.areas[member].stage(turn, HEAD_BYTES);
            // SAFETY: its owner wrote it before it came, and does not again before this rank has come to the next meeting.
            unsafe { std::ptr::copy_nonoverlapping(head.cast_const(), length.as_mut_ptr(), HEAD_BYTES) };
            let len = check_control_bytes(self.members[member], u64::from_ne_bytes(length))?;
            let mut block = vec![0; len];
            let stage = self.areas[member].stage(turn, HEAD_BYTES + block.len());
            // SAFETY: as above.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    stage.add(HEAD_BYTES).cast_const(),
                    block.as_mut_ptr(),
                    block.len(),
                );
            }
            blocks[member] = block;
            control.cost.payload_bytes += len as u64;
        }
        Ok(())
    }

    /// Executes the operation of the call, or a part of it among the members, whose numbers its root and blocks then are.
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
        self.meet_with(call, post_of(operation, &operands), control)?;
        if !self.collect_views(call, operation)? {
            return self.staged(call, operation, operands, control);
        }
        match operation.reduction() {
            Some(op) if !operation.output_is_block() => {
                self.reduce_owned((dtype, op), len, operation.root(), &mut control.cost);
            }
            None if operation.is(CollectiveKind::AllToAll) && operands.output.is_none() => {
                self.swap_blocks(dtype, len, &mut control.cost);
            }
            _ => self.pull_from_vectors(operation, operands, &mut control.cost),
        }
        self.meet(call, control)
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let own = self.own;
        (0..self.members.len()).filter(move |&member| member != own)
    }

    fn next_stage(&mut self) -> usize {
        self.num_staged += 1;
        self.num_staged
    }

    /// Posts the operation, waits for everyone to post theirs, and compares.
    fn meet_with(&mut self, call: &Call, post: Post, control: &mut Control) -> Result<(), CommError> {
        self.areas[self.own].board().post(self.num_meetings.wrapping_add(1), call, post);
        self.meet(call, control)?;
        for member in 0..self.members.len() {
            let board = self.areas[member].board();
            self.posts[member] =
                board.read(self.num_meetings, call, self.members[self.own], self.members[member])?;
        }
        Ok(())
    }

    /// Waits until all have come here, and sees what they wrote before.
    fn meet(&mut self, call: &Call, control: &mut Control) -> Result<(), CommError> {
        self.num_meetings = self.num_meetings.wrapping_add(1);
        self.areas[self.own].board().arrive(self.num_meetings);
        for member in self.others() {
            self.areas[member].board().wait(self.num_meetings, call, &mut self.patience, control)?;
        }
        Ok(())
    }
}

/// Where a member says that its elements are.
fn post_of(operation: Operation, operands: &Operands<'_>) -> Post {
    let locate = |slot: &Slot<'_>, is_block: bool| match slot.offset {
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

/// Bytes before a member's control data, which say how much that is.
const HEAD_BYTES: usize = 8;
