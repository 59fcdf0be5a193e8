//! A rank's shard of a unit's gradient: the sum over microbatches of what the shards' ranks have reduced, and then over
//! replicas.

use crate::error::ParallelError;
use crate::gradients::{Gradient, add};
use crate::offload::Movable;
use crate::pool::Pool;
use crate::ranks::StateRanks;
use crate::space::bring;
use crate::step::Determinism;
use crate::stored::Stored;
use crate::tree::TreeSum;
use crate::vector::{Sum, Summation, Vector};
use crate::waiting::Waiting;
use std::sync::Arc;
use trireme_base::{Bf16, DType, F16, ReduceOp};
use trireme_comm::Fusion;
use trireme_tensor::{Category, Device, Precision, View};

/// Makes a shard's sum of so many elements. Where its memory is given back, it goes from unit to unit.
pub(crate) type MakeShardSum = Box<dyn Fn(usize) -> Box<dyn Sum>>;

/// Shards that are kept in `precision`, which is f32 where several are added, and counted on `device`.
pub(crate) fn shard_sums(
    precision: Precision,
    determinism: Determinism,
    ranks: &StateRanks,
    device: &Device,
) -> MakeShardSum {
    match precision {
        Precision::F32 => {
            let (replicated, device) = (replicated(ranks, device), device.clone());
            Box::new(move |len| {
                let (memory, device) = (replicated(len), device.clone());
                Box::new(TreeShardSum { determinism, device, memory, sum: TreeSum::new() })
            })
        }
        Precision::Bf16 => rounded::<Bf16>(ranks, device),
        Precision::F16 => rounded::<F16>(ranks, device),
    }
}

fn rounded<T: Stored>(ranks: &StateRanks, device: &Device) -> MakeShardSum {
    let replicated = replicated::<T>(ranks, device);
    Box::new(move |len| Box::new(replicated(len)))
}

/// Vectors that replicas add up.
fn replicated<T: Stored>(ranks: &StateRanks, device: &Device) -> impl Fn(usize) -> Vector<T> + use<T> {
    let group = &ranks.replicas;
    let exchange = Summation::AllReduce(Fusion::new(Arc::clone(group), ReduceOp::Sum, 0));
    let pool = Pool::new(group, device, Category::Gradients, true);
    move |len| Vector::new(len, &exchange, &pool)
}

/// The sum over microbatches in f32, in the canonical order.
struct TreeShardSum {
    determinism: Determinism,
    /// Where the shard lies.
    device: Device,
    memory: Vector<f32>,
    sum: TreeSum<Gradient>,
}

impl Sum for TreeShardSum {
    fn add(&mut self, shard: View<'_>, from: &Device) -> Result<(), ParallelError> {
        let (len, device) = (self.memory.len(), &self.device);
        let shard = bring(shard, from, device, Category::Communication)?;
        let mut term = if self.sum.is_empty() {
            Gradient::Reducible(self.memory.take()?)
        } else {
            Gradient::Partial(device.empty([len].into(), DType::F32, Category::Gradients)?)
        };
        device.convert(shard.view(), term.view_mut(len));
        drop(shard);
        self.sum.push(term, |left, right| add(device, len, left, right));
        if self.determinism == Determinism::Run {
            let sum = self.sum.finish(|left, right| add(device, len, left, right));
            self.sum.push(sum.expect("a term was added"), |_, _| unreachable!("one term has no neighbour"));
        }
        Ok(())
    }

    fn reduce(&mut self) {
        let (len, device) = (self.memory.len(), &self.device);
        let sum = self.sum.finish(|left, right| add(device, len, left, right));
        let Some(Gradient::Reducible(buffer)) = sum else {
            unreachable!("the first term is what ranks reduce, and sums grow to the left")
        };
        self.memory.put(buffer);
        self.memory.reduce();
    }

    fn wait(&mut self, waiting: &mut Waiting) -> Result<(), ParallelError> {
        self.memory.wait(waiting)
    }

    fn view(&self) -> View<'_> {
        self.memory.view()
    }

    fn memory(&mut self) -> &mut dyn Movable {
        &mut self.memory
    }
}
