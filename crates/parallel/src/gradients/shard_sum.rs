//! A rank's shard of a unit's gradient: reduced shards, summed over microbatches and then over replicas.

use super::reduced_vector::{ReducedVector, Summation};
use super::{Gradient, TreeSum, add};
use crate::error::Result;
use crate::layout::StateRanks;
use crate::memory::{Pool, on_device};
use crate::step::Determinism;
use std::sync::Arc;
use trireme_base::{DType, ReduceOp};
use trireme_comm::Fusion;
use trireme_tensor::{Category, Device, View};

/// The shard of one unit's gradient. Its memory comes from a pool that all units share, so released memory is reused by other units.
pub(crate) struct ShardSum {
    determinism: Determinism,
    device: Device,
    /// The vector that is summed over the replicas.
    pub(super) vector: ReducedVector,
    sum: TreeSum<Gradient>,
}

/// Creates the shards of units whose state is distributed over the same ranks.
pub(crate) struct ShardSumFactory {
    determinism: Determinism,
    exchange: Summation,
    pool: Pool,
}

impl ShardSumFactory {
    /// Creates shards in `dtype` on `device`. The dtype must be f32 if a shard sums several microbatches.
    pub(crate) fn new(dtype: DType, determinism: Determinism, ranks: &StateRanks, device: &Device) -> Self {
        let group = &ranks.replicas;
        let exchange = Summation::AllReduce(Fusion::new(Arc::clone(group), ReduceOp::Sum, 0));
        ShardSumFactory {
            determinism,
            exchange,
            pool: Pool::new(group, device, dtype, Category::Gradients, true),
        }
    }

    /// Returns a shard of `len` elements. It allocates no memory before the first addition.
    pub(crate) fn shard(&self, len: usize) -> ShardSum {
        ShardSum {
            determinism: self.determinism,
            device: self.pool.device().clone(),
            vector: ReducedVector::new(len, &self.exchange, &self.pool),
            sum: TreeSum::new(),
        }
    }
}

impl ShardSum {
    /// Adds the shard of a microbatch, in memory of the device `from`, in the canonical order.
    pub(crate) fn add(&mut self, shard: View<'_>, from: &Device) -> Result<()> {
        let (len, device) = (self.vector.len, &self.device);
        let shard = on_device(shard, from, device, Category::Communication)?;
        let mut term = if self.sum.is_empty() {
            Gradient::Reducible(self.vector.take()?)
        } else {
            Gradient::Partial(device.empty([len].into(), DType::F32, Category::Gradients)?)
        };
        device.convert(shard.view(), term.view_mut(len));
        drop(shard);
        self.sum.push(term, |left, right| add(device, len, left, right));
        if self.determinism == Determinism::Run {
            let sum = self.sum.finish(|left, right| add(device, len, left, right));
            self.sum.push(sum.expect("a term was added"), |_, _| unreachable!("one term has no neighbor"));
        }
        Ok(())
    }

    pub(crate) fn reduce(&mut self) {
        let (len, device) = (self.vector.len, &self.device);
        let sum = self.sum.finish(|left, right| add(device, len, left, right));
        let Some(Gradient::Reducible(buffer)) = sum else {
            unreachable!("the first term is what ranks reduce, and sums grow to the left")
        };
        self.vector.reduce(buffer);
    }
}
