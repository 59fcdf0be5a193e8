//! The steps of a rank for an operation on memory of devices: a pure function of the operation.
//!
//! Reductions in canonical order exchange parts directly, as an all-to-all, and each rank combines the parts of its own block. For a vector
//! of `D` bytes on `N` ranks, a rank sends `D (N - 1) / N` bytes, as with a ring, in one round of transfers instead of `N - 1`. An
//! all-reduce gathers the blocks afterwards. Parts that are received go through scratch memory, a segment of each block at a time.
//!
//! Without [`keeps_order`](crate::GroupOptions::keeps_order), the library executes all-reduces, and reduce-scatters in place into equal
//! blocks. Other reductions follow the canonical order with and without it.

use crate::call::BlockLens;
use std::ops::Range;
use std::sync::Arc;
use trireme_base::{DType, DeviceMemory, DeviceSpan, DeviceStep, DeviceTransfer, Rank, ReduceOp};
use trireme_schedule::collective::{Collective, CollectiveKind, StackInstruction, block, canonical_order};

/// Bytes of a group's scratch memory.
pub(crate) const SCRATCH_BYTES: usize = 32 << 20;

/// Returns whether the steps of an operation need scratch memory. Must agree with [`DeviceSteps::in_place`] and
/// [`DeviceSteps::out_of_place`].
pub(crate) fn needs_scratch(
    collective: Option<Collective>,
    keeps_order: bool,
    is_in_place: bool,
    world_size: usize,
) -> bool {
    let Some(Collective { kind, len, .. }) = collective else { return false };
    match kind {
        CollectiveKind::AllReduce => keeps_order,
        CollectiveKind::ReduceScatter => keeps_order || !is_in_place || !len.is_multiple_of(world_size),
        CollectiveKind::Reduce => true,
        CollectiveKind::AllToAll => is_in_place,
        _ => false,
    }
}

/// The steps of a rank, while they are put together.
pub(crate) struct DeviceSteps<'a> {
    pub(crate) rank: Rank,
    pub(crate) world_size: usize,
    pub(crate) dtype: DType,
    pub(crate) op: Option<ReduceOp>,
    pub(crate) keeps_order: bool,
    /// Memory for intermediate results, if [needed](needs_scratch).
    pub(crate) scratch: Option<&'a Arc<dyn DeviceMemory>>,
    /// Transfers of the exchange that is being put together.
    pub(crate) transfers: Vec<DeviceTransfer>,
    pub(crate) steps: Vec<DeviceStep>,
}

impl DeviceSteps<'_> {
    /// Appends the steps of a collective in place.
    pub(crate) fn in_place(&mut self, collective: Collective, vector: &DeviceSpan) {
        let (len, root) = (collective.len, collective.root().unwrap_or(Rank::ROOT));
        let own = self.block_of(vector, self.rank, len);
        let is_even = len.is_multiple_of(self.world_size);
        let (span, dtype) = (vector.clone(), self.dtype);
        match collective.kind {
            CollectiveKind::Barrier => {}
            CollectiveKind::Broadcast => self.steps.push(DeviceStep::Broadcast { span, root }),
            CollectiveKind::AllGather => self.all_gather(vector, len),
            CollectiveKind::AllReduce if self.keeps_order => {
                self.reduce_scatter(vector, &own, len);
                self.all_gather(vector, len);
            }
            CollectiveKind::AllReduce => {
                self.steps.push(DeviceStep::AllReduce { span, dtype, op: self.reduction() });
                self.divide(vector);
            }
            CollectiveKind::ReduceScatter if !self.keeps_order && is_even => {
                self.steps.push(DeviceStep::ReduceScatter { span, dtype, op: self.reduction() });
                self.divide(&own);
            }
            CollectiveKind::ReduceScatter => self.reduce_scatter(vector, &own, len),
            CollectiveKind::Reduce => self.reduce(vector, vector, root, len),
            CollectiveKind::Gather => self.gather(&own, vector, root, len),
            CollectiveKind::Scatter => self.scatter(vector, &own, root, len),
            CollectiveKind::AllToAll => self.all_to_all_in_place(vector, len),
        }
    }

    /// Appends the steps of a collective out of place. Vectors that a rank does not have are empty.
    pub(crate) fn out_of_place(&mut self, collective: Collective, input: &DeviceSpan, output: &DeviceSpan) {
        let (len, root) = (collective.len, collective.root().unwrap_or(Rank::ROOT));
        match collective.kind {
            CollectiveKind::ReduceScatter => self.reduce_scatter(input, output, len),
            CollectiveKind::Reduce => self.reduce(input, output, root, len),
            CollectiveKind::Gather => self.gather(input, output, root, len),
            CollectiveKind::Scatter => self.scatter(input, output, root, len),
            CollectiveKind::AllToAll => {
                let lens = vec![len / self.world_size; self.world_size];
                self.all_to_all(input, output, [&lens, &lens]);
            }
            CollectiveKind::AllGather => {
                self.copy(input, &self.block_of(output, self.rank, len));
                self.in_place(collective, output);
            }
            CollectiveKind::Barrier | CollectiveKind::Broadcast | CollectiveKind::AllReduce => {
                if collective.has_input(self.rank) {
                    self.copy(input, output);
                }
                self.in_place(collective, output);
            }
        }
    }

    /// Appends the steps of an all-to-all with blocks of different lengths. Blocks go directly to their receivers.
    pub(crate) fn all_to_all_variable(&mut self, input: &DeviceSpan, output: &DeviceSpan, lens: &BlockLens) {
        let [sent, received] = lens.of_rank(self.rank, self.world_size);
        self.all_to_all(input, output, [&sent, &received]);
    }

    fn all_to_all(&mut self, input: &DeviceSpan, output: &DeviceSpan, [sent, received]: [&[usize]; 2]) {
        let (mut sent_before, mut received_before) = (0, 0);
        for (peer, (&sent, &received)) in sent.iter().zip(received).enumerate() {
            let from = self.elements(input, sent_before..sent_before + sent);
            let to = self.elements(output, received_before..received_before + received);
            (sent_before, received_before) = (sent_before + sent, received_before + received);
            if peer == self.rank.0 {
                self.copy(&from, &to);
            } else {
                self.send(from, Rank(peer));
                self.receive(to, Rank(peer));
            }
        }
        self.exchange();
    }

    fn all_to_all_in_place(&mut self, vector: &DeviceSpan, len: usize) {
        for segment in self.segments(len) {
            for peer in self.peers() {
                self.send(self.part_of_block(vector, peer, len, &segment), peer);
                self.receive(self.slot(peer, &segment, segment.len()), peer);
            }
            self.exchange();
            for peer in self.peers() {
                let slot = self.slot(peer, &segment, segment.len());
                self.copy(&slot, &self.part_of_block(vector, peer, len, &segment));
            }
        }
    }

    fn all_gather(&mut self, vector: &DeviceSpan, len: usize) {
        if len.is_multiple_of(self.world_size) {
            self.steps.push(DeviceStep::AllGather { span: vector.clone() });
            return;
        }
        for peer in self.peers() {
            self.send(self.block_of(vector, self.rank, len), peer);
            self.receive(self.block_of(vector, peer, len), peer);
        }
        self.exchange();
    }

    fn gather(&mut self, own: &DeviceSpan, vector: &DeviceSpan, root: Rank, len: usize) {
        if self.rank == root {
            for peer in self.peers() {
                self.receive(self.block_of(vector, peer, len), peer);
            }
            self.copy(own, &self.block_of(vector, root, len));
        } else {
            self.send(own.clone(), root);
        }
        self.exchange();
    }

    fn scatter(&mut self, vector: &DeviceSpan, own: &DeviceSpan, root: Rank, len: usize) {
        if self.rank == root {
            for peer in self.peers() {
                self.send(self.block_of(vector, peer, len), peer);
            }
            self.copy(&self.block_of(vector, root, len), own);
        } else {
            self.receive(own.clone(), root);
        }
        self.exchange();
    }

    /// Writes this rank's block of the reduction of all inputs to `own_output`.
    fn reduce_scatter(&mut self, input: &DeviceSpan, own_output: &DeviceSpan, len: usize) {
        for segment in self.segments(len) {
            let own_len = self.part_of(self.rank, len, &segment).len();
            let first = segment.start.min(own_output.range.len() / self.dtype.size());
            let output = self.elements(own_output, first..first + own_len);
            self.reduce_segment(input, &output, len, &segment);
        }
    }

    /// Writes the reduction of all inputs to the `output` of the root.
    fn reduce(&mut self, input: &DeviceSpan, output: &DeviceSpan, root: Rank, len: usize) {
        for segment in self.segments(len) {
            if self.rank == root {
                self.reduce_segment(input, &self.part_of_block(output, root, len, &segment), len, &segment);
                for peer in self.peers() {
                    self.receive(self.part_of_block(output, peer, len, &segment), peer);
                }
            } else {
                let own = self.slot(self.rank, &segment, self.part_of(self.rank, len, &segment).len());
                self.reduce_segment(input, &own, len, &segment);
                self.send(own, root);
            }
            self.exchange();
        }
    }

    /// Exchanges a segment of each block, and reduces the segment of this rank's block in canonical order.
    fn reduce_segment(
        &mut self,
        input: &DeviceSpan,
        own_output: &DeviceSpan,
        len: usize,
        segment: &Range<usize>,
    ) {
        let own_len = self.part_of(self.rank, len, segment).len();
        for peer in self.peers() {
            self.send(self.part_of_block(input, peer, len, segment), peer);
            self.receive(self.slot(peer, segment, own_len), peer);
        }
        self.exchange();
        if own_len == 0 {
            return;
        }
        let operand = |rank: Rank| {
            if rank == self.rank {
                self.part_of_block(input, rank, len, segment)
            } else {
                self.slot(rank, segment, own_len)
            }
        };
        let order = canonical_order(self.world_size);
        // Each partial result, with the rank of its first operand, in whose slot it is stored.
        let mut partials: Vec<(Rank, DeviceSpan)> = Vec::new();
        let mut combined = Vec::new();
        for (index, instruction) in order.iter().enumerate() {
            let right = match instruction {
                StackInstruction::Load(rank) => {
                    partials.push((*rank, operand(*rank)));
                    continue;
                }
                StackInstruction::Reduce(rank) => operand(*rank),
                StackInstruction::Combine => partials.pop().expect("two operands are there").1,
            };
            let (first, left) = partials.pop().expect("two operands are there");
            let is_last = index + 1 == order.len();
            let out = if is_last { own_output.clone() } else { self.slot(first, segment, own_len) };
            partials.push((first, out.clone()));
            combined.push(DeviceStep::Combine { left, right, out, dtype: self.dtype, op: self.reduction() });
        }
        self.steps.append(&mut combined);
        self.divide(own_output);
    }

    fn reduction(&self) -> ReduceOp {
        self.op.expect("the collective reduces")
    }

    fn divide(&mut self, sums: &DeviceSpan) {
        if self.op == Some(ReduceOp::Mean) {
            let (span, dtype, by) = (sums.clone(), self.dtype, self.world_size);
            self.steps.push(DeviceStep::Divide { span, dtype, by });
        }
    }

    /// Ends an exchange, so that later transfers wait for it.
    fn exchange(&mut self) {
        if !self.transfers.is_empty() {
            self.steps.push(DeviceStep::Exchange(std::mem::take(&mut self.transfers)));
        }
    }

    fn send(&mut self, from: DeviceSpan, to: Rank) {
        if !from.range.is_empty() {
            self.transfers.push(DeviceTransfer::Send { from, to });
        }
    }

    fn receive(&mut self, to: DeviceSpan, from: Rank) {
        if !to.range.is_empty() {
            self.transfers.push(DeviceTransfer::Receive { to, from });
        }
    }

    /// Copies, unless both are the same bytes.
    fn copy(&mut self, from: &DeviceSpan, to: &DeviceSpan) {
        let is_same = Arc::ptr_eq(&from.memory, &to.memory) && from.range == to.range;
        if !is_same && !from.range.is_empty() {
            self.steps.push(DeviceStep::Copy { from: from.clone(), to: to.clone() });
        }
    }

    /// The other ranks, beginning with the next one, so that not all ranks send to the same rank first.
    fn peers(&self) -> impl Iterator<Item = Rank> + use<> {
        let (rank, world_size) = (self.rank.0, self.world_size);
        (1..world_size).map(move |distance| Rank((rank + distance) % world_size))
    }

    fn elements(&self, span: &DeviceSpan, range: Range<usize>) -> DeviceSpan {
        span.part(range.start * self.dtype.size()..range.end * self.dtype.size())
    }

    fn block_of(&self, vector: &DeviceSpan, rank: Rank, len: usize) -> DeviceSpan {
        // A rank without a vector does not use its blocks.
        if vector.range.is_empty() {
            vector.clone()
        } else {
            self.elements(vector, block(rank, self.world_size, len))
        }
    }

    /// The ranges of elements, counted from the start of each block, that are exchanged together.
    fn segments(&self, len: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        // The first block is the longest.
        let (len, len_max) = (block(Rank::ROOT, self.world_size, len).len(), self.segment_len_max());
        (0..len.div_ceil(len_max)).map(move |index| index * len_max..((index + 1) * len_max).min(len))
    }

    fn segment_len_max(&self) -> usize {
        let num_bytes = self.scratch().num_bytes();
        num_bytes / self.dtype.size() / self.world_size
    }

    /// The elements of the vector that a segment has of a rank's block.
    fn part_of(&self, rank: Rank, len: usize, segment: &Range<usize>) -> Range<usize> {
        let block = block(rank, self.world_size, len);
        let start = (block.start + segment.start).min(block.end);
        start..(block.start + segment.end).min(block.end)
    }

    fn part_of_block(
        &self,
        vector: &DeviceSpan,
        rank: Rank,
        len: usize,
        segment: &Range<usize>,
    ) -> DeviceSpan {
        self.elements(vector, self.part_of(rank, len, segment))
    }

    fn scratch(&self) -> &Arc<dyn DeviceMemory> {
        self.scratch.expect("the operation has scratch memory")
    }

    /// Scratch memory for the part of a rank.
    fn slot(&self, rank: Rank, segment: &Range<usize>, len: usize) -> DeviceSpan {
        let scratch = DeviceSpan::all(self.scratch());
        let first = rank.0 * segment.len();
        self.elements(&scratch, first..first + len)
    }
}
