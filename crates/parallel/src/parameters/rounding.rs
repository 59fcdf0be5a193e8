//! Stochastic rounding of parameters in bf16.

use std::ops::Range;
use std::sync::Arc;
use trireme_tensor::{Device, ParameterTable, View, ViewMut};

/// Consecutive elements of the part of a unit that a rank updates, which are consecutive in the full model as well.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RoundingRun {
    /// The elements within the part.
    elements: Range<usize>,
    /// Position of the first element in the unit's flat buffer in the full model. Its random bits depend on it.
    position: usize,
}

/// The runs of a rank's parameters.
#[derive(Debug)]
pub(super) struct RoundingRuns {
    /// For each parameter, its offset in the flat buffer of its unit in the full model.
    full_offsets: Vec<usize>,
    /// For each unit, the runs of the part that this rank updates.
    of_unit: Vec<Arc<[RoundingRun]>>,
}

impl RoundingRuns {
    /// Finds the runs of `parts`, one for each unit.
    pub(super) fn new(table: &ParameterTable, parts: &[Range<usize>]) -> Self {
        let full_offsets = table.full().parameters().iter().map(|info| info.offset).collect();
        let mut runs = RoundingRuns { full_offsets, of_unit: vec![Arc::default(); parts.len()] };
        parts.iter().enumerate().for_each(|(unit, part)| runs.set_part(table, unit, part));
        runs
    }

    /// Changes the part of a unit that this rank updates.
    pub(super) fn set_part(&mut self, table: &ParameterTable, unit: usize, part: &Range<usize>) {
        let mut runs: Vec<RoundingRun> = Vec::new();
        for index in table.units()[unit].parameters.clone() {
            let info = &table.parameters()[index];
            let Some(held) = info.stored(part) else { continue };
            let first = info.offset + held.start - part.start;
            let (end, position) = (first + held.len(), self.full_offsets[index] + held.start);
            match runs.last_mut() {
                Some(last) if last.position + (first - last.elements.start) == position => {
                    last.elements.end = end;
                }
                _ => runs.push(RoundingRun { elements: first..end, position }),
            }
        }
        self.of_unit[unit] = runs.into();
    }

    /// Returns the runs of a unit. Does not allocate.
    pub(super) fn of_unit(&self, unit: usize) -> Arc<[RoundingRun]> {
        Arc::clone(&self.of_unit[unit])
    }
}

/// Rounds the f32 `values` of a part stochastically to `rounded`, in bf16. One kernel for each run.
pub(crate) fn round_part(
    device: &Device,
    runs: &[RoundingRun],
    values: View<'_>,
    seed: u32,
    mut rounded: ViewMut<'_>,
) {
    for RoundingRun { elements, position } in runs {
        let (start, shape) = (elements.start, [elements.len()].into());
        let rounded = rounded.reborrow().into_part(start, shape);
        device.round_stochastically(values.part(start, shape), seed, *position, rounded);
    }
}
