/// Ticks that a pass or a message may take at most.
pub const TICKS_MAX: u64 = 1 << 40;

/// What the passes of a stage take for a microbatch. Times are in ticks, whatever a tick is; activations in any unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CostsError {
    /// A pass takes no time, or too much.
    #[error(
        "{what} of stage {stage} takes {ticks} ticks; it must be from {min} to {TICKS_MAX}: choose larger or smaller \
         ticks"
    )]
    Ticks {
        /// Stage.
        stage: usize,
        /// Which pass.
        what: &'static str,
        /// What was given.
        ticks: u64,
        /// The least that is possible.
        min: u64,
    },
    /// A message takes too long.
    #[error(
        "a message between stages takes {ticks} ticks; it may take at most {TICKS_MAX}: choose larger ticks"
    )]
    Send {
        /// What was given.
        ticks: u64,
    },
    /// More stays after the input half than was there, or too much.
    #[error(
        "stage {stage} keeps {activation} from forward and {weight_activation} of it after the input half; the \
         second must not exceed the first, and both may be at most {TICKS_MAX}: choose larger units"
    )]
    Activation {
        /// Stage.
        stage: usize,
        /// What forward keeps.
        activation: u64,
        /// What stays after the input half.
        weight_activation: u64,
    },
}

impl Costs {
    /// Costs by stage, and the ticks from the end of a pass until its result is at hand on another rank. Nothing is
    /// sent within a rank. Forward and the input half must take at least a tick.
    pub fn new(stages: Vec<StageCosts>, send: u64) -> Result<Costs, CostsError> {
        for (stage, costs) in stages.iter().enumerate() {
            let passes = [
                ("forward", costs.forward, 1),
                ("backward's input half", costs.backward_input, 1),
                ("backward's weight half", costs.backward_weight, 0),
                ("the update", costs.update, 0),
            ];
            let wrong = passes.into_iter().find(|&(_, ticks, min)| !(min..=TICKS_MAX).contains(&ticks));
            if let Some((what, ticks, min)) = wrong {
                return Err(CostsError::Ticks { stage, what, ticks, min });
            }
            let StageCosts { activation, weight_activation, .. } = *costs;
            if weight_activation > activation || activation > TICKS_MAX {
                return Err(CostsError::Activation { stage, activation, weight_activation });
            }
        }
        if send > TICKS_MAX {
            return Err(CostsError::Send { ticks: send });
        }
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

    /// Ticks of a pass.
    pub(super) fn ticks(&self, pass: super::Pass) -> u64 {
        use super::PassKind;
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
    pub(super) fn activations(&self, pass: super::Pass) -> (u64, u64) {
        use super::PassKind;
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
