//! Muon for the matrices of a unit.
//!
//! Muon orthogonalizes full matrices, but a rank may have only a part of one. So the momentum of the unit is gathered once a step, which
//! sends `4 (N - 1) / N` bytes per element on `N` ranks, and each rank orthogonalizes every matrix of which it has elements. The
//! alternative, sending each matrix to one rank and the result back, would take two exchanges and twice the bytes. Its only advantage would
//! be that a matrix in two shards is orthogonalized once instead of twice.
//!
//! If a matrix is split on the tensor axis, each rank gathers all of it, orthogonalizes it, and keeps its part.

use crate::members::{UpdatedParameter, UpdatedParameters};
use crate::rules::StateSpec;
use crate::settings::{MuonScale, OptimizerSettings};
use crate::shards::ShardOps;
use crate::step::UnitStep;
use std::ops::Range;
use trireme_base::DType;
use trireme_tensor::updates::{MuonStep, Update};
use trireme_tensor::{Category, OptimizerState, Precision, Shape, View, ViewMut};

/// Names of Muon's settings, including AdamW's for the other parameters.
pub(crate) const SETTINGS: &[&str] =
    &["beta1", "beta2", "eps", "muon_momentum", "muon_iterations", "muon_scale", "muon_adamw_lr_scale"];

pub(crate) const MUON_STATES: &[StateSpec] = &[StateSpec::new("momentum_buffer")];

/// Muon's update of the hidden matrices of a unit, with its state.
#[derive(Debug)]
pub(crate) struct MuonUpdate {
    pub(crate) settings: OptimizerSettings,
    /// Precision of the matrix products of the orthogonalization.
    pub(crate) precision: Precision,
    pub(crate) members: UpdatedParameters,
    pub(crate) states: Vec<OptimizerState>,
    pub(crate) num_elements: usize,
    pub(crate) part: Range<usize>,
}

impl MuonUpdate {
    pub(crate) fn apply<S: ShardOps>(
        &mut self,
        step: &UnitStep<'_>,
        parameters: ViewMut<'_>,
        grads: View<'_>,
        shards: &mut S,
    ) -> Result<(), S::Error> {
        let OptimizerSettings { muon_momentum, muon_iterations, muon_scale, .. } = self.settings;
        let (precision, num_iterations) = (self.precision, muon_iterations as usize);
        let device = step.device;
        let mut whole = device.empty([self.num_elements].into(), DType::F32, Category::Optimizer)?;
        let (part, part_shape) = (self.part.clone(), [self.part.len()].into());
        let grad_scale = step.grad_scale();
        let momentum_of = |member: &UpdatedParameter| {
            let momentum = member.settings.beta1.unwrap_or(muon_momentum as f32);
            Update::MuonMomentum(MuonStep { momentum, nesterov: true, grad_scale })
        };
        let out = whole.view_mut().into_part(part.start, part_shape);
        self.members.update(device, out, grads, &mut self.states, step.rounding_seed, momentum_of);
        shards.gather(whole.view_mut(), part.clone())?;
        for member in self.members.list.iter().filter(|member| !member.held.is_empty()) {
            let info = &step.table.parameters()[member.parameter];
            let mut matrix = whole.view_mut().into_part(info.offset, info.shape);
            if info.shape == info.full_shape {
                device.orthogonalize(matrix, num_iterations, precision)?;
                continue;
            }
            let mut joined = device.empty(info.full_shape, DType::F32, Category::Optimizer)?;
            shards.gather_matrix(info, matrix.reborrow().as_view(), joined.view_mut())?;
            device.orthogonalize(joined.view_mut(), num_iterations, precision)?;
            for (first, run) in info.runs(0..info.shape.num_elements()) {
                let shape = [run.len()].into();
                device.copy(joined.view().part(first, shape), matrix.reborrow().into_part(run.start, shape));
            }
        }
        let descend = |member: &UpdatedParameter| {
            let own = member.settings;
            let factor = update_scale(muon_scale, step.table.parameters()[member.parameter].full_shape);
            let lr = (f64::from(own.lr_scale) * step.settings.lr * factor) as f32;
            Update::Descend { lr, parameter_factor: 1.0 - step.lr(own) * own.weight_decay }
        };
        let directions = whole.view().part(part.start, part_shape);
        self.members.update(device, parameters, directions, &mut [], step.rounding_seed, descend);
        Ok(())
    }
}

/// Returns the factor by which an orthogonal update of a matrix of this shape is multiplied.
fn update_scale(scale: MuonScale, shape: Shape) -> f64 {
    let (rows, cols) = (shape.rows() as f64, shape.cols() as f64);
    match scale {
        MuonScale::Original => (rows / cols).max(1.0).sqrt(),
        MuonScale::MatchRmsAdamW => 0.2 * rows.max(cols).sqrt(),
    }
}
