//! Memory of groups and devices in which ranks exchange tensors, and what is counted of it.

pub(crate) mod across_devices;
pub(crate) mod counted;
pub(crate) mod lent;
pub(crate) mod pool;
pub(crate) mod vector;
pub(crate) mod waiting;
