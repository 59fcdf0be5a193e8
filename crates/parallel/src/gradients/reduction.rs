//! The reduction of a unit's gradient over the ranks: in f32, rounded to 16 bits, quantized level by level, or compressed.

use super::CompressedReduction;
use super::hierarchical::HierarchicalReduction;
use super::reduced_vector::{ReducedVector, Summation};
use crate::error::Result;
use crate::memory::{CountedMemory, ExchangeVector, PendingVector, Pool, WaitTracker};
use crate::offload::Movable;
use std::sync::Arc;
use trireme_base::{DType, ReduceOp};
use trireme_comm::{Fusion, Group, TransportKind};
use trireme_tensor::{Category, Device, View};

pub(crate) enum Reduction {
    /// In f32, in the gradient's own memory; a short gradient may be fused with others.
    Plain { exchange: Summation, pending: Option<PendingVector> },
    /// Rounded to 16 bits, in memory of its own.
    Rounded(ReducedVector),
    /// As integers, within hosts and then across them, in memory of its own.
    Hierarchical(HierarchicalReduction),
    /// Compressed by a codec, in memory of its own.
    Compressed(CompressedReduction),
}

/// Creates the uncompressed reductions of units whose gradients are reduced over the same ranks.
pub(crate) struct ReductionFactory {
    exchange: Summation,
    /// For reductions in 16 bits, the pool for rounded gradients, and whether each unit allocates its memory in advance.
    rounded: Option<(Pool, bool)>,
}

impl ReductionFactory {
    /// Creates all-reductions over `group`. Short gradients are fused into messages of up to `fusion_bytes`; with 0, each gradient is sent
    /// alone. Nothing is fused if the group is on shared memory, because a message costs no more than the copies that fusion needs, or if
    /// devices exchange the gradients, because fusion copies on the host.
    ///
    /// Memory of fused messages is allocated in advance, for gradients of `lens` elements in the order of their reductions. If
    /// `allocates_rounded`, memory of rounded gradients is allocated in advance as well, and stays allocated between steps.
    pub(crate) fn all_reduce(
        dtype: DType,
        group: &Arc<Group>,
        fusion_bytes: usize,
        lens: &[usize],
        allocates_rounded: bool,
        counted: &CountedMemory,
    ) -> Result<Self> {
        let shares_memory = matches!(group.transport(), TransportKind::Single | TransportKind::Shm);
        let pool = |category| Pool::new(group, counted.device(), dtype, category, true);
        let is_on_device = pool(Category::Gradients).is_on_device();
        let len_max = if shares_memory || is_on_device { 0 } else { fusion_bytes / dtype.size() };
        let fusion = Fusion::new(Arc::clone(group), ReduceOp::Sum, len_max);
        counted.charge_buffer(group, fusion.reserve(dtype, lens.iter().copied())?)?;
        let rounded = (dtype != DType::F32).then(|| (pool(Category::Gradients), allocates_rounded));
        Ok(ReductionFactory { exchange: Summation::AllReduce(fusion), rounded })
    }

    /// Creates reduce-scatters over `group`, after which each rank has its shard of a sum. If rounded sums `stay`, they are stored until
    /// the next step.
    pub(crate) fn reduce_scatter(dtype: DType, group: &Arc<Group>, stay: bool, device: &Device) -> Self {
        let category = if stay { Category::Gradients } else { Category::Communication };
        let pool = || Pool::new(group, device, dtype, category, true);
        let rounded = (dtype != DType::F32).then(|| (pool(), false));
        ReductionFactory { exchange: Summation::ReduceScatter(Arc::clone(group)), rounded }
    }

    pub(crate) fn reduction(&self, len: usize) -> Result<Reduction> {
        let Some((pool, allocates_rounded)) = &self.rounded else {
            return Ok(Reduction::Plain { exchange: self.exchange.clone(), pending: None });
        };
        let mut vector = ReducedVector::new(len, &self.exchange, pool);
        if *allocates_rounded {
            vector.reallocate()?;
        }
        Ok(Reduction::Rounded(vector))
    }
}

impl Reduction {
    /// Starts the reduction of this rank's `sum`. Returns `sum` if a rounded copy is reduced instead.
    pub(crate) fn start(&mut self, sum: ExchangeVector, device: &Device) -> Result<Option<ExchangeVector>> {
        match self {
            Reduction::Plain { exchange, pending } => *pending = Some(exchange.start(sum, device)),
            Reduction::Rounded(rounded) => {
                rounded.reduce_rounded(sum.view(), device)?;
                return Ok(Some(sum));
            }
            Reduction::Hierarchical(hierarchical) => hierarchical.start(sum, 0)?,
            Reduction::Compressed(compressed) => compressed.start(sum)?,
        }
        Ok(None)
    }

    /// Sends the batch of short gradients that is being collected for fusion. Called when all gradients of a step have been passed to
    /// `start`.
    pub(crate) fn flush(&self) {
        if let Reduction::Plain { exchange, .. } | Reduction::Rounded(ReducedVector { exchange, .. }) = self {
            exchange.flush();
        }
    }

    /// Waits for the message in flight. Returns whether the sum over all ranks is complete: a rounded sum is stored in this reduction, any
    /// other sum in `f32_sum`. If the sum is not complete, the next message is in flight.
    pub(crate) fn advance(
        &mut self,
        f32_sum: &mut Option<ExchangeVector>,
        device: &Device,
        waiting: &mut WaitTracker,
    ) -> Result<bool> {
        *f32_sum = match self {
            Reduction::Plain { pending, .. } => {
                let under_way = pending.take().expect("a reduction was started");
                Some(under_way.wait(device, waiting)?)
            }
            Reduction::Rounded(rounded) => {
                rounded.wait(waiting)?;
                return Ok(true);
            }
            Reduction::Hierarchical(hierarchical) => hierarchical.advance(waiting)?,
            Reduction::Compressed(compressed) => compressed.advance(waiting)?,
        };
        Ok(f32_sum.is_some())
    }

    /// Returns the sum: the rounded sum that is stored in this reduction, or else `f32_sum`.
    pub(crate) fn view<'a>(&'a self, f32_sum: &'a Option<ExchangeVector>) -> View<'a> {
        match self {
            Reduction::Rounded(rounded) => rounded.view(),
            _ => f32_sum.as_ref().expect("a gradient is read after its reduction").view(),
        }
    }

    /// Whether the rounding of the last sum depends on neighboring elements. If it does, ranks that hold different parts of a unit may get
    /// different bits for a replicated parameter.
    pub(crate) fn is_block_rounded(&self) -> bool {
        match self {
            Reduction::Plain { .. } | Reduction::Rounded(_) => false,
            Reduction::Hierarchical(_) => true,
            Reduction::Compressed(compressed) => compressed.is_compressed_step,
        }
    }

    pub(crate) fn compressed(&self) -> Option<&CompressedReduction> {
        if let Reduction::Compressed(compressed) = self { Some(compressed) } else { None }
    }

    pub(crate) fn compressed_mut(&mut self) -> Option<&mut CompressedReduction> {
        if let Reduction::Compressed(compressed) = self { Some(compressed) } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trireme_base::{Bf16, F16};
    use trireme_tensor::DeviceOptions;
    use trireme_testkit::run_ranks;

    const LEN: usize = 1000;

    /// Returns an element of a rank's gradient: a number that every rounding changes; at some indices, a number that overflows f16,
    /// infinity or NaN.
    fn value(rank: usize, index: usize) -> f32 {
        match (rank, index) {
            (1, 3) => 70_000.0,
            (1, 4) => f32::INFINITY,
            (0, 5) => f32::NAN,
            (_, 6) => 40_000.0,
            _ => ((rank * 31 + index * 17) % 101) as f32 / 7.0 - 3.0,
        }
    }

    /// Sums over four ranks by the canonical tree, rounded at every node.
    fn oracle(index: usize, round: &impl Fn(f32) -> f32) -> f32 {
        let leaf = |rank| round(value(rank, index));
        round(round(leaf(0) + leaf(1)) + round(leaf(2) + leaf(3)))
    }

    fn check(dtype: DType, round: impl Fn(f32) -> f32) {
        let ranks = run_ranks(4, |group| {
            let group = Arc::new(group);
            let device = Device::cpu(DeviceOptions { num_threads: 2, ..DeviceOptions::default() }).unwrap();
            let counted = CountedMemory::new(&device);
            let reductions = ReductionFactory::all_reduce(dtype, &group, 0, &[], true, &counted).unwrap();
            let mut reduction = reductions.reduction(LEN).unwrap();
            let mut vector = ExchangeVector::new_for_host(&group, &device, DType::F32, LEN).unwrap();
            let mut found = Vec::new();
            // The second round reuses the buffers of the first.
            for _ in 0..2 {
                let values: Vec<f32> = (0..LEN).map(|index| value(group.rank().0, index)).collect();
                device.upload(&values, vector.view_mut());
                let mut f32_sum = reduction.start(vector, &device).unwrap();
                assert_eq!(
                    f32_sum.is_some(),
                    dtype != DType::F32,
                    "the f32 sum of a rounded gradient is returned"
                );
                assert!(reduction.advance(&mut f32_sum, &device, &mut WaitTracker::default()).unwrap());
                let sum = reduction.view(&f32_sum);
                let mut widened = vec![0.0_f32; LEN];
                let mut converted = device.zeros([LEN].into(), DType::F32, Category::Gradients).unwrap();
                device.convert(sum, converted.view_mut());
                device.download(converted.view(), &mut widened).unwrap();
                found = widened;
                vector = f32_sum.expect("a rounded sum leaves it as it was");
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
        check(DType::F32, |x| x);
        check(DType::Bf16, |x| Bf16::from_f32(x).to_f32());
        check(DType::F16, |x| F16::from_f32(x).to_f32());
        let f16 = |x| F16::from_f32(x).to_f32();
        assert!([3, 4, 6].into_iter().all(|index| oracle(index, &f16) == f32::INFINITY));
        assert!(oracle(5, &f16).is_nan());
    }
}
