//! How the gradient of a unit is summed over the ranks: in f32 where it lies, rounded to 16 bits, as integers level by level,
//! or compressed.

use crate::compressed::Compressed;
use crate::counted::Counted;
use crate::error::ParallelError;
use crate::hierarchical::Hierarchical;
use crate::pool::Pool;
use crate::stored::Stored;
use crate::waiting::Waiting;
use std::ops::Range;
use std::sync::Arc;
use trireme_base::{Bf16, F16, ReduceOp};
use trireme_comm::{Buffer, Element, FusedWork, Fusion, Group, TransportKind, Work};
use trireme_tensor::{Category, Device, Precision, Shape, View};

/// The reduction of one unit's gradient, step after step.
pub(crate) enum Reduction {
    /// In f32: in the gradient's own memory, or with others if it is short.
    Plain { exchange: Exchange<f32>, under_way: Option<Pending<f32>> },
    /// In bf16, in memory beside it.
    Bf16(Rounded<Bf16>),
    /// In f16, in memory beside it.
    F16(Rounded<F16>),
    /// In integers, within hosts and then across them, in memory beside it.
    Hierarchical(Hierarchical),
    /// In what a codec makes of it, in memory beside it.
    Compressed(Compressed),
}

/// What becomes of vectors of all ranks.
#[derive(Clone)]
pub(crate) enum Exchange<T> {
    /// All have the sum.
    AllReduce(Fusion<T>),
    /// Each has its shard of the sum, in its place.
    ReduceScatter(Arc<Group>),
}

/// A vector that is being reduced.
pub(crate) enum Pending<T> {
    Fused(FusedWork<T>),
    Scattered(Work<Buffer<T>>),
}

impl<T: Element> Exchange<T> {
    fn start(&self, vector: Buffer<T>) -> Pending<T> {
        match self {
            Exchange::AllReduce(fusion) => Pending::Fused(fusion.all_reduce(vector)),
            Exchange::ReduceScatter(group) => Pending::Scattered(group.reduce_scatter(vector, ReduceOp::Sum)),
        }
    }
}

impl<T: Element> Pending<T> {
    fn wait(self, waiting: &mut Waiting) -> Result<Buffer<T>, ParallelError> {
        Ok(match self {
            Pending::Fused(work) => waiting.wait_fused(work)?,
            Pending::Scattered(work) => waiting.wait(work)?,
        })
    }
}

/// How the gradients of all units are exchanged.
pub(crate) enum Exchanges {
    /// All ranks have the sums; short gradients travel together.
    Fusing(Fusions),
    /// Each rank has its shards.
    Scattering { group: Arc<Group>, bf16: Pool<Bf16>, f16: Pool<F16> },
}

impl Exchanges {
    /// Sums for all ranks of `group`, up to `num_bytes` of short gradients at a time.
    pub(crate) fn fusing(group: &Arc<Group>, num_bytes: usize) -> Self {
        Exchanges::Fusing(Fusions::new(group, num_bytes))
    }

    /// Shards of sums for the ranks of `group`; `stays` tells whether rounded ones stay where they are until the next step.
    pub(crate) fn scattering(group: &Arc<Group>, device: &Device, stays: bool) -> Self {
        let category = if stays { Category::Gradients } else { Category::Communication };
        Exchanges::Scattering {
            group: Arc::clone(group),
            bf16: Pool::new(group, device, category, true),
            f16: Pool::new(group, device, category, true),
        }
    }

    /// Sends what waits for more: all gradients of a step have been given.
    pub(crate) fn flush(&self) {
        if let Exchanges::Fusing(fusions) = self {
            fusions.flush();
        }
    }
}

/// What the short gradients of a step travel together by, whatever they are rounded to.
pub(crate) struct Fusions {
    f32: Fusion<f32>,
    bf16: Fusion<Bf16>,
    f16: Fusion<F16>,
}

impl Fusions {
    /// Up to `num_bytes` at a time; 0 lets each gradient travel alone. So does a world that shares memory: there a message
    /// costs no more than the copies that it would save.
    pub(crate) fn new(group: &Arc<Group>, num_bytes: usize) -> Self {
        let shares_memory = matches!(group.transport(), TransportKind::Single | TransportKind::Shm);
        let num_bytes = if shares_memory { 0 } else { num_bytes };
        Fusions {
            f32: fusion(group, num_bytes),
            bf16: fusion(group, num_bytes),
            f16: fusion(group, num_bytes),
        }
    }

    /// Sends what waits for more: all gradients of a step have been given.
    pub(crate) fn flush(&self) {
        self.f32.flush();
        self.bf16.flush();
        self.f16.flush();
    }

    /// Takes memory for gradients of these lengths, in the order of their reductions.
    pub(crate) fn reserve(
        &self,
        lens: impl Iterator<Item = usize>,
        dtype: Precision,
        counted: &Counted,
        group: &Group,
    ) -> Result<(), ParallelError> {
        let num_bytes = match dtype {
            Precision::F32 => self.f32.reserve(lens)?,
            Precision::Bf16 => self.bf16.reserve(lens)?,
            Precision::F16 => self.f16.reserve(lens)?,
        };
        counted.take(Category::Communication, num_bytes)?;
        counted.map(group.peer_bytes_mapped(num_bytes))
    }
}

fn fusion<T: Element>(group: &Arc<Group>, num_bytes: usize) -> Fusion<T> {
    Fusion::new(Arc::clone(group), ReduceOp::Sum, num_bytes / size_of::<T>())
}

impl Reduction {
    /// A reduction of `len` elements over `group` without compression. A world of one has nothing to send, so it rounds
    /// nothing.
    ///
    /// 16 bits take memory for the rounded gradient, which is the only one that stays.
    pub(crate) fn new(
        len: usize,
        dtype: Precision,
        exchanges: &Exchanges,
        counted: &Counted,
        group: &Group,
    ) -> Result<Self, ParallelError> {
        let dtype = if group.world_size() == 1 { Precision::F32 } else { dtype };
        Ok(match exchanges {
            Exchanges::Scattering { group, bf16, f16 } => match dtype {
                Precision::F32 => {
                    let exchange = Exchange::ReduceScatter(Arc::clone(group));
                    Reduction::Plain { exchange, under_way: None }
                }
                Precision::Bf16 => Reduction::Bf16(Rounded::scattered(bf16, group)),
                Precision::F16 => Reduction::F16(Rounded::scattered(f16, group)),
            },
            Exchanges::Fusing(fusions) => {
                let num_bytes = len * dtype.dtype().size();
                counted.map(group.peer_bytes_mapped(num_bytes))?;
                if dtype != Precision::F32 {
                    counted.take(Category::Gradients, num_bytes)?;
                }
                match dtype {
                    Precision::F32 => {
                        let exchange = Exchange::AllReduce(fusions.f32.clone());
                        Reduction::Plain { exchange, under_way: None }
                    }
                    Precision::Bf16 => Reduction::Bf16(Rounded::fused(len, &fusions.bf16, group)?),
                    Precision::F16 => Reduction::F16(Rounded::fused(len, &fusions.f16, group)?),
                }
            }
        })
    }

    /// Starts the reduction of this rank's `sum`; gives it back if it is not what is reduced.
    pub(crate) fn start(
        &mut self,
        sum: Buffer<f32>,
        device: &Device,
        group: &Group,
    ) -> Result<Option<Buffer<f32>>, ParallelError> {
        match self {
            Reduction::Plain { exchange, under_way } => *under_way = Some(exchange.start(sum)),
            Reduction::Bf16(rounded) => {
                rounded.start(&sum, device)?;
                return Ok(Some(sum));
            }
            Reduction::F16(rounded) => {
                rounded.start(&sum, device)?;
                return Ok(Some(sum));
            }
            Reduction::Hierarchical(hierarchical) => hierarchical.start(sum)?,
            Reduction::Compressed(compressed) => compressed.start(sum, device, group)?,
        }
        Ok(None)
    }

    /// Whether a reduction was started and has not come to its sum.
    pub(crate) fn is_under_way(&self) -> bool {
        match self {
            Reduction::Plain { under_way, .. } => under_way.is_some(),
            Reduction::Bf16(rounded) => rounded.under_way.is_some(),
            Reduction::F16(rounded) => rounded.under_way.is_some(),
            Reduction::Hierarchical(hierarchical) => hierarchical.is_under_way(),
            Reduction::Compressed(compressed) => compressed.is_under_way(),
        }
    }

    /// Waits for the message under way; the sum over all ranks, unless that takes another message, which is then under way.
    pub(crate) fn advance(
        &mut self,
        group: &Group,
        waiting: &mut Waiting,
    ) -> Result<Option<Reduced>, ParallelError> {
        match self {
            Reduction::Plain { under_way, .. } => {
                let pending = under_way.take().expect("a reduction was started");
                Ok(Some(Reduced::F32(pending.wait(waiting)?)))
            }
            Reduction::Bf16(rounded) => Ok(Some(Reduced::Bf16(rounded.wait(waiting)?))),
            Reduction::F16(rounded) => Ok(Some(Reduced::F16(rounded.wait(waiting)?))),
            Reduction::Hierarchical(hierarchical) => Ok(hierarchical.advance(waiting)?.map(Reduced::F32)),
            Reduction::Compressed(compressed) => Ok(compressed.advance(group, waiting)?.map(Reduced::F32)),
        }
    }

    /// Takes back memory of a sum that was rounded.
    pub(crate) fn give(&mut self, sum: Reduced) {
        match (self, sum) {
            (Reduction::Bf16(rounded), Reduced::Bf16(sum)) => rounded.give(sum),
            (Reduction::F16(rounded), Reduced::F16(sum)) => rounded.give(sum),
            _ => unreachable!("sums go back where they came from"),
        }
    }
}

/// A sum over all ranks, in what it was reduced in.
pub(crate) enum Reduced {
    F32(Buffer<f32>),
    Bf16(Buffer<Bf16>),
    F16(Buffer<F16>),
}

impl Reduced {
    /// The elements `range`.
    pub(crate) fn view(&self, range: Range<usize>) -> View<'_> {
        let shape = [range.len()].into();
        match self {
            Reduced::F32(sum) => f32::view(&sum[range], shape),
            Reduced::Bf16(sum) => Bf16::view(&sum[range], shape),
            Reduced::F16(sum) => F16::view(&sum[range], shape),
        }
    }
}

/// A reduction in 16 bits. Sums of two are taken in f32 and rounded, so the order of the ranks counts; which one that
/// is, is the group's to say.
pub(crate) struct Rounded<T> {
    exchange: Exchange<T>,
    memory: NarrowMemory<T>,
    under_way: Option<Pending<T>>,
}

/// Where rounded gradients lie.
enum NarrowMemory<T> {
    /// In memory of their own, present while it is neither under way nor read.
    Own(Option<Buffer<T>>),
    /// In memory that goes from unit to unit.
    Pooled(Pool<T>),
}

impl<T: Stored> Rounded<T> {
    fn fused(len: usize, fusion: &Fusion<T>, group: &Group) -> Result<Self, ParallelError> {
        let (exchange, memory) = (Exchange::AllReduce(fusion.clone()), group.buffer(len)?);
        Ok(Rounded { exchange, memory: NarrowMemory::Own(Some(memory)), under_way: None })
    }

    fn scattered(pool: &Pool<T>, group: &Arc<Group>) -> Self {
        let exchange = Exchange::ReduceScatter(Arc::clone(group));
        Rounded { exchange, memory: NarrowMemory::Pooled(pool.clone()), under_way: None }
    }

    fn start(&mut self, wide: &[f32], device: &Device) -> Result<(), ParallelError> {
        let mut narrow = match &mut self.memory {
            NarrowMemory::Own(memory) => memory.take().expect("a unit's reductions do not overlap"),
            NarrowMemory::Pooled(pool) => pool.take(wide.len())?,
        };
        let shape = Shape::from([wide.len()]);
        device.convert(View::from_f32s(wide, shape), T::view_mut(&mut narrow, shape));
        self.under_way = Some(self.exchange.start(narrow));
        Ok(())
    }

    fn wait(&mut self, waiting: &mut Waiting) -> Result<Buffer<T>, ParallelError> {
        self.under_way.take().expect("a reduction was started").wait(waiting)
    }

    fn give(&mut self, narrow: Buffer<T>) {
        match &mut self.memory {
            NarrowMemory::Own(memory) => *memory = Some(narrow),
            NarrowMemory::Pooled(pool) => pool.give(narrow),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trireme_tensor::DeviceOptions;
    use trireme_testkit::run_ranks;

    const LEN: usize = 1000;

    /// What a rank gives: numbers that every rounding changes; and on single ranks, what f16 or no float can hold.
    fn value(rank: usize, index: usize) -> f32 {
        match (rank, index) {
            (1, 3) => 70_000.0,
            (1, 4) => f32::INFINITY,
            (0, 5) => f32::NAN,
            (_, 6) => 40_000.0,
            _ => ((rank * 31 + index * 17) % 101) as f32 / 7.0 - 3.0,
        }
    }

    /// The canonical tree over four ranks, rounded at every node.
    fn oracle(index: usize, round: &impl Fn(f32) -> f32) -> f32 {
        let leaf = |rank| round(value(rank, index));
        round(round(leaf(0) + leaf(1)) + round(leaf(2) + leaf(3)))
    }

    fn check(dtype: Precision, round: impl Fn(f32) -> f32) {
        let ranks = run_ranks(4, |group| {
            let group = Arc::new(group);
            let device = Device::cpu(DeviceOptions { num_threads: 2, ..DeviceOptions::default() }).unwrap();
            let exchanges = Exchanges::fusing(&group, 0);
            let counted = Counted::new(&device);
            let mut reduction = Reduction::new(LEN, dtype, &exchanges, &counted, &group).unwrap();
            let mut buffer = group.buffer::<f32>(LEN).unwrap();
            let mut found = Vec::new();
            // The second round finds the buffers of the first.
            for _ in 0..2 {
                assert!(!reduction.is_under_way());
                buffer.iter_mut().enumerate().for_each(|(index, x)| *x = value(group.rank().0, index));
                let mut wide = reduction.start(buffer, &device, &group).unwrap();
                assert!(reduction.is_under_way());
                let sum = reduction.advance(&group, &mut Waiting::default()).unwrap();
                let sum = sum.expect("it was started");
                let mut widened = vec![0.0; LEN];
                device.convert(
                    sum.view(0..LEN),
                    trireme_tensor::ViewMut::from_f32s(&mut widened, [LEN].into()),
                );
                found = widened;
                buffer = match sum {
                    Reduced::F32(sum) => sum,
                    narrow => {
                        reduction.give(narrow);
                        wide.take().expect("what was rounded is given back")
                    }
                };
            }
            found
        });
        for sums in &ranks {
            for (index, &sum) in sums.iter().enumerate() {
                let expected = oracle(index, &round);
                let is_same = sum.to_bits() == expected.to_bits() || (sum.is_nan() && expected.is_nan());
                assert!(is_same, "{dtype}, {index}: {sum} instead of {expected}");
            }
        }
    }

    #[test]
    fn sums_are_rounded_at_every_node_and_overflow_for_all() {
        check(Precision::F32, |x| x);
        check(Precision::Bf16, |x| Bf16::from_f32(x).to_f32());
        check(Precision::F16, |x| F16::from_f32(x).to_f32());
        let f16 = |x| F16::from_f32(x).to_f32();
        assert!([3, 4, 6].into_iter().all(|index| oracle(index, &f16) == f32::INFINITY));
        assert!(oracle(5, &f16).is_nan());
    }
}
