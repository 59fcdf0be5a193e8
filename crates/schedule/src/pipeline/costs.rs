use super::pass::{Pass, PassKind};
use serde::{Deserialize, Serialize};

/// Maximum ticks of a pass or a message.
pub const TICKS_MAX: u64 = 1 << 40;

/// Costs of the passes of a stage for one microbatch. Times are in ticks of any length; activations are in any unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StageCosts {
    /// Ticks of forward.
    pub forward: u64,
    /// Ticks of the input half of backward, which computes the gradient of the input.
    pub backward_input: u64,
    /// Ticks of the weight half of backward, which computes the gradients of the weights. A full backward takes the time of both halves.
    pub backward_weight: u64,
    /// Ticks of an update of the stage's weights.
    pub update: u64,
    /// Activations that forward keeps until the end of backward.
    pub activation: u64,
    /// The part of `activation` that stays after the input half until the end of the weight half.
    pub weight_activation: u64,
}

impl StageCosts {
    /// Creates costs in which each microbatch counts as one activation, all of which stays until the end of the weight half. Updates take
    /// no time.
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

    /// Returns the ticks of all passes for one microbatch, without updates.
    pub const fn total(&self) -> u64 {
        self.forward + self.backward_input + self.backward_weight
    }
}

/// Costs of the stages of a model and of messages between ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Costs {
    stages: Vec<StageCosts>,
    send_ticks: u64,
}

/// An error for costs outside their range.
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
    /// Creates costs from the costs of each stage, and the ticks `send` that a result takes to another rank.
    ///
    /// # Errors
    /// If a time is above [`TICKS_MAX`], forward or the input half takes no tick, `activation` is above [`TICKS_MAX`], or
    /// `weight_activation` is above `activation`.
    pub fn new(stages: Vec<StageCosts>, send: u64) -> Result<Costs, CostsError> {
        let check = |what: &str, found: u64, min: u64, max: u64| {
            if (min..=max).contains(&found) {
                Ok(())
            } else {
                Err(CostsError { what: what.to_owned(), found, min, max })
            }
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
        Ok(Costs { stages, send_ticks: send })
    }

    /// Creates equal costs for every stage, and messages that take no time, as papers assume.
    ///
    /// # Errors
    /// As [`Costs::new`].
    pub fn equal(num_stages: usize, stage: StageCosts) -> Result<Costs, CostsError> {
        Costs::new(vec![stage; num_stages], 0)
    }

    /// Returns the costs by stage.
    pub fn stages(&self) -> &[StageCosts] {
        &self.stages
    }

    /// Returns the ticks from the end of a pass until its result is available on another rank.
    pub fn send_ticks(&self) -> u64 {
        self.send_ticks
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

    /// Returns the activations that a pass adds to its rank, and the activations that it frees.
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
