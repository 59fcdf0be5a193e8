//! Host memory that tensors borrow.

use std::any::Any;
use std::fmt;
use trireme_base::HostMemory;

/// Host memory that backs a tensor until the tensor is dropped, for example a communication buffer.
pub trait LentMemory: HostMemory + Sync + Any + fmt::Debug {
    /// Returns the memory to its owner. Called when the tensor is dropped.
    fn return_to_owner(self: Box<Self>);
}

/// An allocator for activations that do not fit into a device's budget.
pub trait OverflowAllocator: fmt::Debug + Send + Sync {
    /// Allocates `num_bytes` bytes with unspecified contents. Returns `None` if they are not available.
    fn allocate(&self, num_bytes: usize) -> Option<Box<dyn LentMemory>>;
}
