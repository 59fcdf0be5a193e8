//! Memory of groups and devices for exchanges between ranks, and its accounting.

mod across_devices;
mod counted;
mod exchange_pool;
mod pool;
mod vector;
mod waiting;

pub(crate) use across_devices::{on_device, update_on_device};
pub(crate) use counted::CountedMemory;
pub(crate) use exchange_pool::ExchangePool;
pub(crate) use pool::Pool;
pub(crate) use vector::{DevicePart, ExchangeVector, PendingVector};
pub(crate) use waiting::WaitTracker;
