//! Vectors that are summed over ranks.

use crate::error::Result;
use crate::memory::{ExchangeVector, PendingVector, Pool, WaitTracker, on_device};
use crate::offload::Movable;
use std::sync::Arc;
use trireme_base::ReduceOp;
use trireme_comm::{Fusion, Group};
use trireme_schedule::collective::block;
use trireme_tensor::{Category, Device, View, ViewMut};

/// The collective that sums vectors over ranks.
#[derive(Clone)]
pub(crate) enum Summation {
    /// Every rank receives the full sum. Short vectors are fused.
    AllReduce(Fusion),
    /// Every rank receives its shard of the sum, in place.
    ReduceScatter(Arc<Group>),
}

impl Summation {
    pub(crate) fn start(&self, vector: ExchangeVector, device: &Device) -> PendingVector {
        let len = vector.len();
        match self {
            Summation::AllReduce(fusion) => {
                vector.exchange(device, 0..len, 0..len, |buffer| fusion.all_reduce(buffer))
            }
            Summation::ReduceScatter(group) => {
                let own = block(group.rank(), group.world_size(), len);
                let scatter = |buffer| group.reduce_scatter(buffer, ReduceOp::Sum);
                vector.exchange(device, 0..len, own, scatter)
            }
        }
    }

    /// Sends the batch of short vectors that is being collected for fusion.
    pub(crate) fn flush(&self) {
        if let Summation::AllReduce(fusion) = self {
            fusion.flush();
        }
    }
}

/// A vector that is summed over ranks in every step, in the dtype of the exchange. In 16 bits, each sum of two values is computed in f32
/// and rounded, so the result depends on the order of the ranks, which the group determines.
pub(crate) struct ReducedVector {
    pub(super) len: usize,
    pub(super) exchange: Summation,
    /// `None` while a sum is in flight, and while the memory is released.
    memory: Option<ExchangeVector>,
    pending: Option<PendingVector>,
    pool: Pool,
}

impl ReducedVector {
    /// Creates a vector, which allocates no memory before the first sum.
    pub(crate) fn new(len: usize, exchange: &Summation, pool: &Pool) -> Self {
        let (exchange, pool) = (exchange.clone(), pool.clone());
        ReducedVector { len, exchange, memory: None, pending: None, pool }
    }

    pub(crate) fn take(&mut self) -> Result<ExchangeVector> {
        self.memory.take().map_or_else(|| self.pool.take(self.len), Ok)
    }

    /// Rounds this rank's vector `term`, in memory of `device`, and starts the sum over the ranks.
    pub(crate) fn reduce_rounded(&mut self, term: View<'_>, device: &Device) -> Result<()> {
        let mut memory = self.take()?;
        let own = self.pool.device();
        let term = on_device(term, device, own, Category::Communication)?;
        own.convert(term.view(), memory.view_mut());
        drop(term);
        self.reduce(memory);
        Ok(())
    }

    /// Starts the sum over the ranks, with this rank's vector `term`.
    pub(crate) fn reduce(&mut self, term: ExchangeVector) {
        self.pending = Some(self.exchange.start(term, self.pool.device()));
    }

    pub(crate) fn wait(&mut self, waiting: &mut WaitTracker) -> Result<()> {
        let under_way = self.pending.take().expect("the sum over the ranks was started");
        self.memory = Some(under_way.wait(self.pool.device(), waiting)?);
        Ok(())
    }

    pub(crate) fn view(&self) -> View<'_> {
        self.memory.as_ref().expect("a gradient is read after its reduction").view()
    }
}

impl Movable for ReducedVector {
    fn num_bytes(&self) -> usize {
        self.len * self.pool.dtype().size()
    }

    fn view_mut(&mut self) -> ViewMut<'_> {
        self.memory.as_mut().expect("memory is here when it is worked with").view_mut()
    }

    fn release(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.pool.release(memory);
        }
    }

    fn reallocate(&mut self) -> Result<()> {
        self.memory = Some(self.take()?);
        Ok(())
    }
}
