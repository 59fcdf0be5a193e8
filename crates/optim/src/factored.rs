//! Adafactor of one matrix.

use crate::kind::AdafactorSettings;
use crate::members::{Member, Members};
use crate::optimizer::UnitStep;
use crate::share::adafactor;
use trireme_base::DType;
use trireme_tensor::{
    Category, Device, DeviceError, FACTORED_FLOOR, FactoredMatrix, FactoredStep, ParameterInfo, RmsStep,
    Shape, Tensor, Update, View, ViewMut,
};

/// A matrix whose second moment is a column times a row. Every rank has both, whatever it has of the matrix: they are as
/// many as rows and columns.
#[derive(Debug)]
pub(crate) struct Factored {
    settings: AdafactorSettings,
    pub(crate) members: Members,
    matrix: FactoredMatrix,
    /// Mean squares of rows, then of columns.
    moments: [Tensor; 2],
    row_mean: f64,
    /// Moments on the host, while they change.
    on_host: Vec<f32>,
    shape: Shape,
    offset: usize,
    num_elements: f64,
    mean_square: f64,
    update_mean_square: f64,
}

/// Names of the states, with the dim of the matrix that is left of it.
pub(crate) const FACTORED_STATES: [&str; 2] = ["exp_avg_sq_row", "exp_avg_sq_col"];

impl Factored {
    /// The only one of `members`, a matrix of two dims.
    pub(crate) fn new(
        settings: AdafactorSettings,
        members: Members,
        info: &ParameterInfo,
        matrix: FactoredMatrix,
        device: &Device,
    ) -> Result<Self, DeviceError> {
        let shape = info.shape;
        let zeros = |len: usize| device.zeros([len].into(), DType::F32, Category::Optimizer);
        Ok(Factored {
            settings,
            members,
            matrix,
            moments: [zeros(shape.rows())?, zeros(shape.cols())?],
            row_mean: 0.0,
            on_host: Vec::with_capacity(shape.rows().max(shape.cols())),
            shape,
            offset: info.offset,
            num_elements: shape.num_elements() as f64,
            mean_square: 0.0,
            update_mean_square: 0.0,
        })
    }

    pub(crate) fn member(&self) -> &Member {
        &self.members.list[0]
    }

    /// The state of this name, with its length.
    pub(crate) fn moments(&self) -> &[Tensor; 2] {
        &self.moments
    }

    pub(crate) fn moments_mut(&mut self) -> &mut [Tensor; 2] {
        &mut self.moments
    }

    fn numbers(&self, step: &UnitStep<'_>) -> RmsStep {
        let own = self.member().settings;
        adafactor(self.settings, own, step, self.mean_square, self.update_mean_square)
    }

    /// First the square of the parameter and those of its gradient by row and column; then the square of the update.
    pub(crate) fn observe(
        &mut self,
        phase: usize,
        step: &UnitStep<'_>,
        parameters: ViewMut<'_>,
        grads: View<'_>,
        sums: &mut Vec<f64>,
    ) -> Result<(), DeviceError> {
        let grad_scale = step.grad_scale();
        if phase == 0 {
            let updates = self.members.choose(|_, _| Update::Norms { grad_scale });
            let num_sums = self.shape.rows() + self.shape.cols();
            let mut own = step.device.empty([num_sums].into(), DType::F64, Category::Optimizer)?;
            step.device.factored_sums(&self.matrix, grads, grad_scale, own.view_mut());
            self.members.sum_by(step.device, |pieces, sums| {
                step.device.update((pieces, &updates), parameters, grads, &mut [], step.noise, Some(sums));
            })?;
            sums.push(self.members.sum(self.member(), 0));
            let first = sums.len();
            sums.resize(first + num_sums, 0.0);
            step.device.download(own.view(), &mut sums[first..]);
        } else {
            let factored = self.step(1.0, 1.0, grad_scale);
            let moments = self.moments.each_ref().map(Tensor::view);
            self.members.sum_by(step.device, |pieces, sums| {
                step.device.factored_squares(pieces, factored, moments, grads, sums);
            })?;
            sums.push(self.members.sum(self.member(), 0));
        }
        Ok(())
    }

    /// Takes its sums from the front of `sums`.
    pub(crate) fn heed(&mut self, phase: usize, step: &UnitStep<'_>, sums: &mut &[f64]) {
        let (here, rest) = sums.split_at(1);
        *sums = rest;
        if phase == 1 {
            self.update_mean_square = here[0] / self.num_elements;
            return;
        }
        self.mean_square = here[0] / self.num_elements;
        let mixing = f64::from(self.numbers(step).mixing);
        let values = &mut self.on_host;
        // Columns first: what is on the host at the end are the rows.
        let (rows, cols) = sums.split_at(self.shape.rows());
        let (cols, rest) = cols.split_at(self.shape.cols());
        *sums = rest;
        for (moments, (here, num_terms)) in
            self.moments.iter_mut().zip([(rows, cols.len()), (cols, rows.len())]).rev()
        {
            values.clear();
            values.resize(here.len(), 0.0);
            step.device.download(moments.view(), values);
            for (moment, sum) in values.iter_mut().zip(here) {
                let square = sum / num_terms as f64 + f64::from(FACTORED_FLOOR);
                *moment = ((1.0 - mixing) * f64::from(*moment) + mixing * square) as f32;
            }
            step.device.upload(values, moments.view_mut());
        }
        self.row_mean = values.iter().map(|&row| f64::from(row)).sum::<f64>() / values.len() as f64;
    }

    /// Updates what is here.
    pub(crate) fn apply(&mut self, step: &UnitStep<'_>, parameters: ViewMut<'_>, grads: View<'_>) {
        let RmsStep { lr, keep, grad_scale, .. } = self.numbers(step);
        let moments = self.moments.each_ref().map(Tensor::view);
        step.device.factored_update(
            &self.members.pieces,
            self.step(lr, keep, grad_scale),
            moments,
            parameters,
            grads,
        );
    }

    fn step(&self, lr: f32, keep: f32, grad_scale: f32) -> FactoredStep {
        FactoredStep { offset: self.offset, row_mean: self.row_mean, lr, keep, grad_scale }
    }
}
