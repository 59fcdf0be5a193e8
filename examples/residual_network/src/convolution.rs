//! A convolution, an operation that Trireme does not provide.

use std::sync::Arc;
use trireme::base::{AxisSplit, DType};
use trireme::tape::{BackwardContext, ForwardContext, Operation, ReadBy, write_grad};
use trireme::tensor::{DeviceError, GradSink, Initial, Parameter, ParameterSpan, ParameterTable};

/// Number of offsets of a 3 x 3 kernel.
const OFFSETS: usize = 9;

/// A 3 x 3 convolution with stride 1 and zero padding, from `[batch, size * size, inputs]` to `[batch, size * size, outputs]`, computed in
/// f32.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Convolution {
    /// Weight of shape `[9 * inputs, outputs]`. With a tensor axis, this rank's part along one of these dims.
    weight: ParameterSpan,
    /// Side of the image in pixels.
    size: usize,
}

impl Convolution {
    /// Returns the split by output channels: each rank of the tensor axis computes a part of them.
    pub(crate) fn by_outputs() -> AxisSplit {
        AxisSplit::along(1)
    }

    /// Returns the split by input channels: each rank of the tensor axis reads a part of them, and the output is the sum over the ranks.
    /// The weight contains the input channels once for each offset.
    pub(crate) fn by_inputs() -> AxisSplit {
        AxisSplit::along(0).with_groups(OFFSETS)
    }

    /// Declares the weight in `table`. Its initial values preserve the variance of the inputs (He et al., "Delving deep into rectifiers",
    /// 2015, section 2.2).
    pub(crate) fn new(
        table: &mut ParameterTable,
        name: &str,
        size: usize,
        (inputs, outputs): (usize, usize),
        cut: Option<AxisSplit>,
    ) -> Arc<Self> {
        let fan_in = OFFSETS * inputs;
        let initial = Initial::Normal { standard_deviation: (2.0 / fan_in as f32).sqrt() };
        let weight = Parameter::matrix(format!("{name}.weight"), &[fan_in, outputs], initial);
        let weight = match cut {
            Some(cut) => weight.with_split(cut),
            None => weight,
        };
        Arc::new(Convolution { weight: table.add(weight), size })
    }

    /// Returns the pixel at an offset (0 to 8, row by row; 4 is the center) from `pixel`. `None` if it is outside of the image. Pixels are
    /// numbered across the images of a batch.
    fn neighbour(&self, pixel: usize, offset: usize) -> Option<usize> {
        let (row, col) = (pixel / self.size % self.size + offset / 3, pixel % self.size + offset % 3);
        let is_inside = (1..=self.size).contains(&row) && (1..=self.size).contains(&col);
        is_inside.then(|| pixel + offset / 3 * self.size + offset % 3 - self.size - 1)
    }
}

/// Adds `factor * row` to `sum`.
fn add_scaled(sum: &mut [f32], factor: f32, row: &[f32]) {
    sum.iter_mut().zip(row).for_each(|(sum, value)| *sum += factor * value);
}

impl Operation for Convolution {
    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<(), DeviceError> {
        let (shape, outputs) = (cx.input(0).shape(), self.weight.shape.cols());
        let mut y = cx.empty(shape.with_dim(2, outputs), DType::F32)?;
        let (x, inputs) = (cx.in_f32(cx.input(0))?, shape.cols());
        let weight = cx.parameter_in_f32(&self.weight)?;
        let own = *self;
        cx.device().for_each_row(
            [x.view(), weight.view()],
            y.view_mut(),
            2 * OFFSETS * inputs,
            move |[x, weight], pixel, y| {
                y.fill(0.0);
                for offset in 0..OFFSETS {
                    let Some(near) = own.neighbour(pixel, offset) else { continue };
                    for input in 0..inputs {
                        let weights = &weight[(offset * inputs + input) * outputs..][..outputs];
                        add_scaled(y, x[near * inputs + input], weights);
                    }
                }
            },
        )?;
        drop((x, weight));
        cx.output(y);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<(), DeviceError> {
        if !cx.requires_grad(0) {
            return Ok(());
        }
        let (shape, outputs) = (cx.input_shape(0), self.weight.shape.cols());
        let mut dx = cx.empty(shape, DType::F32)?;
        let (inputs, weight) = (shape.cols(), cx.parameter_in_f32(&self.weight)?);
        let own = *self;
        cx.device().for_each_row(
            [cx.grad(), weight.view()],
            dx.view_mut(),
            2 * OFFSETS * outputs,
            move |[dy, weight], pixel, dx| {
                dx.fill(0.0);
                for offset in 0..OFFSETS {
                    // The output pixel that reads this pixel at `offset`.
                    let Some(near) = own.neighbour(pixel, OFFSETS - 1 - offset) else { continue };
                    let dy = &dy[near * outputs..][..outputs];
                    for (input, dx) in dx.iter_mut().enumerate() {
                        let weights = &weight[(offset * inputs + input) * outputs..][..outputs];
                        *dx += weights.iter().zip(dy).map(|(weight, dy)| weight * dy).sum::<f32>();
                    }
                }
            },
        )?;
        drop(weight);
        cx.add_grad(0, dx)
    }

    fn backward_weight(
        &self,
        cx: &mut BackwardContext<'_>,
        sink: &mut dyn GradSink,
    ) -> Result<(), DeviceError> {
        let (shape, outputs) = (cx.input_shape(0), self.weight.shape.cols());
        let (inputs, num_pixels) = (shape.cols(), shape.rows());
        let x = cx.in_f32(cx.input(0))?;
        let own = *self;
        write_grad(sink, &self.weight, |out, accumulate| {
            cx.device().for_each_row([x.view(), cx.grad()], out, 2 * num_pixels, move |[x, dy], row, out| {
                let (offset, input) = (row / inputs, row % inputs);
                if !accumulate {
                    out.fill(0.0);
                }
                for pixel in 0..num_pixels {
                    let Some(near) = own.neighbour(pixel, offset) else { continue };
                    add_scaled(out, x[near * inputs + input], &dy[pixel * outputs..][..outputs]);
                }
            })
        })
    }

    fn has_parameters(&self) -> bool {
        true
    }

    /// The gradient of the input depends only on the weight and the gradient of the output.
    fn reads_input(&self, _: usize) -> ReadBy {
        ReadBy::WEIGHT_HALF
    }
}
