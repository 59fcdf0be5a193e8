//! Operations on vectors that all members can read and write in place.

use super::board::Location;
use super::copy::{copy, copy_piece};
use super::pull::{Contribution, Part, Pull, contribution, pulls};
use super::view::View;
use super::{Operands, SharedMemory};
use crate::buffer::CacheLine;
use crate::call::{Call, CallStatistics};
use crate::{CommError, Operation};
use std::ops::Range;
use trireme_base::{DType, Rank, ReduceOp};
use trireme_schedule::collective::{CollectiveKind, owned_range};

/// Maximum bytes per member that are prefetched before a reduction, so that they stay in the L1 cache.
const PREFETCH_BYTES_MAX: usize = 8 << 10;

impl SharedMemory {
    /// Locates the members' vectors by their posts. Returns whether all vectors that peers must access are in arenas.
    pub(super) fn collect_views(&mut self, call: &Call, operation: Operation) -> Result<bool, CommError> {
        let (dtype, len) = operation.elements();
        let num_members = self.members.len();
        let (mut inputs, mut outputs) = (std::mem::take(&mut self.inputs), std::mem::take(&mut self.outputs));
        inputs.clear();
        outputs.clear();
        let own_is_in_place = self.posts[self.own].is_in_place();
        let mut all_have_one_form = true;
        for (member, post) in self.posts.iter().enumerate() {
            all_have_one_form &= post.is_in_place() == own_is_in_place;
            if !post.fits(operation) {
                return Err(call.protocol(self.members[member], "its buffers do not match its operation"));
            }
            let view = |location: Location, has_data: bool| {
                let (offset, part) = match location {
                    Location::Vector(offset) => (offset, Part::Full),
                    Location::Block(offset) => (offset, Part::Block(member)),
                    Location::Private => return Ok(None),
                };
                // A member without data in an operation may pass an empty vector.
                let range = if has_data { part.range(num_members, len) } else { 0..0 };
                let bytes = range.start * dtype.size()..range.end * dtype.size();
                let refuse = || call.protocol(self.members[member], "its buffer lies outside its arena");
                View::new(&self.areas[member].mapping, offset, dtype.size(), bytes)
                    .ok_or_else(refuse)
                    .map(Some)
            };
            let is_read = contribution(operation, member) != Contribution::Nothing;
            let is_written = operation.root().is_none_or(|root| root.0 == member);
            inputs.extend(view(post.input, is_read)?);
            outputs.extend(view(post.output, is_written)?);
        }
        let all_see_inputs = inputs.len() == num_members;
        let all_see_outputs = outputs.len() == num_members;
        (self.inputs, self.outputs) = (inputs, outputs);
        Ok(match operation.reduction() {
            Some(_) if !operation.output_is_block() => all_see_inputs && all_see_outputs,
            // An in-place exchange writes to inputs, which no other member may read at that time.
            _ if operation.is(CollectiveKind::AllToAll) => all_see_inputs && all_have_one_form,
            _ => all_see_inputs,
        })
    }

    /// Reduces this member's share of the vectors, and writes the result to all outputs, or to the root's.
    pub(super) fn reduce_owned(
        &mut self,
        dtype: DType,
        op: ReduceOp,
        len: usize,
        root: Option<Rank>,
        cost: &mut CallStatistics,
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
        // SAFETY: all vectors are mapped as long as `self` exists, and between the barriers only this member accesses these bytes of them.
        // A result is written only where no member reads any more: its piece has been read.
        unsafe {
            self.reducer.reduce(&self.inputs, owned, dtype, op, |piece, result| {
                for output in outputs {
                    std::ptr::copy_nonoverlapping(result.as_ptr(), output.bytes(&piece), result.len());
                }
            });
        }
    }

    /// Reads from the members' vectors, which do not change until all members have finished.
    pub(super) fn pull_from_vectors(
        &mut self,
        operation: Operation,
        operands: Operands<'_>,
        cost: &mut CallStatistics,
    ) {
        let (_, len) = operation.elements();
        let out_of_place = operands.output.is_some();
        let output = self.view_of_output(operation, operands);
        let inputs = std::mem::take(&mut self.inputs);
        for pull in pulls(operation, self.own, self.members.len(), out_of_place) {
            self.pull(operation, pull, &(0..len), &inputs, output, cost);
        }
        self.inputs = inputs;
    }

    pub(super) fn view_of_output(&self, operation: Operation, operands: Operands<'_>) -> View {
        let (dtype, len) = operation.elements();
        let is_block = operands.output.is_some() && operation.output_is_block();
        let part = if is_block { Part::Block(self.own) } else { Part::Full };
        let range = part.range(self.members.len(), len);
        operands.output.unwrap_or(operands.input).view(range.start * dtype.size())
    }

    /// Executes a pull for one window. `inputs` are the members' inputs and `output` is this member's output. All are addressed by the
    /// position in the full vector.
    pub(super) fn pull(
        &mut self,
        operation: Operation,
        pull: Pull,
        window: &Range<usize>,
        inputs: &[View],
        output: View,
        cost: &mut CallStatistics,
    ) {
        let ((dtype, len), num_members) = (operation.elements(), self.members.len());
        let bytes = |part: Part| {
            let range = part.window(num_members, len, window);
            range.start * dtype.size()..range.end * dtype.size()
        };
        match pull {
            Pull::Copy { from, source, target } => {
                let (source, target) = (bytes(source), bytes(target));
                let (from_bytes, to_bytes) = (inputs[from].bytes(&source), output.bytes(&target));
                // SAFETY: both ranges are mapped, and the memory of different members does not overlap. Before the next barrier, no member
                // writes to the source or reads the target.
                unsafe { copy(from_bytes.cast_const(), to_bytes, source.len()) };
                cost.payload_bytes += if from == self.own { 0 } else { source.len() as u64 };
            }
            Pull::Reduce(part) => {
                let range = bytes(part);
                cost.payload_bytes += (range.len() * (num_members - 1)) as u64;
                let op = operation.reduction().expect("only reductions reduce");
                if range.len() <= PREFETCH_BYTES_MAX {
                    self.others().for_each(|member| inputs[member].prefetch(&range));
                }
                // SAFETY: as above; the output is this member's own, and not an input of another member here.
                unsafe {
                    let total_bytes = range.len();
                    self.reducer.reduce(inputs, range, dtype, op, |piece, result| {
                        copy_piece(result.as_ptr(), output.bytes(&piece), result.len(), total_bytes);
                    });
                }
            }
        }
    }

    /// Exchanges blocks in place. Each member of a pair swaps one half of their blocks.
    pub(super) fn swap_blocks(&mut self, dtype: DType, len: usize, cost: &mut CallStatistics) {
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
            // SAFETY: both blocks are mapped and in different arenas, and only this member accesses this half of this pair of blocks.
            unsafe { std::ptr::swap_nonoverlapping(one, other, half.len()) };
            cost.payload_bytes += 2 * half.len() as u64;
        }
    }
}
