//! The operations of a [`Group`] on vectors.
//!
//! Every rank issues the same operation with vectors of the same whole length and dtype. Where ranks have parts of a
//! vector, rank `r` has [`block`]`(r, world_size, len)`: equal blocks, or the first ones longer by an element. In
//! place, a block lies at its place within the whole vector, before the operation or after it; what else the
//! vector then holds is unspecified. Out of place (`…_into`), the input stays as it is.
//!
//! Steps and bytes of each operation by each algorithm are listed in `docs/collectives.md`.
//!
//! # Errors
//! From the [`Work`]s: [`CommError::NoSuchRoot`] and [`CommError::Lengths`], which this rank sees alone and which
//! leave the group as it is, and whatever ends a group.

use crate::call::BlockLens;
use crate::{Buffer, CommError, Content, Group, Operation, Work};
use std::sync::Arc;
use trireme_base::{Rank, ReduceOp};
use trireme_schedule::collective::{Collective, CollectiveKind};

impl Group {
    /// Replaces each element by the reduction of all ranks' elements.
    pub fn all_reduce<T: Content>(&self, buffer: Buffer<T>, op: ReduceOp) -> Work<Buffer<T>> {
        self.in_place(CollectiveKind::AllReduce.with_len(buffer.len()), Some(op), buffer)
    }

    /// The reduction of all ranks' inputs, as long as they are.
    pub fn all_reduce_into<T: Content>(
        &self,
        input: Buffer<T>,
        output: Buffer<T>,
        op: ReduceOp,
    ) -> Work<(Buffer<T>, Buffer<T>)> {
        self.out_of_place(CollectiveKind::AllReduce.with_len(input.len()), Some(op), (input, output))
    }

    /// Replaces the root's elements by the reduction of all ranks' elements.
    pub fn reduce<T: Content>(&self, buffer: Buffer<T>, op: ReduceOp, root: Rank) -> Work<Buffer<T>> {
        self.in_place(CollectiveKind::Reduce.with_root(root, buffer.len()), Some(op), buffer)
    }

    /// The reduction of all ranks' inputs at the root, as long as they are; the other outputs are empty.
    pub fn reduce_into<T: Content>(
        &self,
        input: Buffer<T>,
        output: Buffer<T>,
        op: ReduceOp,
        root: Rank,
    ) -> Work<(Buffer<T>, Buffer<T>)> {
        self.out_of_place(CollectiveKind::Reduce.with_root(root, input.len()), Some(op), (input, output))
    }

    /// Replaces each rank's elements by those of `root`.
    pub fn broadcast<T: Content>(&self, buffer: Buffer<T>, root: Rank) -> Work<Buffer<T>> {
        self.in_place(CollectiveKind::Broadcast.with_root(root, buffer.len()), None, buffer)
    }

    /// The root's input, as long as the outputs; the other inputs are empty. The root gets its output, too.
    pub fn broadcast_into<T: Content>(
        &self,
        input: Buffer<T>,
        output: Buffer<T>,
        root: Rank,
    ) -> Work<(Buffer<T>, Buffer<T>)> {
        self.out_of_place(CollectiveKind::Broadcast.with_root(root, output.len()), None, (input, output))
    }

    /// Fills the vector with the blocks of all ranks, each of which has its own one in its place.
    pub fn all_gather<T: Content>(&self, buffer: Buffer<T>) -> Work<Buffer<T>> {
        self.in_place(CollectiveKind::AllGather.with_len(buffer.len()), None, buffer)
    }

    /// The inputs of all ranks, one after the other; a rank's input is its block of the output.
    pub fn all_gather_into<T: Content>(
        &self,
        input: Buffer<T>,
        output: Buffer<T>,
    ) -> Work<(Buffer<T>, Buffer<T>)> {
        self.out_of_place(CollectiveKind::AllGather.with_len(output.len()), None, (input, output))
    }

    /// Replaces this rank's block by the reduction of all ranks' elements there.
    pub fn reduce_scatter<T: Content>(&self, buffer: Buffer<T>, op: ReduceOp) -> Work<Buffer<T>> {
        self.in_place(CollectiveKind::ReduceScatter.with_len(buffer.len()), Some(op), buffer)
    }

    /// This rank's block of the reduction of all ranks' inputs.
    pub fn reduce_scatter_into<T: Content>(
        &self,
        input: Buffer<T>,
        output: Buffer<T>,
        op: ReduceOp,
    ) -> Work<(Buffer<T>, Buffer<T>)> {
        self.out_of_place(CollectiveKind::ReduceScatter.with_len(input.len()), Some(op), (input, output))
    }

    /// Fills the root's vector with the blocks of all ranks, each of which has its own one in its place.
    pub fn gather<T: Content>(&self, buffer: Buffer<T>, root: Rank) -> Work<Buffer<T>> {
        self.in_place(CollectiveKind::Gather.with_root(root, buffer.len()), None, buffer)
    }

    /// The inputs of all ranks, all of one length, one after the other at the root; the other outputs are empty.
    pub fn gather_into<T: Content>(
        &self,
        input: Buffer<T>,
        output: Buffer<T>,
        root: Rank,
    ) -> Work<(Buffer<T>, Buffer<T>)> {
        let len = input.len() * self.world_size();
        self.out_of_place(CollectiveKind::Gather.with_root(root, len), None, (input, output))
    }

    /// Replaces each rank's block by that of the root's vector.
    pub fn scatter<T: Content>(&self, buffer: Buffer<T>, root: Rank) -> Work<Buffer<T>> {
        self.in_place(CollectiveKind::Scatter.with_root(root, buffer.len()), None, buffer)
    }

    /// This rank's block of the root's input, all of one length; the other inputs are empty.
    pub fn scatter_into<T: Content>(
        &self,
        input: Buffer<T>,
        output: Buffer<T>,
        root: Rank,
    ) -> Work<(Buffer<T>, Buffer<T>)> {
        let len = output.len() * self.world_size();
        self.out_of_place(CollectiveKind::Scatter.with_root(root, len), None, (input, output))
    }

    /// Swaps blocks: the `j`-th of rank `i` becomes the `i`-th of rank `j`. The length is a multiple of the world size.
    pub fn all_to_all<T: Content>(&self, buffer: Buffer<T>) -> Work<Buffer<T>> {
        self.in_place(CollectiveKind::AllToAll.with_len(buffer.len()), None, buffer)
    }

    /// The `i`-th block of the output is this rank's block of rank `i`'s input. The length is a multiple of the world size.
    pub fn all_to_all_into<T: Content>(
        &self,
        input: Buffer<T>,
        output: Buffer<T>,
    ) -> Work<(Buffer<T>, Buffer<T>)> {
        self.out_of_place(CollectiveKind::AllToAll.with_len(input.len()), None, (input, output))
    }

    /// As [`all_to_all_into`](Group::all_to_all_into), with `send_lens[j]` elements for rank `j` in the input and `receive_lens[i]`
    /// of rank `i` in the output, one block after the other. Both ends of a block must give the same length.
    pub fn all_to_all_variable<T: Content>(
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
            return Work::ready(Err(CommError::Lengths { operation: operation.name(), what }));
        }
        let lens = BlockLens::Own([send_lens.to_vec(), receive_lens.to_vec()]);
        self.issue_pair(operation, (input, output), Some(lens))
    }

    /// As [`all_to_all_variable`](Group::all_to_all_variable), for several hosts of equally many ranks: blocks for another host go
    /// by way of the rank of this host with the receiver's local rank, so that a rank sends one message to each
    /// host. `lens[i * N + j]` elements go from rank `i` to rank `j` of `N`, which all ranks know. The blocks lie one after
    /// the other at the start of the vectors, which may be longer; the rest is neither read nor changed.
    ///
    /// On `H` hosts of `L` ranks these are `H (L - 1)` steps within a host and `H - 1` across, where the pairwise algorithm has
    /// `(H - 1) L` across. The bytes across are the same; those within grow by what a rank's blocks for other hosts
    /// have for ranks with another local rank. Elsewhere, it is the pairwise algorithm. Source and details are those of
    /// [`all_to_all_variable_by_hosts`](trireme_schedule::collective::all_to_all_variable_by_hosts).
    pub fn all_to_all_variable_by_hosts<T: Content>(
        &self,
        input: Buffer<T>,
        output: Buffer<T>,
        lens: Arc<[usize]>,
    ) -> Work<(Buffer<T>, Buffer<T>)> {
        let world_size = self.world_size();
        let sum = lens.iter().try_fold(0_usize, |sum, &len| sum.checked_add(len));
        let sum = sum.filter(|len| len.checked_mul(input.dtype().size()).is_some());
        let operation = Operation::all_to_all_variable_by_hosts(input.dtype(), sum.unwrap_or_default());
        let refuse = |what| Work::ready(Err(CommError::Lengths { operation: operation.name(), what }));
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
        self.issue_pair(operation, (input, output), Some(lens))
    }

    /// Refuses a root that the group lacks, and an all-to-all of unequal blocks.
    fn check(&self, operation: Operation) -> Result<(), CommError> {
        let (world_size, (_, len)) = (self.world_size(), operation.elements());
        match operation.root() {
            Some(root) if root.0 >= world_size => Err(CommError::NoSuchRoot { operation, root, world_size }),
            None if operation.is(CollectiveKind::AllToAll) && !len.is_multiple_of(world_size) => {
                let what = format!("{len} elements cannot be divided into {world_size} equal blocks");
                Err(CommError::Lengths { operation: operation.name(), what })
            }
            _ => Ok(()),
        }
    }

    fn in_place<T: Content>(
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

    fn out_of_place<T: Content>(
        &self,
        collective: Collective,
        op: Option<ReduceOp>,
        (input, output): (Buffer<T>, Buffer<T>),
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
            return Work::ready(Err(CommError::Lengths { operation: operation.name(), what }));
        }
        self.issue_pair(operation, (input, output), None)
    }
}
