//! An operation that another crate defines.

use std::sync::Arc;
use trireme_base::DType;
use trireme_tensor::tape::{BackwardContext, ForwardContext, Operation, ReadBy, write_grad};
use trireme_tensor::{DeviceError, GradSink, Initial, Parameter, ParameterSpan, ParameterTable, Precision};
use trireme_testkit::{GradientCheck, Input};

/// `y[row, col] = sum over k of weight[k] x[row, col + k - 1]`: an operation of this crate, which `tensor` knows nothing of.
#[derive(Debug)]
struct Convolution {
    /// Three of them.
    weight: ParameterSpan,
}

/// The element beside `col`, zero outside of the row.
fn beside(row: &[f32], col: usize, k: usize) -> f32 {
    (col + k).checked_sub(1).and_then(|col| row.get(col)).copied().unwrap_or(0.0)
}

impl Operation for Convolution {
    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<(), DeviceError> {
        let mut y = cx.empty(cx.input(0).shape(), DType::F32)?;
        let (x, weight, cols) = (cx.input(0).f32s(), cx.parameter(&self.weight).f32s(), y.shape().cols());
        cx.device().for_each_row(y.view_mut(), 6, |row, y| {
            let x = &x[row * cols..(row + 1) * cols];
            for (col, y) in y.iter_mut().enumerate() {
                *y = (0..3).map(|k| weight[k] * beside(x, col, k)).sum();
            }
        });
        cx.output(y);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<(), DeviceError> {
        let mut dx = cx.empty(cx.input_shape(0), DType::F32)?;
        let (dy, weight, cols) = (cx.grad().f32s(), cx.parameter(&self.weight).f32s(), dx.shape().cols());
        cx.device().for_each_row(dx.view_mut(), 6, |row, dx| {
            let dy = &dy[row * cols..(row + 1) * cols];
            for (col, dx) in dx.iter_mut().enumerate() {
                *dx = (0..3).map(|k| weight[2 - k] * beside(dy, col, k)).sum();
            }
        });
        cx.add_grad(0, dx)
    }

    fn backward_weight(
        &self,
        cx: &mut BackwardContext<'_>,
        sink: &mut dyn GradSink,
    ) -> Result<(), DeviceError> {
        let (x, dy, cols) = (cx.input(0).f32s(), cx.grad().f32s(), cx.input_shape(0).cols());
        write_grad(sink, &self.weight, |out, accumulate| {
            // A row for each element, so that threads share them.
            let out = out.into_part(0, [3, 1].into());
            cx.device().for_each_row(out, 2 * x.len(), |k, out| {
                let rows = x.chunks(cols).zip(dy.chunks(cols));
                let terms = rows.flat_map(|(x, dy)| (0..cols).map(move |col| dy[col] * beside(x, col, k)));
                out[0] = terms.fold(if accumulate { out[0] } else { 0.0 }, |sum, term| sum + term);
            });
            Ok(())
        })
    }

    fn has_parameters(&self) -> bool {
        true
    }

    fn reads_input(&self, _: usize) -> ReadBy {
        ReadBy::WEIGHT_HALF
    }
}

#[test]
fn an_operation_of_another_crate() {
    let mut table = ParameterTable::default();
    table.begin_unit("unit");
    let weight = table.add(Parameter::vector("weight", 3, Initial::ZEROS));
    let convolution = Arc::new(Convolution { weight });
    let reference = |x: &[Vec<f64>], weight: &[f64]| -> Vec<f64> {
        let row = |row: &[f64]| -> Vec<f64> {
            let element = |col: usize| {
                let near = |k: usize| (col + k).checked_sub(1).and_then(|col| row.get(col)).unwrap_or(&0.0);
                (0..3).map(|k| weight[k] * near(k)).sum()
            };
            (0..row.len()).map(element).collect()
        };
        x[0].chunks(9).flat_map(row).collect()
    };
    GradientCheck {
        name: "a convolution".to_owned(),
        run: &|recorder, inputs| Ok(Some(recorder.apply(&convolution, inputs)?)),
        table,
        precision: Precision::F32,
        inputs: vec![Input::random(&[4, 9], "x")],
        reference: &reference,
    }
    .check();
}
