use super::Cpu;
use crate::kernels::call::OptimizerCall;
use crate::kernels::cpu::optimizer::{MomentFactors, OrthogonalizeScratch, PieceUpdates};
use crate::kernels::{FactoredMoments, Operand, StateSlice};

impl Cpu {
    fn factors(&self, moments: FactoredMoments<Operand>) -> MomentFactors<'_> {
        let FactoredMoments { rows, cols, row_mean } = moments;
        MomentFactors { rows: rows.f32s(self), cols: cols.f32s(self), row_mean: row_mean.f64s(self) }
    }

    pub(super) fn run_optimizer(&self, call: OptimizerCall) {
        match call {
            OptimizerCall::Update {
                mut parameters,
                grads,
                scales,
                mut sums,
                mut states,
                pieces,
                updates,
                rounding_seed,
            } => {
                let states = states.each_mut().map(|state| match state {
                    Some(state) => state.slice(self),
                    None => StateSlice::Absent,
                });
                let sums = sums.as_mut().map(|sums| bytemuck::cast_slice_mut(sums.f64s(self)));
                let scales = self.optional_f32s(scales).unwrap_or_default();
                let (parameters, grads) = (parameters.f32s(self), grads.f32s(self));
                let pass = PieceUpdates { pieces: &pieces, updates: &updates, scales, rounding_seed, sums };
                self.update(pass, parameters, grads, states);
            }
            OptimizerCall::LeafSums { sums, mut out, runs } => {
                let of_pieces = bytemuck::cast_slice(sums.f64s(self));
                for (index, sum) in out.f64s(self).iter_mut().enumerate() {
                    *sum = runs[index % runs.len()].sum(of_pieces, index / runs.len());
                }
            }
            OptimizerCall::StepScales { scales, squares: [of_parameter, of_update], mut out } => {
                let sums = of_parameter.f64s(self).iter().zip(of_update.f64s(self));
                for ((out, scale), (&parameter, &update)) in out.f32s(self).iter_mut().zip(&*scales).zip(sums)
                {
                    *out = scale.factor(parameter, update);
                }
            }
            OptimizerCall::FactoredSums { matrix, grads, scale, mut sums } => {
                let num_rows = sums.shape().num_elements() - matrix.cols;
                let (rows, cols) = sums.f64s(self).split_at_mut(num_rows);
                self.row_squares(&matrix, grads.f32s(self), scale, rows);
                self.column_squares(&matrix, grads.f32s(self), scale, cols);
            }
            OptimizerCall::FactoredMoments { sums, mut moments, num_terms, mixing } => {
                self.factored_moments(sums.f64s(self), num_terms, mixing, moments.f32s(self));
            }
            OptimizerCall::FactoredSquares { moments, grads, mut sums, pieces, step } => {
                let sums = bytemuck::cast_slice_mut(sums.f64s(self));
                self.factored_squares(&pieces, step, self.factors(moments), grads.f32s(self), sums);
            }
            OptimizerCall::FactoredUpdate { moments, lr, mut parameters, grads, pieces, step } => {
                let (lr, factors) = (lr.f32s(self), self.factors(moments));
                self.factored_update(&pieces, step, lr, factors, parameters.f32s(self), grads.f32s(self));
            }
            OptimizerCall::Orthogonalize {
                mut matrix,
                mut gram,
                mut polynomial,
                mut product,
                mut words,
                num_steps,
                precision,
            } => {
                let scratch = OrthogonalizeScratch {
                    gram: gram.f32s(self),
                    polynomial: polynomial.f32s(self),
                    product: product.f32s(self),
                    words: words.u32s(self),
                };
                let shape = [matrix.shape().rows(), matrix.shape().cols()];
                self.orthogonalize(matrix.f32s(self), shape, num_steps, precision, scratch);
            }
        }
    }
}
