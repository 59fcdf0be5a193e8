//! What passes of units take, found by letting them run on a device that only counts.

use crate::error::ModelError;
use crate::model::{Batch, Model, Unit};
use std::sync::Arc;
use trireme_base::{DType, UnitPasses};
use trireme_tensor::tape::{Recording, VarId};
use trireme_tensor::{
    Category, Device, DeviceError, Fp8Scales, GradSink, GradTarget, ParameterSpan, Parameters, Precision,
    Shape, Tape, Tensor, Var,
};

impl Model {
    /// The sizes of every unit's passes over microbatches of `shape` (sequences, and tokens of each), and the bytes of one
    /// tensor of token ids of a microbatch.
    ///
    /// Each unit runs forward and backward once, and once more with the halves of backward apart, on the model's `device`, which must be one that [only
    /// counts](Device::counting): so the sizes are those of the operations themselves, whichever they are. Cost: some
    /// microseconds an operation.
    ///
    /// # Errors
    /// If even the addresses do not suffice.
    pub fn sizes(
        &self,
        device: &Device,
        precision: Precision,
        fp8: Option<&Arc<Fp8Scales>>,
        (batch, seq_len): (usize, usize),
    ) -> Result<(Vec<UnitPasses>, usize), ModelError> {
        let parameters = Parameters::zeros(self.table(), device, Category::Parameters)?;
        let rehearsal = Rehearsal { model: self, device, precision, fp8, parameters: &parameters };
        let before = rehearsal.in_use();
        let Batch { inputs, targets } = Batch::zeros(device, batch, seq_len)?;
        let token_bytes = (rehearsal.in_use() - before) / 2;
        let (mut sizes, mut input, mut targets) = (Vec::new(), inputs, Some(targets));
        for unit in 0..self.num_units() {
            let (found, output) = rehearsal.unit(unit, input, &mut targets)?;
            sizes.push(found);
            match output {
                Some(output) => input = output,
                None => break,
            }
        }
        Ok((sizes, token_bytes))
    }
}

struct Rehearsal<'a> {
    model: &'a Model,
    device: &'a Device,
    precision: Precision,
    fp8: Option<&'a Arc<Fp8Scales>>,
    parameters: &'a Parameters,
}

/// A unit's forward pass.
struct Recorded {
    tape: Tape,
    input: VarId,
    output: Option<Var>,
}

impl Rehearsal<'_> {
    fn in_use(&self) -> usize {
        self.device.memory().usage(Category::Activations).current
    }

    /// What `pass` returns, the most in use while it ran, and its operations.
    fn watch<T>(&self, pass: impl FnOnce() -> Result<T, ModelError>) -> Result<(T, usize, u64), ModelError> {
        let operations = self.device.num_operations();
        self.device.memory().restart_peaks();
        let made = pass()?;
        let peak = self.device.memory().usage(Category::Activations).peak;
        Ok((made, peak, self.device.num_operations() - operations))
    }

    /// The sizes of a unit that reads `input`, and its output; none from the head, which takes the targets.
    fn unit(
        &self,
        unit: usize,
        input: Tensor,
        targets: &mut Option<Tensor>,
    ) -> Result<(UnitPasses, Option<Tensor>), ModelError> {
        let is_token = input.dtype() == DType::U32;
        let input_bytes = if is_token { 0 } else { self.bytes_of(&input)? };
        let base = self.in_use() - input_bytes;
        let (input_shape, input_dtype) = (input.shape(), input.dtype());
        let targets_shape = targets.as_ref().map(Tensor::shape);
        let (mut pass, forward_peak, forward_operations) =
            self.watch(|| self.forward(unit, input, targets))?;
        let all = self.in_use();
        let made = pass.output.as_ref().map(|output| pass.tape.take_output(output)).transpose()?;
        let output = made.as_ref().map_or(Ok(0), |made| self.bytes_of(made))?;
        // The output is the next unit's from here on.
        let base_of_backward = base + output;
        pass.tape.keep_products();
        let products = self.in_use() - base_of_backward;
        let (_, renewal_peak, renewal_operations) =
            self.watch(|| Ok(pass.tape.recompute(self.parameters)?))?;
        let grad = made.as_ref().map(|made| self.empty(made.shape(), made.dtype())).transpose()?;
        let (_, backward_peak, backward_operations) = self.watch(|| {
            let mut sink = CountingSink { device: self.device, target: None };
            let output = pass.output.as_ref().map(Var::id);
            Ok(pass.tape.backward(self.parameters, output.zip(grad), &mut sink)?)
        })?;
        let grad = pass.tape.take_grad(pass.input);
        let input_grad = grad.map_or(Ok(0), |grad| self.bytes_of(&grad))?;
        drop(pass);
        // Tokens are not counted, so they are there before.
        let targets = targets_shape.map(|shape| self.empty(shape, DType::U32)).transpose()?;
        let base_of_tokens = self.in_use();
        let input = self.empty(input_shape, input_dtype)?;
        let base_of_halves = if is_token { self.in_use() } else { base_of_tokens };
        let sizes = UnitPasses {
            input: input_bytes,
            output,
            input_grad,
            record: all - base_of_backward,
            products,
            forward_peak: forward_peak - base,
            renewal_peak: renewal_peak - base_of_backward,
            backward_peak: backward_peak - base_of_backward,
            forward_operations,
            backward_operations,
            renewal_operations,
            ..self.halves(unit, input, targets, base_of_halves)?
        };
        Ok((sizes, made))
    }

    /// What the halves of backward take where they run apart, beside `base` bytes.
    fn halves(
        &self,
        unit: usize,
        input: Tensor,
        mut targets: Option<Tensor>,
        base: usize,
    ) -> Result<UnitPasses, ModelError> {
        let mut pass = self.forward(unit, input, &mut targets)?;
        let made = pass.output.as_ref().map(|output| pass.tape.take_output(output)).transpose()?;
        let grad = made.map(|made| self.empty(made.shape(), made.dtype())).transpose()?;
        let (_, input_half_peak, input_half_operations) = self.watch(|| {
            let output = pass.output.as_ref().map(Var::id);
            Ok(pass.tape.backward_input(self.parameters, output.zip(grad))?)
        })?;
        drop(pass.tape.take_grad(pass.input));
        let halved = self.in_use() - base;
        let (_, weight_half_peak, weight_half_operations) = self.watch(|| {
            let mut sink = CountingSink { device: self.device, target: None };
            Ok(pass.tape.backward_weight(self.parameters, &mut sink)?)
        })?;
        Ok(UnitPasses {
            halved,
            input_half_peak: input_half_peak - base,
            weight_half_peak: weight_half_peak - base,
            input_half_operations,
            weight_half_operations,
            ..UnitPasses::default()
        })
    }

    /// Forward of a unit on a tape of its own.
    fn forward(
        &self,
        unit: usize,
        input: Tensor,
        targets: &mut Option<Tensor>,
    ) -> Result<Recorded, ModelError> {
        let mut tape = Tape::new(self.device, Recording::On, self.precision).with_fp8(self.fp8.cloned());
        let input = tape.input(input);
        let place = input.id();
        let output = match self.model.units()[unit] {
            Unit::Head { .. } => {
                let targets = tape.input(targets.take().expect("a model has one head"));
                self.model.forward_loss(&mut tape.recorder(self.parameters), input, targets)?;
                None
            }
            _ => Some(self.model.forward(unit, &mut tape.recorder(self.parameters), input)?),
        };
        Ok(Recorded { tape, input: place, output })
    }

    fn empty(&self, shape: Shape, dtype: DType) -> Result<Tensor, DeviceError> {
        self.device.empty(shape, dtype, Category::Activations)
    }

    /// What the device counts for a tensor.
    fn bytes_of(&self, tensor: &Tensor) -> Result<usize, DeviceError> {
        let before = self.in_use();
        let _like = self.empty(tensor.shape(), tensor.dtype())?;
        Ok(self.in_use() - before)
    }
}

/// Takes gradients and forgets them.
struct CountingSink<'a> {
    device: &'a Device,
    target: Option<Tensor>,
}

impl GradSink for CountingSink<'_> {
    fn target(&mut self, span: &ParameterSpan) -> Result<GradTarget<'_>, DeviceError> {
        let target = self.device.empty(span.shape, DType::F32, Category::Gradients)?;
        // Nothing is to be cleared first.
        Ok(GradTarget { view: self.target.insert(target).view_mut(), accumulate: true })
    }

    fn grad_ready(&mut self, _: &ParameterSpan) {
        self.target = None;
    }
}
