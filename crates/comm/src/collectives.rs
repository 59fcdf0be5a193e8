//! The collective operations of a [`Group`].
//!
//! All ranks issue the same operation with vectors of the same dtype and the same full length. The vector is divided into one
//! [block](trireme_schedule::collective::block) per rank: block `r` is `block(r, world_size, len)`. The blocks are equal, or the first ones
//! are longer by one element. In-place operations read and write a rank's block at its offset in the full vector; the other elements are
//! unspecified afterwards. Out-of-place operations (`…_into`) do not change the input.
//!
//! `docs/collectives.md` lists the steps and bytes of each operation with each algorithm.
//!
//! # Errors
//! From the [`Work`]s: [`CommError::NoSuchRoot`] and [`CommError::InvalidBuffers`], which only this rank sees and which do not end the
//! group, and any failure that ends a group.

use crate::call::BlockLens;
use crate::{Buffer, BufferElement, CommError, Group, Operation, Work};
use std::sync::Arc;
use trireme_base::{Rank, ReduceOp};
use trireme_schedule::collective::{Collective, CollectiveKind};

impl Group {
    /// Replaces each element by the reduction of all ranks' elements.
    pub fn all_reduce<T: BufferElement>(&self, buffer: Buffer<T>, op: ReduceOp) -> Work<Buffer<T>> {
        self.in_place(CollectiveKind::AllReduce.with_len(buffer.len()), Some(op), buffer)
    }

    /// Writes the reduction of all ranks' inputs to every output. Input and output have the same length.
    pub fn all_reduce_into<T: BufferElement>(
        &self,
        input: Buffer<T>,
        output: Buffer<T>,
        op: ReduceOp,
    ) -> Work<(Buffer<T>, Buffer<T>)> {
        self.out_of_place(CollectiveKind::AllReduce.with_len(input.len()), Some(op), input, output)
    }

    /// Replaces the root's elements by the reduction of all ranks' elements. The other ranks' elements are unspecified afterwards.
    pub fn reduce<T: BufferElement>(&self, buffer: Buffer<T>, op: ReduceOp, root: Rank) -> Work<Buffer<T>> {
        self.in_place(CollectiveKind::Reduce.with_root(root, buffer.len()), Some(op), buffer)
    }

    /// Writes the reduction of all ranks' inputs to the root's output, which has the length of the input. The other ranks pass empty
    /// outputs.
    pub fn reduce_into<T: BufferElement>(
        &self,
        input: Buffer<T>,
        output: Buffer<T>,
        op: ReduceOp,
        root: Rank,
    ) -> Work<(Buffer<T>, Buffer<T>)> {
        self.out_of_place(CollectiveKind::Reduce.with_root(root, input.len()), Some(op), input, output)
    }

    /// Replaces each rank's elements by the root's elements.
    pub fn broadcast<T: BufferElement>(&self, buffer: Buffer<T>, root: Rank) -> Work<Buffer<T>> {
        self.in_place(CollectiveKind::Broadcast.with_root(root, buffer.len()), None, buffer)
    }

    /// Writes the root's input to all outputs, the root's own included. The other ranks pass empty inputs.
    pub fn broadcast_into<T: BufferElement>(
        &self,
        input: Buffer<T>,
        output: Buffer<T>,
        root: Rank,
    ) -> Work<(Buffer<T>, Buffer<T>)> {
        self.out_of_place(CollectiveKind::Broadcast.with_root(root, output.len()), None, input, output)
    }

    /// Fills the vector with the blocks of all ranks. Each rank passes its own block at its offset in the vector.
    pub fn all_gather<T: BufferElement>(&self, buffer: Buffer<T>) -> Work<Buffer<T>> {
        self.in_place(CollectiveKind::AllGather.with_len(buffer.len()), None, buffer)
    }

    /// Concatenates the inputs of all ranks in every output. The input is this rank's block of the output.
    pub fn all_gather_into<T: BufferElement>(
        &self,
        input: Buffer<T>,
        output: Buffer<T>,
    ) -> Work<(Buffer<T>, Buffer<T>)> {
        self.out_of_place(CollectiveKind::AllGather.with_len(output.len()), None, input, output)
    }

    /// Replaces this rank's block by the reduction of that block over all ranks.
    pub fn reduce_scatter<T: BufferElement>(&self, buffer: Buffer<T>, op: ReduceOp) -> Work<Buffer<T>> {
        self.in_place(CollectiveKind::ReduceScatter.with_len(buffer.len()), Some(op), buffer)
    }

    /// Writes this rank's block of the reduction of all ranks' inputs to the output.
    pub fn reduce_scatter_into<T: BufferElement>(
        &self,
        input: Buffer<T>,
        output: Buffer<T>,
        op: ReduceOp,
    ) -> Work<(Buffer<T>, Buffer<T>)> {
        self.out_of_place(CollectiveKind::ReduceScatter.with_len(input.len()), Some(op), input, output)
    }

    /// Fills the root's vector with the blocks of all ranks. Each rank passes its own block at its offset in the vector.
    pub fn gather<T: BufferElement>(&self, buffer: Buffer<T>, root: Rank) -> Work<Buffer<T>> {
        self.in_place(CollectiveKind::Gather.with_root(root, buffer.len()), None, buffer)
    }

    /// Concatenates the inputs of all ranks, which have equal lengths, in the root's output. The other ranks pass empty outputs.
    pub fn gather_into<T: BufferElement>(
        &self,
        input: Buffer<T>,
        output: Buffer<T>,
        root: Rank,
    ) -> Work<(Buffer<T>, Buffer<T>)> {
        let len = input.len() * self.world_size();
        self.out_of_place(CollectiveKind::Gather.with_root(root, len), None, input, output)
    }

    /// Replaces each rank's block by the same block of the root's vector.
    pub fn scatter<T: BufferElement>(&self, buffer: Buffer<T>, root: Rank) -> Work<Buffer<T>> {
        self.in_place(CollectiveKind::Scatter.with_root(root, buffer.len()), None, buffer)
    }

    /// Writes this rank's block of the root's input to the output. All blocks have equal lengths. The other ranks pass empty inputs.
    pub fn scatter_into<T: BufferElement>(
        &self,
        input: Buffer<T>,
        output: Buffer<T>,
        root: Rank,
    ) -> Work<(Buffer<T>, Buffer<T>)> {
        let len = output.len() * self.world_size();
        self.out_of_place(CollectiveKind::Scatter.with_root(root, len), None, input, output)
    }

    /// Exchanges blocks: block `j` of rank `i` becomes block `i` of rank `j`. The length must be a multiple of the world size.
    pub fn all_to_all<T: BufferElement>(&self, buffer: Buffer<T>) -> Work<Buffer<T>> {
        self.in_place(CollectiveKind::AllToAll.with_len(buffer.len()), None, buffer)
    }

    /// Exchanges blocks: block `i` of the output is this rank's block of rank `i`'s input. The length must be a multiple of the world size.
    pub fn all_to_all_into<T: BufferElement>(
        &self,
        input: Buffer<T>,
        output: Buffer<T>,
    ) -> Work<(Buffer<T>, Buffer<T>)> {
        self.out_of_place(CollectiveKind::AllToAll.with_len(input.len()), None, input, output)
    }

    /// Like [`all_to_all_into`](Group::all_to_all_into), with blocks of different lengths: `send_lens[j]` elements of the input go to rank
    /// `j`, and `receive_lens[i]` elements of the output come from rank `i`. Blocks are contiguous, in rank order. Sender and receiver must
    /// pass the same length for a block.
    pub fn all_to_all_variable<T: BufferElement>(
        &self,
        input: Buffer<T>,
        send_lens: &[usize],
        output: Buffer<T>,
        receive_lens: &[usize],
    ) -> Work<(Buffer<T>, Buffer<T>)> {
        let operation = Operation::all_to_all_variable(input.dtype());
        let own = self.rank().0;
        for (lens, buffer, which) in [(send_lens, &input, "input"), (receive_lens, &output, "output")] {
            let what = if lens.len() != self.world_size() {
                format!("{} block lengths for {} ranks", lens.len(), self.world_size())
            } else if lens.iter().try_fold(0_usize, |sum, &len| sum.checked_add(len)) != Some(buffer.len()) {
                format!("the {which} has {} elements, but its blocks are {lens:?}", buffer.len())
            } else if send_lens.get(own) != receive_lens.get(own) {
                format!("rank {own} sends itself {:?} elements", [send_lens[own], receive_lens[own]])
            } else {
                continue;
            };
            return Work::ready(Err(CommError::InvalidBuffers { operation: operation.name(), what }));
        }
        let lens = BlockLens::Own([send_lens.to_vec(), receive_lens.to_vec()]);
        self.issue_pair(operation, input, output, Some(lens))
    }

    /// A hierarchical [`all_to_all_variable`](Group::all_to_all_variable): a block for another host goes through the rank of this host that
    /// has the receiver's local rank, so each rank sends one message to each other host. `lens[i * N + j]` elements go from rank `i` to
    /// rank `j` of `N` ranks; all ranks pass the same `lens`. Blocks are contiguous from the start of the vectors. The vectors may be
    /// longer; the rest is neither read nor changed.
    ///
    /// On `H` hosts of `L` ranks, this takes `H (L - 1)` steps within a host and `H - 1` steps between hosts, where the pairwise algorithm
    /// takes `(H - 1) L` between hosts. The bytes between hosts are the same. A block for another host also travels within the sender's
    /// host if its receiver has another local rank. The pairwise algorithm is used unless there are several hosts with equally many ranks.
    /// [`all_to_all_variable_by_hosts`](trireme_schedule::collective::all_to_all_variable_by_hosts) describes the steps and cites the
    /// papers.
    pub fn all_to_all_variable_by_hosts<T: BufferElement>(
        &self,
        input: Buffer<T>,
        output: Buffer<T>,
        lens: Arc<[usize]>,
    ) -> Work<(Buffer<T>, Buffer<T>)> {
        let world_size = self.world_size();
        let sum = lens.iter().try_fold(0_usize, |sum, &len| sum.checked_add(len));
        let sum = sum.filter(|len| len.checked_mul(input.dtype().size()).is_some());
        let operation = Operation::all_to_all_variable_by_hosts(input.dtype(), sum.unwrap_or_default());
        let refuse = |what| Work::ready(Err(CommError::InvalidBuffers { operation: operation.name(), what }));
        if lens.len() != world_size * world_size {
            return refuse(format!(
                "{} block lengths, but {world_size} ranks need {}",
                lens.len(),
                world_size * world_size
            ));
        }
        if sum.is_none() {
            return refuse("the sum of the block lengths overflows".to_owned());
        }
        let lens = BlockLens::All(lens);
        let totals = lens.totals(self.rank(), world_size);
        for ((which, buffer), len) in [("input", &input), ("output", &output)].into_iter().zip(totals) {
            if buffer.len() < len {
                return refuse(format!(
                    "the {which} has {} elements, but its blocks have {len}",
                    buffer.len()
                ));
            }
        }
        self.issue_pair(operation, input, output, Some(lens))
    }

    /// Rejects a root outside the group, and an all-to-all whose length does not divide into equal blocks.
    fn check(&self, operation: Operation) -> Result<(), CommError> {
        let (world_size, (_, len)) = (self.world_size(), operation.elements());
        match operation.root() {
            Some(root) if root.0 >= world_size => Err(CommError::NoSuchRoot { operation, root, world_size }),
            None if operation.is(CollectiveKind::AllToAll) && !len.is_multiple_of(world_size) => {
                let what = format!("{len} elements cannot be divided into {world_size} equal blocks");
                Err(CommError::InvalidBuffers { operation: operation.name(), what })
            }
            _ => Ok(()),
        }
    }

    fn in_place<T: BufferElement>(
        &self,
        collective: Collective,
        op: Option<ReduceOp>,
        buffer: Buffer<T>,
    ) -> Work<Buffer<T>> {
        let operation = Operation::new(collective, op, buffer.dtype());
        match self.check(operation) {
            Ok(()) => self.issue(operation, buffer),
            Err(error) => Work::ready(Err(error)),
        }
    }

    fn out_of_place<T: BufferElement>(
        &self,
        collective: Collective,
        op: Option<ReduceOp>,
        input: Buffer<T>,
        output: Buffer<T>,
    ) -> Work<(Buffer<T>, Buffer<T>)> {
        let operation = Operation::new(collective, op, input.dtype());
        if let Err(error) = self.check(operation) {
            return Work::ready(Err(error));
        }
        let [input_len, output_len] = collective.lens(self.rank(), self.world_size());
        if (input.len(), output.len()) != (input_len, output_len) {
            let what = format!(
                "an input of {} elements and an output of {}, but expected {input_len} and {output_len}",
                input.len(),
                output.len()
            );
            return Work::ready(Err(CommError::InvalidBuffers { operation: operation.name(), what }));
        }
        self.issue_pair(operation, input, output, None)
    }
}
