//! Sums that stay on a device, in f64, until the host [downloads](Device::download) them.

use super::{Device, each, written};
use crate::kernels::cpu::cross_entropy::{STATISTICS, row_loss};
use crate::kernels::cpu::element::with_element;
use crate::tensor::{View, ViewMut};
use trireme_base::{Cost, DType};

impl Device {
    /// Sums the rows of `x`, `[rows, cols]`, into `out`, `[cols]`.
    pub(crate) fn column_sums(&self, x: View<'_>, out: ViewMut<'_>, accumulate: bool) {
        let cost = written(each(x.shape(), 1).reads(x.num_bytes()), &out, accumulate);
        let (x, mut out) = (x.place(), out.into_place());
        self.issue("column_sums", cost, move |cpu| {
            with_element!(x.dtype() => |T| cpu.column_sums::<T>(x.elements(cpu), out.f32s(cpu), accumulate));
        });
    }

    /// Adds the squares of the elements of `x`, each rounded to f32, to `sum`: the f64s of an [`ExactSum`](crate::ExactSum), which are carried afterwards.
    pub fn add_squares(&self, x: View<'_>, sum: ViewMut<'_>) {
        let cost = each(x.shape(), 2).reads(x.num_bytes()).updates(sum.num_bytes());
        let (x, mut sum) = (x.place(), sum.into_place());
        self.issue("add_squares", cost, move |cpu| {
            let mut total = cpu.sum_of_squares(x.f32s(cpu));
            let sum = sum.f64s(cpu);
            total.add(sum);
            total.carry();
            sum.copy_from_slice(total.windows());
        });
    }

    /// Sum of the elements of `x`, which are f32, divided by `divisor`: one after the other, in f64. `out` is one f64.
    pub fn sum_elements(&self, x: View<'_>, divisor: f64, out: ViewMut<'_>) {
        let (x, mut out) = (x.place(), out.into_place());
        self.issue("sum_elements", Cost::ZERO.reads(x.num_bytes()), move |cpu| {
            if !cpu.threads.is_idle() {
                let sum: f64 = x.f32s(cpu).iter().map(|&x| f64::from(x)).sum();
                out.f64s(cpu)[0] = sum / divisor;
            }
        });
    }

    /// Sum of the losses of rows, by their `statistics`, `[rows, 3]`: one after the other, in f64. `out` is one f64.
    ///
    /// With `weights`, f32 and one a row, each is multiplied by its own; a row of weight 0 adds nothing.
    pub(crate) fn sum_losses(&self, statistics: View<'_>, weights: Option<View<'_>>, out: ViewMut<'_>) {
        let (statistics, mut out) = (statistics.place(), out.into_place());
        let weights = weights.map(|weights| weights.place());
        self.issue("sum_losses", Cost::ZERO.reads(statistics.num_bytes()), move |cpu| {
            if !cpu.threads.is_idle() {
                let rows = statistics.f32s(cpu).chunks_exact(STATISTICS);
                let losses = rows.map(|row| f64::from(row_loss(row)));
                out.f64s(cpu)[0] = match &weights {
                    None => losses.sum(),
                    Some(weights) => {
                        let weights = weights.f32s(cpu).iter();
                        let weighted = losses.zip(weights).filter(|&(_, &weight)| weight != 0.0);
                        weighted.map(|(loss, &weight)| loss * f64::from(weight)).sum()
                    }
                };
            }
        });
    }

    /// For each row of scores, `[rows, classes]`, 1 if the score of its class is the first of the largest ones, else 0; `hits` has one f32 a row.
    pub(crate) fn hits(&self, scores: View<'_>, classes: View<'_>, hits: ViewMut<'_>) {
        let cols = scores.shape().cols();
        let cost = each(scores.shape(), 1).reads(scores.num_bytes() + classes.num_bytes());
        let (scores, classes, mut hits) = (scores.place(), classes.place(), hits.into_place());
        self.issue("hits", cost.writes(hits.num_bytes()), move |cpu| {
            let (scores, classes) = (scores.f32s(cpu), classes.u32s(cpu));
            cpu.for_each_row(hits.f32s(cpu), 1, |row, hit| {
                let scores = &scores[row * cols..][..cols];
                hit[0] = f32::from(is_largest(scores, classes[row] as usize));
            });
        });
    }

    /// `out = weight * term`, or `out += (weight * term) * ratio`, of one f64 each.
    pub(crate) fn add_term(&self, term: View<'_>, weight: f64, ratio: Option<f64>, out: ViewMut<'_>) {
        let cost = Cost::others(&[2]).reads(DType::F64.size());
        let (term, mut out) = (term.place(), out.into_place());
        self.issue("add_term", cost.writes(out.num_bytes()), move |cpu| {
            let (term, out) = (weight * term.f64s(cpu)[0], &mut out.f64s(cpu)[0]);
            match ratio {
                Some(ratio) => *out += term * ratio,
                None => *out = term,
            }
        });
    }
}

/// Whether the score of `class` is the first of the largest ones.
fn is_largest(scores: &[f32], class: usize) -> bool {
    let Some(&own) = scores.get(class) else { return false };
    scores[..class].iter().all(|score| *score < own) && scores[class..].iter().all(|score| *score <= own)
}
