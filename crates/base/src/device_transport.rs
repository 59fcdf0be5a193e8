use crate::{DType, Rank, ReduceOp};
use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// Memory of a device that the ranks of a group can exchange without a copy to the host. Dropping the last handle frees it. `Any` lets the
/// device recover its own type.
pub trait DeviceMemory: Any + Send + Sync + fmt::Debug {
    /// Size in bytes.
    fn num_bytes(&self) -> usize;
}

/// Bytes of [`DeviceMemory`].
#[derive(Debug, Clone)]
pub struct DeviceSpan {
    /// The memory.
    pub memory: Arc<dyn DeviceMemory>,
    /// Range in bytes within the memory.
    pub range: Range<usize>,
}

impl DeviceSpan {
    /// All bytes of `memory`.
    pub fn all(memory: &Arc<dyn DeviceMemory>) -> Self {
        DeviceSpan { memory: Arc::clone(memory), range: 0..memory.num_bytes() }
    }

    /// Returns the bytes `range`, relative to this span.
    ///
    /// # Panics
    /// If the range exceeds the span.
    pub fn part(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.range.len(), "{range:?} of {:?}", self.range);
        let range = self.range.start + range.start..self.range.start + range.end;
        DeviceSpan { memory: Arc::clone(&self.memory), range }
    }
}

/// A part of an [exchange](DeviceStep::Exchange).
#[derive(Debug, Clone)]
pub enum DeviceTransfer {
    /// Sends bytes to a rank, which [receives](DeviceTransfer::Receive) as many.
    Send {
        /// The bytes.
        from: DeviceSpan,
        /// The receiver.
        to: Rank,
    },
    /// Receives bytes from a rank.
    Receive {
        /// Where the bytes go.
        to: DeviceSpan,
        /// The sender.
        from: Rank,
    },
}

/// A step of an operation on the memory of a device. Steps run in order.
#[derive(Debug, Clone)]
pub enum DeviceStep {
    /// Transfers that run together, so that ranks may list theirs in any order. A transfer and its counterpart are in the same exchange of
    /// the two ranks, counted from the first one that both have.
    Exchange(Vec<DeviceTransfer>),
    /// Sends bytes of the root to all ranks, in place.
    Broadcast {
        /// The bytes, on every rank.
        span: DeviceSpan,
        /// The sender.
        root: Rank,
    },
    /// Gathers equally many bytes of every rank, in rank order, in place.
    AllGather {
        /// The bytes of all ranks.
        span: DeviceSpan,
    },
    /// Reduces the elements of all ranks in an order that the library chooses, in place.
    AllReduce {
        /// The elements.
        span: DeviceSpan,
        /// Their type.
        dtype: DType,
        /// The reduction.
        op: ReduceOp,
    },
    /// As [`AllReduce`](DeviceStep::AllReduce), of equally many elements for each rank. The result is written only to the block of this
    /// rank.
    ReduceScatter {
        /// The elements of all blocks.
        span: DeviceSpan,
        /// Their type.
        dtype: DType,
        /// The reduction.
        op: ReduceOp,
    },
    /// Copies bytes on this device.
    Copy {
        /// The bytes.
        from: DeviceSpan,
        /// Where they go.
        to: DeviceSpan,
    },
    /// Reduces two vectors of this device. A mean is a sum.
    Combine {
        /// The left operand.
        left: DeviceSpan,
        /// The right operand.
        right: DeviceSpan,
        /// The result, which may be one of the operands.
        out: DeviceSpan,
        /// The type of the elements.
        dtype: DType,
        /// The reduction.
        op: ReduceOp,
    },
    /// Divides sums by a number.
    Divide {
        /// The sums, which become the quotients.
        span: DeviceSpan,
        /// The type of the elements.
        dtype: DType,
        /// The number.
        by: usize,
    },
}

impl DeviceStep {
    /// Calls `visit` with each span of the step.
    pub fn for_each_span(&self, mut visit: impl FnMut(&DeviceSpan)) {
        match self {
            DeviceStep::Exchange(transfers) => {
                for transfer in transfers {
                    let (DeviceTransfer::Send { from: span, .. } | DeviceTransfer::Receive { to: span, .. }) =
                        transfer;
                    visit(span);
                }
            }
            DeviceStep::Broadcast { span, .. }
            | DeviceStep::AllGather { span }
            | DeviceStep::AllReduce { span, .. }
            | DeviceStep::ReduceScatter { span, .. }
            | DeviceStep::Divide { span, .. } => visit(span),
            DeviceStep::Copy { from, to } => [from, to].into_iter().for_each(visit),
            DeviceStep::Combine { left, right, out, .. } => [left, right, out].into_iter().for_each(visit),
        }
    }
}

/// The identifier of a communicator, by which its ranks find each other.
pub type DeviceCommunicatorId = [u8; 128];

/// Why an operation between devices failed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum DeviceTransportError {
    /// The device of this rank failed.
    #[error("{0}")]
    Device(String),
    /// The library reports a failure, which may be of another rank.
    #[error("{0}")]
    Library(String),
}

/// Opens communicators between devices of several ranks. NCCL, for example, connects GPUs.
pub trait DeviceTransport: Send + Sync + fmt::Debug {
    /// Creates the identifier of a new communicator. One rank calls it, and sends the identifier to the others.
    ///
    /// # Errors
    /// If the library fails.
    fn create_id(&self) -> Result<DeviceCommunicatorId, DeviceTransportError>;

    /// Starts to join the communicator `id` as `rank` of `world_size` ranks, all of which must join.
    ///
    /// # Errors
    /// If the library or the device fails.
    fn join(
        &self,
        id: &DeviceCommunicatorId,
        rank: Rank,
        world_size: usize,
    ) -> Result<Box<dyn DeviceCommunicator>, DeviceTransportError>;

    /// Allocates memory for intermediate results, with unspecified contents. Blocks until the kernels that were issued before have run.
    ///
    /// # Errors
    /// If there is not enough memory, or if the device fails.
    fn allocate(&self, num_bytes: usize) -> Result<Arc<dyn DeviceMemory>, DeviceTransportError>;

    /// Returns whether devices can reduce elements of this type.
    fn can_reduce(&self, dtype: DType) -> bool;
}

/// The place of a rank among the devices of a group. All ranks issue the same operations in the same order.
pub trait DeviceCommunicator: Send {
    /// Issues steps that are still queued, as far as the library accepts them, and returns whether the communicator has joined and all
    /// steps have run. Does not block. The caller polls until it returns true.
    ///
    /// # Errors
    /// If the library or the device fails, for example because a peer was lost. The communicator can only be aborted and dropped then.
    fn poll(&mut self) -> Result<bool, DeviceTransportError>;

    /// Queues the steps of an operation, and issues them as far as the library accepts them; [`poll`](DeviceCommunicator::poll) issues the
    /// rest. The communicator keeps their memory until they have run.
    ///
    /// # Errors
    /// As [`poll`](DeviceCommunicator::poll).
    ///
    /// # Panics
    /// If earlier steps have not run, or if memory is of another device.
    fn issue(&mut self, steps: Vec<DeviceStep>) -> Result<(), DeviceTransportError>;

    /// Ends all steps that have not run, without the peers. Does not block: memory stays allocated until no step writes to it. The
    /// communicator can only be dropped then.
    fn abort(&mut self);
}
