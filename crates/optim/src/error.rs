use crate::LossScaling;

/// An invalid optimizer state.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages explain the fields")]
pub enum OptimError {
    #[error("the loss scale is {scale}; it must be a power of two from 1 to {}", LossScaling::SCALE_MAX)]
    LossScale { scale: u32 },
}
