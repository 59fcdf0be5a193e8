//! The optimizer of one rank. The rank's part of each unit is divided among the rules that apply to its parameters.

use crate::elementwise::ElementwiseUpdate;
use crate::factored::AdafactorUpdate;
use crate::groups::ParameterSettings;
use crate::members::{PieceSplit, UpdatedParameters};
use crate::muon::{MUON_STATES, MuonUpdate};
use crate::options::OptimizerOptions;
use crate::rules::{OptimizerName, Rule, Sign, StateSpec};
use crate::shards::ShardOps;
use crate::step::{StepSettings, UnitStep};
use std::ops::Range;
use std::sync::Arc;
use trireme_base::DType;
use trireme_tensor::{
    Category, Device, DeviceError, FactoredMatrix, OptimizerState, ParameterClass, ParameterTable,
    StateDType, Tensor, View, ViewMut,
};

#[derive(Debug)]
pub(crate) enum UnitUpdate {
    Elementwise(ElementwiseUpdate),
    Factored(Box<AdafactorUpdate>),
    Muon(MuonUpdate),
    /// A matrix of an expert that is on other ranks, by its parameter index. Its state is factored by rows and columns.
    OnOtherRanks(usize),
}

impl UnitUpdate {
    /// Returns the number of sums over full parameters in exchange `phase`.
    fn num_sums(&self, phase: usize) -> usize {
        match self {
            UnitUpdate::Elementwise(share) => share.num_sums(phase),
            UnitUpdate::Factored(share) => share.num_sums(phase),
            UnitUpdate::Muon(_) | UnitUpdate::OnOtherRanks(_) => 0,
        }
    }

    /// Computes this rank's contribution to the sums of an exchange: of the first exchange if `first_sums` is `None`, otherwise of the
    /// second one. `first_sums` holds the results of the first exchange. Returns an error if scratch memory cannot be allocated.
    fn compute_sums(
        &mut self,
        step: &UnitStep<'_>,
        parameters: ViewMut<'_>,
        grads: View<'_>,
        first_sums: Option<View<'_>>,
        sums: ViewMut<'_>,
    ) -> Result<(), DeviceError> {
        match self {
            UnitUpdate::Elementwise(share) => {
                share.compute_sums(usize::from(first_sums.is_some()), step, parameters, grads, sums)
            }
            UnitUpdate::Factored(share) => share.compute_sums(step, parameters, grads, first_sums, sums),
            UnitUpdate::Muon(_) | UnitUpdate::OnOtherRanks(_) => Ok(()),
        }
    }

    fn apply<S: ShardOps>(
        &mut self,
        step: &UnitStep<'_>,
        parameters: ViewMut<'_>,
        grads: View<'_>,
        sums: [View<'_>; 2],
        shards: &mut S,
    ) -> Result<(), S::Error> {
        match self {
            UnitUpdate::Elementwise(share) => share.apply(step, parameters, grads, sums)?,
            UnitUpdate::Factored(share) => share.apply(step, parameters, grads, sums)?,
            UnitUpdate::Muon(share) => share.apply(step, parameters, grads, shards)?,
            UnitUpdate::OnOtherRanks(_) => {}
        }
        Ok(())
    }
}

/// Offsets of the sums of each [`UnitUpdate`] in the vectors of the two exchanges.
#[derive(Default)]
struct SumOffsets {
    ends: [usize; 2],
}

impl SumOffsets {
    fn next(&mut self, share: &UnitUpdate) -> [Range<usize>; 2] {
        [0, 1].map(|phase| {
            let start = self.ends[phase];
            self.ends[phase] += share.num_sums(phase);
            start..self.ends[phase]
        })
    }
}

/// An optimizer with its state for every unit, or for a part of every unit.
#[derive(Debug)]
pub struct Optimizer {
    pub(crate) options: OptimizerOptions,
    pub(crate) table: Arc<ParameterTable>,
    pub(crate) parts: Vec<Range<usize>>,
    pub(crate) units: Vec<Vec<UnitUpdate>>,
    /// For each parameter, the number of updates that the run had done when the state of the parameter was created.
    pub(crate) starts: Vec<u64>,
}

impl Optimizer {
    /// Creates an optimizer for `parts` of the units' flat buffers, with all states zero.
    ///
    /// # Errors
    /// If the memory for its state cannot be allocated.
    ///
    /// # Panics
    /// If there is not one part for each unit.
    pub fn new(
        options: &OptimizerOptions,
        table: &Arc<ParameterTable>,
        parts: &[Range<usize>],
        device: &Device,
    ) -> Result<Self, DeviceError> {
        Self::build(options, table, parts, device, true)
    }

    /// Like [`new`](Optimizer::new), but returns the optimizer without memory for its state. At most one unit's state is allocated at a
    /// time, and released again. The caller allocates and zeroes it through [`for_each_state_tensor`](Optimizer::for_each_state_tensor).
    ///
    /// # Errors
    /// If the memory for the state of one unit cannot be allocated.
    ///
    /// # Panics
    /// If there is not one part for each unit.
    pub fn without_memory(
        options: &OptimizerOptions,
        table: &Arc<ParameterTable>,
        parts: &[Range<usize>],
        device: &Device,
    ) -> Result<Self, DeviceError> {
        Self::build(options, table, parts, device, false)
    }

    fn build(
        options: &OptimizerOptions,
        table: &Arc<ParameterTable>,
        parts: &[Range<usize>],
        device: &Device,
        has_memory: bool,
    ) -> Result<Self, DeviceError> {
        assert_eq!(parts.len(), table.units().len(), "one part for each unit");
        let mut optimizer = Optimizer {
            options: options.clone(),
            table: Arc::clone(table),
            parts: parts.to_vec(),
            units: Vec::new(),
            starts: vec![0; table.parameters().len()],
        };
        for index in 0..parts.len() {
            let unit = optimizer.unit_updates(index, device)?;
            optimizer.units.push(unit);
            if !has_memory {
                optimizer.for_each_state_tensor(index, Tensor::release);
            }
        }
        Ok(optimizer)
    }

    /// Changes this rank's part of a unit to `part`, and resets the unit's state to zeros. The previous state is freed first.
    ///
    /// # Errors
    /// If the memory for the new state cannot be allocated. The unit then has no state.
    pub fn set_part(&mut self, unit: usize, part: Range<usize>, device: &Device) -> Result<(), DeviceError> {
        self.units[unit].clear();
        self.parts[unit] = part;
        self.units[unit] = self.unit_updates(unit, device)?;
        Ok(())
    }

    fn unit_updates(&self, unit: usize, device: &Device) -> Result<Vec<UnitUpdate>, DeviceError> {
        let (table, unit, part) = (&self.table, &self.table.units()[unit], &self.parts[unit]);
        let OptimizerOptions { name, settings, precision, balance_rate, .. } = self.options;
        let state_dtype = match self.options.state_dtype {
            StateDType::Int8 if unit.num_elements < OptimizerOptions::INT8_ELEMENTS_MIN => StateDType::F32,
            dtype => dtype,
        };
        let members = |split: PieceSplit, chosen: Vec<(usize, ParameterSettings)>| {
            let cut = if state_dtype == StateDType::Int8 { PieceSplit::Leaves } else { split };
            UpdatedParameters::new(table, unit, part, cut, chosen)
        };
        let states = |members: &UpdatedParameters, states: &[StateSpec]| -> Result<Vec<_>, DeviceError> {
            let zeros = |state: &StateSpec| {
                OptimizerState::zeros(&members.pieces, state_dtype, state.is_second_moment, device)
            };
            states.iter().map(zeros).collect()
        };
        let (mut rest, mut matrices, mut balancing) = (Vec::new(), Vec::new(), Vec::new());
        for parameter in unit.parameters.clone() {
            let info = &table.parameters()[parameter];
            // Frozen parameters have no member, so that a gradient that is not finite cannot change them.
            if self.options.is_frozen(&info.name) {
                continue;
            }
            let chosen = (parameter, self.options.settings_of(info));
            let is_matrix = match name {
                OptimizerName::Muon => info.class == ParameterClass::Matrix && info.shape.dims().len() == 2,
                OptimizerName::Adafactor => info.shape.dims().len() == 2,
                _ => false,
            };
            let list = match info.class {
                ParameterClass::Balance => &mut balancing,
                _ if is_matrix => &mut matrices,
                _ => &mut rest,
            };
            list.push(chosen);
        }
        let mut unit_updates = Vec::new();
        let rules: [(Box<dyn Rule>, _); 2] =
            [(name.rule(settings), rest), (Box::new(Sign(balance_rate)), balancing)];
        for (rule, chosen) in rules.into_iter().filter(|(_, chosen)| !chosen.is_empty()) {
            let split = if rule.num_sums() == [0, 0] { PieceSplit::Anywhere } else { PieceSplit::Leaves };
            let members = members(split, chosen);
            let states = states(&members, rule.states())?;
            unit_updates.push(UnitUpdate::Elementwise(ElementwiseUpdate { rule, members, states }));
        }
        match name {
            OptimizerName::Muon if !matrices.is_empty() => {
                let members = members(PieceSplit::Anywhere, matrices);
                let states = states(&members, MUON_STATES)?;
                let (num_elements, part) = (unit.num_elements, part.clone());
                let muon = MuonUpdate { settings, precision, members, states, num_elements, part };
                unit_updates.push(UnitUpdate::Muon(muon));
            }
            OptimizerName::Adafactor => {
                for chosen in matrices {
                    let info = &table.parameters()[chosen.0];
                    if !table.stores(info) {
                        unit_updates.push(UnitUpdate::OnOtherRanks(chosen.0));
                        continue;
                    }
                    let matrix = FactoredMatrix::new(info, unit, part.clone());
                    let members = members(PieceSplit::Leaves, Vec::from([chosen]));
                    let factored = AdafactorUpdate::new(settings, members, info, matrix, device)?;
                    unit_updates.push(UnitUpdate::Factored(Box::new(factored)));
                }
            }
            _ => {}
        }
        Ok(unit_updates)
    }

    /// Returns the number of updates that the run had done when the state of a parameter was created as zeros. This is 0 unless
    /// [set](Optimizer::set_state_start).
    ///
    /// # Panics
    /// If the model has no parameter with this index.
    pub fn state_start(&self, parameter: usize) -> u64 {
        self.starts[parameter]
    }

    /// Declares that the state of a parameter was created after `start` updates of the run. Bias correction, and schedules that belong to
    /// the state (such as the warm-up of 1-bit Adam), count from there. The number of every later update must be above `start`.
    ///
    /// # Panics
    /// If the model has no parameter with this index.
    pub fn set_state_start(&mut self, parameter: usize, start: u64) {
        self.starts[parameter] = start;
    }

    /// Returns the number of units of the model.
    pub fn num_units(&self) -> usize {
        self.units.len()
    }

    /// Updates this optimizer's part of a unit from its gradient.
    ///
    /// Adafactor calls `shards` at most twice, with all sums of the unit at once. LAMB, LARS and Muon call it at most once, and the other
    /// optimizers never (docs/optimizers.md lists the bytes). On the tensor axis, Muon also calls it once for each matrix that is split.
    /// All ranks that have a part of the unit must call this together, even if their part is empty.
    ///
    /// # Errors
    /// Errors of `shards`, and failed allocations of scratch memory. The unit may then be partially updated.
    ///
    /// # Panics
    /// If the lengths of parameters or gradient differ from the length of the part.
    pub fn step_unit<S: ShardOps>(
        &mut self,
        device: &Device,
        unit: usize,
        mut parameters: ViewMut<'_>,
        grads: View<'_>,
        settings: StepSettings,
        shards: &mut S,
    ) -> Result<(), S::Error> {
        self.check_lengths(unit, parameters.shape().num_elements(), grads.shape().num_elements());
        let rounding_seed = rounding_seed(unit, settings.step);
        let step = UnitStep { device, table: &self.table, settings, starts: &self.starts, rounding_seed };
        let unit_updates = &mut self.units[unit];
        let num_sums =
            [0, 1].map(|phase| unit_updates.iter().map(|share| share.num_sums(phase)).sum::<usize>());
        if num_sums == [0, 0] {
            let none = [View::from_bytes(&[], DType::F64, [0].into()); 2];
            return (unit_updates.iter_mut())
                .try_for_each(|share| share.apply(&step, parameters.reborrow(), grads, none, shards));
        }
        let empty = |len: usize| device.empty([len].into(), DType::F64, Category::Optimizer);
        let mut sums = [empty(num_sums[0])?, empty(num_sums[1])?];
        for phase in (0..2).filter(|&phase| num_sums[phase] > 0) {
            let (known, sums) = sums.split_at_mut(phase);
            let mut places = SumOffsets::default();
            for share in unit_updates.iter_mut() {
                let [first, second] = places.next(share);
                let known = known.first().map(|known| known.view().part(first.start, [first.len()].into()));
                let place = if phase == 0 { first } else { second };
                let sums = sums[0].view_mut().into_part(place.start, [place.len()].into());
                share.compute_sums(&step, parameters.reborrow(), grads, known, sums)?;
            }
            shards.sum(sums[0].view_mut())?;
        }
        let mut places = SumOffsets::default();
        for share in unit_updates.iter_mut() {
            let [first, second] = places.next(share);
            let known = [(&sums[0], first), (&sums[1], second)]
                .map(|(sums, place)| sums.view().part(place.start, [place.len()].into()));
            share.apply(&step, parameters.reborrow(), grads, known, shards)?;
        }
        Ok(())
    }

    pub(crate) fn check_lengths(&self, unit: usize, parameters: usize, grads: usize) {
        let len = self.parts[unit].len();
        assert_eq!((parameters, grads), (len, len), "lengths of parameters and gradient");
    }
}

/// Returns the seed for stochastic rounding of a unit's parameters in one step. Differs from the seeds of the unit's optimizer state, so
/// that rounding errors are independent.
pub fn parameter_rounding_seed(unit: usize, step: u64) -> u32 {
    rounding_seed(unit, step).rotate_left(16) ^ 0x9e37_79b9
}

/// Returns the random bits for stochastic rounding of a unit's state in one step.
pub(crate) fn rounding_seed(unit: usize, step: u64) -> u32 {
    (step as u32).wrapping_mul(0x85eb_ca6b) ^ (unit as u32).wrapping_mul(0xc2b2_ae35)
}
