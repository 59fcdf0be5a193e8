//! Collectives over stream sockets: executes the steps of [`trireme_schedule::collective`].
//!
//! Each pair of ranks has one data connection: a TCP connection, or a socket pair between threads of one
//! process. The message of each step is a frame: a header of five little-endian words (magic, sequence
//! number, the operation in two words, payload length), then the payload. The receiver knows what must come,
//! so a header that says anything else ends the operation, and no length from the wire is ever allocated.

mod exchange;
mod frame;
#[cfg(test)]
mod tests;

use crate::buffer::CacheLine;
use crate::control::Control;
use crate::element::finish_mean;
use crate::engine::{Call, Cost, Payload};
use crate::group::CONTROL_BYTES_MAX;
use crate::transport::Transport;
use crate::{CommError, GroupOptions, Operation};
use exchange::{Exchange, Vector};
use std::os::fd::OwnedFd;
use trireme_base::Rank;
use trireme_schedule::collective::{
    Step, all_gather_pairwise, all_reduce_halving_doubling, all_reduce_recursive_doubling,
    barrier_dissemination, broadcast_binomial,
};

pub(crate) struct Sockets {
    rank: Rank,
    /// The data connection to each rank, `None` for this one.
    peers: Vec<Option<OwnedFd>>,
    short_bytes_max: usize,
    /// Where a piece of a message lies before it is reduced.
    piece: Vec<CacheLine>,
    /// The steps of the operation under way, kept for their memory.
    steps: Vec<Step>,
}

impl Sockets {
    /// Takes one connected stream socket per peer, in rank order, `None` for this rank.
    pub(crate) fn new(
        rank: Rank,
        peers: Vec<Option<OwnedFd>>,
        options: &GroupOptions,
    ) -> Result<Self, CommError> {
        Ok(Sockets {
            rank,
            peers,
            short_bytes_max: options.short_bytes_max,
            piece: CacheLine::zeroed(options.chunk_bytes)?,
            steps: Vec::new(),
        })
    }

    fn world_size(&self) -> usize {
        self.peers.len()
    }

    /// Fills `self.steps` for an operation on a vector.
    fn fill_steps(&mut self, operation: Operation) {
        let (rank, world_size, steps) = (self.rank, self.peers.len(), &mut self.steps);
        steps.clear();
        match operation {
            Operation::AllReduce { dtype, len, .. } if len * dtype.size() <= self.short_bytes_max => {
                all_reduce_recursive_doubling(rank, world_size, len, steps);
            }
            Operation::AllReduce { len, .. } => all_reduce_halving_doubling(rank, world_size, len, steps),
            Operation::Broadcast { root, len, .. } => {
                broadcast_binomial(rank, world_size, root, len, steps);
                // A root that has sent everything knows nothing of the others: a mismatch must reach it too.
                barrier_dissemination(rank, world_size, steps);
            }
            Operation::Barrier => barrier_dissemination(rank, world_size, steps),
            Operation::AllGatherBytes => unreachable!("gather_blocks makes its own steps"),
        }
    }

    /// Executes `self.steps` on a vector.
    fn run_steps(
        &mut self,
        call: &Call,
        mut vector: Vector<'_>,
        control: &mut Control,
        cost: &mut Cost,
    ) -> Result<(), CommError> {
        let piece: &mut [u8] = bytemuck::cast_slice_mut(&mut self.piece);
        for step in &self.steps {
            let Step::Exchange { send, receive } = step else { unreachable!("no algorithm in use copies") };
            Exchange::new(self.rank, call, (send, receive), &self.peers, &vector).run(
                &mut vector,
                piece,
                control,
                cost,
            )?;
        }
        Ok(())
    }

    /// Gathers the lengths of all blocks, then the blocks.
    fn gather_blocks(
        &mut self,
        call: &Call,
        blocks: &mut [Vec<u8>],
        control: &mut Control,
        cost: &mut Cost,
    ) -> Result<(), CommError> {
        let own = self.rank.0;
        let mut lengths = vec![0_u64; self.world_size()];
        lengths[own] = blocks[own].len() as u64;
        let places: Vec<_> = (0..lengths.len()).map(|rank| 8 * rank..8 * (rank + 1)).collect();
        self.steps.clear();
        all_gather_pairwise(self.rank, &places, &mut self.steps);
        self.run_steps(call, Vector::bytes(bytemuck::cast_slice_mut(&mut lengths)), control, cost)?;

        let mut places = Vec::with_capacity(lengths.len());
        let mut end = 0;
        for (rank, &bytes) in lengths.iter().enumerate() {
            if bytes > CONTROL_BYTES_MAX as u64 {
                let bytes_max = CONTROL_BYTES_MAX;
                return Err(CommError::ControlDataTooLong { rank: Rank(rank), bytes, bytes_max });
            }
            places.push(end..end + bytes as usize);
            end += bytes as usize;
        }
        let mut gathered = vec![0; end];
        gathered[places[own].clone()].copy_from_slice(&blocks[own]);
        self.steps.clear();
        all_gather_pairwise(self.rank, &places, &mut self.steps);
        self.run_steps(call, Vector::bytes(&mut gathered), control, cost)?;
        for (block, place) in blocks.iter_mut().zip(places) {
            *block = gathered[place].to_vec();
        }
        Ok(())
    }
}

impl Transport for Sockets {
    fn execute(
        &mut self,
        call: &Call,
        payload: &mut Payload,
        control: &mut Control,
        cost: &mut Cost,
    ) -> Result<(), CommError> {
        match payload {
            Payload::Blocks(blocks) => self.gather_blocks(call, blocks, control, cost),
            Payload::Vector(storage) => {
                self.fill_steps(call.operation);
                let vector = Vector::of(call.operation, storage.bytes_mut());
                self.run_steps(call, vector, control, cost)?;
                if let Operation::AllReduce { op, dtype, .. } = call.operation {
                    finish_mean(storage.bytes_mut(), dtype, op, self.world_size());
                }
                Ok(())
            }
            Payload::Nothing => {
                self.fill_steps(call.operation);
                self.run_steps(call, Vector::bytes(&mut []), control, cost)
            }
        }
    }
}
