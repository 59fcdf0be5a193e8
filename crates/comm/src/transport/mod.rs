//! Transports: the implementations that move a group's data.
//!
//! # Adding a transport
//! A transport that moves bytes between two ranks is a variant of [`link::Link`], like sockets, rings in shared memory and MPI. All
//! algorithms, hierarchies, messages and codecs then work over it, and `GroupConnections::assemble` creates it. Each pair of ranks has its
//! own kind of link, so one world may have several kinds.
//!
//! A library that communicates between devices, like NCCL, implements [`DeviceTransport`](trireme_base::DeviceTransport) in the crate of
//! the devices. [`device`] maps all operations on memory of devices to its steps; the queue, the flight recorder, deadlines and control
//! connections do not depend on it.
//!
//! A transport between hosts needs a `TransportChoice` and a `TransportKind`. Data that ranks exchange before the start is distributed like
//! MPI's addresses (`rendezvous/mpi_exchange.rs`). Tests follow `tests/mpi.rs`, and `docs/collectives.md` has a table of transports.

pub(crate) mod device;
mod group_connections;
pub(crate) mod link;
pub(crate) mod link_transport;
pub(crate) mod mpi;
pub(crate) mod shm;

pub(crate) use group_connections::{GroupConnections, OwnMemory};

use crate::CommError;
use crate::call::{Call, Payload};
use crate::control::Control;
use trireme_base::Rank;

/// Maximum bytes per rank in [`Group::all_gather_bytes`](crate::Group::all_gather_bytes).
pub const CONTROL_BYTES_MAX: usize = 1 << 20;

/// The length of a rank's control data. An error if it exceeds [`CONTROL_BYTES_MAX`].
pub(crate) fn check_control_bytes(rank: Rank, bytes: u64) -> Result<usize, CommError> {
    let bytes_max = CONTROL_BYTES_MAX;
    let len = usize::try_from(bytes).ok().filter(|&len| len <= bytes_max);
    len.ok_or(CommError::ControlDataTooLong { rank, bytes, bytes_max })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    Collectives = 0,
    Messages = 1,
    /// Notices.
    Control = 2,
}

impl Purpose {
    pub(crate) const ALL: [Purpose; 3] = [Purpose::Collectives, Purpose::Messages, Purpose::Control];
}

/// Executes operations among the ranks of one group.
///
/// All ranks call it with the same operations in the same order. Otherwise, it fails with a mismatch. While it waits, it calls
/// [`Control::tick`], which ends the wait if a peer is lost.
pub(crate) trait Transport: Send {
    /// Executes one operation on this rank's payload.
    fn execute(&mut self, call: &Call, payload: &mut Payload, control: &mut Control)
    -> Result<(), CommError>;

    /// Called after the operation failed on this rank. Memory that peers, the kernel or MPI may still access, including the payload, must
    /// not be reused.
    fn abandon(&mut self, payload: &mut Payload);
}
