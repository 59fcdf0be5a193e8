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
//!   the vectors themselves. In an all-reduce, where all need everything, it reduces only its [`owned_range`] and
//!   writes each piece into all vectors. It meets the others again when it has finished.
//! - *Long vectors in private memory* go through the stages by windows, one meeting each.
//!
//! # Safety of the memory
//! This module holds the crate's only unsafe code. Every other process that maps an arena is a member of
//! the same job that runs this same code under the same user; between the meetings of an
//! operation the memory is divided as above, and outside of them a buffer is touched by its owner only.
//! Offsets and lengths read from a board are checked before use, and seals keep a peer from shrinking what is
//! mapped.
//!
//! [pulls]: pull::pulls

#![allow(unsafe_code)]

mod area;
mod arena;
mod board;
mod mapping;
mod pull;
mod reducer;
mod ring;
mod view;

pub(crate) use area::{Area, RingPurpose, area_bytes};
pub(crate) use arena::{Arena, Region};
pub(crate) use mapping::PeerArena;
pub(crate) use ring::{Corrupt, RingReceiver, RingSender};

use crate::buffer::{CacheLine, Memory, Storage};
use crate::control::Control;
use crate::engine::{Call, Cost};
use crate::group::CONTROL_BYTES_MAX;
use crate::{CommError, GroupOptions, Operation};
use area::STAGE_BYTES;
use board::{Location, Post};
use pull::{Contribution, Part, Pull, contribution, pulls, staging};
use reducer::Reducer;
use std::ops::Range;
use std::sync::Arc;
use trireme_base::{DType, Rank, ReduceOp};
use trireme_schedule::collective::owned_range;
use view::View;

/// The group's ranks that share this rank's host, and the memory through which they meet.
pub(crate) struct SharedMemory {
    /// Which member this rank is.
    own: usize,
    /// The members, by ascending rank.
    members: Vec<Rank>,
    /// The members' areas.
    areas: Vec<Area>,
    arena: Arc<Arena>,
    /// Keeps the own area's memory.
    _own_area: Arc<Region>,
    short_bytes_max: usize,
    reducer: Reducer,
    num_meetings: u32,
    num_posts: usize,
    num_staged: usize,
    /// What the members posted last.
    posts: Vec<Post>,
    inputs: Vec<View>,
    outputs: Vec<View>,
}

/// The elements of an operation on this rank: an input, and where the result goes if that is another place.
pub(crate) struct Operands<'a> {
    pub(crate) input: &'a mut Storage,
    pub(crate) output: Option<&'a mut Storage>,
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
            num_meetings: 0,
            num_posts: 0,
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
    pub(crate) fn barrier(
        &mut self,
        call: &Call,
        control: &mut Control,
        cost: &mut Cost,
    ) -> Result<(), CommError> {
        self.meet_with(call, Post::STAGED, control, cost)
    }

    /// Gives every member a few bytes of every member.
    pub(crate) fn gather_blocks(
        &mut self,
        call: &Call,
        blocks: &mut [Vec<u8>],
        control: &mut Control,
        cost: &mut Cost,
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
        self.meet_with(call, Post::STAGED, control, cost)?;
        for member in self.others() {
            let mut length = [0; HEAD_BYTES];
            let head = self.areas[member].stage(turn, HEAD_BYTES);
            // SAFETY: its owner wrote it before it came, and does not again before this rank has come to the next meeting.
            unsafe { std::ptr::copy_nonoverlapping(head.cast_const(), length.as_mut_ptr(), HEAD_BYTES) };
            let (bytes, bytes_max) = (u64::from_ne_bytes(length), CONTROL_BYTES_MAX);
            if bytes > bytes_max as u64 {
                let rank = self.members[member];
                return Err(CommError::ControlDataTooLong { rank, bytes, bytes_max });
            }
            let mut block = vec![0; bytes as usize];
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
            cost.payload_bytes += bytes;
        }
        Ok(())
    }

    /// Executes an operation on vectors.
    pub(crate) fn execute(
        &mut self,
        call: &Call,
        operands: Operands<'_>,
        control: &mut Control,
        cost: &mut Cost,
    ) -> Result<(), CommError> {
        let (dtype, len) = call.operation.elements();
        if len * dtype.size() <= self.short_bytes_max {
            return self.staged(call, operands, control, cost);
        }
        let post = self.post_of(call.operation, &operands);
        self.meet_with(call, post, control, cost)?;
        if !self.collect_views(call)? {
            return self.staged(call, operands, control, cost);
        }
        match call.operation {
            Operation::AllReduce { op, .. } | Operation::Reduce { op, .. } => {
                self.reduce_owned((dtype, op), len, call.operation.root(), cost);
            }
            Operation::AllToAll { .. } if operands.output.is_none() => self.swap_blocks(dtype, len, cost),
            _ => self.pull_from_vectors(call.operation, operands, cost),
        }
        self.meet(call, control, cost)
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
    fn meet_with(
        &mut self,
        call: &Call,
        post: Post,
        control: &mut Control,
        cost: &mut Cost,
    ) -> Result<(), CommError> {
        self.num_posts += 1;
        self.areas[self.own].board().post(self.num_posts, call, post);
        self.meet(call, control, cost)?;
        for member in 0..self.members.len() {
            let board = self.areas[member].board();
            self.posts[member] =
                board.read(self.num_posts, call, self.members[self.own], self.members[member])?;
        }
        Ok(())
    }

    /// Waits until all have come here, and sees what they wrote before.
    fn meet(&mut self, call: &Call, control: &mut Control, cost: &mut Cost) -> Result<(), CommError> {
        self.num_meetings = self.num_meetings.wrapping_add(1);
        self.areas[self.own].board().arrive(self.num_meetings);
        for member in self.others() {
            self.areas[member].board().wait(self.num_meetings, call, control, cost)?;
        }
        Ok(())
    }

    fn post_of(&self, operation: Operation, operands: &Operands<'_>) -> Post {
        let locate = |storage: &Storage, is_block: bool| match storage.memory() {
            Memory::Shared(region) if region.is_in(&self.arena) => match is_block {
                true => Location::Block(region.offset()),
                false => Location::Vector(region.offset()),
            },
            _ => Location::Private,
        };
        let (input_is_block, output_is_block) = match operation {
            Operation::AllGather { .. } | Operation::Gather { .. } => (true, false),
            Operation::ReduceScatter { .. } | Operation::Scatter { .. } => (false, true),
            _ => (false, false),
        };
        match &operands.output {
            None => {
                let location = locate(operands.input, false);
                Post { input: location, output: location }
            }
            Some(output) => Post {
                input: locate(operands.input, input_is_block),
                output: locate(output, output_is_block),
            },
        }
    }

    /// Finds the members' vectors by what they posted. Whether all that others read and write lies in arenas.
    fn collect_views(&mut self, call: &Call) -> Result<bool, CommError> {
        let (dtype, len) = call.operation.elements();
        let num_members = self.members.len();
        let (mut inputs, mut outputs) = (std::mem::take(&mut self.inputs), std::mem::take(&mut self.outputs));
        inputs.clear();
        outputs.clear();
        for (member, post) in self.posts.iter().enumerate() {
            let view = |location: Location, counts: bool| {
                let (offset, part) = match location {
                    Location::Vector(offset) => (offset, Part::Whole),
                    Location::Block(offset) => (offset, Part::Block(member)),
                    Location::Private => return Ok(None),
                };
                // A member that has no part in an operation may give an empty vector.
                let range = if counts { part.range(num_members, len) } else { 0..0 };
                let bytes = range.start * dtype.size()..range.end * dtype.size();
                let refuse = || call.protocol(self.members[member], "its buffer lies outside of its arena");
                View::new(self.areas[member].memory(), offset, bytes).ok_or_else(refuse).map(Some)
            };
            let is_read = contribution(call.operation, member) != Contribution::Nothing;
            let is_written = call.operation.root().is_none_or(|root| root.0 == member);
            inputs.extend(view(post.input, is_read)?);
            outputs.extend(view(post.output, is_written)?);
        }
        let all_see_inputs = inputs.len() == num_members;
        let all_see_outputs = outputs.len() == num_members;
        (self.inputs, self.outputs) = (inputs, outputs);
        Ok(match call.operation {
            Operation::AllReduce { .. } | Operation::Reduce { .. } => all_see_inputs && all_see_outputs,
            _ => all_see_inputs,
        })
    }

    /// Reduces this member's share of the vectors, and writes it into all outputs, or the root's.
    fn reduce_owned(
        &mut self,
        (dtype, op): (DType, ReduceOp),
        len: usize,
        root: Option<Rank>,
        cost: &mut Cost,
    ) {
        let granule = size_of::<CacheLine>() / dtype.size();
        let owned = owned_range(Rank(self.own), self.members.len(), len, granule);
        let owned = owned.start * dtype.size()..owned.end * dtype.size();
        let outputs = match root {
            None => &self.outputs[..],
            Some(root) => &self.outputs[root.0..=root.0],
        };
        let num_written =
            if root.is_none() { self.others().count() } else { usize::from(root != Some(Rank(self.own))) };
        cost.payload_bytes += (owned.len() * (self.others().count() + num_written)) as u64;
        // SAFETY: all vectors are mapped as long as `self` is, and between the meetings only this member touches these
        // bytes of them. Results are put where nobody reads any more: the piece itself has been read.
        unsafe {
            self.reducer.reduce(&self.inputs, owned, (dtype, op), |piece, result| {
                for output in outputs {
                    std::ptr::copy_nonoverlapping(result.as_ptr(), output.bytes(&piece), result.len());
                }
            });
        }
    }

    /// Pulls from the members' vectors, which do not change until all have finished.
    fn pull_from_vectors(&mut self, operation: Operation, operands: Operands<'_>, cost: &mut Cost) {
        let (dtype, len) = operation.elements();
        let out_of_place = operands.output.is_some();
        let output = self.view_of_output(operation, operands);
        let inputs = std::mem::take(&mut self.inputs);
        let pulled = pulls(operation, self.own, self.members.len(), out_of_place);
        for pull in pulled {
            self.pull(pull, len, dtype, operation.reduction(), 0..len, &inputs, output, cost);
        }
        self.inputs = inputs;
    }

    fn view_of_output(&self, operation: Operation, operands: Operands<'_>) -> View {
        let (dtype, len) = operation.elements();
        let part = match (&operands.output, operation) {
            (Some(_), Operation::ReduceScatter { .. } | Operation::Scatter { .. }) => Part::Block(self.own),
            _ => Part::Whole,
        };
        let storage = operands.output.unwrap_or(operands.input);
        let range = part.range(self.members.len(), len);
        let bytes = storage.bytes_mut();
        let first = range.start * dtype.size();
        View::at(bytes.as_mut_ptr(), first..first + bytes.len())
    }

    /// Pulls a window of one part. `inputs` have what is read, and `output` what is written, at their places.
    #[expect(clippy::too_many_arguments, reason = "two callers, and all of it changes from call to call")]
    fn pull(
        &mut self,
        pull: Pull,
        len: usize,
        dtype: DType,
        op: Option<ReduceOp>,
        window: Range<usize>,
        inputs: &[View],
        output: View,
        cost: &mut Cost,
    ) {
        let num_members = self.members.len();
        let bytes = |part: Part| {
            let range = part.window(num_members, len, &window);
            range.start * dtype.size()..range.end * dtype.size()
        };
        match pull {
            Pull::Copy { from, source, target } => {
                let (source, target) = (bytes(source), bytes(target));
                let (from_bytes, to_bytes) = (inputs[from].bytes(&source), output.bytes(&target));
                // SAFETY: both are mapped, no two members' memory overlaps, and nobody writes to the source, nor
                // reads the target, before the next meeting.
                unsafe { std::ptr::copy_nonoverlapping(from_bytes.cast_const(), to_bytes, source.len()) };
                cost.payload_bytes += if from == self.own { 0 } else { source.len() as u64 };
            }
            Pull::Reduce(part) => {
                let range = bytes(part);
                cost.payload_bytes += (range.len() * (num_members - 1)) as u64;
                let op = op.expect("only reductions reduce");
                // SAFETY: as above; the output is this member's own, and is no input of another one here.
                unsafe {
                    self.reducer.reduce(inputs, range, (dtype, op), |piece, result| {
                        std::ptr::copy_nonoverlapping(result.as_ptr(), output.bytes(&piece), result.len());
                    });
                }
            }
        }
    }

    /// Swaps blocks in place: of each pair of members each moves one half.
    fn swap_blocks(&mut self, dtype: DType, len: usize, cost: &mut Cost) {
        let num_members = self.members.len();
        for distance in 1..num_members {
            let peer = (self.own + distance) % num_members;
            let bytes = |part: Part| {
                let range = part.range(num_members, len);
                range.start * dtype.size()..range.end * dtype.size()
            };
            let (own_block, peer_block) = (bytes(Part::Block(peer)), bytes(Part::Block(self.own)));
            let middle = own_block.len() / 2;
            let half = if self.own < peer { 0..middle } else { middle..own_block.len() };
            let one = self.inputs[self.own].bytes(&own_block).wrapping_add(half.start);
            let other = self.inputs[peer].bytes(&peer_block).wrapping_add(half.start);
            // SAFETY: both blocks are mapped and lie in different arenas, and of this pair of blocks this half is
            // touched by this member only.
            unsafe { std::ptr::swap_nonoverlapping(one, other, half.len()) };
            cost.payload_bytes += 2 * half.len() as u64;
        }
    }

    /// Executes the operation through the stages, window by window.
    fn staged(
        &mut self,
        call: &Call,
        mut operands: Operands<'_>,
        control: &mut Control,
        cost: &mut Cost,
    ) -> Result<(), CommError> {
        let (dtype, len) = call.operation.elements();
        let num_members = self.members.len();
        let stage_len = STAGE_BYTES / dtype.size();
        let (window_len, end) = staging(call.operation, num_members, stage_len);
        // Windows begin at multiples of a cache line, so that vectors are aligned in the stage as elsewhere.
        let window_len = (window_len & !63).max(64);
        let out_of_place = operands.output.is_some();
        let mut inputs = std::mem::take(&mut self.inputs);
        let mut first = 0;
        loop {
            let window = first..end.min(first + window_len);
            let turn = self.next_stage();
            self.fill_stage(call.operation, &mut operands, &window, turn, window_len);
            self.meet_with(call, Post::STAGED, control, cost)?;
            let reborrowed = Operands { input: operands.input, output: operands.output.as_deref_mut() };
            let output = self.view_of_output(call.operation, reborrowed);
            for pull in pulls(call.operation, self.own, num_members, out_of_place) {
                let part = match pull {
                    Pull::Copy { source, .. } => source,
                    Pull::Reduce(part) => part,
                };
                inputs.clear();
                for member in 0..num_members {
                    inputs.push(self.view_of_stage(call.operation, member, part, &window, turn, window_len));
                }
                self.pull(
                    pull,
                    len,
                    dtype,
                    call.operation.reduction(),
                    window.clone(),
                    &inputs,
                    output,
                    cost,
                );
            }
            first = window.end;
            if first >= end {
                break;
            }
        }
        self.inputs = inputs;
        Ok(())
    }

    /// Copies what the peers need of this window into the own stage.
    fn fill_stage(
        &self,
        operation: Operation,
        operands: &mut Operands<'_>,
        window: &Range<usize>,
        turn: usize,
        window_len: usize,
    ) {
        let (dtype, len) = operation.elements();
        let num_members = self.members.len();
        let out_of_place = operands.output.is_some();
        let copy = |part: Part, from_first: usize| {
            let range = part.window(num_members, len, window);
            let view = self.view_of_stage(operation, self.own, part, window, turn, window_len);
            let bytes = range.start * dtype.size()..range.end * dtype.size();
            let source = &operands.input.bytes()[bytes.start - from_first..bytes.end - from_first];
            // SAFETY: this rank's stage of this turn, which the peers finished reading before they came to the last
            // meeting; `source` lies on the heap or in a buffer.
            unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), view.bytes(&bytes), source.len()) };
        };
        match contribution(operation, self.own) {
            Contribution::Nothing => {}
            Contribution::Whole => copy(Part::Whole, 0),
            Contribution::EveryBlock => (0..num_members).for_each(|member| copy(Part::Block(member), 0)),
            Contribution::OwnBlock => {
                let part = Part::Block(self.own);
                let first = if out_of_place { part.range(num_members, len).start * dtype.size() } else { 0 };
                copy(part, first);
            }
        }
    }

    /// Where a window of a part lies in a member's stage.
    fn view_of_stage(
        &self,
        operation: Operation,
        member: usize,
        part: Part,
        window: &Range<usize>,
        turn: usize,
        window_len: usize,
    ) -> View {
        let (dtype, len) = operation.elements();
        let index = match (contribution(operation, member), part) {
            (Contribution::EveryBlock, Part::Block(block)) => block,
            _ => 0,
        };
        let range = part.window(self.members.len(), len, window);
        let first = index * window_len * dtype.size();
        let bytes = range.start * dtype.size()..range.end * dtype.size();
        let start = self.areas[member].stage(turn, first + bytes.len()).wrapping_add(first);
        View::at(start, bytes)
    }
}

/// Bytes before a member's control data, which say how much that is.
const HEAD_BYTES: usize = 8;
