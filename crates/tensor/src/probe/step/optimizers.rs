//! Updates of optimizers, for a whole buffer of parameters.

use super::Step;
use crate::device::{DeviceError, FactoredMoments, UpdatePass};
use crate::kernels::{
    AdamWStep, FactoredStep, LarsStep, LionStep, MomentumStep, MuonStep, Pieces, RmsStep, StateDType, Update,
};
use crate::optimizer::OptimizerState;
use crate::tensor::Tensor;
use std::sync::Arc;
use trireme_base::{Category, DType};

const ADAMW: AdamWStep = AdamWStep {
    lr: 1e-4,
    beta1: 0.9,
    beta2: 0.95,
    nu: 1.0,
    epsilon: 1e-8,
    weight_decay: 0.1,
    grad_scale: 1.0,
    step: 1,
};

const RMS: RmsStep = RmsStep { lr: 1e-4, mixing: 0.05, keep: 1.0, grad_scale: 1.0 };

struct Rule {
    name: &'static str,
    update: Update,
    /// Of each state, whether it is a second moment.
    states: &'static [bool],
    dtype: StateDType,
}

const BASE: Rule =
    Rule { name: "adamw", update: Update::AdamW(ADAMW), states: &[false, true], dtype: StateDType::F32 };

/// All rules; of those with two phases both.
fn rules() -> Vec<Rule> {
    let momentum = MomentumStep {
        lr: 1e-3,
        momentum: 0.9,
        nesterov: false,
        weight_decay: 0.1,
        grad_scale: 1.0,
        step: 2,
    };
    let lion = LionStep { lr: 1e-4, beta1: 0.9, beta2: 0.99, weight_decay: 0.1, grad_scale: 1.0 };
    let lars = LarsStep { lr: 1e-3, momentum: 0.9, weight_decay: 0.1, grad_scale: 1.0 };
    let muon = MuonStep { momentum: 0.95, nesterov: true, grad_scale: 1.0 };
    Vec::from([
        BASE,
        Rule { name: "adamw, bf16 states", dtype: StateDType::Bf16, ..BASE },
        Rule { name: "adamw, int8 states", dtype: StateDType::Int8, ..BASE },
        Rule { name: "adam", update: Update::Adam(ADAMW), ..BASE },
        Rule { name: "sgd", update: Update::Momentum(momentum), states: &[false], ..BASE },
        Rule { name: "lion", update: Update::Lion(lion), states: &[false], ..BASE },
        Rule { name: "lamb: moments", update: Update::LambMoments(ADAMW), ..BASE },
        Rule { name: "lamb: update", update: Update::Lamb(ADAMW), ..BASE },
        Rule { name: "lars: norms", update: Update::Norms { grad_scale: 1.0 }, states: &[], ..BASE },
        Rule { name: "lars: update", update: Update::Lars(lars), states: &[false], ..BASE },
        Rule { name: "adafactor: moment", update: Update::RmsMoment(RMS), states: &[true], ..BASE },
        Rule { name: "muon: momentum", update: Update::MuonMomentum(muon), states: &[false], ..BASE },
    ])
}

impl Step<'_> {
    /// The updates of `num` parameters. A step calls one of the optimizers: AdamW's count, for it is the default.
    pub(super) fn optimizers(&mut self, part: &str, num: usize, calls: f64) -> Result<(), DeviceError> {
        for rule in rules() {
            let calls = if rule.name == BASE.name { calls } else { 0.0 };
            self.optimizer(&rule, part, num, calls)?;
        }
        Ok(())
    }

    fn optimizer(&mut self, rule: &Rule, part: &str, num: usize, calls: f64) -> Result<(), DeviceError> {
        let name = format!("{}: {part}", rule.name);
        if !name.contains(self.only) {
            return Ok(());
        }
        let device = &self.probe.device;
        let pieces = Arc::new(Pieces::whole(num));
        let (mut weights, gradients) = (self.tensor([num])?, self.tensor([num])?);
        let mut states = Vec::new();
        for &is_square in rule.states {
            let mut state = OptimizerState::zeros(&pieces, rule.dtype, is_square, device)?;
            state.write(&pieces, 0..pieces.as_slice().len(), device, &vec![0.5; num]);
            states.push(state);
        }
        let shape = [pieces.as_slice().len(), 2].into();
        let mut sums = device.empty(shape, DType::F64, Category::Optimizer)?;
        let updates = Arc::new(vec![rule.update]);
        self.kernel((&name, calls), &[num], |_| {
            let sums = Some(sums.view_mut());
            let pass = UpdatePass { pieces: &pieces, updates: &updates, scales: None, noise: 1, sums };
            device.update(pass, weights.view_mut(), gradients.view(), &mut states);
        })
    }

    /// What optimizers do to a matrix of a feed-forward layer, and no other kernel does.
    pub(super) fn matrix_updates(&mut self) -> Result<(), DeviceError> {
        let (rows, cols) = (self.sizes.hidden, self.sizes.intermediate);
        let num = rows * cols;
        let device = &self.probe.device;
        let (mut weights, gradients) = (self.tensor([rows, cols])?, self.tensor([rows, cols])?);
        let pieces = Arc::new(Pieces::whole(num));
        let (mut row_moments, mut col_moments) = (self.tensor([rows])?, self.tensor([cols])?);
        device.upload(&vec![1.0_f32; rows], row_moments.view_mut());
        device.upload(&vec![1.0_f32; cols], col_moments.view_mut());
        let mut row_mean = device.empty([1].into(), DType::F64, Category::Optimizer)?;
        device.upload(&[1.0_f64], row_mean.view_mut());
        let mut lr = self.tensor([1])?;
        device.upload(&[1e-4_f32], lr.view_mut());
        let step = FactoredStep { offset: 0, keep: 1.0, grad_scale: 1.0 };
        let shape = [rows, cols];
        self.kernel(("adafactor: matrix update", 0.0), &shape, |_| {
            let (rows, cols, row_mean) = (row_moments.view(), col_moments.view(), row_mean.view());
            let moments = FactoredMoments { rows, cols, row_mean };
            let step = (step, lr.view());
            device.factored_update(&pieces, step, moments, weights.view_mut(), gradients.view());
        })?;
        let mut matrix = self.tensor(shape)?;
        let precision = self.precision;
        let reset = |matrix: &mut Tensor| device.copy(gradients.view(), matrix.view_mut());
        self.kernel(("muon: orthogonalize", 0.0), &shape, |start| {
            reset(&mut matrix);
            *start = std::time::Instant::now();
            device.orthogonalize(matrix.view_mut(), 5, precision)
        })
    }
}
