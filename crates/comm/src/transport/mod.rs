//! What carries the data of a group.

pub(crate) mod shm;
pub(crate) mod sockets;

use crate::control::Control;
use crate::engine::{Call, Cost, Payload};
use crate::{CommError, TransportKind};
use shm::Arena;
use std::sync::Arc;

/// All that connects one rank to its peers.
pub(crate) struct Fabric {
    pub(crate) kind: TransportKind,
    pub(crate) control: Control,
    pub(crate) transport: Box<dyn Transport>,
    /// Where the group's buffers must lie; anywhere, if there is none.
    pub(crate) arena: Option<Arc<Arena>>,
}

/// Executes operations among the ranks of one group.
///
/// All ranks call it with the same operations in the same order; where they do not, it fails with a
/// mismatch. While it waits it calls [`Control::tick`], which ends the wait when a peer is lost.
pub(crate) trait Transport: Send {
    /// Executes one operation on this rank's payload.
    fn execute(
        &mut self,
        call: &Call,
        payload: &mut Payload,
        control: &mut Control,
        cost: &mut Cost,
    ) -> Result<(), CommError>;

    /// The operation failed on this rank: memory that peers may still write to must not be used again.
    fn abandon(&mut self) {}
}
