//! Vectors that ranks add up.

use crate::error::Result;
use crate::memory::{Exchanged, Exchanging, Pool, Waiting, bring};
use crate::offload::Movable;
use std::sync::Arc;
use trireme_base::ReduceOp;
use trireme_comm::{Fusion, Group};
use trireme_schedule::collective::block;
use trireme_tensor::{Category, Device, View, ViewMut};

/// How ranks add vectors up.
#[derive(Clone)]
pub(crate) enum Summation {
    /// All have the sum; short vectors travel together.
    AllReduce(Fusion),
    /// Each has its shard of the sum, in its place.
    ReduceScatter(Arc<Group>),
}

impl Summation {
    pub(crate) fn start(&self, vector: Exchanged, device: &Device) -> Exchanging {
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

    /// Sends what waits for more.
    pub(crate) fn flush(&self) {
        if let Summation::AllReduce(fusion) = self {
            fusion.flush();
        }
    }
}

/// The sum over ranks of one vector each, step after step, in the type that ranks exchange. In 16 bits, each sum of two is taken in f32
/// and rounded, so the order of the ranks matters. The group decides that order.
pub(crate) struct Vector {
    pub(super) len: usize,
    pub(super) exchange: Summation,
    /// Present while no sum is pending and the memory was not released.
    memory: Option<Exchanged>,
    under_way: Option<Exchanging>,
    pool: Pool,
}

impl Vector {
    /// Takes no memory before the first term.
    pub(crate) fn new(len: usize, exchange: &Summation, pool: &Pool) -> Self {
        let (exchange, pool) = (exchange.clone(), pool.clone());
        Vector { len, exchange, memory: None, under_way: None, pool }
    }

    pub(crate) fn take(&mut self) -> Result<Exchanged> {
        self.memory.take().map_or_else(|| self.pool.take(self.len), Ok)
    }

    /// Rounds the term of this rank, which is on `device`, and starts the sum over the ranks.
    pub(crate) fn reduce_rounded(&mut self, term: View<'_>, device: &Device) -> Result<()> {
        let mut memory = self.take()?;
        let own = self.pool.device();
        let term = bring(term, device, own, Category::Communication)?;
        own.convert(term.view(), memory.view_mut());
        drop(term);
        self.reduce(memory);
        Ok(())
    }

    /// Starts the sum over the ranks, with the term of this rank.
    pub(crate) fn reduce(&mut self, term: Exchanged) {
        self.under_way = Some(self.exchange.start(term, self.pool.device()));
    }

    pub(crate) fn wait(&mut self, waiting: &mut Waiting) -> Result<()> {
        let under_way = self.under_way.take().expect("the sum over the ranks was started");
        self.memory = Some(under_way.wait(self.pool.device(), waiting)?);
        Ok(())
    }

    pub(crate) fn view(&self) -> View<'_> {
        self.memory.as_ref().expect("a gradient is read after its reduction").view()
    }
}

impl Movable for Vector {
    fn num_bytes(&self) -> usize {
        self.len * self.pool.dtype().size()
    }

    fn view_mut(&mut self) -> ViewMut<'_> {
        self.memory.as_mut().expect("memory is here when it is worked with").view_mut()
    }

    fn release(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.pool.give(memory);
        }
    }

    fn restore(&mut self) -> Result<()> {
        self.memory = Some(self.take()?);
        Ok(())
    }
}
