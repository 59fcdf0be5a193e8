//! Sums that stay on the device until the host [downloads](Device::download) them.

use super::Device;
use crate::kernels::call::SumCall;
use crate::tensor::{View, ViewMut};

impl Device {
    /// Sums the rows of `x`, `[rows, cols]`, into `out`, `[cols]`.
    pub(crate) fn column_sums(&self, x: View<'_>, out: ViewMut<'_>, accumulate: bool) {
        self.issue(SumCall::ColumnSums { x: x.operand(), out: out.into_operand(), accumulate });
    }

    /// Adds the squares of the elements of `x`, each rounded to f32, to `sum`: the f64s of an [`ExactSum`](crate::ExactSum), whose carries
    /// the kernel propagates.
    pub fn add_squares(&self, x: View<'_>, sum: ViewMut<'_>) {
        self.issue(SumCall::AddSquares { x: x.operand(), sum: sum.into_operand() });
    }

    /// Sums the f32 elements of `x`, divided by `divisor`, sequentially in f64. `out` is one f64.
    pub fn sum_elements(&self, x: View<'_>, divisor: f64, out: ViewMut<'_>) {
        self.issue(SumCall::SumElements { x: x.operand(), out: out.into_operand(), divisor });
    }

    /// Sums the losses in `statistics`, `[rows, 3]`, sequentially in f64. `out` is one f64.
    ///
    /// With `weights`, one f32 per row, each loss is multiplied by its weight. A row of weight 0 adds nothing, even if its loss is not
    /// finite.
    pub(crate) fn sum_losses(&self, statistics: View<'_>, weights: Option<View<'_>>, out: ViewMut<'_>) {
        let (statistics, out) = (statistics.operand(), out.into_operand());
        let weights = weights.map(View::operand);
        self.issue(SumCall::SumLosses { statistics, weights, out });
    }

    /// Writes 1 to `hits` for each row of `scores`, `[rows, classes]`, whose class has the first of the largest scores, else 0. `hits` has
    /// one f32 per row.
    pub(crate) fn hits(&self, scores: View<'_>, classes: View<'_>, hits: ViewMut<'_>) {
        let (scores, classes, hits) = (scores.operand(), classes.operand(), hits.into_operand());
        self.issue(SumCall::Hits { scores, classes, hits });
    }

    /// Computes `out = weight * term`, or `out += (weight * term) * ratio` if there is a ratio. All are single f64s.
    pub(crate) fn add_term(&self, term: View<'_>, weight: f64, ratio: Option<f64>, out: ViewMut<'_>) {
        self.issue(SumCall::AddTerm { term: term.operand(), out: out.into_operand(), weight, ratio });
    }
}
