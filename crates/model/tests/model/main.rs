//! Models against those of other implementations.

mod golden;
mod operations;
