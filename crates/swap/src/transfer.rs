use crate::queue::Queue;
use crate::{AlignedBuffer, SwapError};
use std::fmt;
use std::sync::Arc;

/// A read or a write that was issued and may be in flight. [`wait`](Transfer::wait) returns its buffer.
///
/// Dropping a transfer does not cancel it. Its buffer returns to the file's pool when the transfer ends.
#[must_use = "a transfer's buffer, or its failure, is seen by waiting for it"]
pub struct Transfer {
    /// `None` once the result was taken.
    state: Option<TransferState>,
}

enum TransferState {
    Ready(Result<AlignedBuffer, SwapError>),
    Pending { queue: Arc<Queue>, slot: usize },
}

impl Transfer {
    pub(crate) fn ready(result: Result<AlignedBuffer, SwapError>) -> Self {
        Transfer { state: Some(TransferState::Ready(result)) }
    }

    pub(crate) fn pending(queue: &Arc<Queue>, slot: usize) -> Self {
        Transfer { state: Some(TransferState::Pending { queue: Arc::clone(queue), slot }) }
    }

    /// Blocks until the transfer has ended, and returns its buffer. After a read, the buffer holds the block. After a write, its content is
    /// unchanged.
    ///
    /// # Errors
    /// If this transfer or any other transfer of the file failed, or the file was dropped before this transfer ended. Waiting ends at the
    /// latest when a running transfer exceeds the file's timeout, even if the system never answers.
    #[expect(
        clippy::missing_panics_doc,
        reason = "only this method takes the state, and it consumes the transfer"
    )]
    pub fn wait(mut self) -> Result<AlignedBuffer, SwapError> {
        match self.state.take().expect("only this method takes the result, and it takes the transfer, too") {
            TransferState::Ready(result) => result,
            TransferState::Pending { queue, slot } => queue.wait(slot),
        }
    }

    /// Returns whether [`wait`](Transfer::wait) would return at once.
    pub fn is_done(&self) -> bool {
        match &self.state {
            Some(TransferState::Pending { queue, slot }) => queue.is_done(*slot),
            Some(TransferState::Ready(_)) | None => true,
        }
    }
}

impl fmt::Debug for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transfer").field("is_done", &self.is_done()).finish()
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        if let Some(TransferState::Pending { queue, slot }) = &self.state {
            queue.abandon(*slot);
        }
    }
}
