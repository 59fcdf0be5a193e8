//! Compares every operation with its definition in f64: values, and gradients of all inputs and parameters.

mod axis;
mod context;
mod elements;
mod experts;
mod layers;
mod losses;
mod random;
mod readers;
mod shapes;
mod threads;

use std::sync::Arc;
use trireme_tensor::tape::{Op, Operation};
use trireme_tensor::{ParameterTable, Precision};
use trireme_testkit::{GradientCheck, Input, Reference};

pub(crate) const PRECISIONS: [Precision; 3] = [Precision::F32, Precision::Bf16, Precision::F16];

pub(crate) fn op(operation: impl Operation + 'static) -> Op {
    Op::from(&Arc::new(operation))
}

pub(crate) fn no_parameters() -> ParameterTable {
    let mut table = ParameterTable::default();
    table.begin_unit("none");
    table
}

/// Checks an operation in all precisions.
pub(crate) fn check(op: &Op, table: &ParameterTable, inputs: &[Input], reference: &Reference<'_>) {
    for precision in PRECISIONS {
        GradientCheck {
            name: format!("{op:?} in {precision}"),
            run: &|recorder, inputs| Ok(recorder.apply_many(op.clone(), inputs)?.next()),
            table: table.clone(),
            precision,
            inputs: inputs.to_vec(),
            reference,
        }
        .check();
    }
}

/// Computes `[rows, inner] x [inner, cols]`.
pub(crate) fn product(left: &[f64], right: &[f64], inner: usize, cols: usize) -> Vec<f64> {
    let rows = left.len() / inner;
    let element = |index: usize| {
        let (row, col) = (index / cols, index % cols);
        (0..inner).map(|k| left[row * inner + k] * right[k * cols + col]).sum()
    };
    (0..rows * cols).map(element).collect()
}

/// Returns the cumulative normal distribution at `x`, by the series around 0; for moderate arguments.
pub(crate) fn normal_distribution(x: f64) -> f64 {
    let density = (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
    let terms = (1..200).scan(x, |term, n| {
        let own = *term;
        *term *= x * x / f64::from(2 * n + 1);
        Some(own)
    });
    0.5 + density * terms.sum::<f64>()
}

pub(crate) fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh())
}
