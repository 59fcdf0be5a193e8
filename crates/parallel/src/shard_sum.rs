use crate::error::ParallelError;
use crate::gradients::{Determinism, Gradient, add};
use crate::ranks::DataParallelRanks;
use crate::step::ExecutorOptions;
use crate::tree::TreeSum;
use crate::waiting::Waiting;
use std::ops::Range;
use std::sync::Arc;
use trireme_base::{DType, ReduceOp};
use trireme_comm::{Buffer, Group, Work};
use trireme_tensor::{Category, Device, Shape, View};

/// A rank's shard of a unit's gradient: the sum over microbatches of what the shards' ranks have reduced, and then over
/// replicas.
pub(crate) struct ShardSum {
    own: Range<usize>,
    determinism: Determinism,
    replicas: Arc<Group>,
    /// Present while nothing was added.
    memory: Option<Buffer<f32>>,
    sum: TreeSum<Gradient>,
    under_way: Option<Work<Buffer<f32>>>,
}

impl ShardSum {
    /// Zeros for the elements `own` of a unit.
    pub(crate) fn new(
        own: Range<usize>,
        ranks: &DataParallelRanks,
        device: &Device,
        options: &ExecutorOptions,
    ) -> Result<Self, ParallelError> {
        let replicas = Arc::clone(ranks.replicas());
        let memory = replicas.buffer::<f32>(own.len())?;
        let num_bytes = size_of_val(&*memory);
        device.memory().add(Category::Gradients, num_bytes);
        device.memory().add(Category::Communication, replicas.peer_bytes_mapped(num_bytes));
        let (sum, determinism) = (TreeSum::new(), options.determinism);
        Ok(ShardSum { own, determinism, replicas, memory: Some(memory), sum, under_way: None })
    }

    fn shape(&self) -> Shape {
        [self.own.len()].into()
    }

    /// Adds this shard of a whole gradient.
    pub(crate) fn add(&mut self, whole: &[f32], device: &Device) -> Result<(), ParallelError> {
        let shape = self.shape();
        let mut term = match self.memory.take() {
            Some(buffer) => Gradient::Reducible(buffer),
            None => Gradient::Partial(device.empty(shape, DType::F32, Category::Gradients)?),
        };
        device.convert(View::from_f32s(&whole[self.own.clone()], shape), term.view_mut(shape));
        self.sum.push(term, |left, right| add(device, shape, left, right));
        if self.determinism == Determinism::Run {
            let sum = self.sum.finish(|left, right| add(device, shape, left, right));
            self.sum.push(sum.expect("a term was added"), |_, _| unreachable!("one term has no neighbour"));
        }
        Ok(())
    }

    /// Starts the sum over replicas of what was added.
    pub(crate) fn reduce(&mut self, device: &Device) {
        let shape = self.shape();
        let sum = self.sum.finish(|left, right| add(device, shape, left, right));
        let Some(Gradient::Reducible(buffer)) = sum else {
            unreachable!("the first term lies in the group's memory, and sums grow to the left")
        };
        self.under_way = Some(self.replicas.all_reduce(buffer, ReduceOp::Sum));
    }

    /// Waits for the sum over replicas.
    pub(crate) fn wait(&mut self, waiting: &mut Waiting) -> Result<(), ParallelError> {
        let work = self.under_way.take().expect("the sum over replicas was started");
        self.memory = Some(waiting.wait(work)?);
        Ok(())
    }

    /// The sum.
    pub(crate) fn view(&self) -> View<'_> {
        let buffer = self.memory.as_ref().expect("a gradient is read after its reduction");
        View::from_f32s(buffer, self.shape())
    }
}
