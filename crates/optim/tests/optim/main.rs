//! Optimizers, whole and in shards.

mod balance;
mod common;
mod exchange;
mod golden;
mod shards;
mod states;
