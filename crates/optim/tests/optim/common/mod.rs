//! Optimizers of small units, unsharded or with shards on simulated ranks.

use std::ops::Range;
use std::sync::{Arc, Barrier, Mutex};
use trireme_base::RandomKey;
use trireme_optim::{
    MuonScale, Optimizer, OptimizerName, OptimizerOptions, OptimizerSettings, ShardOps, StepSettings,
    Unsharded,
};
use trireme_tensor::{
    Device, DeviceError, DeviceOptions, Initial, Parameter, ParameterInfo, ParameterTable, View, ViewMut,
};

/// An optimizer with its settings.
pub(crate) type OptimizerCase = (OptimizerName, OptimizerSettings);

pub(crate) const DEFAULT: OptimizerSettings = OptimizerSettings::DEFAULT;

pub(crate) const MUON: OptimizerSettings =
    OptimizerSettings { muon_scale: MuonScale::Original, muon_adamw_lr_scale: 0.5, ..DEFAULT };

/// Every optimizer, and Adafactor with two settings.
pub(crate) const OPTIMIZER_CASES: [OptimizerCase; 11] = [
    (OptimizerName::AdamW, DEFAULT),
    (OptimizerName::Adam, OptimizerSettings { nu: 0.7, ..DEFAULT }),
    (OptimizerName::Sgd, OptimizerSettings { nesterov: true, ..DEFAULT }),
    (OptimizerName::Lion, DEFAULT),
    (OptimizerName::Adafactor, DEFAULT),
    (OptimizerName::Adafactor, OptimizerSettings { clip_threshold: 0.5, relative_step: false, ..DEFAULT }),
    (OptimizerName::Lamb, DEFAULT),
    (OptimizerName::Lars, OptimizerSettings { trust_coefficient: 0.02, ..DEFAULT }),
    (OptimizerName::Muon, MUON),
    (OptimizerName::OneBitAdam, OptimizerSettings { freeze_step: 2, ..DEFAULT }),
    (OptimizerName::ZeroOneAdam, OptimizerSettings { var_update_scaler: 1, ..DEFAULT }),
];

pub(crate) fn options((name, settings): OptimizerCase) -> OptimizerOptions {
    OptimizerOptions { settings, ..OptimizerOptions::new(name) }
}

/// Returns three units. The second has matrices and vectors, and its leaves have `leaf_len` elements.
pub(crate) fn table(leaf_len: usize) -> Arc<ParameterTable> {
    let mut table = ParameterTable::default();
    table.begin_unit("embedding");
    table.add(Parameter::embedding("wte.weight", &[40, 24], Initial::ZEROS));
    table.begin_unit("block");
    table.add(Parameter::vector("norm.weight", 24, Initial::ZEROS));
    // Depending on `leaf_len`, rows are longer or shorter than leaves.
    table.add(Parameter::matrix("in.weight", &[24, 72], Initial::ZEROS));
    table.add(Parameter::vector("in.bias", 72, Initial::ZEROS));
    table.add(Parameter::balance("router.bias", 7));
    table.add(Parameter::matrix("out.weight", &[18 * leaf_len, 48], Initial::ZEROS));
    table.add(Parameter::vector("out.bias", 1, Initial::ZEROS));
    table.begin_unit("head");
    table.add(Parameter::vector("norm_f.weight", 24, Initial::ZEROS));
    Arc::new(table)
}

pub(crate) fn device(num_threads: usize) -> Device {
    Device::cpu(DeviceOptions { num_threads, ..DeviceOptions::default() }).unwrap()
}

/// Returns normal values for a unit. Their sizes differ so much between leaves that a sum of their squares depends on its order.
pub(crate) fn random(len: usize, name: &str, size: f32) -> Vec<f32> {
    let mut values = vec![0.0; len];
    RandomKey::new(3, name).fill_normal(&mut values, size);
    for (index, values) in values.chunks_mut(16).enumerate() {
        let scale = 0.5_f32.powi((index * 5 % 19) as i32);
        values.iter_mut().for_each(|value| *value *= scale);
    }
    values
}

/// Exchanges vectors between the threads that simulate a group of ranks.
pub(crate) struct Exchange {
    barrier: Barrier,
    slots: Mutex<Vec<Vec<f64>>>,
}

impl Exchange {
    pub(crate) fn new(num_ranks: usize) -> Arc<Self> {
        let slots = Mutex::new(vec![Vec::new(); num_ranks]);
        Arc::new(Exchange { barrier: Barrier::new(num_ranks), slots })
    }
}

/// The [`ShardOps`] of one rank. Counts its calls, and records the bits of all sums.
pub(crate) struct Shards {
    pub(crate) exchange: Arc<Exchange>,
    pub(crate) rank: usize,
    pub(crate) num_sums: usize,
    pub(crate) sum_bits: Vec<u64>,
    pub(crate) num_gathers: usize,
}

impl Shards {
    pub(crate) fn new(exchange: &Arc<Exchange>, rank: usize) -> Self {
        Shards { exchange: Arc::clone(exchange), rank, num_sums: 0, sum_bits: Vec::new(), num_gathers: 0 }
    }

    fn all_gather(&self, own: Vec<f64>) -> Vec<Vec<f64>> {
        self.exchange.slots.lock().unwrap()[self.rank] = own;
        self.exchange.barrier.wait();
        let all = self.exchange.slots.lock().unwrap().clone();
        self.exchange.barrier.wait();
        all
    }
}

impl ShardOps for Shards {
    type Error = DeviceError;

    fn sum(&mut self, values: ViewMut<'_>) -> Result<(), DeviceError> {
        self.num_sums += 1;
        let (device, len) = (device(1), values.shape().num_elements());
        let mut all = self.all_gather(device.read(values.as_view()).unwrap());
        assert!(all.iter().all(|other| other.len() == len), "ranks sum as many values");
        while all.len() > 1 {
            let add = |pair: &[Vec<f64>]| match pair {
                [left, right] => left.iter().zip(right).map(|(left, right)| left + right).collect(),
                rest => rest[0].clone(),
            };
            all = all.chunks(2).map(add).collect();
        }
        device.upload(&all[0], values);
        self.sum_bits.extend(all[0].iter().map(|value| value.to_bits()));
        Ok(())
    }

    fn gather(&mut self, whole: ViewMut<'_>, part: Range<usize>) -> Result<(), DeviceError> {
        self.num_gathers += 1;
        let device = device(1);
        let mut values: Vec<f32> = device.read(whole.as_view()).unwrap();
        let mut own = vec![part.start as f64];
        own.extend(values[part].iter().map(|&value| f64::from(value)));
        for other in self.all_gather(own) {
            let first = other[0] as usize;
            for (index, value) in other[1..].iter().enumerate() {
                values[first + index] = *value as f32;
            }
        }
        device.upload(&values, whole);
        Ok(())
    }

    fn gather_matrix(
        &mut self,
        info: &ParameterInfo,
        _: View<'_>,
        _: ViewMut<'_>,
    ) -> Result<(), DeviceError> {
        unreachable!("{} is not cut", info.name)
    }
}

/// Parameters of all units.
pub(crate) type Weights = Vec<Vec<f32>>;

pub(crate) fn weights(table: &ParameterTable) -> Weights {
    table.units().iter().map(|unit| random(unit.num_elements, &unit.name, 0.5)).collect()
}

/// Runs one step for all units of an optimizer of `parts`.
pub(crate) fn step<S: ShardOps<Error = DeviceError>>(
    optimizer: &mut Optimizer,
    device: &Device,
    weights: &mut Weights,
    grads: &Weights,
    parts: &[Range<usize>],
    settings: StepSettings,
    shards: &mut S,
) {
    for (unit, part) in parts.iter().enumerate() {
        let shape = [part.len()].into();
        let parameters = ViewMut::from_f32s(&mut weights[unit][part.clone()], shape);
        let grads = View::from_f32s(&grads[unit][part.clone()], shape);
        optimizer.step_unit(device, unit, parameters, grads, settings, shards).unwrap();
    }
}

/// Returns the gradients of one step.
pub(crate) fn grads(table: &ParameterTable, step: u64, size: f32) -> Weights {
    let grads =
        |unit: &trireme_tensor::UnitInfo| random(unit.num_elements, &format!("{} {step}", unit.name), size);
    table.units().iter().map(grads).collect()
}

/// Returns the weights after some steps on a single rank.
pub(crate) fn train(
    options: &OptimizerOptions,
    table: &Arc<ParameterTable>,
    num_steps: u64,
    grad_size: f32,
) -> Weights {
    let device = device(1);
    let parts = table.shards(0, 1);
    let mut optimizer = Optimizer::new(options, table, &parts, &device).unwrap();
    let mut weights = weights(table);
    for number in 1..=num_steps {
        let settings = StepSettings { step: number, lr: 0.01, grad_scale: 0.5 };
        let grads = grads(table, number, grad_size);
        step(&mut optimizer, &device, &mut weights, &grads, &parts, settings, &mut Unsharded);
    }
    weights
}

pub(crate) fn bits(weights: &[f32]) -> Vec<u32> {
    weights.iter().map(|weight| weight.to_bits()).collect()
}
