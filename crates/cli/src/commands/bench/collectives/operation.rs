//! The operations that are timed: their vectors, their calls and their expected results.

use super::number::{Number, name};
use super::vectors::VectorMemory;
use anyhow::{Context, Result};
use trireme_base::{Rank, ReduceOp};
use trireme_comm::{Buffer, Group, Work};
use trireme_schedule::collective::{Collective, CollectiveKind, block};

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
pub(super) enum Op {
    AllReduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    /// Blocks of different lengths.
    AllToAllVariable,
    Broadcast,
    Reduce,
    Gather,
    Scatter,
    Barrier,
    /// A message from rank 0 to rank 1 and back; reports the one-way time.
    Send,
}

impl Op {
    /// Operations that benchmarks of other libraries have, too.
    pub(super) const COMMON: [Op; 5] =
        [Op::AllReduce, Op::AllGather, Op::ReduceScatter, Op::AllToAll, Op::Broadcast];

    pub(super) fn has_sizes(self) -> bool {
        self != Op::Barrier
    }

    /// Returns the ratio of bus bandwidth to algorithm bandwidth (nccl-tests, doc/PERFORMANCE.md).
    pub(super) fn bus_factor(self, world_size: usize) -> f64 {
        let n = world_size as f64;
        match self {
            Op::AllReduce => 2.0 * (n - 1.0) / n,
            Op::Broadcast | Op::Reduce | Op::Barrier | Op::Send => 1.0,
            _ => (n - 1.0) / n,
        }
    }

    /// Returns the number of elements of the full vector: the largest valid number up to `len`.
    fn valid_len(self, world_size: usize, len: usize) -> usize {
        match self {
            Op::Barrier => 0,
            Op::AllReduce | Op::Broadcast | Op::Reduce | Op::Send => len,
            Op::AllToAllVariable => len - len % num_units(world_size),
            _ => len - len % world_size,
        }
    }

    /// Returns the collective for which the group chooses an algorithm; `None` if there is no choice.
    fn collective(self, len: usize) -> Option<Collective> {
        let kind = CollectiveKind::named(&name(self)).filter(|kind| *kind != CollectiveKind::Barrier)?;
        Some(kind.with_root(Rank::ROOT, len))
    }
}

/// Returns the number of units that a rank sends to all ranks together in an all-to-all of variable block lengths: the sum of [`units`].
/// The length of a block is a multiple of one unit.
fn num_units(world_size: usize) -> usize {
    world_size * (world_size + 1) / 2
}

/// Returns the length of the block that rank `from` sends to rank `to`, in units. In the matrix of these lengths, each row and each column
/// has every number from 1 to the world size.
fn units(from: usize, to: usize, world_size: usize) -> usize {
    1 + (from + to) % world_size
}

/// An operation with its vectors on one rank.
pub(super) struct Bench<'a, T> {
    group: &'a Group,
    memory: &'a VectorMemory<'a>,
    op: Op,
    /// Elements of the full vector.
    len: usize,
    /// The input, and the output if the operation is out of place. Absent during a call.
    vectors: Option<(Buffer<T>, Option<Buffer<T>>)>,
    /// Elements of the blocks of an all-to-all, by the other rank. Sent and received blocks have equal lengths.
    block_lens: Vec<usize>,
}

impl<'a, T: Number> Bench<'a, T> {
    /// Allocates vectors for a full vector of at most `bytes`. Every input element of rank `r` is `r + 1`.
    pub(super) fn new(group: &'a Group, op: Op, memory: &'a VectorMemory<'a>, bytes: usize) -> Result<Self> {
        let (own, world_size) = (group.rank(), group.world_size());
        let len = op.valid_len(world_size, bytes / size_of::<T>());
        let (input, output) = match (op, op.collective(len)) {
            (Op::AllReduce | Op::Broadcast | Op::Reduce | Op::Barrier | Op::Send, _) => (len, None),
            (_, Some(collective)) => {
                let [input, output] = collective.lens(own, world_size);
                (input, Some(output))
            }
            (_, None) => (len, Some(len)),
        };
        let unit = len / num_units(world_size);
        let block_lens = (0..world_size).map(|other| unit * units(own.0, other, world_size)).collect();
        let input = memory.vector(input, T::of(own.0 as f64 + 1.0))?;
        let output = output.map(|len| memory.vector(len, T::of(0.0))).transpose()?;
        Ok(Bench { group, memory, op, len, vectors: Some((input, output)), block_lens })
    }

    pub(super) fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// Returns the algorithm that the group uses, if it has a choice.
    pub(super) fn algorithm(&self) -> Option<String> {
        let collective = self.op.collective(self.len)?;
        Some(self.group.algorithm(collective, size_of::<T>()).to_string())
    }

    /// Sets the input to zero, so that repeated sums stay finite.
    pub(super) fn clear(&mut self) {
        if let Some((input, _)) = &mut self.vectors {
            self.memory.fill(input, T::of(0.0));
        }
    }

    pub(super) fn call(&mut self) -> Result<()> {
        let (input, output) = self.vectors.take().context("every call gives its vectors back")?;
        self.vectors = Some(match output {
            Some(output) => {
                let (input, output) = self.out_of_place(input, output).wait()?;
                (input, Some(output))
            }
            None => (self.in_place(input)?, None),
        });
        Ok(())
    }

    fn in_place(&self, vector: Buffer<T>) -> Result<Buffer<T>> {
        let group = self.group;
        let work = match (self.op, group.rank()) {
            (Op::AllReduce, _) => group.all_reduce(vector, ReduceOp::Sum),
            (Op::Broadcast, _) => group.broadcast(vector, Rank::ROOT),
            (Op::Reduce, _) => group.reduce(vector, ReduceOp::Sum, Rank::ROOT),
            (Op::Send, Rank(0)) => {
                let sent = group.send(vector, Rank(1)).wait()?;
                group.receive(sent, Rank(1))
            }
            (Op::Send, Rank(1)) => {
                let received = group.receive(vector, Rank(0)).wait()?;
                group.send(received, Rank(0))
            }
            (Op::Send, _) => return Ok(vector),
            (Op::Barrier, _) => {
                group.barrier().wait()?;
                return Ok(vector);
            }
            (op, _) => unreachable!("{op:?} is out of place"),
        };
        Ok(work.wait()?)
    }

    fn out_of_place(&self, input: Buffer<T>, output: Buffer<T>) -> Work<(Buffer<T>, Buffer<T>)> {
        let (group, lens) = (self.group, &self.block_lens);
        match self.op {
            Op::AllGather => group.all_gather_into(input, output),
            Op::ReduceScatter => group.reduce_scatter_into(input, output, ReduceOp::Sum),
            Op::AllToAll => group.all_to_all_into(input, output),
            Op::AllToAllVariable => group.all_to_all_variable(input, lens, output, lens),
            Op::Gather => group.gather_into(input, output, Rank::ROOT),
            Op::Scatter => group.scatter_into(input, output, Rank::ROOT),
            op => unreachable!("{op:?} is in place"),
        }
    }

    /// Whether the result of the first call is right.
    pub(super) fn is_right(&self) -> Result<bool> {
        let (rank, world_size) = (self.group.rank(), self.group.world_size());
        let Some((input, output)) = &self.vectors else { return Ok(false) };
        let input = self.memory.read(input)?;
        let output = output.as_ref().map(|output| self.memory.read(output)).transpose()?;
        let all_are = |vector: &[T], expected: f64| vector.iter().all(|value| value.is_close_to(expected));
        let total = (world_size * (world_size + 1) / 2) as f64;
        let blocks = |output: &[T]| {
            (0..world_size)
                .all(|other| all_are(&output[block(Rank(other), world_size, self.len)], other as f64 + 1.0))
        };
        let blocks_of_any_lengths = |mut output: &[T]| {
            self.block_lens.iter().enumerate().all(|(other, &len)| {
                let (block, rest) = output.split_at(len);
                output = rest;
                all_are(block, other as f64 + 1.0)
            })
        };
        Ok(match (self.op, output.as_deref()) {
            (Op::Barrier, None) => true,
            (Op::AllReduce, None) => all_are(&input, total),
            (Op::Reduce, None) => rank != Rank::ROOT || all_are(&input, total),
            (Op::Broadcast, None) => all_are(&input, 1.0),
            (Op::Send, None) => rank.0 > 1 || all_are(&input, 1.0),
            (Op::ReduceScatter, Some(output)) => all_are(output, total),
            (Op::AllGather | Op::AllToAll, Some(output)) => blocks(output),
            (Op::AllToAllVariable, Some(output)) => blocks_of_any_lengths(output),
            (Op::Gather, Some(output)) => rank != Rank::ROOT || blocks(output),
            (Op::Scatter, Some(output)) => all_are(output, 1.0),
            _ => false,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sent_and_received_blocks_match_and_all_ranks_send_equal_amounts() {
        for world_size in 1..=9 {
            for rank in 0..world_size {
                let sent: Vec<usize> = (0..world_size).map(|to| units(rank, to, world_size)).collect();
                let received: Vec<usize> =
                    (0..world_size).map(|from| units(from, rank, world_size)).collect();
                assert_eq!(sent, received);
                assert_eq!(sent.iter().sum::<usize>(), num_units(world_size));
            }
        }
    }
}
