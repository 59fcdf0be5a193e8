//! Memory of groups and devices for exchanges between ranks, and its accounting.

mod across_devices;
mod counted;
mod lent;
mod pool;
mod vector;
mod waiting;

pub(crate) use across_devices::{bring, change_on};
pub(crate) use counted::Counted;
pub(crate) use lent::ExchangePool;
pub(crate) use pool::Pool;
pub(crate) use vector::{DevicePart, Exchanged, Exchanging};
pub(crate) use waiting::Waiting;
