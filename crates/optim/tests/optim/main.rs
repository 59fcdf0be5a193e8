//! Tests of optimizers with full and with sharded state.

mod balance;
mod common;
mod exchange;
mod golden;
mod shards;
mod states;
