//! Reverse-mode differentiation over fused operations.
//!
//! A tape records one unit's forward pass for one microbatch. Backward walks the record in reverse; a parameter's
//! gradient goes to the [`GradSink`] at the moment it is complete, and each saved value is given back as soon as
//! nothing needs it. Each operation's backward has an input half and a weight half. They run one after the other
//! ([`Tape::backward`]), or all input halves before all weight halves ([`Tape::backward_input`], [`Tape::backward_weight`]), with
//! the same bits.

mod attention;
mod embedding;
mod linear;
mod loss;
mod norm;
#[cfg(test)]
mod tests;

pub use attention::{KeyValueCache, RotaryTable};
pub use embedding::Embedding;
pub use linear::{InputActivation, Linear, WeightLayout};
pub use loss::LossHead;
pub use norm::Norm;

use crate::device::{Device, DeviceError};
use crate::fp8::Fp8Scales;
use crate::parameter_table::ParameterSpan;
use crate::parameters::ParameterSource;
use crate::precision::Precision;
use crate::tensor::{Tensor, View, ViewMut};
use std::sync::Arc;
use trireme_base::DType;

/// A value on a tape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Var(usize);

/// Where the gradient of a span of parameters goes.
#[derive(Debug)]
pub struct GradTarget<'a> {
    /// Memory of the span's shape.
    pub view: ViewMut<'a>,
    /// Whether it already holds a part of this microbatch's gradient, to be added to.
    pub accumulate: bool,
}

/// Takes gradients of parameters during backward.
pub trait GradSink {
    /// Where to put a contribution to the gradient of `span`.
    ///
    /// # Errors
    /// If there is no memory for it.
    fn target(&mut self, span: &ParameterSpan) -> Result<GradTarget<'_>, DeviceError>;

    /// The contribution is written.
    fn grad_ready(&mut self, span: &ParameterSpan);
}

#[derive(Debug)]
enum Node {
    Embedding(embedding::EmbeddingNode),
    Norm(norm::NormNode),
    Linear(linear::LinearNode),
    Attention(attention::AttentionNode),
    Loss(loss::LossNode),
}

/// The half of an operation's backward that makes gradients of parameters. It has what it needs, but for values of the tape.
#[derive(Debug)]
enum WeightHalf {
    Embedding(embedding::EmbeddingWeights),
    Norm(norm::NormWeights),
    Linear(linear::LinearWeights),
    Loss(loss::LossWeights),
}

impl WeightHalf {
    /// The values of the tape that it reads.
    fn reads(&self) -> [Option<Var>; 2] {
        match self {
            WeightHalf::Embedding(half) => [Some(half.ids()), None],
            WeightHalf::Norm(half) => [Some(half.x()), None],
            WeightHalf::Linear(half) => [half.x(), None],
            WeightHalf::Loss(half) => half.reads().map(Some),
        }
    }

    fn run(self, cx: &mut Backward<'_>, sink: &mut dyn GradSink) -> Result<(), DeviceError> {
        match self {
            WeightHalf::Embedding(half) => half.run(cx, sink),
            WeightHalf::Norm(half) => half.run(cx, sink),
            WeightHalf::Linear(half) => half.run(cx, sink).map(drop),
            WeightHalf::Loss(half) => half.run(cx, sink),
        }
    }
}

/// Whether a tape saves what backward needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recording {
    /// Forward will be followed by backward.
    On,
    /// Forward only: evaluation and generation.
    Off,
}

/// The record of one unit's forward pass.
#[derive(Debug)]
pub struct Tape {
    device: Device,
    recording: Recording,
    precision: Precision,
    fp8: Option<Arc<Fp8Scales>>,
    values: Values,
    grads: Vec<Option<Tensor>>,
    nodes: Vec<Node>,
    /// What the input halves have left to do, in order.
    weight_halves: Vec<WeightHalf>,
    /// By [`Var`], between the halves: a weight half reads the value.
    is_read: Vec<bool>,
    loss_sum: Option<f64>,
}

/// Values by [`Var`]; empty where they were taken or have had their last use.
#[derive(Debug, Default)]
struct Values(Vec<Option<Tensor>>);

impl Values {
    fn get(&self, var: Var) -> View<'_> {
        self.0[var.0].as_ref().expect("values live until their last use").view()
    }

    fn get_mut(&mut self, var: Var) -> ViewMut<'_> {
        self.0[var.0].as_mut().expect("values live until their last use").view_mut()
    }

    fn take(&mut self, var: Var) -> Tensor {
        self.0[var.0].take().expect("values live until their last use")
    }
}

/// A vector of parameters as operations compute with it: in f32, rounded to their precision.
enum Vector<'a> {
    Stored(View<'a>),
    Rounded(Tensor),
}

impl<'a> Vector<'a> {
    fn new(device: &Device, precision: Precision, stored: View<'a>) -> Result<Self, DeviceError> {
        if precision == Precision::F32 && stored.dtype() == DType::F32 {
            return Ok(Vector::Stored(stored));
        }
        let mut rounded = device.activation(stored.shape())?;
        device.round(precision, stored, rounded.view_mut());
        Ok(Vector::Rounded(rounded))
    }

    fn view(&self) -> View<'_> {
        match self {
            Vector::Stored(view) => *view,
            Vector::Rounded(tensor) => tensor.view(),
        }
    }
}

/// What backward of one operation works with.
struct Backward<'a> {
    device: &'a Device,
    precision: Precision,
    fp8: Option<&'a Fp8Scales>,
    parameters: &'a dyn ParameterSource,
    values: &'a mut Values,
    grads: &'a mut [Option<Tensor>],
}

impl Backward<'_> {
    fn take_grad(&mut self, var: Var) -> Tensor {
        self.grads[var.0].take().expect("a gradient arrives before the operation that needs it")
    }

    /// Gives `grad` to `var`: as its gradient, or added to it.
    fn add_grad(&mut self, var: Var, grad: Tensor) {
        match &mut self.grads[var.0] {
            Some(sum) => self.device.add_assign(sum.view_mut(), grad.view()),
            slot => *slot = Some(grad),
        }
    }

    /// Adds what a later operation still reads to the gradient of `var`.
    fn add_grad_copied(&mut self, var: Var, grad: &Tensor) -> Result<(), DeviceError> {
        match &mut self.grads[var.0] {
            Some(sum) => self.device.add_assign(sum.view_mut(), grad.view()),
            slot => {
                let mut copy = self.device.activation_of(grad.shape(), grad.dtype())?;
                self.device.convert(grad.view(), copy.view_mut());
                *slot = Some(copy);
            }
        }
        Ok(())
    }
}

/// Lets `write` put the gradient of a span where the sink wants it, or add it there.
fn write_grad(
    sink: &mut dyn GradSink,
    span: &ParameterSpan,
    write: impl FnOnce(ViewMut<'_>, bool) -> Result<(), DeviceError>,
) -> Result<(), DeviceError> {
    let target = sink.target(span)?;
    write(target.view, target.accumulate)?;
    sink.grad_ready(span);
    Ok(())
}

impl Tape {
    /// An empty tape, whose operations work in `precision`.
    pub fn new(device: &Device, recording: Recording, precision: Precision) -> Self {
        Tape {
            device: device.clone(),
            recording,
            precision,
            fp8: None,
            values: Values::default(),
            grads: Vec::new(),
            nodes: Vec::new(),
            weight_halves: Vec::new(),
            is_read: Vec::new(),
            loss_sum: None,
        }
    }

    /// The same tape, whose linear layers work in fp8 as far as `scales` has them. If the tape records, amaxes go there.
    ///
    /// # Panics
    /// If the tape's precision is not bf16, in which products of fp8 are exact.
    pub fn with_fp8(self, scales: Option<Arc<Fp8Scales>>) -> Self {
        assert!(scales.is_none() || self.precision == Precision::Bf16, "fp8 is emulated in bf16");
        Tape { fp8: scales, ..self }
    }

    /// Forgets everything but its capacity, so that a reused tape allocates nothing.
    pub fn clear(&mut self) {
        self.values.0.clear();
        self.grads.clear();
        self.nodes.clear();
        self.weight_halves.clear();
        self.is_read.clear();
        self.loss_sum = None;
    }

    /// Puts a value on the tape.
    pub fn input(&mut self, tensor: Tensor) -> Var {
        self.values.0.push(Some(tensor));
        self.grads.push(None);
        Var(self.values.0.len() - 1)
    }

    /// Takes a value off the tape: the unit's output, which no operation of this tape reads again.
    ///
    /// # Panics
    /// If it was taken before.
    pub fn take_value(&mut self, var: Var) -> Tensor {
        self.values.take(var)
    }

    /// Shows `visit` all memory that the tape holds: what backward reads. To move it elsewhere for a while.
    pub fn for_each_memory(&mut self, mut visit: impl FnMut(&mut Tensor)) {
        self.values.0.iter_mut().flatten().for_each(&mut visit);
        for node in &mut self.nodes {
            match node {
                Node::Norm(node) => visit(&mut node.statistics),
                Node::Attention(node) => visit(&mut node.log_sums),
                Node::Embedding(_) | Node::Linear(_) | Node::Loss(_) => (),
            }
        }
    }

    /// Gives back what is quickly made again from the rest: the results of normalisations. Backward needs
    /// [`recompute`](Tape::recompute) first.
    pub fn keep_products(&mut self) {
        for node in &self.nodes {
            if let Node::Norm(node) = node {
                node.give_back(&mut self.values);
            }
        }
    }

    /// Makes again what [`keep_products`](Tape::keep_products) has given back, with the same bits.
    pub fn recompute(&mut self, parameters: &dyn ParameterSource) -> Result<(), DeviceError> {
        for node in &mut self.nodes {
            if let Node::Norm(node) = node {
                node.recompute(&self.device, self.precision, parameters, &mut self.values)?;
            }
        }
        Ok(())
    }

    /// Takes the gradient of a value, if backward gave it one.
    pub fn take_grad(&mut self, var: Var) -> Option<Tensor> {
        self.grads[var.0].take()
    }

    /// Sum of the losses of all rows in nats: after forward without recording, after backward with it.
    pub fn loss_sum(&self) -> Option<f64> {
        self.loss_sum
    }

    /// Runs backward. `output` carries the gradient of the unit's output; `None` starts from the loss.
    pub fn backward(
        &mut self,
        parameters: &dyn ParameterSource,
        output: Option<(Var, Tensor)>,
        sink: &mut dyn GradSink,
    ) -> Result<(), DeviceError> {
        self.begin_backward(output);
        while let Some(node) = self.nodes.pop() {
            let cx = &mut self.backward_context(parameters);
            let output = match node {
                Node::Embedding(node) => node.backward(cx, sink)?,
                Node::Norm(node) => node.backward(cx, sink)?,
                Node::Linear(node) => node.backward(cx, sink)?,
                Node::Attention(node) => node.backward(cx)?,
                Node::Loss(node) => {
                    self.loss_sum = Some(node.backward(cx, sink)?);
                    continue;
                }
            };
            // Every reader of the value came later on the tape, and has been differentiated.
            self.values.0[output.0] = None;
        }
        Ok(())
    }

    /// Runs the input halves of backward: the gradient of what the unit reads is there then, and the loss. `output` is as for
    /// [`backward`](Tape::backward).
    ///
    /// What the weight halves read stays: inputs of linear layers and of normalisations, and the gradients of their results. A
    /// gradient that goes on along a residual is copied for them.
    pub fn backward_input(
        &mut self,
        parameters: &dyn ParameterSource,
        output: Option<(Var, Tensor)>,
    ) -> Result<(), DeviceError> {
        self.begin_backward(output);
        self.is_read.resize(self.values.0.len(), false);
        while let Some(node) = self.nodes.pop() {
            let cx = &mut self.backward_context(parameters);
            let (output, half) = match node {
                Node::Embedding(node) => {
                    let (output, half) = node.backward_input(cx);
                    (Some(output), Some(WeightHalf::Embedding(half)))
                }
                Node::Norm(node) => {
                    let (output, half) = node.backward_input(cx)?;
                    (Some(output), Some(WeightHalf::Norm(half)))
                }
                Node::Linear(node) => {
                    let (output, half) = node.backward_input(cx)?;
                    (Some(output), Some(WeightHalf::Linear(half)))
                }
                Node::Attention(node) => (Some(node.backward(cx)?), None),
                Node::Loss(node) => {
                    let (loss_sum, half) = node.backward_input(cx)?;
                    self.loss_sum = Some(loss_sum);
                    (None, Some(WeightHalf::Loss(half)))
                }
            };
            for var in half.iter().flat_map(WeightHalf::reads).flatten() {
                self.is_read[var.0] = true;
            }
            self.weight_halves.extend(half);
            // Every reader of the value came later on the tape.
            if let Some(output) = output.filter(|output| !self.is_read[output.0]) {
                self.values.0[output.0] = None;
            }
        }
        Ok(())
    }

    /// Runs the weight halves of backward, after [`backward_input`](Tape::backward_input).
    pub fn backward_weight(
        &mut self,
        parameters: &dyn ParameterSource,
        sink: &mut dyn GradSink,
    ) -> Result<(), DeviceError> {
        let mut halves = std::mem::take(&mut self.weight_halves);
        let cx = &mut self.backward_context(parameters);
        halves.drain(..).try_for_each(|half| half.run(cx, sink))?;
        self.weight_halves = halves;
        Ok(())
    }

    fn begin_backward(&mut self, output: Option<(Var, Tensor)>) {
        if let Some((var, grad)) = output {
            self.grads[var.0] = Some(grad);
        }
    }

    fn backward_context<'a>(&'a mut self, parameters: &'a dyn ParameterSource) -> Backward<'a> {
        Backward {
            device: &self.device,
            precision: self.precision,
            fp8: self.fp8.as_deref(),
            parameters,
            values: &mut self.values,
            grads: &mut self.grads,
        }
    }

    fn record(&mut self, node: impl FnOnce() -> Node) {
        if self.recording == Recording::On {
            self.nodes.push(node());
        }
    }
}
