use super::pass::{Pass, PassKind};
use serde::{Deserialize, Serialize};

/// Ticks that a pass or a message may take at most.
pub const TICKS_MAX: u64 = 1 << 40;

/// What the passes of a stage take for a microbatch. Times are in ticks, whatever a tick is; activations in any unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StageCosts {
    /// Forward.
    pub forward: u64,
    /// The half of backward that makes the gradient of the input.
    pub backward_input: u64,
    /// The half of backward that makes the gradients of the weights. Backward takes both halves' time.
    pub backward_weight: u64,
    /// An update of the stage's weights.
    pub update: u64,
    /// What forward keeps until the end of backward.
    pub activation: u64,
    /// What of it is kept after the input half until the end of the weight half.
    pub weight_activation: u64,
}

impl StageCosts {
    /// A stage of which activations are counted as microbatches, all of which stay until the weight half.
    pub const fn of(forward: u64, backward_input: u64, backward_weight: u64) -> StageCosts {
        StageCosts {
            forward,
            backward_input,
            backward_weight,
            update: 0,
            activation: 1,
            weight_activation: 1,
        }
    }

    /// Ticks of all passes for a microbatch, updates aside.
    pub const fn total(&self) -> u64 {
        self.forward + self.backward_input + self.backward_weight
    }
}

/// Costs of the stages of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Costs {
    stages: Vec<StageCosts>,
    send: u64,
}

/// Costs that no pipeline has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{what} is {found}; it must be from {min} to {max}. Give times in longer or shorter ticks, or memory in another measure"
)]
#[expect(missing_docs, reason = "the names say it")]
pub struct CostsError {
    pub what: String,
    pub found: u64,
    pub min: u64,
    pub max: u64,
}

impl Costs {
    /// Costs by stage, and the ticks that a result takes to another rank. Forward and the input half take at least a tick.
    pub fn new(stages: Vec<StageCosts>, send: u64) -> Result<Costs, CostsError> {
        let check = |what: &str, found: u64, min: u64, max: u64| match (min..=max).contains(&found) {
            true => Ok(()),
            false => Err(CostsError { what: what.to_owned(), found, min, max }),
        };
        for (stage, costs) in stages.iter().enumerate() {
            for (what, found, min, max) in [
                ("the time of forward", costs.forward, 1, TICKS_MAX),
                ("the time of backward's input half", costs.backward_input, 1, TICKS_MAX),
                ("the time of backward's weight half", costs.backward_weight, 0, TICKS_MAX),
                ("the time of the update", costs.update, 0, TICKS_MAX),
                ("what forward keeps", costs.activation, 0, TICKS_MAX),
                ("what stays of that after the input half", costs.weight_activation, 0, costs.activation),
            ] {
                check(&format!("{what} of stage {stage}"), found, min, max)?;
            }
        }
        check("the time of a message between stages", send, 0, TICKS_MAX)?;
        Ok(Costs { stages, send })
    }

    /// The same for every stage, and messages that take no time: what papers reckon with.
    pub fn equal(num_stages: usize, stage: StageCosts) -> Result<Costs, CostsError> {
        Costs::new(vec![stage; num_stages], 0)
    }

    /// By stage.
    pub fn stages(&self) -> &[StageCosts] {
        &self.stages
    }

    /// Ticks from the end of a pass until its result is at hand on another rank.
    pub fn send(&self) -> u64 {
        self.send
    }

    pub(super) fn ticks(&self, pass: Pass) -> u64 {
        let stage = &self.stages[pass.stage];
        match pass.kind {
            PassKind::Forward => stage.forward,
            PassKind::Backward => stage.backward_input + stage.backward_weight,
            PassKind::BackwardInput => stage.backward_input,
            PassKind::BackwardWeight => stage.backward_weight,
            PassKind::Update => stage.update,
        }
    }

    /// What a pass adds to the activations that its rank holds, and what it takes from them.
    pub(super) fn activations(&self, pass: Pass) -> (u64, u64) {
        let stage = &self.stages[pass.stage];
        match pass.kind {
            PassKind::Forward => (stage.activation, 0),
            PassKind::Backward => (0, stage.activation),
            PassKind::BackwardInput => (0, stage.activation - stage.weight_activation),
            PassKind::BackwardWeight => (0, stage.weight_activation),
            PassKind::Update => (0, 0),
        }
    }
}
