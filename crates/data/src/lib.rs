//! Tokenizers, token files and deterministic samplers.
