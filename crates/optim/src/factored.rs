//! Adafactor for one matrix.

use crate::members::{UpdatedParameter, UpdatedParameters};
use crate::rules::{adafactor_scale, adafactor_step};
use crate::settings::OptimizerSettings;
use crate::step::UnitStep;
use std::sync::Arc;
use trireme_base::{DType, Segment};
use trireme_tensor::updates::{AdafactorVectorStep, Update};
use trireme_tensor::{
    Category, Device, DeviceError, FactoredMatrix, FactoredMoments, FactoredStep, ParameterInfo, Shape,
    Tensor, UpdatePass, View, ViewMut,
};

/// A matrix whose second moment is factored into a row and a column vector. Every rank stores both vectors for the full matrix, whichever
/// part of the matrix it has.
#[derive(Debug)]
pub(crate) struct AdafactorUpdate {
    settings: OptimizerSettings,
    pub(crate) members: UpdatedParameters,
    matrix: FactoredMatrix,
    /// Mean squares of rows, then of columns.
    pub(crate) moments: [Tensor; 2],
    /// The moments of the rows and columns of this rank's part, if the matrix is split on the tensor axis.
    local_moments: Option<[Tensor; 2]>,
    /// This rank's segments of the rows, and of the columns.
    segments: [Vec<Segment>; 2],
    /// Mean of the moments of rows, one f64.
    row_mean: Tensor,
    shape: Shape,
    full_shape: Shape,
    offset: usize,
}

/// Names of the states: per row, then per column.
pub(crate) const FACTORED_STATES: [&str; 2] = ["exp_avg_sq_row", "exp_avg_sq_col"];

impl AdafactorUpdate {
    /// Creates the state of a two-dimensional matrix, the only parameter in `members`.
    pub(crate) fn new(
        settings: OptimizerSettings,
        members: UpdatedParameters,
        info: &ParameterInfo,
        matrix: FactoredMatrix,
        device: &Device,
    ) -> Result<Self, DeviceError> {
        let (shape, whole) = (info.shape, info.full_shape);
        let zeros = |len: usize| device.zeros([len].into(), DType::F32, Category::Optimizer);
        let moments = |shape: Shape| Ok::<_, DeviceError>([zeros(shape.rows())?, zeros(shape.cols())?]);
        let mut local_moments = (shape != whole).then(|| moments(shape)).transpose()?;
        // The gradients of padding are zero, so its updates are zero with any positive moment.
        for moments in local_moments.iter_mut().flatten() {
            device.upload(&vec![1.0_f32; moments.shape().num_elements()], moments.view_mut());
        }
        Ok(AdafactorUpdate {
            settings,
            members,
            matrix,
            moments: moments(whole)?,
            local_moments,
            segments: [info.segments(0), info.segments(1)],
            row_mean: device.zeros([1].into(), DType::F64, Category::Optimizer)?,
            shape,
            full_shape: whole,
            offset: info.offset,
        })
    }

    pub(crate) fn member(&self) -> &UpdatedParameter {
        &self.members.list[0]
    }

    /// Returns the number of sums in exchange `phase`.
    pub(crate) fn num_sums(&self, phase: usize) -> usize {
        if phase == 0 { 1 + self.full_shape.rows() + self.full_shape.cols() } else { 1 }
    }

    /// Computes this rank's contribution to the sums of an exchange. If `first_sums` is `None`, this is the first exchange: sums the
    /// squares of the parameter, and the squares of the gradient by row and by column. Otherwise `first_sums` holds the results of the
    /// first exchange: updates the moments from them, and sums the squares of the update for the second exchange.
    pub(crate) fn compute_sums(
        &mut self,
        step: &UnitStep<'_>,
        parameters: ViewMut<'_>,
        grads: View<'_>,
        first_sums: Option<View<'_>>,
        mut sums: ViewMut<'_>,
    ) -> Result<(), DeviceError> {
        let (device, grad_scale, rounding_seed) = (step.device, step.grad_scale(), step.rounding_seed);
        let Some(known) = first_sums else {
            let updates = &self.members.member_updates(|_| Update::Norms { grad_scale });
            self.members.sum_by(device, sums.reborrow().into_part(0, [1].into()), |pieces, sums| {
                let pass = UpdatePass { pieces, updates, scales: None, rounding_seed, sums: Some(sums) };
                device.update(pass, parameters, grads, &mut []);
            })?;
            let len = self.full_shape.rows() + self.full_shape.cols();
            return self.sum_by_dims(step, grads, sums.into_part(1, [len].into()));
        };
        self.change_moments(step, known);
        self.members.sum_by(device, sums, |pieces, sums| {
            device.factored_squares(
                Arc::clone(pieces),
                self.step(step, 1.0),
                self.used_moments(),
                grads,
                sums,
            );
        })
    }

    /// Computes the sums of squares of the gradient over each row and each column of the full matrix, from this rank's elements.
    fn sum_by_dims(
        &self,
        step: &UnitStep<'_>,
        grads: View<'_>,
        mut sums: ViewMut<'_>,
    ) -> Result<(), DeviceError> {
        let (device, grad_scale) = (step.device, step.grad_scale());
        let is_counted = step.contributes(self.member());
        if is_counted && self.local_moments.is_none() {
            device.factored_sums(self.matrix.clone(), grads, grad_scale, sums);
            return Ok(());
        }
        device.zero(sums.reborrow());
        if is_counted {
            let [rows, cols] = [self.shape.rows(), self.shape.cols()];
            let mut own = device.empty([rows + cols].into(), DType::F64, Category::Optimizer)?;
            device.factored_sums(self.matrix.clone(), grads, grad_scale, own.view_mut());
            for ((first, place), segments) in
                [(0, 0), (self.full_shape.rows(), rows)].into_iter().zip(&self.segments)
            {
                for segment in segments {
                    let len = [segment.len].into();
                    let to = sums.reborrow().into_part(first + segment.start, len);
                    device.copy(own.view().part(place + segment.offset, len), to);
                }
            }
        }
        Ok(())
    }

    /// Updates the moments from the `known` sums of all rows and columns.
    fn change_moments(&mut self, step: &UnitStep<'_>, known: View<'_>) {
        let (device, AdafactorVectorStep { mixing, .. }) =
            (step.device, adafactor_step(self.settings, self.member(), step));
        let [rows, cols] = [self.full_shape.rows(), self.full_shape.cols()];
        let sums = [known.part(1, [rows].into()), known.part(1 + rows, [cols].into())];
        for ((moments, sums), num_terms) in self.moments.iter_mut().zip(sums).zip([cols, rows]) {
            device.factored_moments(sums, num_terms, mixing, moments.view_mut());
        }
        device.sum_elements(self.moments[0].view(), rows as f64, self.row_mean.view_mut());
        for ((here, moments), segments) in
            self.local_moments.iter_mut().flatten().zip(&self.moments).zip(&self.segments)
        {
            for &Segment { start, offset: place, len } in segments {
                let len = [len].into();
                device.copy(moments.view().part(start, len), here.view_mut().into_part(place, len));
            }
        }
    }

    pub(crate) fn apply(
        &mut self,
        step: &UnitStep<'_>,
        parameters: ViewMut<'_>,
        grads: View<'_>,
        [first, second]: [View<'_>; 2],
    ) -> Result<(), DeviceError> {
        let sums = [first.part(0, [1].into()), second];
        let settings = self.settings;
        let lr = self.members.scales(step.device, sums, |member| adafactor_scale(settings, member, step))?;
        let factored = self.step(step, adafactor_step(settings, self.member(), step).parameter_factor);
        let (pieces, moments) = (Arc::clone(&self.members.pieces), self.used_moments());
        step.device.factored_update(pieces, factored, lr.view(), moments, parameters, grads);
        Ok(())
    }

    fn used_moments(&self) -> FactoredMoments<View<'_>> {
        let [rows, cols] = self.local_moments.as_ref().unwrap_or(&self.moments).each_ref().map(Tensor::view);
        FactoredMoments { rows, cols, row_mean: self.row_mean.view() }
    }

    fn step(&self, step: &UnitStep<'_>, parameter_factor: f32) -> FactoredStep {
        FactoredStep { offset: self.offset, parameter_factor, grad_scale: step.grad_scale() }
    }
}
