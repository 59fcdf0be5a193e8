//! Tensors in memory of groups, so that ranks exchange them without a copy.

use crate::memory::Pool;
use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use trireme_base::{HostMemory, Pending};
use trireme_comm::{Buffer, Untyped};
use trireme_tensor::{LentMemory, Shape, Tensor};

/// A buffer of a group that holds a tensor until the tensor is dropped.
pub(crate) struct ExchangeMemory {
    /// `None` after an exchange has taken the buffer.
    buffer: Option<Buffer<Untyped>>,
    range: Range<usize>,
    /// The pool that the buffer returns to; `None` while this is in the pool's `spare`.
    owner: Option<ExchangePool>,
}

type Boxes = Vec<Box<ExchangeMemory>>;

/// A pool of group memory that is lent to tensors.
#[derive(Clone)]
pub(crate) struct ExchangePool {
    pool: Pool,
    /// Boxes without buffers, kept so that steps do not allocate.
    spare: Arc<Mutex<Boxes>>,
}

impl ExchangePool {
    pub(crate) fn new(pool: Pool) -> Self {
        ExchangePool { pool, spare: Arc::default() }
    }

    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    fn spare(&self) -> MutexGuard<'_, Boxes> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a tensor in the elements `range` of a buffer of the pool.
    pub(crate) fn lend(&self, buffer: Buffer<Untyped>, range: Range<usize>, shape: Shape) -> Tensor {
        let spare = self.spare().pop();
        let mut memory =
            spare.unwrap_or_else(|| Box::new(ExchangeMemory { buffer: None, range: 0..0, owner: None }));
        *memory = ExchangeMemory { buffer: Some(buffer), range, owner: Some(self.clone()) };
        Tensor::lent(memory, shape, self.pool.dtype())
    }

    pub(crate) fn has_lent(&self, memory: &dyn LentMemory) -> bool {
        let memory = (memory as &dyn Any).downcast_ref::<ExchangeMemory>();
        let owner = memory.and_then(|memory| memory.owner.as_ref());
        owner.is_some_and(|owner| Arc::ptr_eq(&owner.spare, &self.spare))
    }

    /// Takes the buffer back from a tensor that fills it.
    ///
    /// # Panics
    /// If another pool has lent the memory, or if the tensor does not fill it.
    pub(crate) fn reclaim(&self, memory: Box<dyn LentMemory>) -> Buffer<Untyped> {
        let memory: Box<dyn Any> = memory;
        let mut memory: Box<ExchangeMemory> = memory.downcast().expect("a pool of this type has lent it");
        let is_own = memory.owner.as_ref().is_some_and(|owner| Arc::ptr_eq(&owner.spare, &self.spare));
        assert!(is_own, "this pool has lent the memory");
        let buffer = memory.buffer.take().expect("a tensor has its memory");
        assert_eq!(memory.range, 0..buffer.len(), "the tensor fills its memory");
        memory.return_to_owner();
        buffer
    }
}

impl ExchangeMemory {
    fn byte_range(&self) -> Range<usize> {
        let size = self.buffer.as_ref().map_or(0, |buffer| buffer.dtype().size());
        self.range.start * size..self.range.end * size
    }
}

impl HostMemory for ExchangeMemory {
    fn bytes(&self) -> &[u8] {
        let buffer = self.buffer.as_ref().expect("a tensor has its memory");
        &buffer.bytes()[self.byte_range()]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        let range = self.byte_range();
        let buffer = self.buffer.as_mut().expect("a tensor has its memory");
        &mut buffer.bytes_mut()[range]
    }
}

impl LentMemory for ExchangeMemory {
    fn return_to_owner(mut self: Box<Self>) {
        let owner = self.owner.take().expect("it was lent");
        if let Some(buffer) = self.buffer.take() {
            owner.pool.release_buffer(buffer.len(), Pending::new(buffer));
        }
        owner.spare().push(self);
    }
}

impl fmt::Debug for ExchangeMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ExchangeMemory({:?})", self.range)
    }
}
