//! The description of a family of models.

use super::{ModelConfig, Reader};
use crate::error::Result;
use crate::model::Model;
use serde_json::Value;
use std::fmt;
use std::sync::Arc;
use trireme_tensor::ParameterTable;
use trireme_tensor::tape::RotaryTable;

/// A family of models.
#[derive(Clone, Copy)]
pub struct Family {
    pub(crate) name: &'static str,
    /// Keys that change what a model computes, with their implemented values as JSON. Null counts as the first value.
    pub(crate) supported_values: &'static [(&'static str, &'static [&'static str])],
    pub(crate) read: fn(&Reader<'_>) -> Result<ModelConfig>,
    pub(crate) write: fn(&ModelConfig) -> Value,
    pub(crate) build: fn(&ModelConfig, Option<&Arc<RotaryTable>>, ParameterTable) -> Model,
}

impl Family {
    /// Returns the family's `model_type` in `config.json`.
    pub fn name(self) -> &'static str {
        self.name
    }
}

impl PartialEq for Family {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for Family {}

impl fmt::Debug for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}
