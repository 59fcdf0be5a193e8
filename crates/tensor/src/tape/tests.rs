//! The halves of backward, together and separately.

use super::*;
use crate::declaration::{Initial, Parameter};
use crate::device::{DeviceError, DeviceOptions};
use crate::kernels::{Activation, AttentionRule};
use crate::parameter_table::{ParameterSpan, ParameterTable};
use crate::parameters::Parameters;
use std::sync::Arc;
use trireme_base::{Category, RandomKey};

/// Enough rows that the logits of the vocabulary take two chunks.
const ROWS: usize = 3072;
const COLS: usize = 8;
const VOCABULARY: usize = 3000;

/// Accumulates gradients in one flat buffer.
struct Grads {
    sum: Parameters,
    num_written: usize,
}

impl GradSink for Grads {
    fn target(&mut self, span: &ParameterSpan) -> Result<GradTarget<'_>> {
        let view = self.sum.flat_mut(span.unit).into_part(span.offset, span.shape);
        Ok(GradTarget { view, accumulate: true })
    }

    fn grad_ready(&mut self, _: &ParameterSpan) {
        self.num_written += 1;
    }
}

/// An embedding, a block and the loss on one tape.
struct Network {
    device: Device,
    embedding: Arc<Embedding>,
    norm: Arc<Norm>,
    qkv: Arc<Linear>,
    attention: Arc<Attention>,
    hidden: Arc<Linear>,
    projection: Arc<Linear>,
    head: Arc<LossHead>,
    parameters: Parameters,
    num_parameters: usize,
}

impl Network {
    fn new(activation: InputActivation) -> Self {
        let device = Device::cpu(DeviceOptions { num_threads: 2, ..DeviceOptions::default() }).unwrap();
        let mut table = ParameterTable::default();
        table.begin_unit("all");
        let projected = if activation == InputActivation::Gated(Activation::Silu) { COLS / 2 } else { COLS };
        let embedding = Embedding {
            tokens: table.add(Parameter::embedding("tokens", &[VOCABULARY, COLS], Initial::ZEROS)),
            positions: Some(table.add(Parameter::embedding("positions", &[ROWS, COLS], Initial::ZEROS))),
        };
        let (weight, bias) = (
            table.add(Parameter::vector("norm.weight", COLS, Initial::ZEROS)),
            Some(table.add(Parameter::vector("norm.bias", COLS, Initial::ZEROS))),
        );
        let norm = Norm { weight, bias, weight_offset: 0.0, epsilon: 1e-5, is_centered: true };
        let qkv = Linear {
            weight: table.add(Parameter::matrix("qkv.weight", &[COLS, 3 * COLS], Initial::ZEROS)),
            layout: WeightLayout::InputsFirst,
            bias: None,
            activation: InputActivation::Identity,
        };
        let weight = table.add(Parameter::matrix("hidden.weight", &[COLS, COLS], Initial::ZEROS));
        let hidden = Linear { weight, ..qkv };
        let projection = Linear {
            weight: table.add(Parameter::matrix("projection.weight", &[COLS, projected], Initial::ZEROS)),
            layout: WeightLayout::OutputsFirst,
            bias: Some(table.add(Parameter::vector("projection.bias", COLS, Initial::ZEROS))),
            activation,
        };
        let head = LossHead {
            weight: table.add(Parameter::embedding("head.weight", &[VOCABULARY, COLS], Initial::ZEROS)),
            soft_cap: None,
        };
        let num_parameters = table.parameters().len();
        let mut parameters = Parameters::zeros(&table.into(), &device, Category::Parameters).unwrap();
        device
            .fill(parameters.flat_mut(0), |values| {
                RandomKey::new(3, "parameters").fill_normal(values, 0.3);
                Ok::<_, DeviceError>(())
            })
            .unwrap();
        let attention = Attention::new(2, 2, COLS / 2, AttentionRule::causal(COLS / 2));
        Network {
            device,
            embedding: embedding.into(),
            norm: norm.into(),
            qkv: qkv.into(),
            attention: attention.into(),
            hidden: hidden.into(),
            projection: projection.into(),
            head: head.into(),
            parameters,
            num_parameters,
        }
    }

    /// Returns the bits of the gradients of all parameters, and the loss.
    fn run(&self, precision: Precision, apart: bool) -> (Vec<u32>, u64) {
        let tokens = |first: u32| {
            let mut tensor = self.device.empty([1, ROWS].into(), DType::U32, Category::Activations).unwrap();
            let values = (first..first + ROWS as u32).map(|token| token * 7 % VOCABULARY as u32);
            self.device.upload(&values.collect::<Vec<_>>(), tensor.view_mut());
            tensor
        };
        let mut tape = Tape::new(&self.device, Recording::On, precision);
        let parameters = &self.parameters;
        let (ids, targets) = (tape.input(tokens(0)), tape.input(tokens(1)));
        let mut recorder = tape.recorder(parameters);
        let x = recorder.apply(&self.embedding, [ids]).unwrap();
        let normed = recorder.apply(&self.norm, [&x]).unwrap();
        let qkv = recorder.apply(&self.qkv, [normed]).unwrap();
        let attended = recorder.apply(&self.attention, [qkv]).unwrap();
        let hidden = recorder.apply(&self.hidden, [attended]).unwrap();
        let y = recorder.apply(&self.projection, (hidden, x)).unwrap();
        let last = recorder.apply(&self.norm, [y]).unwrap();
        recorder.apply_loss(&self.head, (last, targets), 1.0).unwrap();
        let sum = Parameters::zeros(parameters.table(), &self.device, Category::Gradients).unwrap();
        let mut grads = Grads { sum, num_written: 0 };
        if apart {
            tape.backward_input(parameters, None).unwrap();
            assert_eq!(grads.num_written, 0);
            tape.backward_weight(parameters, &mut grads).unwrap();
        } else {
            tape.backward(parameters, None, &mut grads).unwrap();
        }
        // The normalization is applied twice.
        assert_eq!(grads.num_written, self.num_parameters + 2);
        let bits = self.device.read(grads.sum.flat(0)).unwrap();
        let loss = tape.loss().unwrap().read(&self.device).unwrap().sum;
        drop(tape);
        (bits, loss.to_bits())
    }
}

#[test]
fn separate_backward_halves_give_the_same_bits() {
    for activation in [
        InputActivation::Identity,
        InputActivation::Elementwise(Activation::Gelu),
        InputActivation::Gated(Activation::Silu),
    ] {
        let network = Network::new(activation);
        assert_eq!(network.head.chunks(ROWS).count(), 2);
        for precision in [Precision::F32, Precision::Bf16] {
            let whole = network.run(precision, false);
            assert!(whole.0.iter().any(|&bits| bits != 0));
            assert!(network.run(precision, true) == whole, "{activation:?} {precision}");
        }
        let in_use = network.device.memory().usage(Category::Activations).current;
        assert_eq!(in_use, 0, "nothing is left");
    }
}

#[test]
fn constants_get_no_gradient() {
    let network = Network::new(InputActivation::Identity);
    let device = &network.device;
    let zeros = || device.zeros([3, COLS].into(), DType::F32, Category::Activations).unwrap();
    for (is_data, num_products) in [(false, 2), (true, 1)] {
        let mut tape = Tape::new(device, Recording::On, Precision::F32);
        let x = if is_data { tape.constant(zeros()) } else { tape.input(zeros()) };
        let y = tape.recorder(&network.parameters).apply(&network.hidden, [x]).unwrap();
        let sum = Parameters::zeros(network.parameters.table(), device, Category::Gradients).unwrap();
        let mut grads = Grads { sum, num_written: 0 };
        device.reset_cost();
        tape.backward(&network.parameters, [(y.id(), zeros())], &mut grads).unwrap();
        let found = device.cost();
        assert_eq!(found.product_operations as usize, num_products * 2 * 3 * COLS * COLS);
    }
}
