use crate::counted::Counted;
use crate::error::ParallelError;
use std::sync::{Arc, Mutex, PoisonError};
use trireme_comm::{Buffer, Element, Group};
use trireme_tensor::{Category, Device};

/// Buffers of a group that are used again, so that steps allocate nothing.
pub(crate) struct Pool<T> {
    group: Arc<Group>,
    category: Category,
    /// Whether peers read the buffers.
    is_exchanged: bool,
    shared: Arc<Shared<T>>,
}

/// What clones have in common. Buffers that were taken go no later than this.
struct Shared<T> {
    free: Mutex<Vec<Buffer<T>>>,
    counted: Counted,
}

impl<T> Clone for Pool<T> {
    fn clone(&self) -> Self {
        Pool { group: Arc::clone(&self.group), shared: Arc::clone(&self.shared), ..*self }
    }
}

impl<T: Element> Pool<T> {
    /// An empty pool, whose buffers are counted as `category`; and what this rank maps of its peers' ones, if they are
    /// exchanged as they are.
    pub(crate) fn new(group: &Arc<Group>, device: &Device, category: Category, is_exchanged: bool) -> Self {
        let shared = Shared { free: Mutex::default(), counted: Counted::new(device) };
        Pool { group: Arc::clone(group), category, is_exchanged, shared: Arc::new(shared) }
    }

    /// The group whose buffers these are.
    pub(crate) fn group(&self) -> &Arc<Group> {
        &self.group
    }

    /// A buffer of `len` elements with unspecified contents.
    pub(crate) fn take(&self, len: usize) -> Result<Buffer<T>, ParallelError> {
        let mut free = self.shared.free.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(index) = free.iter().position(|buffer| buffer.len() == len) {
            return Ok(free.swap_remove(index));
        }
        let (own, mapped) = self.num_bytes(len);
        self.shared.counted.take(self.category, own)?;
        self.shared.counted.map(mapped)?;
        Ok(self.group.buffer::<T>(len)?)
    }

    /// Bytes of a buffer, and of what is mapped of its peers.
    fn num_bytes(&self, len: usize) -> (usize, usize) {
        let own = len * size_of::<T>();
        (own, if self.is_exchanged { self.group.peer_bytes_mapped(own) } else { 0 })
    }

    /// Gives a buffer back.
    pub(crate) fn give(&self, buffer: Buffer<T>) {
        self.shared.free.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
    }

    /// Gives a buffer back that is not used again.
    pub(crate) fn discard(&self, buffer: Buffer<T>) {
        let (own, mapped) = self.num_bytes(buffer.len());
        drop(buffer);
        self.shared.counted.give(self.category, own);
        self.shared.counted.unmap(mapped);
    }
}
