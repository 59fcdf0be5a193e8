//! Sums of the squares of gradients: what their norm comes from.

use crate::error::ParallelError;
use crate::exchanged::Exchanged;
use crate::ranks::RankGrid;
use crate::space::change_on;
use crate::waiting::Waiting;
use std::ops::Range;
use std::sync::Arc;
use trireme_base::ReduceOp;
use trireme_comm::Group;
use trireme_tensor::{Category, Device, ParameterClass, ParameterTable, UnitInfo, View};

/// Sums of the squares of the gradient of each unit: one for each run of parameters that equally many ranks of the tensor axis hold, of which
/// one counts them, and one for each run of an expert's. So they are the same wherever experts lie.
pub(crate) struct Squares {
    /// For each unit.
    units: Vec<Unit>,
    sums: Option<Exchanged<f64>>,
    device: Device,
}

struct Unit {
    /// Elements of a leaf of the unit with all experts.
    leaf_len: usize,
    /// The sums of its runs.
    places: Range<usize>,
    runs: Vec<Run>,
}

struct Run {
    /// Of the unit's flat buffer; empty if the expert lies elsewhere.
    range: Range<usize>,
    /// Where leaves begin that it is summed by: a run of an expert's begins one.
    origin: usize,
    /// Whether this rank counts it.
    is_counted: bool,
}

/// What distinguishes runs: how many ranks of the tensor axis hold them, whether they have gradients, and the expert.
type Kind = (usize, bool, Option<usize>);

impl Squares {
    pub(crate) fn new(
        table: &ParameterTable,
        ranks: &RankGrid,
        device: &Device,
    ) -> Result<Self, ParallelError> {
        let mut units: Vec<Unit> = Vec::new();
        let (group, is_first) = ranks.having_all();
        for unit in table.units() {
            let mut runs: Vec<(Kind, Run)> = Vec::new();
            let infos = &table.parameters()[unit.parameters.clone()];
            // Ranks with other experts have the same of the rest of a unit with experts.
            let has_rest = if unit.num_experts > 0 { table.expert_place().rank == 0 } else { is_first };
            for info in infos {
                // What balances loads is no gradient.
                let is_gradient = info.class != ParameterClass::Balance;
                let (kind, range) = ((info.num_holders(), is_gradient, info.expert), info.range());
                match runs.last_mut() {
                    Some((last, run)) if *last == kind => run.range.end = range.end,
                    _ => {
                        let is_here = if info.expert.is_some() { table.has(info) } else { has_rest };
                        let is_counted = is_gradient && is_here && info.is_counted();
                        let origin = if info.expert.is_some() { range.start } else { 0 };
                        runs.push((kind, Run { range, origin, is_counted }));
                    }
                }
            }
            let of_all = infos.iter().map(|info| table.counterpart(info).shape.num_elements());
            let whole = UnitInfo { num_elements: of_all.sum(), ..unit.clone() };
            let first = units.last().map_or(0, |unit| unit.places.end);
            let places = first..first + runs.len();
            let runs = runs.into_iter().map(|(_, run)| run).collect();
            units.push(Unit { leaf_len: whole.leaf_len(), places, runs });
        }
        let len = units.last().map_or(0, |unit| unit.places.end);
        let sums = Some(Exchanged::new_for_host(group, device, len)?);
        Ok(Squares { units, sums, device: device.clone() })
    }

    /// Takes the squares of a unit's `gradient`, of whose elements `part` are here, on the device `on`.
    pub(crate) fn take(
        &mut self,
        unit: usize,
        (gradient, part): (View<'_>, Range<usize>),
        on: &Device,
    ) -> Result<(), ParallelError> {
        let sums = self.sums.as_mut().expect("squares are summed once a step");
        let Unit { leaf_len, places, runs } = &self.units[unit];
        for (place, Run { range, origin, is_counted }) in places.clone().zip(runs) {
            let (start, end) = (range.start.max(part.start), range.end.min(part.end));
            let sum = sums.part_mut(place..place + 1);
            if start >= end || !is_counted {
                self.device.zero(sum);
                continue;
            }
            let run = gradient.part(start - part.start, [end - start].into());
            change_on(sum, &self.device, on, Category::Communication, |sum| {
                on.sum_of_squares(run, start - origin, *leaf_len, sum);
                Ok::<_, ParallelError>(())
            })?;
        }
        Ok(())
    }

    /// Sets the squares of a unit that lies elsewhere to zeros, which change no sum.
    pub(crate) fn skip(&mut self, unit: usize) {
        let places = self.units[unit].places.clone();
        let sums = self.sums.as_mut().expect("squares are summed once a step");
        self.device.zero(sums.part_mut(places));
    }

    /// The sum of all squares over the ranks of these groups, one group after the other.
    pub(crate) fn sum(
        &mut self,
        groups: &[&Arc<Group>],
        waiting: &mut Waiting,
    ) -> Result<f64, ParallelError> {
        let sums = self.sums.take().expect("squares are summed once a step");
        let len = sums.len();
        let (mut buffer, part) = sums.leave(&self.device, 0..len, 0..0);
        for group in groups {
            buffer = waiting.wait(group.all_reduce(buffer, ReduceOp::Sum))?;
        }
        let mut sums = Exchanged::arrive(buffer.into_memory(), part, &self.device);
        let sum = sums.host_elements().iter().sum();
        self.sums = Some(sums);
        Ok(sum)
    }
}
