//! Operations whose data goes through stages: vectors of up to 256 KiB in one piece, longer ones window by window.

use super::area::STAGE_BYTES;
use super::board::Post;
use super::pull::{Contribution, Part, Pull, contribution, pulls, window_lens};
use super::view::View;
use super::{Operands, SharedMemory};
use crate::buffer::CacheLine;
use crate::call::Call;
use crate::control::Control;
use crate::{CommError, Operation};
use std::ops::Range;
use trireme_base::{Rank, ReduceOp};
use trireme_schedule::collective::{CollectiveKind, owned_range};

/// Bytes of a longer vector that go through a stage at a time: few enough to stay in a core's cache together with their source.
const WINDOW_BYTES: usize = 256 << 10;

/// A window of a staged operation. `stage_number` selects the stage that it uses. The stage has room for `len_max` elements of each staged
/// part.
struct Window {
    operation: Operation,
    elements: Range<usize>,
    stage_number: usize,
    len_max: usize,
}

impl SharedMemory {
    /// Executes the operation through the stages, window by window.
    pub(super) fn staged(
        &mut self,
        call: &Call,
        operation: Operation,
        mut operands: Operands<'_>,
        control: &mut Control,
    ) -> Result<(), CommError> {
        let (dtype, len) = operation.elements();
        let num_members = self.members.len();
        let is_short = len * dtype.size() <= WINDOW_BYTES;
        let stage_len = if is_short { STAGE_BYTES } else { WINDOW_BYTES } / dtype.size();
        let (window_len, end) = window_lens(operation, num_members, stage_len);
        // Windows start at multiples of a cache line, so that vectors have the same alignment in the stage as in memory.
        let window_len = (window_len & !63).max(64);
        let out_of_place = operands.output.is_some();
        if let Some(op) = operation.reduction()
            && operation.is(CollectiveKind::AllReduce)
            && num_members >= 3
            && len > window_len
        {
            return self.staged_by_shares(call, operation, op, operands, control);
        }
        let mut inputs = std::mem::take(&mut self.inputs);
        let mut first = 0;
        loop {
            let (elements, stage_number) = (first..end.min(first + window_len), self.next_stage());
            let window = Window { operation, elements, stage_number, len_max: window_len };
            self.fill_stage(&window, &operands);
            self.post_and_synchronize(call, Post::STAGED, control)?;
            let output = self.view_of_output(operation, operands.reborrow());
            for pull in pulls(operation, self.own, num_members, out_of_place) {
                let part = match pull {
                    Pull::Copy { source, .. } => source,
                    Pull::Reduce(part) => part,
                };
                inputs.clear();
                inputs.extend((0..num_members).map(|member| self.view_of_stage(&window, member, part)));
                self.pull(operation, pull, &window.elements, &inputs, output, &mut control.call_statistics);
            }
            first = window.elements.end;
            if first >= end {
                break;
            }
        }
        self.inputs = inputs;
        Ok(())
    }

    /// Executes an all-reduce through the stages. Each member reduces its share of a window for all members.
    fn staged_by_shares(
        &mut self,
        call: &Call,
        operation: Operation,
        op: ReduceOp,
        mut operands: Operands<'_>,
        control: &mut Control,
    ) -> Result<(), CommError> {
        let (dtype, len) = operation.elements();
        let num_members = self.members.len();
        let granule = size_of::<CacheLine>() / dtype.size();
        let window_len = WINDOW_BYTES / dtype.size();
        let mut inputs = std::mem::take(&mut self.inputs);
        for first in (0..len).step_by(window_len) {
            let (elements, stage_number) = (first..len.min(first + window_len), self.next_stage());
            let window = Window { operation, elements, stage_number, len_max: window_len };
            self.fill_stage(&window, &operands);
            self.post_and_synchronize(call, Post::STAGED, control)?;
            let output = self.view_of_output(operation, operands.reborrow());
            inputs.clear();
            inputs.extend((0..num_members).map(|member| self.view_of_stage(&window, member, Part::Full)));
            let share = |member: usize| {
                let share = owned_range(Rank(member), num_members, window.elements.len(), granule);
                (first + share.start) * dtype.size()..(first + share.end) * dtype.size()
            };
            let own_stage = inputs[self.own];
            // SAFETY: the members' stages of this turn are mapped and filled, and no other member accesses this share before the next
            // barrier. A piece has been read when its result is written.
            unsafe {
                self.reducer.reduce(&inputs, share(self.own), dtype, op, |piece, result| {
                    std::ptr::copy_nonoverlapping(result.as_ptr(), own_stage.bytes(&piece), result.len());
                    std::ptr::copy_nonoverlapping(result.as_ptr(), output.bytes(&piece), result.len());
                });
            }
            self.synchronize(call, control)?;
            for member in self.others() {
                let share = share(member);
                let (from, to) = (inputs[member].bytes(&share), output.bytes(&share));
                // SAFETY: the member has written its results there, and does not access them before this member arrives at the barrier of
                // the next window. The output is this member's own.
                unsafe { std::ptr::copy_nonoverlapping(from.cast_const(), to, share.len()) };
                control.call_statistics.payload_bytes += share.len() as u64;
            }
            control.call_statistics.payload_bytes += (share(self.own).len() * (num_members - 1)) as u64;
        }
        self.inputs = inputs;
        Ok(())
    }

    /// Copies the data of this window that the peers need into this rank's stage.
    fn fill_stage(&self, window: &Window, operands: &Operands<'_>) {
        let (dtype, len) = window.operation.elements();
        let num_members = self.members.len();
        let out_of_place = operands.output.is_some();
        let copy = |part: Part, input_first: usize| {
            let range = part.window(num_members, len, &window.elements);
            let view = self.view_of_stage(window, self.own, part);
            let bytes = range.start * dtype.size()..range.end * dtype.size();
            let source = operands.input.view(input_first).bytes(&bytes).cast_const();
            // SAFETY: this rank's stage of this turn, which the peers finished reading before they arrived at the last barrier. The source
            // is on the heap or in a buffer, and only its owner accesses a vector of a staged operation.
            unsafe { std::ptr::copy_nonoverlapping(source, view.bytes(&bytes), bytes.len()) };
        };
        match contribution(window.operation, self.own) {
            Contribution::Nothing => {}
            Contribution::Full => copy(Part::Full, 0),
            Contribution::EveryBlock => (0..num_members).for_each(|member| copy(Part::Block(member), 0)),
            Contribution::OwnBlock => {
                let part = Part::Block(self.own);
                let first = if out_of_place { part.range(num_members, len).start * dtype.size() } else { 0 };
                copy(part, first);
            }
        }
    }

    /// The place in a member's stage where the window of `part` is stored.
    fn view_of_stage(&self, window: &Window, member: usize, part: Part) -> View {
        let (dtype, len) = window.operation.elements();
        let index = match (contribution(window.operation, member), part) {
            (Contribution::EveryBlock, Part::Block(block)) => block,
            _ => 0,
        };
        let range = part.window(self.members.len(), len, &window.elements);
        let first = index * window.len_max * dtype.size();
        let bytes = range.start * dtype.size()..range.end * dtype.size();
        let start = self.areas[member].stage(window.stage_number, first + bytes.len()).wrapping_add(first);
        View::at(start, bytes)
    }
}
