use super::Cpu;
use crate::kernels::call::SumCall;
use crate::kernels::cpu::cross_entropy::{NUM_STATISTICS, row_loss};
use crate::kernels::cpu::element::with_element;

impl Cpu {
    pub(super) fn run_sum(&self, call: SumCall) {
        match call {
            SumCall::ColumnSums { x, mut out, accumulate } => with_element!(x.dtype() => |T| {
                self.column_sums::<T>(x.elements(self), out.f32s(self), accumulate);
            }),
            SumCall::AddSquares { x, mut sum } => {
                let mut total = self.sum_of_squares(x.f32s(self));
                let sum = sum.f64s(self);
                total.add(sum);
                total.carry();
                sum.copy_from_slice(total.windows());
            }
            SumCall::SumElements { x, mut out, divisor } => {
                let sum: f64 = x.f32s(self).iter().map(|&x| f64::from(x)).sum();
                out.f64s(self)[0] = sum / divisor;
            }
            SumCall::SumLosses { statistics, weights, mut out } => {
                let rows = statistics.f32s(self).chunks_exact(NUM_STATISTICS);
                let losses = rows.map(|row| f64::from(row_loss(row)));
                out.f64s(self)[0] = match self.optional_f32s(weights) {
                    None => losses.sum(),
                    Some(weights) => {
                        let weighted = losses.zip(weights).filter(|&(_, &weight)| weight != 0.0);
                        weighted.map(|(loss, &weight)| loss * f64::from(weight)).sum()
                    }
                };
            }
            SumCall::Hits { scores, classes, mut hits } => {
                let cols = scores.shape().cols();
                let (scores, classes) = (scores.f32s(self), classes.u32s(self));
                self.for_each_row(hits.f32s(self), 1, |row, hit| {
                    let scores = &scores[row * cols..][..cols];
                    hit[0] = f32::from(is_largest(scores, classes[row] as usize));
                });
            }
            SumCall::AddTerm { term, mut out, weight, ratio } => {
                let (term, out) = (weight * term.f64s(self)[0], &mut out.f64s(self)[0]);
                match ratio {
                    Some(ratio) => *out += term * ratio,
                    None => *out = term,
                }
            }
        }
    }
}

/// Returns whether the score of `class` is the first of the largest scores.
fn is_largest(scores: &[f32], class: usize) -> bool {
    let Some(&own) = scores.get(class) else { return false };
    scores[..class].iter().all(|score| *score < own) && scores[class..].iter().all(|score| *score <= own)
}
