//! Access to optimizer states by name and parameter. Values are f32 whatever the dtype of the state, so a run may resume with another
//! dtype.

use crate::factored::FACTORED_STATES;
use crate::members::{UpdatedParameter, UpdatedParameters};
use crate::muon::MUON_STATES;
use crate::optimizer::{Optimizer, UnitUpdate};
use crate::rules::StateSpec;
use std::ops::Range;
use trireme_tensor::{Device, DeviceError, OptimizerState, ParameterInfo, ParameterTable, Shape, Tensor};

/// Name, shape and location of one state of one parameter.
#[derive(Debug, Clone)]
pub struct StateInfo<'a> {
    /// Name of the state, such as `exp_avg`.
    pub name: &'static str,
    /// The parameter.
    pub parameter: &'a ParameterInfo,
    /// Shape of the full state: the shape of the full parameter, or one dim of it for Adafactor's rows and columns.
    pub shape: Shape,
    /// Whether the state has one element per parameter element and the same layout. Otherwise each rank has the full state.
    pub has_parameter_layout: bool,
    /// This rank's elements of the state: a range within the rank's tensor-parallel part of the parameter, or of the full state if
    /// `has_parameter_layout` is false.
    pub held: Range<usize>,
}

/// One state of one parameter, on the device or offloaded.
pub struct State<'a> {
    /// Name, shape and location of the state.
    pub info: StateInfo<'a>,
    source: Source<'a>,
}

enum Source<'a> {
    Moments(&'a Tensor),
    Elementwise(&'a OptimizerState, &'a UpdatedParameters, &'a UpdatedParameter),
    /// On the ranks that have the expert.
    OnOtherRanks,
}

impl State<'_> {
    /// Copies this rank's values of the state to host memory.
    ///
    /// # Errors
    /// If the device has failed.
    ///
    /// # Panics
    /// If the unit's state is offloaded.
    pub fn values(&self, device: &Device) -> Result<Vec<f32>, DeviceError> {
        match self.source {
            Source::Moments(moments) => device.read(moments.view()),
            Source::OnOtherRanks => Ok(Vec::new()),
            Source::Elementwise(state, members, member) => {
                let mut values = vec![0.0; member.held.len()];
                state.read(&members.pieces, member.pieces.clone(), device, &mut values)?;
                Ok(values)
            }
        }
    }
}

impl Optimizer {
    /// Returns all states of all parameters of a unit. Adafactor's row and column states are the same on all ranks.
    pub fn states(&self, unit: usize) -> Vec<State<'_>> {
        let (table, mut found) = (&self.table, Vec::new());
        for unit_update in &self.units[unit] {
            let (members, specs, states) = match unit_update {
                UnitUpdate::Elementwise(share) => (&share.members, share.rule.states(), &share.states),
                UnitUpdate::Muon(share) => (&share.members, MUON_STATES, &share.states),
                UnitUpdate::Factored(share) => {
                    for (name, moments) in FACTORED_STATES.into_iter().zip(&share.moments) {
                        let info = factored_info(table, name, share.member().parameter, moments.shape());
                        found.push(State { info, source: Source::Moments(moments) });
                    }
                    continue;
                }
                UnitUpdate::OnOtherRanks(parameter) => {
                    let whole = table.parameters()[*parameter].full_shape;
                    for (name, len) in FACTORED_STATES.into_iter().zip([whole.rows(), whole.cols()]) {
                        let info = factored_info(table, name, *parameter, [len].into());
                        let info = StateInfo { held: 0..0, ..info };
                        found.push(State { info, source: Source::OnOtherRanks });
                    }
                    continue;
                }
            };
            for (StateSpec { name, .. }, state) in specs.iter().zip(states) {
                for member in &members.list {
                    let source = Source::Elementwise(state, members, member);
                    found.push(State { info: elementwise_info(table, name, member), source });
                }
            }
        }
        found
    }

    /// Fills the states of a unit that [`Optimizer::states`] lists with the values that `read` writes. Skips states of which this rank has
    /// no elements.
    ///
    /// # Errors
    /// The error of `read`. States that were filled before it keep their new values.
    pub fn load_states<E>(
        &mut self,
        unit: usize,
        device: &Device,
        mut read: impl FnMut(&StateInfo<'_>, &mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let table = &self.table;
        let mut buffer = Vec::new();
        for share in &mut self.units[unit] {
            let (members, specs, states) = match share {
                UnitUpdate::Elementwise(share) => (&share.members, share.rule.states(), &mut share.states),
                UnitUpdate::Muon(share) => (&share.members, MUON_STATES, &mut share.states),
                UnitUpdate::Factored(share) => {
                    let parameter = share.member().parameter;
                    for (name, moments) in FACTORED_STATES.into_iter().zip(&mut share.moments) {
                        let info = factored_info(table, name, parameter, moments.shape());
                        device.fill(moments.view_mut(), |values| read(&info, values))?;
                    }
                    continue;
                }
                UnitUpdate::OnOtherRanks(_) => continue,
            };
            for (StateSpec { name, .. }, state) in specs.iter().zip(states) {
                for member in members.list.iter().filter(|member| !member.held.is_empty()) {
                    buffer.clear();
                    buffer.resize(member.held.len(), 0.0);
                    read(&elementwise_info(table, name, member), &mut buffer)?;
                    state.write(&members.pieces, member.pieces.clone(), device, &buffer);
                }
            }
        }
        Ok(())
    }

    /// Calls `visit` with all tensors that hold state of a unit, so that they can be offloaded temporarily.
    pub fn for_each_state_tensor(&mut self, unit: usize, mut visit: impl FnMut(&mut Tensor)) {
        for share in &mut self.units[unit] {
            let states = match share {
                UnitUpdate::Elementwise(share) => &mut share.states,
                UnitUpdate::Muon(share) => &mut share.states,
                UnitUpdate::Factored(share) => {
                    share.moments.iter_mut().for_each(&mut visit);
                    continue;
                }
                UnitUpdate::OnOtherRanks(_) => continue,
            };
            states.iter_mut().for_each(|state| state.for_each_tensor(&mut visit));
        }
    }
}

fn elementwise_info<'a>(
    table: &'a ParameterTable,
    name: &'static str,
    member: &UpdatedParameter,
) -> StateInfo<'a> {
    let parameter = &table.parameters()[member.parameter];
    let (shape, held) = (parameter.full_shape, member.held.clone());
    StateInfo { name, parameter, shape, has_parameter_layout: true, held }
}

fn factored_info<'a>(
    table: &'a ParameterTable,
    name: &'static str,
    parameter: usize,
    shape: Shape,
) -> StateInfo<'a> {
    let (parameter, held) = (&table.parameters()[parameter], 0..shape.num_elements());
    StateInfo { name, parameter, shape, has_parameter_layout: false, held }
}
