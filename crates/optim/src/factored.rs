//! Adafactor of one matrix.

use crate::kind::AdafactorSettings;
use crate::members::{Member, Members};
use crate::optimizer::UnitStep;
use crate::share::adafactor;
use trireme_base::{DType, Segment};
use trireme_tensor::{
    Category, Device, DeviceError, FACTORED_FLOOR, FactoredMatrix, FactoredStep, ParameterInfo, RmsStep,
    Shape, Tensor, Update, View, ViewMut,
};

/// A matrix whose second moment is a column times a row. Every rank has both of the whole matrix, whatever it has of it: they are as
/// many as rows and columns.
#[derive(Debug)]
pub(crate) struct Factored {
    settings: AdafactorSettings,
    pub(crate) members: Members,
    matrix: FactoredMatrix,
    /// Mean squares of rows, then of columns.
    moments: [Tensor; 2],
    /// Those of the rows and columns that are here, if ranks of the tensor axis cut the matrix.
    here: Option<[Tensor; 2]>,
    /// What is here of the rows, and of the columns.
    segments: [Vec<Segment>; 2],
    row_mean: f64,
    /// Moments on the host, while they change.
    on_host: Vec<f32>,
    /// Those of what is here.
    own_moments: Vec<f32>,
    /// Sums over what is here, by rows and then by columns.
    own_sums: Vec<f64>,
    /// Of what is here.
    shape: Shape,
    whole: Shape,
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
        let (shape, whole) = (info.shape, info.whole);
        let zeros = |len: usize| device.zeros([len].into(), DType::F32, Category::Optimizer);
        let moments = |shape: Shape| Ok::<_, DeviceError>([zeros(shape.rows())?, zeros(shape.cols())?]);
        Ok(Factored {
            settings,
            members,
            matrix,
            moments: moments(whole)?,
            here: (shape != whole).then(|| moments(shape)).transpose()?,
            segments: [info.segments(0), info.segments(1)],
            row_mean: 0.0,
            on_host: Vec::with_capacity(whole.rows().max(whole.cols())),
            own_moments: Vec::with_capacity(shape.rows().max(shape.cols())),
            own_sums: vec![0.0; shape.rows() + shape.cols()],
            shape,
            whole,
            offset: info.offset,
            num_elements: whole.num_elements() as f64,
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
            let is_counted = step.counts(self.member());
            sums.push(if is_counted { self.members.sum(self.member(), 0) } else { 0.0 });
            let first = sums.len();
            sums.resize(first + self.whole.rows() + self.whole.cols(), 0.0);
            if is_counted {
                step.device.download(own.view(), &mut self.own_sums);
                let (rows, cols) = self.own_sums.split_at(self.shape.rows());
                let starts = [first, first + self.whole.rows()];
                for ((own, first), segments) in [rows, cols].into_iter().zip(starts).zip(&self.segments) {
                    for &Segment { start, place, len } in segments {
                        sums[first + start..][..len].copy_from_slice(&own[place..place + len]);
                    }
                }
            }
        } else {
            let factored = self.step(1.0, 1.0, grad_scale);
            let moments = self.here.as_ref().unwrap_or(&self.moments).each_ref().map(Tensor::view);
            self.members.sum_by(step.device, |pieces, sums| {
                step.device.factored_squares(pieces, factored, moments, grads, sums);
            })?;
            let is_counted = step.counts(self.member());
            sums.push(if is_counted { self.members.sum(self.member(), 0) } else { 0.0 });
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
        let (rows, cols) = sums.split_at(self.whole.rows());
        let (cols, rest) = cols.split_at(self.whole.cols());
        *sums = rest;
        let of_dims = [(rows, cols.len()), (cols, rows.len())];
        for (dim, (moments, (here, num_terms))) in self.moments.iter_mut().zip(of_dims).enumerate().rev() {
            values.clear();
            values.resize(here.len(), 0.0);
            step.device.download(moments.view(), values);
            for (moment, sum) in values.iter_mut().zip(here) {
                let square = sum / num_terms as f64 + f64::from(FACTORED_FLOOR);
                *moment = ((1.0 - mixing) * f64::from(*moment) + mixing * square) as f32;
            }
            step.device.upload(values, moments.view_mut());
            if let Some(here) = &mut self.here {
                // What fills up a part has gradients of 0, which any moment leaves.
                let len = here[dim].shape().num_elements();
                let own = &mut self.own_moments;
                own.clear();
                own.resize(len, 1.0);
                for &Segment { start, place, len } in &self.segments[dim] {
                    own[place..place + len].copy_from_slice(&values[start..start + len]);
                }
                step.device.upload(own, here[dim].view_mut());
            }
        }
        self.row_mean = values.iter().map(|&row| f64::from(row)).sum::<f64>() / values.len() as f64;
    }

    /// Updates what is here.
    pub(crate) fn apply(&mut self, step: &UnitStep<'_>, parameters: ViewMut<'_>, grads: View<'_>) {
        let RmsStep { lr, keep, grad_scale, .. } = self.numbers(step);
        let moments = self.here.as_ref().unwrap_or(&self.moments).each_ref().map(Tensor::view);
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
