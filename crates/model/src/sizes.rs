//! What passes of units take, found by letting them run on a device that only counts.

use crate::error::ModelError;
use crate::model::{Batch, Model, Step, Unit};
use std::sync::Arc;
use trireme_base::{DType, UnitPasses};
use trireme_tensor::tape::Recording;
use trireme_tensor::{
    Category, Device, DeviceError, Fp8Scales, GradSink, GradTarget, ParameterSpan, Parameters, Precision,
    Tape, Tensor, Var,
};

impl Model {
    /// The sizes of every unit's passes over microbatches of `shape` (sequences, and tokens of each), and the bytes of one
    /// tensor of token ids of a microbatch.
    ///
    /// Each unit runs forward and backward once on the model's `device`, which must be one that [only
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
        let mut rehearsal = Rehearsal {
            model: self,
            device,
            precision,
            fp8,
            shape: (batch, seq_len),
            parameters: &parameters,
        };
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
    shape: (usize, usize),
    parameters: &'a Parameters,
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
        &mut self,
        unit: usize,
        input: Tensor,
        targets: &mut Option<Tensor>,
    ) -> Result<(UnitPasses, Option<Tensor>), ModelError> {
        let is_token = input.dtype() == DType::U32;
        let input_bytes = if is_token { 0 } else { self.bytes_of(&input)? };
        let base = self.in_use() - input_bytes;
        let mut tape = Tape::new(self.device, Recording::On, self.precision).with_fp8(self.fp8.cloned());
        let input = tape.input(input);
        let step = Step { parameters: self.parameters, shape: self.shape };
        let forward = || -> Result<Option<Var>, ModelError> {
            if let Unit::Head { .. } = self.model.units()[unit] {
                let targets = tape.input(targets.take().expect("a model has one head"));
                self.model.forward_loss(&mut tape, step, input, targets, 1.0)?;
                return Ok(None);
            }
            Ok(Some(self.model.forward(unit, &mut tape, step, input)?))
        };
        let (output, forward_peak, forward_operations) = self.watch(forward)?;
        let all = self.in_use();
        let made = output.map(|output| tape.take_value(output));
        let output_bytes = made.as_ref().map_or(Ok(0), |made| self.bytes_of(made))?;
        // The output is the next unit's from here on.
        let base_of_backward = base + output_bytes;
        tape.keep_products();
        let products = self.in_use() - base_of_backward;
        let (_, renewal_peak, renewal_operations) = self.watch(|| Ok(tape.recompute(self.parameters)?))?;
        let grad =
            made.as_ref().map(|made| self.device.empty(made.shape(), made.dtype(), Category::Activations));
        let grad = grad.transpose()?;
        let mut sink = CountingSink { device: self.device, target: None };
        let (_, backward_peak, backward_operations) =
            self.watch(|| Ok(tape.backward(self.parameters, output.zip(grad), &mut sink)?))?;
        let input_grad = tape.take_grad(input);
        tape.clear();
        let input_grad = input_grad.map_or(0, |grad| {
            let with = self.in_use();
            drop(grad);
            with - self.in_use()
        });
        let sizes = UnitPasses {
            input: input_bytes,
            output: output_bytes,
            input_grad,
            record: all - base_of_backward,
            products,
            forward_peak: forward_peak - base,
            renewal_peak: renewal_peak - base_of_backward,
            backward_peak: backward_peak - base_of_backward,
            forward_operations,
            backward_operations,
            renewal_operations,
        };
        Ok((sizes, made))
    }

    /// What the device counts for a tensor.
    fn bytes_of(&self, tensor: &Tensor) -> Result<usize, DeviceError> {
        let before = self.in_use();
        let _like = self.device.empty(tensor.shape(), tensor.dtype(), Category::Activations)?;
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
