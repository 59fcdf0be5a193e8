use std::ops::Range;
use std::sync::Arc;
use trireme_tensor::{
    AdamWStep, Category, Device, DeviceError, MomentumStep, ParameterTable, Parameters, Shape, View, ViewMut,
};

/// Settings of AdamW (Loshchilov, Hutter 2019).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWSettings {
    /// Decay rate of the first moment.
    pub beta1: f32,
    /// Decay rate of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub epsilon: f32,
}

/// Settings of stochastic gradient descent with momentum.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SgdSettings {
    /// Decay rate of the velocity; 0 for none.
    pub momentum: f32,
    /// Nesterov's variant.
    pub nesterov: bool,
}

/// Which optimizer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum OptimizerKind {
    /// AdamW: two values of state a parameter.
    AdamW(AdamWSettings),
    /// SGD with momentum: one value of state a parameter.
    Sgd(SgdSettings),
}

/// What changes from step to step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepSettings {
    /// Number of the update, from 1: skipped steps do not count, for they leave the moments as they are.
    pub step: u64,
    /// Learning rate.
    pub lr: f64,
    /// Factor for every gradient: mean over microbatches, loss scale, and clipping.
    pub grad_scale: f64,
}

/// An optimizer with its state for every unit.
#[derive(Debug)]
pub struct Optimizer {
    kind: OptimizerKind,
    weight_decay: f32,
    /// For each unit, runs of parameters that decay alike.
    runs: Vec<Vec<Run>>,
    states: Vec<(&'static str, Parameters)>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Run {
    range: Range<usize>,
    decays: bool,
}

impl Optimizer {
    /// An optimizer of `parts` of the units' flat buffers, whose state is all zeros. `decay_norms_and_biases` extends
    /// weight decay from matrices to vectors.
    ///
    /// # Panics
    /// If there is not one part for each unit.
    pub fn new(
        kind: OptimizerKind,
        weight_decay: f32,
        decay_norms_and_biases: bool,
        table: &Arc<ParameterTable>,
        parts: &[Range<usize>],
        device: &Device,
    ) -> Result<Self, DeviceError> {
        let names: &[&'static str] = match kind {
            OptimizerKind::AdamW(_) => &["exp_avg", "exp_avg_sq"],
            OptimizerKind::Sgd(_) => &["momentum_buffer"],
        };
        let zeros =
            |&name| Ok((name, Parameters::zeros_of(table, parts.to_vec(), device, Category::Optimizer)?));
        let states = names.iter().map(zeros).collect::<Result<_, DeviceError>>()?;
        let runs = |(unit, part)| runs(table, unit, part, decay_norms_and_biases);
        let runs = parts.iter().enumerate().map(runs).collect();
        Ok(Optimizer { kind, weight_decay, runs, states })
    }

    /// The state, by name: for AdamW `exp_avg` and `exp_avg_sq`, for SGD `momentum_buffer`.
    pub fn states(&self) -> &[(&'static str, Parameters)] {
        &self.states
    }

    /// The state, to load.
    pub fn states_mut(&mut self) -> &mut [(&'static str, Parameters)] {
        &mut self.states
    }

    /// Updates this optimizer's part of a unit, from its gradient.
    ///
    /// # Panics
    /// If parameters or gradient have another length than the part.
    pub fn step_unit(
        &mut self,
        device: &Device,
        unit: usize,
        mut parameters: ViewMut<'_>,
        grads: View<'_>,
        settings: StepSettings,
    ) {
        let len = self.states[0].1.parts()[unit].len();
        assert_eq!((parameters.shape().num_elements(), grads.shape().num_elements()), (len, len));
        let StepSettings { step, lr, grad_scale } = settings;
        let (lr, grad_scale) = (lr as f32, grad_scale as f32);
        for Run { range, decays } in &self.runs[unit] {
            let weight_decay = if *decays { self.weight_decay } else { 0.0 };
            let (offset, shape) = (range.start, Shape::from([range.len()]));
            let (parameters, grads) =
                (parameters.reborrow().into_part(offset, shape), grads.part(offset, shape));
            match (self.kind, &mut self.states[..]) {
                (
                    OptimizerKind::AdamW(AdamWSettings { beta1, beta2, epsilon }),
                    [(_, first), (_, second)],
                ) => {
                    let first = first.flat_mut(unit).into_part(offset, shape);
                    let second = second.flat_mut(unit).into_part(offset, shape);
                    let step = AdamWStep { lr, beta1, beta2, epsilon, weight_decay, grad_scale, step };
                    device.adamw(parameters, grads, (first, second), step);
                }
                (OptimizerKind::Sgd(SgdSettings { momentum, nesterov }), [(_, velocity)]) => {
                    let velocity = velocity.flat_mut(unit).into_part(offset, shape);
                    let step = MomentumStep { lr, momentum, nesterov, weight_decay, grad_scale, step };
                    device.momentum(parameters, grads, velocity, step);
                }
                _ => unreachable!("the states are those of the kind"),
            }
        }
    }
}

/// Neighbouring parameters of a part of a unit that decay alike, as one run: matrices do, vectors (norms, biases) only
/// if asked. Ranges are within the part.
fn runs(table: &ParameterTable, unit: usize, part: &Range<usize>, decay_norms_and_biases: bool) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for info in &table.parameters()[table.units()[unit].parameters.clone()] {
        let Some(held) = info.held(part) else { continue };
        let first = info.offset + held.start - part.start;
        let range = first..first + held.len();
        let decays = decay_norms_and_biases || info.shape.dims().len() >= 2;
        match runs.last_mut() {
            Some(last) if last.decays == decays => last.range.end = range.end,
            _ => runs.push(Run { range, decays }),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;
    use trireme_tensor::DeviceOptions;

    fn table() -> Arc<ParameterTable> {
        let mut table = ParameterTable::default();
        table.begin_unit("block");
        table.add("norm.weight", &[2]);
        table.add("fc.weight", &[2, 2]);
        table.add("fc2.weight", &[1, 2]);
        table.add("fc2.bias", &[1]);
        Arc::new(table)
    }

    fn run(kind: OptimizerKind, decay_all: bool, num_steps: u64) -> Vec<f32> {
        let device = Device::cpu(DeviceOptions { num_threads: 1, ..DeviceOptions::default() }).unwrap();
        let table = table();
        let mut parameters = Parameters::zeros(&table, &device, Category::Parameters).unwrap();
        parameters.flat_mut(0).f32s().fill(1.0);
        // In two parts, of which one begins within a matrix.
        for part in [0..4, 4..9] {
            let parts = [part.clone()];
            let mut optimizer = Optimizer::new(kind, 0.5, decay_all, &table, &parts, &device).unwrap();
            for step in 1..=num_steps {
                let settings = StepSettings { step, lr: 0.1, grad_scale: 0.5 };
                let shape = [part.len()].into();
                let own = parameters.flat_mut(0).into_part(part.start, shape);
                let grads = View::from_f32s(&[2.0; 9][..part.len()], shape);
                optimizer.step_unit(&device, 0, own, grads, settings);
            }
        }
        parameters.flat(0).f32s().to_vec()
    }

    #[test]
    fn adamw_decays_matrices_only() {
        let kind = OptimizerKind::AdamW(AdamWSettings { beta1: 0.9, beta2: 0.95, epsilon: 0.0 });
        // With constant gradients the bias-corrected update is exactly lr.
        let plain = 1.0 - 2.0 * 0.1;
        let decayed = ((1.0 - 0.05) - 0.1) * (1.0 - 0.05) - 0.1;
        let close = |a: f32, b: f32| (a - b).abs() < 1e-6;
        let found = run(kind, false, 2);
        assert!(found[..2].iter().chain(&found[8..]).all(|&x| close(x, plain)), "{found:?}");
        assert!(found[2..8].iter().all(|&x| close(x, decayed)), "{found:?}");
        assert!(run(kind, true, 2).iter().all(|&x| close(x, decayed)));
    }

    #[test]
    fn sgd_carries_momentum_as_pytorch_does() {
        let close = |found: &[f32], expected: f32| {
            assert!((found[0] - expected).abs() < 1e-6, "{found:?} {expected}")
        };
        let kind = |nesterov| OptimizerKind::Sgd(SgdSettings { momentum: 0.9, nesterov });
        // velocity 1, then 1.9.
        close(&run(kind(false), false, 2), 1.0 - 0.1 - 0.19);
        close(&run(kind(true), false, 2), 1.0 - 0.19 - 0.1 * (1.0 + 0.9 * 1.9));
        close(&run(OptimizerKind::Sgd(SgdSettings { momentum: 0.0, nesterov: false }), false, 2), 0.8);
    }

    #[test]
    fn neighbours_that_decay_alike_are_one_run() {
        let ranges = |part: Range<usize>| -> Vec<Range<usize>> {
            runs(&table(), 0, &part, false).into_iter().map(|run| run.range).collect()
        };
        assert_eq!(ranges(0..9), [0..2, 2..8, 8..9]);
        assert_eq!(ranges(1..4), [0..1, 1..3]);
        assert_eq!(runs(&table(), 0, &(0..9), true).len(), 1);
    }
}
