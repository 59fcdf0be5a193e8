use trireme_tensor::{DeviceError, ExpertDegreeError, UnsplittableError};

/// A result with the error [`ModelError`], unless another error type is given.
pub(crate) type Result<T, E = ModelError> = std::result::Result<T, E>;

/// An error of reading a config, building a model or running its units.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages explain the fields")]
pub enum ModelError {
    #[error("config.json is not valid JSON: {0}")]
    NotJson(#[source] serde_json::Error),
    #[error("config.json lacks '{key}', which a {family} model requires")]
    MissingKey { key: &'static str, family: String },
    #[error("config.json: '{key}' is {found}; expected {expected}")]
    WrongValue { key: String, found: String, expected: String },
    #[error(
        "unit {unit} passes on '{name}' of dims {dims:?} for a batch of {num_samples} samples; make dim 0 a multiple of \
         the samples"
    )]
    Output { unit: String, name: &'static str, dims: Vec<usize>, num_samples: usize },
    #[error(transparent)]
    CannotSplit(#[from] UnsplittableError),
    #[error(transparent)]
    Experts(#[from] ExpertDegreeError),
    #[error("cannot build the model")]
    Build(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error(transparent)]
    Device(#[from] DeviceError),
}
