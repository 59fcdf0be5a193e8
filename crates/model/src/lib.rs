//! Models as chains of units, including models built from a Hugging Face `config.json`.
//!
//! A [`Model`] is a description: [units](Unit), and the table of their parameters. The caller provides the values of parameters
//! ([`trireme_tensor::Parameters`]), the tapes that record passes ([`trireme_tensor::Tape`]), and all communication between ranks.

mod bundle;
mod config;
mod error;
mod families;
mod kv_cache;
mod model;
mod profile;
mod sampling;
mod tokens;
mod transformer;
mod unit;
mod unit_benchmark;

pub use bundle::{Batch, Bundle, HostBatch, TensorSpec};
pub use config::{
    AttentionConfig, ExchangeConfig, ExpertsConfig, Family, LatentConfig, Llama3Scaling, ModelConfig, Rope,
    RopeScaling, RouterScores, SlidingWindow, YarnScaling,
};
pub use error::ModelError;
pub use families::{canonical_names, tied_names};
pub use kv_cache::KvCache;
pub use model::Model;
pub use profile::{BatchTensor, KeptBytes, MeanReport, ModelProfile, PassOptions, UnitProfile};
pub use sampling::Sampling;
pub use tokens::{
    DOCUMENT_STARTS, LOGITS, LOSS_WEIGHTS, TARGETS, TOKEN_WEIGHTS, TOKENS, set_window, token_specs,
};
pub use unit::{Unit, UnitContext, UnitPass};
pub use unit_benchmark::UnitBenchmark;
