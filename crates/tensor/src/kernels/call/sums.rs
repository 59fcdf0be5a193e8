//! Sums over columns, elements and losses, and counts of correct predictions.

use super::{each, kernel_calls, written};
use crate::kernels::{Operand, OperandMut};
use trireme_base::{Cost, DType};

kernel_calls! {
    /// Sums.
    SumCall {
        "column_sums" => ColumnSums { x: Operand, out: OperandMut; accumulate: bool }
        "add_squares" => AddSquares { x: Operand, sum: OperandMut }
        "sum_elements" => SumElements { x: Operand, out: OperandMut; divisor: f64 }
        "sum_losses" => SumLosses { statistics: Operand, weights: Option<Operand>, out: OperandMut }
        "hits" => Hits { scores: Operand, classes: Operand, hits: OperandMut }
        "add_term" => AddTerm { term: Operand, out: OperandMut; weight: f64, ratio: Option<f64> }
    }
}

impl SumCall {
    pub(crate) fn cost(&self) -> Cost {
        match self {
            Self::ColumnSums { x, out, accumulate } => {
                written(each(x.shape(), 1).reads(x.num_bytes()), out, *accumulate)
            }
            Self::AddSquares { x, sum } => each(x.shape(), 2).reads(x.num_bytes()).updates(sum.num_bytes()),
            Self::SumElements { x, .. } => Cost::ZERO.reads(x.num_bytes()),
            Self::SumLosses { statistics, .. } => Cost::ZERO.reads(statistics.num_bytes()),
            Self::Hits { scores, classes, hits } => {
                let read = scores.num_bytes() + classes.num_bytes();
                each(scores.shape(), 1).reads(read).writes(hits.num_bytes())
            }
            Self::AddTerm { out, .. } => Cost::others(&[2]).reads(DType::F64.size()).writes(out.num_bytes()),
        }
    }
}
