//! What the config leaves open, decided so that a step fits.

use anyhow::Result;
use trireme_base::{Bytes, UnitPasses};
use trireme_planner::{BatchMemory, DryRun, MemoryBounds, Placing, StateSizes, fit_keeps, fit_places};
use trireme_schedule::{Action, Chain, Keep, Program, StateClass, Tier};
use trireme_train::config::{self, ActivationCheckpointMode, Config};
use trireme_train::{StepChoices, step_programs};

/// Classes that the config leaves to a plan.
pub(crate) fn open_classes(config: &Config) -> Vec<StateClass> {
    let offload = config.offload();
    let is_open = |class: &StateClass| {
        let tier = match class {
            StateClass::Optimizer => offload.optimizer,
            StateClass::Parameters => offload.parameters,
            StateClass::Gradients => offload.gradients,
            StateClass::Activations => offload.activations,
        };
        tier == config::Tier::Auto
    };
    StateClass::ALL.into_iter().filter(is_open).collect()
}

/// A step with something open.
pub(super) struct Planning<'a> {
    pub(super) config: &'a Config,
    pub(super) chain: &'a Chain,
    pub(super) sizes: &'a StateSizes,
    pub(super) passes: &'a [UnitPasses],
    pub(super) batch: &'a [BatchMemory],
    pub(super) bounds: MemoryBounds,
    /// The worker's place in the pipeline.
    pub(super) rank: usize,
    /// What choices take.
    pub(super) run: &'a dyn Fn(&StepChoices) -> Result<DryRun>,
}

impl Planning<'_> {
    /// What fits, and why that; where nothing does, what takes least.
    ///
    /// Recomputation comes first: it asks for no other memory. Where even the most of it does not suffice, state leaves, and
    /// then no more is made again than is needed beside that.
    pub(super) fn choose(&self, given: StepChoices) -> Result<(StepChoices, Vec<String>)> {
        let is_kept_open = self.config.activation_checkpoint().mode == ActivationCheckpointMode::Auto;
        let open = open_classes(self.config);
        let (mut choices, mut reasons) = (given, Vec::new());
        let mut fits = false;
        if is_kept_open {
            fits = self.choose_keeps(&mut choices, &mut reasons)?;
        }
        if !fits && !open.is_empty() {
            self.choose_places(&mut choices, &open, &mut reasons)?;
            if is_kept_open {
                self.choose_keeps(&mut choices, &mut reasons)?;
            }
        }
        Ok((choices, reasons))
    }

    fn program(&self, choices: StepChoices) -> Program {
        let programs = step_programs(self.config, self.chain, &choices);
        programs.expect("the choices that were given make programs, and so do others").swap_remove(self.rank)
    }

    /// The least recomputation that fits; whether something does.
    fn choose_keeps(&self, choices: &mut StepChoices, reasons: &mut Vec<String>) -> Result<bool> {
        let (choice, prediction) = fit_keeps(self.passes, self.batch, self.bounds, |keeps| {
            (self.run)(&StepChoices { keeps: keeps.to_vec(), ..choices.clone() })
        })?;
        let fits = self.bounds.hold(&prediction);
        if fits {
            let forward = self.passes.iter().map(|passes| passes.forward_cost.operations());
            let forward = forward.fold(0, u64::saturating_add);
            let share = 100.0 * choice.operations as f64 / forward.max(1) as f64;
            reasons.push(format!(
                "recomputation, for at most {} per worker: {}; this repeats {share:.1} % of the forward pass and \
                 takes {}",
                Bytes(self.bounds.device.min(self.bounds.machine) as u64),
                describe_keeps(&choice.keeps),
                Bytes(prediction.total() as u64)
            ));
        }
        choices.keeps = choice.keeps;
        Ok(fits)
    }

    /// The places of the open classes with which least moves.
    fn choose_places(
        &self,
        choices: &mut StepChoices,
        open: &[StateClass],
        reasons: &mut Vec<String>,
    ) -> Result<()> {
        let with = |state| StepChoices { state, ..choices.clone() };
        let program = |state| self.program(with(state));
        let run = |state| Ok::<_, anyhow::Error>((self.run)(&with(state))?.prediction);
        let placing = fit_places(self.sizes, (choices.state, open), self.bounds, program, run)?;
        if self.bounds.hold(&placing.prediction) {
            reasons.push(self.describe_places(&placing, open, &program(placing.state)));
        }
        choices.state = placing.state;
        Ok(())
    }

    /// `offload, for at most 512.00MiB a worker, the optimizer's state lives with the host; …`.
    fn describe_places(&self, placing: &Placing, open: &[StateClass], program: &Program) -> String {
        let Placing { state, traffic, prediction } = placing;
        let of_class = |&class: &StateClass| match state.of(class).tier {
            Tier::Device => None,
            tier if class == StateClass::Activations => {
                let units = moved_units(program);
                let (Some(first), Some(last)) = (units.first(), units.last()) else { return None };
                let (ahead, passes) =
                    (state.fetch_ahead, if state.fetch_ahead == 1 { "pass" } else { "passes" });
                Some(format!(
                    "activations of units {first}-{last} ({}, from their forward pass until {ahead} {passes} before \
                     their use)",
                    tier.name()
                ))
            }
            tier => Some(format!("{} ({})", class.name(), tier.name())),
        };
        let away: Vec<String> = open.iter().filter_map(of_class).collect();
        let moved = match away.is_empty() {
            true => "everything stays on the device".to_owned(),
            false => format!(
                "{}; each step moves {} to and from the host, and {} to and from disk",
                away.join(", "),
                Bytes(traffic.host),
                Bytes(traffic.disk)
            ),
        };
        format!(
            "offload, for at most {} per worker: {moved}; takes {} on the device and {} of host memory",
            Bytes(self.bounds.device.min(self.bounds.machine) as u64),
            Bytes(prediction.total() as u64),
            Bytes(prediction.host as u64)
        )
    }
}

/// The units whose activations leave, in order.
fn moved_units(program: &Program) -> Vec<usize> {
    let moved = |action: &Action| match action {
        Action::Evict(state) if state.class == StateClass::Activations => Some(state.unit),
        _ => None,
    };
    let mut units: Vec<usize> = program.actions.iter().filter_map(moved).collect();
    units.sort_unstable();
    units.dedup();
    units
}

/// `units 0-3 keep all, units 4-6 keep their input`.
fn describe_keeps(keeps: &[Keep]) -> String {
    let mut runs: Vec<(usize, usize, Keep)> = Vec::new();
    for (unit, &keep) in keeps.iter().enumerate() {
        match runs.last_mut() {
            Some((_, last, same)) if *same == keep => *last = unit,
            _ => runs.push((unit, unit, keep)),
        }
    }
    let run = |&(first, last, keep): &(usize, usize, Keep)| {
        let units =
            if first == last { format!("unit {first} keeps") } else { format!("units {first}-{last} keep") };
        format!("{units} {}", keep.name())
    };
    runs.iter().map(run).collect::<Vec<_>>().join(", ")
}
