//! Memory of the host that tensors may use.

use std::any::Any;
use std::fmt;
use trireme_base::HostMemory;

/// Memory of the host in which a tensor lies until it is dropped, such as that which ranks exchange.
pub trait LentMemory: HostMemory + Sync + Any + fmt::Debug {
    /// The tensor was dropped.
    fn give_back(self: Box<Self>);
}

/// Where activations lie that do not fit into a device's budget.
pub trait Overflow: fmt::Debug + Send + Sync {
    /// So many bytes, with unspecified contents; `None` if there are none either.
    fn take(&self, num_bytes: usize) -> Option<Box<dyn LentMemory>>;
}
