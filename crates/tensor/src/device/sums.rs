//! Sums that stay on a device, in f64, until the host [downloads](Device::download) them.

use super::Device;
use crate::kernels::call::SumCall;
use crate::tensor::{View, ViewMut};

impl Device {
    /// Sums the rows of `x`, `[rows, cols]`, into `out`, `[cols]`.
    pub(crate) fn column_sums(&self, x: View<'_>, out: ViewMut<'_>, accumulate: bool) {
        self.issue(SumCall::ColumnSums { x: x.operand(), out: out.into_operand(), accumulate });
    }

    /// Adds the squares of the elements of `x`, each rounded to f32, to `sum`: the f64s of an [`ExactSum`](crate::ExactSum), which are carried afterwards.
    pub fn add_squares(&self, x: View<'_>, sum: ViewMut<'_>) {
        self.issue(SumCall::AddSquares { x: x.operand(), sum: sum.into_operand() });
    }

    /// Sum of the elements of `x`, which are f32, divided by `divisor`: one after the other, in f64. `out` is one f64.
    pub fn sum_elements(&self, x: View<'_>, divisor: f64, out: ViewMut<'_>) {
        self.issue(SumCall::SumElements { x: x.operand(), out: out.into_operand(), divisor });
    }

    /// Sum of the losses of rows, by their `statistics`, `[rows, 3]`: one after the other, in f64. `out` is one f64.
    ///
    /// With `weights`, f32 and one a row, each is multiplied by its own; a row of weight 0 adds nothing.
    pub(crate) fn sum_losses(&self, statistics: View<'_>, weights: Option<View<'_>>, out: ViewMut<'_>) {
        let (statistics, out) = (statistics.operand(), out.into_operand());
        let weights = weights.map(View::operand);
        self.issue(SumCall::SumLosses { statistics, weights, out });
    }

    /// For each row of scores, `[rows, classes]`, 1 if the score of its class is the first of the largest ones, else 0; `hits` has one f32 a row.
    pub(crate) fn hits(&self, scores: View<'_>, classes: View<'_>, hits: ViewMut<'_>) {
        let (scores, classes, hits) = (scores.operand(), classes.operand(), hits.into_operand());
        self.issue(SumCall::Hits { scores, classes, hits });
    }

    /// `out = weight * term`, or `out += (weight * term) * ratio`, of one f64 each.
    pub(crate) fn add_term(&self, term: View<'_>, weight: f64, ratio: Option<f64>, out: ViewMut<'_>) {
        self.issue(SumCall::AddTerm { term: term.operand(), out: out.into_operand(), weight, ratio });
    }
}
