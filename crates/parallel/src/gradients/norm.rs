//! Sums of squared gradients, from which the gradient norm is computed.

use crate::error::{ParallelError, Result};
use crate::layout::RankGrid;
use crate::memory::{ExchangeVector, WaitTracker, update_on_device};
use std::ops::Range;
use std::sync::Arc;
use trireme_base::{DType, ReduceOp};
use trireme_comm::Group;
use trireme_optim::OptimizerOptions;
use trireme_tensor::{Category, Device, ExactSum, ParameterTable, UnitInfo, View, ViewMut};

/// Exact sums of squared gradients, one for each unit, over the elements that this rank counts. If several ranks hold an element, only the
/// first of them counts it. Because the sums are exact, their total over all ranks does not depend on the layout.
pub(crate) struct SquaredNorms {
    /// For each unit, the runs of its flat buffer that this rank counts.
    counted_runs: Vec<Vec<Range<usize>>>,
    /// For each unit, the windows of an [`ExactSum`]; `None` while they are summed over the ranks.
    sums: Option<ExchangeVector>,
    device: Device,
}

impl SquaredNorms {
    pub(crate) fn new(
        table: &ParameterTable,
        ranks: &RankGrid,
        device: &Device,
        optimizer: &OptimizerOptions,
    ) -> Result<Self> {
        let (group, is_first) = ranks.grad_norm_group();
        let counted = |unit: &UnitInfo| {
            // In a unit with experts, parameters that belong to no expert are equal on all ranks of the expert axis.
            let has_rest = if unit.has_experts() { table.expert_rank().rank == 0 } else { is_first };
            let mut runs: Vec<Range<usize>> = Vec::new();
            for info in &table.parameters()[unit.parameters.clone()] {
                let is_here = if info.expert.is_some() { table.stores(info) } else { has_rest };
                // Counts that balance expert loads are not gradients, and frozen parameters are not updated.
                let is_updated = info.class.has_gradient() && !optimizer.is_frozen(&info.name);
                if !is_here || !info.is_first_replica() || !is_updated {
                    continue;
                }
                let range = info.range();
                match runs.last_mut() {
                    Some(run) if run.end == range.start => run.end = range.end,
                    _ => runs.push(range),
                }
            }
            runs
        };
        let len = table.units().len() * ExactSum::LEN;
        let sums = Some(ExchangeVector::new_for_host(group, device, DType::F64, len)?);
        Ok(SquaredNorms {
            counted_runs: table.units().iter().map(counted).collect(),
            sums,
            device: device.clone(),
        })
    }

    /// Computes the sum of squares of a unit's gradient. `gradient` has the elements `part` of the unit, in memory of the device `on`.
    pub(crate) fn compute(
        &mut self,
        unit: usize,
        gradient: View<'_>,
        part: Range<usize>,
        on: &Device,
    ) -> Result<()> {
        let (counted, mut sum) = (&self.counted_runs[unit], sum_of(&mut self.sums, unit));
        self.device.zero(sum.reborrow());
        update_on_device(sum, &self.device, on, Category::Communication, |mut sum| {
            for run in counted {
                let (start, end) = (run.start.max(part.start), run.end.min(part.end));
                if start < end {
                    let run = gradient.part(start - part.start, [end - start].into());
                    on.add_squares(run, sum.reborrow());
                }
            }
            Ok::<_, ParallelError>(())
        })
    }

    /// Sets this rank's sum for a unit to zero. The unit is on another pipeline rank.
    pub(crate) fn skip(&mut self, unit: usize) {
        self.device.zero(sum_of(&mut self.sums, unit));
    }

    /// Returns the sum of all squares over the ranks of `groups`, by one all-reduce over each group in turn.
    pub(crate) fn sum(&mut self, groups: &[&Arc<Group>], waiting: &mut WaitTracker) -> Result<f64> {
        let sums = self.sums.take().expect("squares are summed once a step");
        let len = sums.len();
        let (mut buffer, part) = sums.begin_exchange(&self.device, 0..len, 0..0);
        for group in groups {
            buffer = waiting.wait(group.all_reduce(buffer, ReduceOp::Sum))?;
        }
        let mut sums = ExchangeVector::end_exchange(buffer.into_memory()?, part, &self.device);
        let mut sum = ExactSum::default();
        for windows in sums.host_elements::<f64>().chunks_exact(ExactSum::LEN) {
            sum.add(windows);
            sum.carry();
        }
        self.sums = Some(sums);
        Ok(sum.value())
    }
}

fn sum_of(sums: &mut Option<ExchangeVector>, unit: usize) -> ViewMut<'_> {
    let sums = sums.as_mut().expect("squares are summed once a step");
    sums.part_mut(unit * ExactSum::LEN..(unit + 1) * ExactSum::LEN)
}
