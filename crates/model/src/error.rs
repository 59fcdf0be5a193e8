use trireme_tensor::{DeviceError, ExpertsError, UncuttableError};

/// What a model refuses.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages explain the fields")]
pub enum ModelError {
    /// The text is no JSON object.
    #[error("config.json is not valid JSON: {0}")]
    NotJson(#[source] serde_json::Error),
    /// A required key is missing.
    #[error("config.json lacks '{key}', which a {family} model requires")]
    MissingKey { key: &'static str, family: String },
    /// A value has the wrong type or lies out of range.
    #[error("config.json: '{key}' is {found}; expected {expected}")]
    WrongValue { key: String, found: String, expected: String },
    /// What a unit passes on has no samples along dim 0.
    #[error(
        "unit {unit} passes on '{name}' of dims {dims:?} for a batch of {num_samples} samples; make dim 0 a multiple of \
         the samples"
    )]
    Output { unit: String, name: &'static str, dims: Vec<usize>, num_samples: usize },
    /// So many ranks of the tensor axis cannot cut the model.
    #[error(transparent)]
    Uncuttable(#[from] UncuttableError),
    /// So many ranks cannot divide the model's experts.
    #[error(transparent)]
    Experts(#[from] ExpertsError),
    /// A program cannot build its model.
    #[error("cannot build the model")]
    Build(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The device refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
}
