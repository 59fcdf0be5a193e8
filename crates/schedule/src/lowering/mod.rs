//! Passes that put into a program what a layout asks for. Each takes a program and gives another one that computes the same;
//! [`recompute`](fn@recompute) comes before [`shard`](fn@shard), for what is recomputed reads parameters, too; and
//! [`offload`](fn@offload) after both.

mod offload;
mod recompute;
mod shard;

pub use offload::{Offload, Tier, offload};
pub use recompute::recompute;
pub use shard::{Sharding, shard};
