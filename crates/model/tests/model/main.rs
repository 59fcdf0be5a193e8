//! Compares models with other implementations.

mod golden;
mod operations;
