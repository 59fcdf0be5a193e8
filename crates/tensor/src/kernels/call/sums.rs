//! Sums that stay on the device until the host [downloads](crate::Device::download) them, and counts of correct predictions.

use super::{kernel_calls, per_element_cost, with_output_traffic};
use crate::view::{View, ViewMut};
use trireme_base::{Cost, DType};

kernel_calls! {
    /// Sums, and counts of correct predictions.
    SumCall {
        /// Sums the rows of `x`, `[rows, cols]`, into `out`, `[cols]`.
        pub(crate) fn column_sums => ColumnSums { x: View, out: ViewMut, accumulate: bool }

        /// Adds the squares of the elements of `x`, each rounded to f32, to `sum`: the f64s of an [`ExactSum`](crate::ExactSum), whose
        /// carries the kernel propagates.
        pub fn add_squares => AddSquares { x: View, sum: ViewMut }

        /// Sums the f32 elements of `x`, divided by `divisor`, sequentially in f64. `out` is one f64.
        pub fn sum_elements => SumElements { x: View, divisor: f64, out: ViewMut }

        /// Sums the losses in `statistics`, `[rows, 3]`, sequentially in f64. `out` is one f64.
        ///
        /// With `weights`, one f32 per row, each loss is multiplied by its weight. A row of weight 0 adds nothing, even if its loss is not
        /// finite.
        pub(crate) fn sum_losses => SumLosses { statistics: View, weights: Option<View>, out: ViewMut }

        /// Writes to `hits`, one f32 per row, 1 if the row's class in `classes` is the first column with the row's largest score, else 0.
        /// `scores` is `[rows, num_classes]`.
        pub(crate) fn hits => Hits { scores: View, classes: View, hits: ViewMut }

        /// Computes `out = weight * term`, or `out += (weight * term) * ratio` if there is a ratio. All are single f64s.
        pub(crate) fn add_term => AddTerm { term: View, weight: f64, ratio: Option<f64>, out: ViewMut }
    }
}

impl SumCall {
    pub(crate) fn cost(&self) -> Cost {
        match self {
            Self::ColumnSums { x, out, accumulate } => {
                with_output_traffic(per_element_cost(x.shape(), 1).reads(x.num_bytes()), out, *accumulate)
            }
            Self::AddSquares { x, sum } => {
                per_element_cost(x.shape(), 2).reads(x.num_bytes()).updates(sum.num_bytes())
            }
            Self::SumElements { x, .. } => Cost::ZERO.reads(x.num_bytes()),
            Self::SumLosses { statistics, .. } => Cost::ZERO.reads(statistics.num_bytes()),
            Self::Hits { scores, classes, hits } => {
                let read = scores.num_bytes() + classes.num_bytes();
                per_element_cost(scores.shape(), 1).reads(read).writes(hits.num_bytes())
            }
            Self::AddTerm { out, .. } => Cost::others(&[2]).reads(DType::F64.size()).writes(out.num_bytes()),
        }
    }
}
