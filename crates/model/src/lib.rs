//! Layers, and models built from a Hugging Face `config.json`.
//!
//! A [`Model`] is a description: units of layers, and the table of their parameters. Values of parameters
//! ([`trireme_tensor::Parameters`]) and records of passes ([`trireme_tensor::Tape`]) are given to it. It knows nothing of ranks.

mod block;
mod build;
mod config;
mod error;
mod generate;
mod model;
mod sizes;

pub use config::{Architecture, ModelConfig};
pub use error::ModelError;
pub use generate::{Generation, Sampling};
pub use model::{Batch, Model};
