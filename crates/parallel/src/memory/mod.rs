//! Memory of groups and devices for exchanges between ranks, and its accounting.
//!
//! Groups exchange host memory. If kernels reach the host's memory, the vectors that ranks exchange are in memory of the group, and nothing
//! is copied ([`ExchangeVector`], [`ExchangePool`]). On other devices, they are on the device: groups whose devices communicate exchange
//! them there, and others through memory of the group.
//!
//! Exchanges within units avoid copies only for partial sums and temporary results, which are in memory of the group if kernels reach it.
//! Parts to gather, results that are kept, the exchanges of the context axis and the rows of the expert axis are copied.

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
pub(crate) use vector::{DevicePart, ExchangeVector, PendingVector, exchanged_in_place};
pub(crate) use waiting::WaitTracker;
