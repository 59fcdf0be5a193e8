use crate::error::ParallelError;
use std::sync::{Arc, Mutex, PoisonError};
use trireme_comm::{Buffer, Element, Group};
use trireme_tensor::{Category, Device};

/// Buffers of a group that are used again, so that steps allocate nothing.
pub(crate) struct Pool<T> {
    group: Arc<Group>,
    device: Device,
    category: Category,
    /// Whether peers read the buffers.
    is_exchanged: bool,
    free: Arc<Mutex<Vec<Buffer<T>>>>,
}

impl<T> Clone for Pool<T> {
    fn clone(&self) -> Self {
        let Pool { group, device, free, .. } = self;
        Pool { group: Arc::clone(group), device: device.clone(), free: Arc::clone(free), ..*self }
    }
}

impl<T: Element> Pool<T> {
    /// An empty pool, whose buffers are counted as `category`; and what this rank maps of its peers' ones, if they are
    /// exchanged as they are.
    pub(crate) fn new(group: &Arc<Group>, device: &Device, category: Category, is_exchanged: bool) -> Self {
        let (group, device) = (Arc::clone(group), device.clone());
        Pool { group, device, category, is_exchanged, free: Arc::default() }
    }

    /// A buffer of `len` elements with unspecified contents, if one is free.
    pub(crate) fn free(&self, len: usize) -> Option<Buffer<T>> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let index = free.iter().position(|buffer| buffer.len() == len)?;
        Some(free.swap_remove(index))
    }

    /// A buffer of `len` elements with unspecified contents.
    pub(crate) fn take(&self, len: usize) -> Result<Buffer<T>, ParallelError> {
        if let Some(buffer) = self.free(len) {
            return Ok(buffer);
        }
        let num_bytes = len * size_of::<T>();
        self.device.memory().take(self.category, num_bytes)?;
        if self.is_exchanged {
            self.device.memory().take(Category::Communication, self.group.peer_bytes_mapped(num_bytes))?;
        }
        Ok(self.group.buffer::<T>(len)?)
    }

    /// Gives a buffer back.
    pub(crate) fn give(&self, buffer: Buffer<T>) {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
    }
}
