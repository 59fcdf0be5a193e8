//! A rank's shard of a unit's gradient: the sum over microbatches of what the shards' ranks have reduced, and then over
//! replicas.

use crate::error::ParallelError;
use crate::gradients::{Determinism, Gradient, add};
use crate::ranks::DataParallelRanks;
use crate::stored::Stored;
use crate::tree::TreeSum;
use crate::waiting::Waiting;
use std::sync::Arc;
use trireme_base::{Bf16, DType, F16, ReduceOp};
use trireme_comm::{Buffer, Element, Group, Work};
use trireme_tensor::{Category, Device, Precision, Shape, View};

/// What becomes of a shard's gradients.
pub(crate) trait ShardSum: Send {
    /// Adds this rank's shard of the gradient of a microbatch.
    fn add(&mut self, shard: View<'_>, device: &Device) -> Result<(), ParallelError>;

    /// Starts the sum over replicas of what was added.
    fn reduce(&mut self, device: &Device);

    /// Waits for the sum over replicas.
    fn wait(&mut self, waiting: &mut Waiting) -> Result<(), ParallelError>;

    /// The sum.
    fn view(&self) -> View<'_>;
}

/// Zeros of a shard of `len` elements that are kept in `precision`, which is f32 where several are added.
pub(crate) fn shard_sum(
    len: usize,
    precision: Precision,
    determinism: Determinism,
    ranks: &DataParallelRanks,
    device: &Device,
) -> Result<Box<dyn ShardSum>, ParallelError> {
    Ok(match precision {
        Precision::F32 => Box::new(TreeShardSum {
            determinism,
            memory: Replicated::new(len, ranks, device)?,
            sum: TreeSum::new(),
        }),
        Precision::Bf16 => Box::new(Replicated::<Bf16>::new(len, ranks, device)?),
        Precision::F16 => Box::new(Replicated::<F16>::new(len, ranks, device)?),
    })
}

/// A vector that replicas add up.
struct Replicated<T> {
    shape: Shape,
    replicas: Arc<Group>,
    /// Present while nothing is under way.
    memory: Option<Buffer<T>>,
    under_way: Option<Work<Buffer<T>>>,
}

impl<T: Element> Replicated<T> {
    fn new(len: usize, ranks: &DataParallelRanks, device: &Device) -> Result<Self, ParallelError> {
        let replicas = Arc::clone(ranks.replicas());
        let num_bytes = len * size_of::<T>();
        device.memory().take(Category::Gradients, num_bytes)?;
        device.memory().take(Category::Communication, replicas.peer_bytes_mapped(num_bytes))?;
        let memory = replicas.buffer::<T>(len)?;
        Ok(Replicated { shape: [len].into(), replicas, memory: Some(memory), under_way: None })
    }

    fn start(&mut self, sum: Buffer<T>) {
        self.under_way = Some(self.replicas.all_reduce(sum, ReduceOp::Sum));
    }

    fn finish(&mut self, waiting: &mut Waiting) -> Result<(), ParallelError> {
        let work = self.under_way.take().expect("the sum over replicas was started");
        self.memory = Some(waiting.wait(work)?);
        Ok(())
    }

    fn sum(&self) -> &Buffer<T> {
        self.memory.as_ref().expect("a gradient is read after its reduction")
    }
}

/// One gradient a step, as it was rounded.
impl<T: Stored> ShardSum for Replicated<T> {
    fn add(&mut self, shard: View<'_>, device: &Device) -> Result<(), ParallelError> {
        let shape = self.shape;
        let memory = self.memory.as_mut().expect("one gradient is added a step");
        device.convert(shard, T::view_mut(memory, shape));
        Ok(())
    }

    fn reduce(&mut self, _: &Device) {
        let sum = self.memory.take().expect("a gradient was added");
        self.start(sum);
    }

    fn wait(&mut self, waiting: &mut Waiting) -> Result<(), ParallelError> {
        self.finish(waiting)
    }

    fn view(&self) -> View<'_> {
        T::view(self.sum(), self.shape)
    }
}

/// The sum over microbatches in f32, in the canonical order.
struct TreeShardSum {
    determinism: Determinism,
    memory: Replicated<f32>,
    sum: TreeSum<Gradient>,
}

impl ShardSum for TreeShardSum {
    fn add(&mut self, shard: View<'_>, device: &Device) -> Result<(), ParallelError> {
        let shape = self.memory.shape;
        let mut term = match self.memory.memory.take() {
            Some(buffer) => Gradient::Reducible(buffer),
            None => Gradient::Partial(device.empty(shape, DType::F32, Category::Gradients)?),
        };
        device.convert(shard, term.view_mut(shape));
        self.sum.push(term, |left, right| add(device, shape, left, right));
        if self.determinism == Determinism::Run {
            let sum = self.sum.finish(|left, right| add(device, shape, left, right));
            self.sum.push(sum.expect("a term was added"), |_, _| unreachable!("one term has no neighbour"));
        }
        Ok(())
    }

    fn reduce(&mut self, device: &Device) {
        let shape = self.memory.shape;
        let sum = self.sum.finish(|left, right| add(device, shape, left, right));
        let Some(Gradient::Reducible(buffer)) = sum else {
            unreachable!("the first term lies in the group's memory, and sums grow to the left")
        };
        self.memory.start(buffer);
    }

    fn wait(&mut self, waiting: &mut Waiting) -> Result<(), ParallelError> {
        self.memory.finish(waiting)
    }

    fn view(&self) -> View<'_> {
        View::from_f32s(self.memory.sum(), self.memory.shape)
    }
}
