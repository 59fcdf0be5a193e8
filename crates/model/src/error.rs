use trireme_tensor::DeviceError;

/// What a model refuses.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The text is no JSON object.
    #[error("config.json is not valid JSON: {0}")]
    NotJson(#[source] serde_json::Error),
    /// A required key is missing.
    #[error("config.json lacks '{key}', which a {architecture} model requires")]
    MissingKey {
        /// The key.
        key: &'static str,
        /// `model_type`.
        architecture: String,
    },
    /// A value has the wrong type or lies out of range.
    #[error("config.json: '{key}' is {found}; expected {expected}")]
    WrongValue {
        /// The key.
        key: String,
        /// What stands there.
        found: String,
        /// What may stand there.
        expected: String,
    },
    /// The device refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
}
