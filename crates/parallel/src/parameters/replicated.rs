//! Parameters that several ranks of the tensor or expert axis hold. Keeps their gradients and values equal on these ranks.
//!
//! There are two reasons to exchange them:
//! - A rank may compute only a partial sum of a gradient, for example for a norm that it applies only to its rows, or for a router that
//!   sees only its tokens. The partial sums are added before the unit's gradient is reduced. On the tensor axis, shape inference finds
//!   these parameters (`UnitProfile::partial_grads`).
//! - With codecs and the integers of ZeRO++, the rounding of an element depends on adjacent elements of the flat buffer, which differ
//!   between ranks. The first rank that holds the parameter then broadcasts its values to the others.
//!
//! Sums over all parameters, such as the gradient norm (`SquaredNorms`) and sums in optimizers, count such a parameter only on its
//! [first rank](ParameterInfo::is_first_replica).

use crate::error::Result;
use crate::layout::RankGrid;
use crate::memory::{Pool, WaitTracker};
use std::collections::BTreeMap;
use std::ops::Range;
use trireme_base::{DType, Rank, ReduceOp};
use trireme_model::ModelProfile;
use trireme_tensor::{Category, Device, ParameterInfo, ParameterTable, ViewMut};

/// Parameters that are replicated across the tensor or expert axis, with the buffers used to keep the replicas equal.
pub(crate) struct ReplicatedParameters {
    units: Vec<Vec<Run>>,
}

/// Adjacent parameters that the same ranks hold.
struct Run {
    /// The range in the unit's flat buffer.
    range: Range<usize>,
    pool: Pool,
}

impl ReplicatedParameters {
    /// Selects the parameters for which a rank computes only a partial gradient.
    pub(crate) fn with_partial_gradients(
        table: &ParameterTable,
        profile: &ModelProfile,
        ranks: &RankGrid,
        device: &Device,
    ) -> Self {
        let mut terms: Vec<usize> =
            profile.units.iter().flat_map(|unit| unit.partial_grads.clone()).collect();
        terms.sort_unstable();
        terms.dedup();
        let mut found = Self::new(table, &terms, ranks, device, DType::F32);
        // In a unit with experts, parameters that belong to no expert are held by every rank of the expert axis. Each of these ranks has
        // seen different tokens.
        if let Some(group) = ranks.experts() {
            let pool = Pool::new(group, device, DType::F32, Category::Communication, true);
            let is_shared =
                |info: &&ParameterInfo| table.units()[info.unit].has_experts() && info.expert.is_none();
            table.parameters().iter().filter(is_shared).for_each(|info| found.add(info, &pool));
        }
        found
    }

    /// Selects all parameters that several ranks of the tensor axis hold.
    pub(crate) fn all(table: &ParameterTable, ranks: &RankGrid, device: &Device, dtype: DType) -> Self {
        let is_shared = |index: &usize| table.parameters()[*index].num_replicas() > 1;
        let shared: Vec<usize> = (0..table.parameters().len()).filter(is_shared).collect();
        Self::new(table, &shared, ranks, device, dtype)
    }

    pub(crate) fn none(table: &ParameterTable) -> Self {
        ReplicatedParameters { units: table.units().iter().map(|_| Vec::new()).collect() }
    }

    fn new(
        table: &ParameterTable,
        chosen: &[usize],
        ranks: &RankGrid,
        device: &Device,
        dtype: DType,
    ) -> Self {
        let mut pools: BTreeMap<usize, Pool> = BTreeMap::new();
        let mut found = Self::none(table);
        for &index in chosen {
            let info = &table.parameters()[index];
            let num_holders = info.num_replicas();
            let new =
                || Pool::new(ranks.replicated_on(num_holders), device, dtype, Category::Communication, true);
            found.add(info, pools.entry(num_holders).or_insert_with(new));
        }
        found
    }

    /// Adds a parameter that the ranks of `pool` hold. It extends the run before it if that is adjacent and held by the same ranks.
    fn add(&mut self, info: &ParameterInfo, pool: &Pool) {
        let (runs, range) = (&mut self.units[info.unit], info.range());
        match runs.last_mut() {
            Some(run) if run.pool.is_clone_of(pool) && run.range.end == range.start => {
                run.range.end = range.end;
            }
            _ => runs.push(Run { range, pool: pool.clone() }),
        }
    }

    pub(crate) fn has(&self, unit: usize) -> bool {
        !self.units[unit].is_empty()
    }

    /// Sums the selected parameters in `values`, a unit's flat buffer, over the ranks that hold them: one all-reduce for each run.
    pub(crate) fn sum(&self, unit: usize, mut values: ViewMut<'_>, waiting: &mut WaitTracker) -> Result<()> {
        for Run { range, pool } in &self.units[unit] {
            let device = pool.device();
            let mut terms = values.reborrow().into_part(range.start, [range.len()].into());
            let buffer = pool.copy_to_buffer(device, terms.reborrow().as_view(), 0, range.len())?;
            let sum = pool.group().all_reduce(buffer, ReduceOp::Sum);
            let buffer = waiting.wait_on_device(sum, pool.dtype(), range.len(), device)?;
            pool.copy_from_buffer(device, buffer, range.len(), 0, terms);
        }
        Ok(())
    }

    /// Broadcasts the selected parameters from the first rank that holds them. `values` are the elements `part` of a unit's flat buffer.
    /// One broadcast for each run.
    pub(crate) fn broadcast_first(
        &self,
        unit: usize,
        mut values: ViewMut<'_>,
        part: Range<usize>,
        waiting: &mut WaitTracker,
    ) -> Result<()> {
        for Run { range, pool } in &self.units[unit] {
            let (start, end) = (range.start.max(part.start), range.end.min(part.end));
            if start >= end {
                continue;
            }
            let (group, device, len) = (pool.group(), pool.device(), end - start);
            let mut own = values.reborrow().into_part(start - part.start, [len].into());
            let is_first = group.rank() == Rank::ROOT;
            let buffer = if is_first {
                pool.copy_to_buffer(device, own.reborrow().as_view(), 0, len)?
            } else {
                pool.pass_on(device, pool.take_buffer(len)?, len)
            };
            let buffer =
                waiting.wait_on_device(group.broadcast(buffer, Rank::ROOT), pool.dtype(), len, device)?;
            if is_first {
                pool.release_buffer(len, buffer)
            } else {
                pool.copy_from_buffer(device, buffer, len, 0, own)
            }
        }
        Ok(())
    }
}
