//! Hands operations and messages from their callers to the threads that execute them.

use super::Group;
use crate::buffer::Storage;
use crate::call::{BlockLens, Payload};
use crate::recorder::Direction;
use crate::transport::check_control_bytes;
use crate::transport::device::needs_scratch;
use crate::{Buffer, BufferElement, CommError, Operation, Work};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use trireme_base::{AsyncOperation, Rank};

impl Group {
    /// Gathers a few bytes of every rank on all ranks, in rank order. Lengths may differ between ranks.
    ///
    /// # Errors
    /// From the work: [`CommError::ControlDataTooLong`] above [`CONTROL_BYTES_MAX`](crate::CONTROL_BYTES_MAX), which does not end the
    /// group, and any failure that ends a group.
    pub fn all_gather_bytes(&self, mine: &[u8]) -> Work<Vec<Vec<u8>>> {
        if let Err(error) = check_control_bytes(self.rank, mine.len() as u64) {
            return Work::ready(Err(error));
        }
        if self.is_dry() {
            // Assumes that all ranks pass the same bytes as this one.
            return self.completed_work(Operation::ALL_GATHER_BYTES, vec![mine.to_vec(); self.world_size]);
        }
        let mut blocks = vec![Vec::new(); self.world_size];
        blocks[self.rank.0] = mine.to_vec();
        let Some(executor) = &self.executor else { return Work::ready(Ok(blocks)) };
        let ticket = executor.queue.submit(Operation::ALL_GATHER_BYTES, Payload::Blocks(blocks));
        Work::queued(ticket, |payload| match payload {
            Payload::Blocks(blocks) => blocks,
            _ => unreachable!("an operation gives back the payload it took"),
        })
    }

    /// Completes when all ranks have reached it. By then, each rank has completed all operations that it issued before.
    ///
    /// # Errors
    /// From the work: any failure that ends a group.
    pub fn barrier(&self) -> Work<()> {
        let Some(executor) = &self.executor else { return self.completed_work(Operation::BARRIER, ()) };
        Work::queued(executor.queue.submit(Operation::BARRIER, Payload::Nothing), |_| ())
    }

    /// Prepares exchanges of vectors in device memory, if they are [needed](Group::need_devices): the devices join a communicator, and
    /// memory for sums in canonical order is allocated. Completes when all ranks have done so. Otherwise, the first exchange does this.
    ///
    /// # Errors
    /// [`CommError::Allocate`] if there is not enough memory on the device. From the work: any failure that ends a group.
    pub fn join_devices(&self) -> Result<Work<()>, CommError> {
        if !self.has_device_transport() || !self.devices.are_needed.load(Ordering::Relaxed) {
            return Ok(Work::ready(Ok(())));
        }
        if self.options.keeps_order {
            self.reserve_scratch()?;
        }
        let Some(executor) = &self.executor else { return Ok(Work::ready(Ok(()))) };
        Ok(Work::queued(executor.queue.submit(Operation::BARRIER, Payload::JoinDevices), |_| ()))
    }

    /// Sends a vector to rank `to`, which must [receive](Group::receive) a vector of the same type and length. Messages from one rank to
    /// another arrive in order. Apart from that, messages and the group's operations may be issued in any order.
    ///
    /// # Errors
    /// From the work: [`CommError::NoSuchPeer`], and any failure that ends a group.
    pub fn send<T: BufferElement>(&self, buffer: Buffer<T>, to: Rank) -> Work<Buffer<T>> {
        let len = buffer.len();
        self.send_first(buffer, len, to)
    }

    /// Like [`send`](Group::send), for the first `len` elements only.
    ///
    /// # Errors
    /// As [`send`](Group::send).
    ///
    /// # Panics
    /// If the vector has fewer than `len` elements.
    pub fn send_first<T: BufferElement>(&self, buffer: Buffer<T>, len: usize, to: Rank) -> Work<Buffer<T>> {
        self.message(Direction::Send, buffer, len, to)
    }

    /// Fills the vector with the elements that rank `from` [sends](Group::send).
    ///
    /// # Errors
    /// As [`send`](Group::send).
    pub fn receive<T: BufferElement>(&self, buffer: Buffer<T>, from: Rank) -> Work<Buffer<T>> {
        let len = buffer.len();
        self.receive_first(buffer, len, from)
    }

    /// Like [`receive`](Group::receive), into the first `len` elements only.
    ///
    /// # Errors
    /// As [`send`](Group::send).
    ///
    /// # Panics
    /// If the vector has fewer than `len` elements.
    pub fn receive_first<T: BufferElement>(
        &self,
        buffer: Buffer<T>,
        len: usize,
        from: Rank,
    ) -> Work<Buffer<T>> {
        self.message(Direction::Receive, buffer, len, from)
    }

    fn message<T: BufferElement>(
        &self,
        direction: Direction,
        mut buffer: Buffer<T>,
        len: usize,
        peer: Rank,
    ) -> Work<Buffer<T>> {
        assert!(len <= buffer.len(), "the first {len} of {} elements", buffer.len());
        let is_send = direction == Direction::Send;
        let direction_name = if is_send { "send" } else { "receive" };
        let is_peer = peer != self.rank && peer.0 < self.world_size;
        let num_bytes = len * buffer.dtype().size();
        let message = Operation::message(buffer.dtype(), len);
        if let Err(error) = self.prepare_devices(direction_name, message, &[&buffer.storage]) {
            return Work::ready(Err(error));
        }
        match (&self.messenger, &self.dry) {
            (None, Some(dry)) if is_peer => {
                let (peer, bytes) = (dry.members[peer.0], num_bytes);
                self.record_and_complete(buffer, || match direction {
                    Direction::Send => AsyncOperation::Send { to: peer, bytes },
                    Direction::Receive => AsyncOperation::Receive { from: peer, bytes },
                })
            }
            (Some(messenger), _) if is_peer => {
                if is_send {
                    self.message_bytes.fetch_add(num_bytes as u64, Ordering::Relaxed);
                }
                buffer.storage.shorten(num_bytes);
                let ticket = messenger.submit(direction, peer, message, buffer.storage);
                Work::message(ticket, |mut storage| {
                    storage.lengthen();
                    Buffer::from_storage(storage)
                })
            }
            _ => {
                let (operation, rank, world_size) = (direction_name, peer, self.world_size);
                Work::ready(Err(CommError::NoSuchPeer { operation, rank, world_size }))
            }
        }
    }

    /// Completes an operation at once, in a group without a communication thread: a dry group or a group of a single rank. A dry group
    /// records the operation.
    fn completed_work<T>(&self, operation: Operation, result: T) -> Work<T> {
        let (_, len) = operation.elements();
        self.completed_work_with_len(operation, len, result)
    }

    /// Like [`completed_work`](Group::completed_work), for an operation that has `len` elements on this rank.
    fn completed_work_with_len<T>(&self, operation: Operation, len: usize, result: T) -> Work<T> {
        let (dtype, _) = operation.elements();
        self.record_and_complete(result, || {
            let members = self.dry.as_ref().map_or_else(|| Arc::from([]), |dry| Arc::clone(&dry.members));
            AsyncOperation::Collective {
                operation: operation.name(),
                len,
                element_bytes: dtype.size(),
                members,
            }
        })
    }

    fn record_and_complete<T>(&self, result: T, issued: impl FnOnce() -> AsyncOperation) -> Work<T> {
        match self.dry.as_ref().filter(|_| self.world_size > 1).and_then(|dry| dry.journal.get()) {
            Some(journal) => Work::dry(result, journal.clone(), journal.issue(issued())),
            None => Work::ready(Ok(result)),
        }
    }

    /// Checks an operation, and allocates what it needs, if vectors are in memory of a device. `name` is the method of the caller.
    fn prepare_devices(
        &self,
        name: &'static str,
        operation: Operation,
        vectors: &[&Storage],
    ) -> Result<(), CommError> {
        let num_on_device = vectors.iter().filter(|vector| vector.is_on_device()).count();
        if num_on_device == 0 || self.world_size == 1 {
            return Ok(());
        }
        let refuse = |what: String| Err(CommError::InvalidBuffers { operation: name, what });
        let Some(transport) = self.devices.transport.get() else {
            return refuse("a vector is in device memory, but the group has no device transport".to_owned());
        };
        if num_on_device < vectors.len() {
            return refuse(
                "input and output must both be in device memory, or both in host memory".to_owned(),
            );
        }
        let (dtype, _) = operation.elements();
        if operation.reduction().is_some() && !transport.can_reduce(dtype) {
            return refuse(format!("devices cannot reduce {dtype}; use a vector in host memory"));
        }
        let (is_in_place, keeps_order) = (vectors.len() == 1, self.options.keeps_order);
        if needs_scratch(operation.collective(), keeps_order, is_in_place, self.world_size) {
            self.reserve_scratch()?;
        }
        Ok(())
    }

    pub(crate) fn issue<T: BufferElement>(&self, operation: Operation, buffer: Buffer<T>) -> Work<Buffer<T>> {
        if let Err(error) = self.prepare_devices(operation.name(), operation, &[&buffer.storage]) {
            return Work::ready(Err(error));
        }
        let Some(executor) = &self.executor else { return self.completed_work(operation, buffer) };
        let ticket = executor.queue.submit(operation, Payload::Vector(buffer.storage));
        Work::queued(ticket, |payload| match payload {
            Payload::Vector(storage) => Buffer::from_storage(storage),
            _ => unreachable!("an operation gives back the payload it took"),
        })
    }

    /// Issues an out-of-place operation. Input and output must have the same type. `lens` are the block lengths of a variable all-to-all;
    /// the caller has checked that the blocks fit into the vectors.
    pub(crate) fn issue_pair<T: BufferElement>(
        &self,
        operation: Operation,
        mut input: Buffer<T>,
        mut output: Buffer<T>,
        lens: Option<BlockLens>,
    ) -> Work<(Buffer<T>, Buffer<T>)> {
        if let Err(error) = check_types(operation, &input, &output) {
            return Work::ready(Err(error));
        }
        let vectors = [&input.storage, &output.storage];
        if let Err(error) = self.prepare_devices(operation.name(), operation, &vectors) {
            return Work::ready(Err(error));
        }
        let Some(executor) = &self.executor else {
            let totals = lens.map(|lens| lens.totals(self.rank, self.world_size));
            if !self.is_dry() {
                if let Err(failure) = input.wait().and_then(|()| output.wait()) {
                    return Work::ready(Err(failure));
                }
                let lens = totals.unwrap_or([input.len(), output.len()]);
                let [sent, received] = lens.map(|len| len * input.dtype().size());
                output.storage.bytes_mut()[..received].copy_from_slice(&input.storage.bytes()[..sent]);
            }
            let (_, len) = operation.elements();
            let len = totals.map_or(len, |[sent, received]| sent.max(received));
            return self.completed_work_with_len(operation, len, (input, output));
        };
        let payload = Payload::Pair { input: input.storage, output: output.storage, lens };
        let ticket = executor.queue.submit(operation, payload);
        Work::queued(ticket, |payload| match payload {
            Payload::Pair { input, output, .. } => {
                (Buffer::from_storage(input), Buffer::from_storage(output))
            }
            _ => unreachable!("an operation gives back the payload it took"),
        })
    }
}

/// Rejects vectors of two types: the engine computes the length of the output from the type of the input.
fn check_types<T: BufferElement>(
    operation: Operation,
    input: &Buffer<T>,
    output: &Buffer<T>,
) -> Result<(), CommError> {
    if input.dtype() == output.dtype() {
        return Ok(());
    }
    let what = format!("an input of {} and an output of {}", input.dtype(), output.dtype());
    Err(CommError::InvalidBuffers { operation: operation.name(), what })
}
