//! A rank's shard of a unit's gradient: the sum over microbatches of what the shards' ranks have reduced, and then over
//! replicas.

use crate::error::ParallelError;
use crate::gradients::{Determinism, Gradient, add};
use crate::offload::Movable;
use crate::pool::Pool;
use crate::ranks::RankGrid;
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

    /// The memory of the sum.
    fn memory(&mut self) -> &mut dyn Movable;
}

/// Where shards of gradients lie, which may go from unit to unit.
pub(crate) struct ShardSums<'a> {
    ranks: &'a RankGrid,
    determinism: Determinism,
    f32: Pool<f32>,
    bf16: Pool<Bf16>,
    f16: Pool<F16>,
}

impl<'a> ShardSums<'a> {
    /// Shards that are counted on `device`.
    pub(crate) fn new(ranks: &'a RankGrid, determinism: Determinism, device: &Device) -> Self {
        let (group, category) = (ranks.replicas(), Category::Gradients);
        ShardSums {
            ranks,
            determinism,
            f32: Pool::new(group, device, category, true),
            bf16: Pool::new(group, device, category, true),
            f16: Pool::new(group, device, category, true),
        }
    }

    /// A shard of `len` elements that is kept in `precision`, which is f32 where several are added.
    pub(crate) fn sum(&self, len: usize, precision: Precision) -> Box<dyn ShardSum> {
        match precision {
            Precision::F32 => {
                let memory = Replicated::new(len, self.ranks, self.f32.clone());
                Box::new(TreeShardSum { determinism: self.determinism, memory, sum: TreeSum::new() })
            }
            Precision::Bf16 => Box::new(Replicated::new(len, self.ranks, self.bf16.clone())),
            Precision::F16 => Box::new(Replicated::new(len, self.ranks, self.f16.clone())),
        }
    }
}

/// A vector that replicas add up.
struct Replicated<T> {
    shape: Shape,
    replicas: Arc<Group>,
    pool: Pool<T>,
    /// Present while nothing is under way and it was not given back.
    memory: Option<Buffer<T>>,
    under_way: Option<Work<Buffer<T>>>,
}

impl<T: Element> Replicated<T> {
    fn new(len: usize, ranks: &RankGrid, pool: Pool<T>) -> Self {
        let replicas = Arc::clone(ranks.replicas());
        Replicated { shape: [len].into(), replicas, pool, memory: None, under_way: None }
    }

    /// Memory for a sum.
    fn take(&mut self) -> Result<Buffer<T>, ParallelError> {
        match self.memory.take() {
            Some(memory) => Ok(memory),
            None => self.pool.take(self.shape.num_elements()),
        }
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
        let mut memory = self.take()?;
        device.convert(shard, T::view_mut(&mut memory, shape));
        self.memory = Some(memory);
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

    fn memory(&mut self) -> &mut dyn Movable {
        self
    }
}

impl<T: Element> Movable for Replicated<T> {
    fn num_bytes(&self) -> usize {
        self.shape.num_elements() * size_of::<T>()
    }

    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self.sum())
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        let memory = self.memory.as_mut().expect("memory is here when it is worked with");
        bytemuck::cast_slice_mut(memory)
    }

    fn release(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.pool.give(memory);
        }
    }

    fn restore(&mut self) -> Result<(), ParallelError> {
        self.memory = Some(self.take()?);
        Ok(())
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
        let mut term = if self.sum.is_empty() {
            Gradient::Reducible(self.memory.take()?)
        } else {
            Gradient::Partial(device.empty(shape, DType::F32, Category::Gradients)?)
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

    fn memory(&mut self) -> &mut dyn Movable {
        &mut self.memory
    }
}
