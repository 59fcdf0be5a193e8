//! Checks operations and their gradients against a reference in f64.

use crate::{TracedDevice, test_gpu};
use std::sync::Arc;
use trireme_base::{DType, RandomKey};
use trireme_tensor::tape::{Recorder, Recording, Scale};
use trireme_tensor::{
    BackendKind, Category, DetachedOptions, Device, DeviceError, DeviceOptions, GradSink, GradTarget,
    ParameterSpan, ParameterTable, Parameters, Precision, Shape, Tape, Tensor, Var,
};

/// Step of the reference's central differences. Their error is about 1e-9 of the scale of the values.
const STEP: f64 = 1e-5;

/// A reference in f64. Returns the output or the mean loss, for the inputs and the flat parameters.
pub type Reference<'a> = dyn Fn(&[Vec<f64>], &[f64]) -> Vec<f64> + 'a;

/// A function that applies operations to inputs. Returns the output, or `None` if the operations end in a loss.
pub type ApplyOperations<'a> = dyn Fn(&mut Recorder<'_>, Vec<Var>) -> Result<Option<Var>, DeviceError> + 'a;

/// Operations that end in one output or in a loss, and a reference for them.
pub struct GradientCheck<'a> {
    /// Name of the check, for messages.
    pub name: String,
    /// Applies the operations.
    pub run: &'a ApplyOperations<'a>,
    /// The parameters that the operations read.
    pub table: ParameterTable,
    /// Precision of activations. Inputs are rounded to it, unless they are [in f32](Input::in_f32).
    pub precision: Precision,
    /// The inputs.
    pub inputs: Vec<Input>,
    /// Computes the output or the mean loss in f64, from the inputs and the flat parameters of unit 0.
    pub reference: &'a Reference<'a>,
}

/// An input of an operation.
#[derive(Debug, Clone)]
pub struct Input {
    shape: Shape,
    values: Values,
    requires_grad: bool,
}

#[derive(Debug, Clone)]
enum Values {
    /// Values that are rounded to the precision of the check.
    Rounded(Vec<f32>),
    F32(Vec<f32>),
    Ids(Vec<u32>),
}

impl Input {
    /// Returns random normal values, rounded to the precision of the check. `name` seeds them.
    pub fn random(shape: &[usize], name: &str) -> Self {
        let shape = Shape::new(shape);
        Input { shape, values: Values::Rounded(random(shape.num_elements(), name)), requires_grad: true }
    }

    /// Returns ids, which have no gradient.
    pub fn ids(shape: &[usize], ids: &[u32]) -> Self {
        Input { shape: Shape::new(shape), values: Values::Ids(ids.to_vec()), requires_grad: false }
    }

    /// Returns an input with these values, rounded to the precision of the check.
    pub fn values(shape: &[usize], values: &[f32]) -> Self {
        Input { shape: Shape::new(shape), values: Values::Rounded(values.to_vec()), requires_grad: true }
    }

    /// Returns the same input without a gradient.
    pub fn constant(self) -> Self {
        Input { requires_grad: false, ..self }
    }

    /// Returns the same input in f32 instead of the precision of the check.
    pub fn in_f32(self) -> Self {
        match self.values {
            Values::Rounded(values) => Input { values: Values::F32(values), ..self },
            _ => self,
        }
    }
}

fn random(len: usize, name: &str) -> Vec<f32> {
    let mut values = vec![0.0; len];
    RandomKey::new(7, name).fill_normal(&mut values, 1.0);
    values
}

#[derive(Debug, Clone, Copy)]
struct RunVariant {
    num_threads: usize,
    /// Whether the gradients of inputs and of parameters are computed by two separate backward passes.
    splits_backward: bool,
    overwrites_inputs: bool,
    /// Initial value of the parameter gradients, which the gradients are added to. `None` if gradients are written.
    initial_grad: Option<f32>,
    backend: BackendKind,
}

impl Default for RunVariant {
    fn default() -> Self {
        RunVariant {
            num_threads: 1,
            splits_backward: false,
            overwrites_inputs: false,
            initial_grad: None,
            backend: BackendKind::Cpu,
        }
    }
}

#[derive(Debug, PartialEq)]
struct Outputs {
    /// The output, or the mean loss.
    output: Vec<f32>,
    is_loss: bool,
    input_grads: Vec<Option<Vec<f32>>>,
    parameter_grads: Vec<f32>,
}

/// Results of the reference.
struct Expected {
    output: Vec<f64>,
    input_grads: Vec<Option<Vec<f64>>>,
    parameter_grads: Vec<f64>,
}

/// A sink for the gradients of one unit. Its memory holds NaN until gradients are written, or an initial value that they are added to.
struct Grads {
    flat: Parameters,
    is_written: Vec<bool>,
}

impl Grads {
    fn new(table: &Arc<ParameterTable>, device: &Device, before: Option<f32>) -> Self {
        let mut flat = Parameters::zeros(table, device, Category::Gradients).unwrap();
        if table.num_elements() > 0 {
            let values = vec![before.unwrap_or(f32::NAN); table.num_elements()];
            device.upload(&values, flat.flat_mut(0));
        }
        Grads { flat, is_written: vec![before.is_some(); table.parameters().len()] }
    }
}

impl GradSink for Grads {
    fn target(&mut self, span: &ParameterSpan) -> Result<GradTarget<'_>, DeviceError> {
        let view = self.flat.flat_mut(span.unit).into_part(span.offset, span.shape);
        Ok(GradTarget { view, accumulate: self.is_written[span.first.0] })
    }

    fn grad_ready(&mut self, span: &ParameterSpan) {
        self.is_written[span.first.0..span.first.0 + span.num_parameters].fill(true);
    }
}

impl GradientCheck<'_> {
    /// Compares the output, and the gradient of every element of every input and parameter, with the reference and its central differences.
    /// Checks that the bits do not depend on whether backward runs as two separate halves, on the number of threads, on whether an
    /// operation may overwrite its inputs, or on whether the processor is detached. Checks that gradients of parameters can be written, or
    /// added to other values. Compares a GPU with the reference as well, unless the operation is a Rust function.
    ///
    /// # Panics
    /// If a value differs by more than the rounding of the precision explains, or if bits differ.
    pub fn check(&self) {
        let plain = RunVariant::default();
        let variants = [
            RunVariant { splits_backward: true, ..plain },
            RunVariant { num_threads: 3, ..plain },
            RunVariant { overwrites_inputs: true, ..plain },
            RunVariant { overwrites_inputs: true, splits_backward: true, ..plain },
            RunVariant { backend: detached(0), ..plain },
            RunVariant { backend: detached(1), num_threads: 2, overwrites_inputs: true, ..plain },
        ];
        let found = self.same_outputs(plain, &variants).expect("a processor runs Rust functions");
        let expected = self.expected(found.is_loss);
        self.compare(&found, &expected, plain);
        let Some(backend) = test_gpu() else { return };
        let plain = RunVariant { backend, ..plain };
        let variants = [RunVariant { splits_backward: true, overwrites_inputs: true, ..plain }];
        if let Some(found) = self.same_outputs(plain, &variants) {
            self.compare(&found, &expected, plain);
        }
    }

    /// Returns the outputs of a variant; `None` if it is on a GPU, which refuses the operation because it is a Rust function. Asserts that
    /// the others have the same bits.
    fn same_outputs(&self, plain: RunVariant, variants: &[RunVariant]) -> Option<Outputs> {
        let found = self.compute(plain);
        for &variant in variants {
            assert_eq!(found, self.compute(variant), "{}: {variant:?}", self.name);
        }
        found
    }

    /// Computes the output of the reference, and gradients as its central differences.
    fn expected(&self, is_loss: bool) -> Expected {
        let mut inputs: Vec<Vec<f64>> = self.inputs.iter().map(|input| self.values(input)).collect();
        let mut parameters = self.parameter_values();
        let output = (self.reference)(&inputs, &parameters);
        let cotangent = if is_loss { vec![1.0] } else { self.cotangent(output.len()) };
        let loss = |inputs: &[Vec<f64>], parameters: &[f64]| -> f64 {
            let output = (self.reference)(inputs, parameters);
            output.iter().zip(&cotangent).map(|(y, c)| y * c).sum()
        };
        let mut input_grads = Vec::new();
        for (index, input) in self.inputs.iter().enumerate() {
            let mut values = inputs[index].clone();
            input_grads.push(input.requires_grad.then(|| {
                differences(&mut values, |values| {
                    inputs[index].copy_from_slice(values);
                    loss(&inputs, &parameters)
                })
            }));
            inputs[index] = values;
        }
        let mut values = parameters.clone();
        let parameter_grads = differences(&mut values, |values| {
            parameters.copy_from_slice(values);
            loss(&inputs, &parameters)
        });
        Expected { output, input_grads, parameter_grads }
    }

    /// Compares what a variant has computed with the reference. Also adds the gradients of parameters to other values.
    fn compare(&self, found: &Outputs, expected: &Expected, plain: RunVariant) {
        let tolerance = match self.precision {
            Precision::F32 => 2e-6,
            Precision::F16 => 4e-3,
            Precision::Bf16 => 3e-2,
        };
        let compare = |found: &[f32], expected: &[f64], what: &str| {
            compare(found, expected, tolerance, &format!("{}: {plain:?}: {what}", self.name));
        };
        compare(&found.output, &expected.output, "output");
        for (index, (found, expected)) in found.input_grads.iter().zip(&expected.input_grads).enumerate() {
            assert_eq!(found.is_some(), expected.is_some(), "{}: gradient of input {index}", self.name);
            if let (Some(found), Some(expected)) = (found, expected) {
                compare(found, expected, &format!("gradient of input {index}"));
            }
        }
        compare(&found.parameter_grads, &expected.parameter_grads, "gradient of the parameters");
        let added = self.compute(RunVariant { initial_grad: Some(1.0), ..plain });
        let added = added.expect("the same variant has run");
        let expected: Vec<f64> = expected.parameter_grads.iter().map(|grad| grad + 1.0).collect();
        compare(&added.parameter_grads, &expected, "gradient of the parameters, added to 1");
    }

    fn dtype(&self, input: &Input) -> DType {
        match input.values {
            Values::Rounded(_) => self.precision.dtype(),
            Values::F32(_) => DType::F32,
            Values::Ids(_) => DType::U32,
        }
    }

    fn tensor(&self, device: &Device, input: &Input) -> Tensor {
        match &input.values {
            Values::Rounded(values) | Values::F32(values) => {
                narrow(device, values, input.shape, self.dtype(input))
            }
            Values::Ids(ids) => {
                let mut tensor = device.empty(input.shape, DType::U32, Category::Activations).unwrap();
                device.upload(ids, tensor.view_mut());
                tensor
            }
        }
    }

    /// Returns the values of an input as the operation reads them.
    fn values(&self, input: &Input) -> Vec<f64> {
        match &input.values {
            Values::Ids(ids) => ids.iter().map(|&id| f64::from(id)).collect(),
            _ => {
                let device =
                    Device::cpu(DeviceOptions { num_threads: 1, ..DeviceOptions::default() }).unwrap();
                let values = in_f32(&device, &self.tensor(&device, input));
                values.into_iter().map(f64::from).collect()
            }
        }
    }

    fn parameter_values(&self) -> Vec<f64> {
        random(self.table.num_elements(), "parameters").into_iter().map(f64::from).collect()
    }

    /// Returns the gradient of the output from which backward starts.
    fn cotangent(&self, len: usize) -> Vec<f64> {
        self.values(&Input::random(&[len], "dy"))
    }

    fn parameters(&self, device: &Device) -> Parameters {
        let table = self.table.clone().into();
        let mut parameters = Parameters::zeros(&table, device, Category::Parameters).unwrap();
        if table.num_elements() > 0 {
            let values = random(table.num_elements(), "parameters");
            device.upload(&values, parameters.flat_mut(0));
        }
        parameters
    }

    /// Returns `None` if a GPU refuses the operation, because it is a Rust function.
    fn compute(&self, variant: RunVariant) -> Option<Outputs> {
        let RunVariant { num_threads, splits_backward, overwrites_inputs, initial_grad, backend } = variant;
        let device =
            TracedDevice::open(DeviceOptions { num_threads, backend, ..DeviceOptions::default() }).unwrap();
        let parameters = self.parameters(&device);
        let mut tape = Tape::new(&device, Recording::On, self.precision);
        let put = |input: &Input| {
            let tensor = self.tensor(&device, input);
            if input.requires_grad { tape.input(tensor) } else { tape.constant(tensor) }
        };
        let mut inputs: Vec<Var> = self.inputs.iter().map(put).collect();
        let ids: Vec<_> = inputs.iter().map(Var::id).collect();
        let mut recorder = tape.recorder(&parameters);
        if overwrites_inputs {
            // The result of an operation may be overwritten by its last reader.
            let is_float = |index: usize| !matches!(self.inputs[index].values, Values::Ids(_));
            let same = Arc::new(Scale(1.0));
            let moved = inputs.into_iter().enumerate().map(|(index, input)| {
                if is_float(index) { recorder.apply(&same, [input]).unwrap() } else { input }
            });
            inputs = moved.collect();
        }
        let made = match (self.run)(&mut recorder, inputs) {
            Err(DeviceError::RustFunction { .. }) => return None,
            made => made.unwrap(),
        };
        let output = made.as_ref().map(|output| tape.take_output(output).unwrap());
        let start = made.as_ref().zip(output.as_ref());
        let start = start.map(|(place, output)| {
            let shape = output.shape();
            let cotangent: Vec<f32> =
                self.cotangent(shape.num_elements()).iter().map(|&c| c as f32).collect();
            (place.id(), narrow(&device, &cotangent, shape, output.dtype()))
        });
        let mut sink = Grads::new(parameters.table(), &device, initial_grad);
        if splits_backward {
            tape.backward_input(&parameters, start).unwrap();
            tape.backward_weight(&parameters, &mut sink).unwrap();
        } else {
            tape.backward(&parameters, start, &mut sink).unwrap();
        }
        let loss = || {
            let mean = tape.loss().map(|loss| loss.read(&device).unwrap());
            mean.map(|mean| (mean.sum / mean.num_rows as f64) as f32).into_iter().collect()
        };
        let is_loss = output.is_none();
        let output = output.map_or_else(loss, |output| in_f32(&device, &output));
        // The gradient of a 16-bit input may be in f32.
        let grad = |(id, input)| {
            let grad = tape.take_grad(id)?;
            let mut rounded = device.empty(grad.shape(), self.dtype(input), Category::Activations).unwrap();
            device.convert(grad.view(), rounded.view_mut());
            Some(in_f32(&device, &rounded))
        };
        let input_grads = ids.into_iter().zip(&self.inputs).map(grad).collect();
        let has_parameters = self.table.num_elements() > 0;
        let parameter_grads =
            if has_parameters { device.read(sink.flat.flat(0)).unwrap() } else { Vec::new() };
        drop(tape);
        assert_eq!(device.memory().usage(Category::Activations).current, 0, "nothing is left");
        Some(Outputs { output, is_loss, input_grads, parameter_grads })
    }
}

fn detached(seed: u64) -> BackendKind {
    BackendKind::Detached(DetachedOptions { seed, ignored_wait: None })
}

fn in_f32(device: &Device, tensor: &Tensor) -> Vec<f32> {
    let mut wide = device.empty(tensor.shape(), DType::F32, Category::Activations).unwrap();
    device.convert(tensor.view(), wide.view_mut());
    device.read(wide.view()).unwrap()
}

fn narrow(device: &Device, values: &[f32], shape: Shape, dtype: DType) -> Tensor {
    let mut wide = device.empty(shape, DType::F32, Category::Activations).unwrap();
    device.upload(values, wide.view_mut());
    let mut tensor = device.empty(shape, dtype, Category::Activations).unwrap();
    device.convert(wide.view(), tensor.view_mut());
    tensor
}

/// Returns the central difference of `loss` along each of `values`.
fn differences(values: &mut [f64], mut loss: impl FnMut(&[f64]) -> f64) -> Vec<f64> {
    let len = values.len();
    let difference = |index: usize| {
        let value = values[index];
        let [above, below] = [STEP, -STEP].map(|step| {
            values[index] = value + step;
            loss(values)
        });
        values[index] = value;
        (above - below) / (2.0 * STEP)
    };
    let found = (0..len).map(difference).collect();
    // `loss` stores the values that it is given. This call restores the unchanged values there.
    loss(values);
    found
}

/// Asserts that each error is at most `tolerance` times the sum of the expected value's magnitude and the largest magnitude.
fn compare(found: &[f32], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0.0_f64, |largest, value| largest.max(value.abs()));
    for (index, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let error = (f64::from(found) - expected).abs();
        assert!(
            error <= tolerance * (expected.abs() + largest) + 1e-8,
            "{what}, element {index}: {found} instead of {expected}"
        );
    }
}
