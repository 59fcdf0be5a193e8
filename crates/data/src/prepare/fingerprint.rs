//! The fingerprint of everything that a prepared corpus depends on.

use super::inputs::Inputs;
use super::options::{PrepareOptions, TokenizerChoice};
use crate::DataError;
use crate::tokenizer::eos_name_next_to;
use std::fs;

/// Changes with each version that writes different files for the same inputs and options.
const OUTPUT_VERSION: u32 = 4;

impl PrepareOptions {
    /// Returns a text that identifies the inputs and options. Equal fingerprints mean equal output.
    pub(super) fn fingerprint(&self, inputs: &Inputs) -> Result<String, DataError> {
        let mut hasher = crc32fast::Hasher::new();
        let tokenizer = match &self.tokenizer {
            // The fingerprint must not depend on the path of the model.
            TokenizerChoice::OfModel { tokenizer, .. } => {
                let around = (tokenizer.prefix_tokens(), tokenizer.suffix_tokens());
                format!("OfModel({}, {around:?})", tokenizer.sha256()?)
            }
            choice => format!("{choice:?}"),
        };
        let settings = (
            OUTPUT_VERSION,
            format_args!("{tokenizer}"),
            &self.field,
            &self.extensions,
            self.invalid_utf8,
            self.validation_fraction,
        );
        hasher.update(format!("{settings:?}").as_bytes());
        if let TokenizerChoice::File(path) = &self.tokenizer {
            let read = |source| DataError::Read { path: path.clone(), source };
            hasher.update(&fs::read(path).map_err(read)?);
            hasher.update(eos_name_next_to(path)?.unwrap_or_default().as_bytes());
        }
        // If these options are not used, fingerprints equal those of earlier versions, which did not have them.
        if let Some(template) = &self.chat_template {
            template.hash_into(&mut hasher);
            if self.special_tokens_in_messages {
                hasher.update(b"special_tokens_in_messages");
            }
        }
        if !self.weights.is_empty() {
            hasher.update(format!("{:?}", self.weights).as_bytes());
        }
        let validation = if self.validation_inputs.is_empty() {
            String::new()
        } else {
            format!("-{}", Inputs::of(&self.validation_inputs, self)?.fingerprint())
        };
        Ok(format!("{:08x}-{}{validation}", hasher.finalize(), inputs.fingerprint()))
    }
}
