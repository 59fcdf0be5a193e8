//! Gradients that ranks of the tensor axis add up: those of parameters that several of them hold, of which each makes only a term.

use crate::error::ParallelError;
use crate::pool::Pool;
use crate::ranks::RankGrid;
use crate::waiting::Waiting;
use std::collections::BTreeMap;
use std::ops::Range;
use trireme_base::ReduceOp;
use trireme_model::Rehearsal;
use trireme_tensor::{Category, Device, ParameterTable, ViewMut};

/// The sums of such gradients. Cost: one all-reduce a unit before its gradient is reduced over the batch, of as many f32 as these parameters
/// have elements.
pub(crate) struct GradTerms {
    /// For each unit, what of its flat buffer is summed.
    units: Vec<Vec<Run>>,
}

/// Neighbouring parameters that the same ranks hold.
struct Run {
    range: Range<usize>,
    pool: Pool<f32>,
}

impl GradTerms {
    /// Makes the groups that these sums take; collective over the tensor axis.
    pub(crate) fn new(
        table: &ParameterTable,
        rehearsal: &Rehearsal,
        ranks: &mut RankGrid,
        device: &Device,
    ) -> Result<Self, ParallelError> {
        let mut terms: Vec<usize> = rehearsal.units.iter().flat_map(|unit| unit.grad_terms.clone()).collect();
        terms.sort_unstable();
        terms.dedup();
        let mut pools: BTreeMap<usize, Pool<f32>> = BTreeMap::new();
        let mut units: Vec<Vec<Run>> = table.units().iter().map(|_| Vec::new()).collect();
        let mut last = None;
        for index in terms {
            let info = &table.parameters()[index];
            let num_holders = info.num_holders();
            let pool = match pools.get(&num_holders) {
                Some(pool) => pool.clone(),
                None => {
                    let group = ranks.holders(num_holders)?;
                    let pool = Pool::new(&group, device, Category::Communication, true);
                    pools.entry(num_holders).or_insert(pool).clone()
                }
            };
            let (runs, range) = (&mut units[info.unit], info.range());
            match runs.last_mut() {
                Some(run) if last == Some(num_holders) && run.range.end == range.start => {
                    run.range.end = range.end;
                }
                _ => runs.push(Run { range, pool }),
            }
            last = Some(num_holders);
        }
        Ok(GradTerms { units })
    }

    /// Whether there is something to add up of a unit's gradient.
    pub(crate) fn has(&self, unit: usize) -> bool {
        !self.units[unit].is_empty()
    }

    /// Adds up what ranks have of a unit's gradient.
    pub(crate) fn sum(
        &self,
        device: &Device,
        unit: usize,
        mut gradient: ViewMut<'_>,
        waiting: &mut Waiting,
    ) -> Result<(), ParallelError> {
        for Run { range, pool } in &self.units[unit] {
            let mut terms = gradient.reborrow().into_part(range.start, [range.len()].into());
            let buffer = pool.send(device, (terms.reborrow().as_view(), 0), range.len())?;
            let buffer = waiting.wait(pool.group().all_reduce(buffer, ReduceOp::Sum))?;
            pool.receive(device, (buffer, 0), terms);
        }
        Ok(())
    }
}
