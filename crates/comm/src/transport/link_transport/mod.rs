//! Collectives over [links](super::link), by the steps of [`trireme_schedule::collective`], or by [`SharedMemory`] within one host.
//!
//! The message of each step is a frame: a header of five little-endian words (magic, sequence number, two words of the operation, payload
//! length), the payload, and its checksum if [`GroupOptions::checksums`] is set. The receiver knows the expected header, so any other
//! header ends the operation, and no memory is allocated by the payload length in a header.

mod blocks;
mod exchange;
mod frame;
mod frame_transfer;
mod memories;
#[cfg(test)]
mod tests;

use crate::backoff::Backoff;
use crate::buffer::{CacheLine, Storage};
use crate::call::{BlockLens, Call, Payload};
use crate::control::Control;
use crate::element::finish_mean;
use crate::selection::Selection;
use crate::transport::Transport;
use crate::transport::link::Link;
use crate::transport::shm::{Arena, Operands, SharedMemory, VectorRef};
use crate::{CommError, GroupOptions};
use exchange::Exchange;
pub(crate) use frame_transfer::{Incoming, Outgoing, ReceiveError};
pub(crate) use memories::Memories;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::sync::Arc;
use trireme_base::{DType, Rank};
use trireme_schedule::collective::{
    Algorithm, CollectiveKind, FlatAlgorithm, Hosts, Phase, Step, all_to_all_variable,
    all_to_all_variable_by_hosts, block, phases, scratch_len, segments, steps,
};

pub(crate) struct LinkTransport {
    rank: Rank,
    hosts: Hosts,
    /// The link to each rank, `None` for this rank.
    links: Vec<Option<Link>>,
    /// Memory shared with the ranks of this host. `None` if this rank shares memory with no other rank.
    shared: Option<SharedMemory>,
    /// The arena of the group's buffers, if they are in shared memory.
    arena: Option<Arc<Arena>>,
    selection: Selection,
    backoff: Backoff,
    checksums: bool,
    /// A buffer for the part of an incoming message that is about to be copied or reduced.
    receive_buffer: Vec<CacheLine>,
    /// The steps of the current operation. Later operations reuse the list's memory.
    steps: Vec<Step>,
    phases: Vec<Phase>,
    /// Scratch memory of the steps. An operation that uses it takes it out of the transport. If the operation panics, the memory leaks,
    /// because MPI may still access it. The same holds for `vector`.
    scratch: Vec<CacheLine>,
    /// A full vector for out-of-place operations without a full output.
    vector: Vec<CacheLine>,
}

impl LinkTransport {
    /// Creates the transport from one link per peer, in rank order, with `None` for this rank.
    pub(crate) fn new(
        rank: Rank,
        hosts: Hosts,
        links: Vec<Option<Link>>,
        shared: Option<SharedMemory>,
        arena: Option<Arc<Arena>>,
        selection: Selection,
        options: &GroupOptions,
    ) -> Result<Self, CommError> {
        Ok(LinkTransport {
            rank,
            hosts,
            links,
            shared,
            arena,
            selection,
            backoff: Backoff::new(),
            checksums: options.checksums,
            receive_buffer: CacheLine::zeroed(options.chunk_bytes)?,
            steps: Vec::new(),
            phases: Vec::new(),
            scratch: Vec::new(),
            vector: Vec::new(),
        })
    }

    fn world_size(&self) -> usize {
        self.links.len()
    }

    fn own_block(&self, len: usize) -> Range<usize> {
        block(self.rank, self.world_size(), len)
    }

    fn run_steps(
        &mut self,
        call: &Call,
        memories: &mut Memories<'_>,
        control: &mut Control,
    ) -> Result<(), CommError> {
        let piece: &mut [u8] = bytemuck::cast_slice_mut(&mut self.receive_buffer);
        for step in &self.steps {
            match step {
                Step::Copy { from, to } => memories.copy(from, to),
                Step::Exchange { send, receive } => {
                    let (send, receive) = (send.as_ref(), receive.as_ref());
                    Exchange::new(self.rank, call, send, receive, memories, self.checksums).run(
                        &mut self.links,
                        memories,
                        piece,
                        &mut self.backoff,
                        control,
                    )?;
                }
            }
        }
        Ok(())
    }

    /// Executes an in-place operation. `vector` holds the elements of the full vector from index `first` on.
    fn in_place(
        &mut self,
        call: &Call,
        mut vector: VectorRef<'_>,
        first: usize,
        algorithm: Algorithm,
        control: &mut Control,
    ) -> Result<(), CommError> {
        let (dtype, len) = call.operation.elements();
        let collective = call.operation.collective().expect("operations in place are collectives");
        match (algorithm, collective.kind) {
            (Algorithm::Flat(_), CollectiveKind::AllReduce) => {
                debug_assert_eq!(first, 0, "all of the vector is reduced");
                for segment in segments(&self.hosts, len, dtype.size()) {
                    let bytes = segment.start * dtype.size()..segment.end * dtype.size();
                    self.steps.clear();
                    let of_segment = CollectiveKind::AllReduce.with_len(segment.len());
                    steps(of_segment, algorithm, &self.hosts, self.rank, &mut self.steps);
                    self.execute_steps(call, &mut vector.part(bytes), 0, control)?;
                }
            }
            (Algorithm::Flat(_), _) => {
                self.steps.clear();
                steps(collective, algorithm, &self.hosts, self.rank, &mut self.steps);
                self.execute_steps(call, &mut vector, first, control)?;
            }
            (Algorithm::Hierarchical(levels), _) => {
                let mut list = std::mem::take(&mut self.phases);
                list.clear();
                phases(collective, levels, &self.hosts, self.rank, &mut list);
                let result = list.iter().try_for_each(|phase| self.phase(call, phase, &mut vector, control));
                self.phases = list;
                result?;
            }
        }
        if let Some(op) = call.operation.reduction() {
            let range = match call.operation.root() {
                Some(root) if root != self.rank => 0..0,
                _ if call.operation.output_is_block() => self.own_block(len),
                _ => 0..len,
            };
            let result = &mut vector.bytes()[range.start * dtype.size()..range.end * dtype.size()];
            finish_mean(result, dtype, op, self.world_size());
        }
        if call.operation.root().is_some() {
            // A rank that only sends gets no header from the others. The barrier makes a mismatch reach it, too.
            self.barrier_by_links(call, control)?;
        }
        Ok(())
    }

    /// Executes one phase of a hierarchical algorithm, in memory that its members share or by its steps.
    fn phase(
        &mut self,
        call: &Call,
        phase: &Phase,
        vector: &mut VectorRef<'_>,
        control: &mut Control,
    ) -> Result<(), CommError> {
        let (dtype, _) = call.operation.elements();
        match (&mut self.shared, phase.algorithm) {
            (Some(shared), FlatAlgorithm::Direct) if phase.collective.kind == CollectiveKind::Barrier => {
                shared.barrier(call, control)
            }
            (Some(shared), FlatAlgorithm::Direct) => {
                let bytes = phase.range.start * dtype.size()..phase.range.end * dtype.size();
                let operands = Operands { input: vector.part(bytes), output: None };
                shared.execute(call, call.operation.phase(phase.collective), operands, control)
            }
            _ => {
                self.steps.clear();
                phase.steps(&self.hosts, self.rank, &mut self.steps);
                self.execute_steps(call, vector, 0, control)
            }
        }
    }

    /// Executes `self.steps`. `vector` holds the elements of the full vector from index `first` on.
    fn execute_steps(
        &mut self,
        call: &Call,
        vector: &mut VectorRef<'_>,
        first: usize,
        control: &mut Control,
    ) -> Result<(), CommError> {
        let (dtype, _) = call.operation.elements();
        let mut scratch = ManuallyDrop::new(std::mem::take(&mut self.scratch));
        let scratch_bytes = reserve(&mut scratch, scratch_len(&self.steps) * dtype.size())?;
        let mut memories = Memories::new(vector.bytes(), dtype, call.operation.reduction());
        (memories.first, memories.scratch) = (first * dtype.size(), scratch_bytes);
        let result = self.run_steps(call, &mut memories, control);
        self.scratch = ManuallyDrop::into_inner(scratch);
        result
    }

    /// Executes an out-of-place operation by an in-place one.
    fn out_of_place(
        &mut self,
        call: &Call,
        mut input: VectorRef<'_>,
        mut output: VectorRef<'_>,
        algorithm: Algorithm,
        control: &mut Control,
    ) -> Result<(), CommError> {
        let (dtype, len) = call.operation.elements();
        let collective = call.operation.collective().expect("operations on vectors are collectives");
        let own = self.own_block(len);
        let own_bytes = own.start * dtype.size()..own.end * dtype.size();
        let is_root = call.operation.root().is_none_or(|root| root == self.rank);
        // With the linear algorithm, a rank other than the root accesses only its own block.
        let has_own_only = !is_root && algorithm == Algorithm::Flat(FlatAlgorithm::Linear);
        if has_own_only && call.operation.input_is_block() {
            return self.in_place(call, input, own.start, algorithm, control);
        }
        if has_own_only && call.operation.output_is_block() {
            return self.in_place(call, output, own.start, algorithm, control);
        }
        let mut vector = ManuallyDrop::new(std::mem::take(&mut self.vector));
        let is_full = output.len() == len * dtype.size();
        let mut full_vector = if is_full {
            output.part(0..len * dtype.size())
        } else {
            VectorRef::private(reserve(&mut vector, len * dtype.size())?)
        };
        if call.operation.input_is_block() {
            full_vector.bytes()[own_bytes.clone()].copy_from_slice(input.bytes());
        } else if collective.has_input(self.rank) {
            full_vector.bytes().copy_from_slice(input.bytes());
        }
        let result = self.in_place(call, full_vector.part(0..len * dtype.size()), 0, algorithm, control);
        if call.operation.output_is_block() && !is_full && result.is_ok() {
            let block: &[u8] = bytemuck::cast_slice(&vector);
            output.bytes().copy_from_slice(&block[own_bytes]);
        }
        self.vector = ManuallyDrop::into_inner(vector);
        result
    }

    fn execute_collective(
        &mut self,
        call: &Call,
        input: &mut Storage,
        output: Option<&mut Storage>,
        control: &mut Control,
    ) -> Result<(), CommError> {
        let collective = call.operation.collective().expect("operations on vectors are collectives");
        let (dtype, _) = call.operation.elements();
        let algorithm = self.selection.algorithm(collective, dtype.size());
        let arena = self.arena.clone();
        let input = VectorRef::new(input, arena.as_ref());
        let output = output.map(|output| VectorRef::new(output, arena.as_ref()));
        match (algorithm, &mut self.shared, output) {
            (Algorithm::Flat(FlatAlgorithm::Direct), Some(shared), output) => {
                shared.execute(call, call.operation, Operands { input, output }, control)
            }
            (_, _, None) => self.in_place(call, input, 0, algorithm, control),
            (_, _, Some(output)) => self.out_of_place(call, input, output, algorithm, control),
        }
    }

    fn execute_all_to_all_variable(
        &mut self,
        call: &Call,
        input: &Storage,
        output: &mut Storage,
        lens: &BlockLens,
        control: &mut Control,
    ) -> Result<(), CommError> {
        let (dtype, _) = call.operation.elements();
        self.steps.clear();
        match lens {
            BlockLens::Own([send_lens, receive_lens]) => {
                all_to_all_variable(self.rank, send_lens, receive_lens, &mut self.steps);
            }
            BlockLens::All(lens) => {
                all_to_all_variable_by_hosts(self.rank, &self.hosts, lens, &mut self.steps);
            }
        }
        let mut scratch = ManuallyDrop::new(std::mem::take(&mut self.scratch));
        // Large enough for any block lengths of these vectors, so that it does not grow in later operations.
        let (len, room) =
            (scratch_len(&self.steps) * dtype.size(), input.bytes().len() + output.bytes().len());
        let scratch_bytes = reserve(&mut scratch, if len == 0 { 0 } else { len.max(room) })?;
        let mut memories = Memories::new(output.bytes_mut(), dtype, None);
        (memories.input, memories.scratch) = (input.bytes(), scratch_bytes);
        let result = self.run_steps(call, &mut memories, control);
        self.scratch = ManuallyDrop::into_inner(scratch);
        result
    }

    fn barrier(&mut self, call: &Call, control: &mut Control) -> Result<(), CommError> {
        match self.shared_by_all() {
            Some(shared) => shared.barrier(call, control),
            None => self.barrier_by_links(call, control),
        }
    }

    fn barrier_by_links(&mut self, call: &Call, control: &mut Control) -> Result<(), CommError> {
        self.steps.clear();
        let algorithm = Algorithm::Flat(FlatAlgorithm::Dissemination);
        steps(CollectiveKind::Barrier.with_len(0), algorithm, &self.hosts, self.rank, &mut self.steps);
        self.run_steps(call, &mut Memories::new(&mut [], DType::U8, None), control)
    }

    /// The shared memory, if all ranks of the group are members of it.
    fn shared_by_all(&mut self) -> Option<&mut SharedMemory> {
        let world_size = self.world_size();
        self.shared.as_mut().filter(|shared| shared.num_members() == world_size)
    }
}

impl Transport for LinkTransport {
    fn execute(
        &mut self,
        call: &Call,
        payload: &mut Payload,
        control: &mut Control,
    ) -> Result<(), CommError> {
        match payload {
            Payload::Nothing | Payload::JoinDevices => self.barrier(call, control),
            Payload::Blocks(blocks) => self.gather_blocks(call, blocks, control),
            Payload::Vector(storage) => self.execute_collective(call, storage, None, control),
            Payload::Pair { input, output, lens: None } => {
                self.execute_collective(call, input, Some(output), control)
            }
            Payload::Pair { input, output, lens: Some(lens) } => {
                self.execute_all_to_all_variable(call, input, output, lens, control)
            }
        }
    }

    fn abandon(&mut self, payload: &mut Payload) {
        if let Some(shared) = &mut self.shared {
            shared.abandon();
        }
        let is_lent = self.links.iter_mut().flatten().fold(false, |is_lent, link| link.abandon() | is_lent);
        if is_lent {
            std::mem::forget(std::mem::replace(payload, Payload::Nothing));
            for memory in [&mut self.receive_buffer, &mut self.scratch, &mut self.vector] {
                std::mem::forget(std::mem::take(memory));
            }
        }
    }
}

/// The first `num_bytes` of `memory`, which grows if it is shorter.
fn reserve(memory: &mut Vec<CacheLine>, num_bytes: usize) -> Result<&mut [u8], CommError> {
    if memory.len() * size_of::<CacheLine>() < num_bytes {
        *memory = CacheLine::zeroed(num_bytes)?;
    }
    Ok(&mut bytemuck::cast_slice_mut(memory)[..num_bytes])
}
