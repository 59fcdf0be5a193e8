use crate::action::{Action, Keep, StateClass, StateOf};
use crate::program::{Chain, Program, ZeroStage};

/// Where a class of state lives between its uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Tier {
    /// On the device.
    #[default]
    Device,
    /// In the host's memory.
    Host,
    /// On a disk.
    Disk,
}

impl Tier {
    /// Every place, from the nearest to the device.
    pub const ALL: [Tier; 3] = [Tier::Device, Tier::Host, Tier::Disk];

    /// Name in plans.
    pub const fn name(self) -> &'static str {
        match self {
            Tier::Device => "device",
            Tier::Host => "host",
            Tier::Disk => "disk",
        }
    }
}

/// Where state lives between its uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Offload {
    /// The optimizer's state; elsewhere than on the device with ZeRO from the first stage on. There the host updates.
    pub optimizer: Tier,
    /// Shards of parameters, with the third stage.
    pub parameters: Tier,
    /// Shards of reduced gradients, from the second stage on; on disk with one microbatch.
    pub gradients: Tier,
    /// What forward passes keep for backward.
    pub activations: Tier,
    /// How many units' activations leave: of those that [keep](crate::Chain::keeps) some the first, which wait longest for their
    /// backward pass.
    pub num_units: usize,
    /// How many uses of a class ahead of its own use state begins to be fetched.
    pub prefetch: usize,
}

impl Default for Offload {
    /// Everything stays on the device; of activations that do not, all leave.
    fn default() -> Self {
        let [optimizer, parameters, gradients, activations] = [Tier::Device; 4];
        Offload { optimizer, parameters, gradients, activations, num_units: usize::MAX, prefetch: 1 }
    }
}

impl Offload {
    /// Where a class lives.
    pub fn tier(&self, class: StateClass) -> Tier {
        match class {
            StateClass::Optimizer => self.optimizer,
            StateClass::Parameters => self.parameters,
            StateClass::Gradients => self.gradients,
            StateClass::Activations => self.activations,
        }
    }

    /// The same, but that `class` lives at `tier`.
    pub fn with(mut self, class: StateClass, tier: Tier) -> Self {
        match class {
            StateClass::Optimizer => self.optimizer = tier,
            StateClass::Parameters => self.parameters = tier,
            StateClass::Gradients => self.gradients = tier,
            StateClass::Activations => self.activations = tier,
        }
        self
    }

    /// Whether a program moves a class: what lives on a disk, and activations wherever they live. What else lives with the
    /// host is worked with there.
    pub fn moves(&self, class: StateClass) -> bool {
        match self.tier(class) {
            Tier::Device => false,
            Tier::Host => class == StateClass::Activations,
            Tier::Disk => true,
        }
    }
}

/// Has state fetched ahead of its use and evicted after (Ren et al., "ZeRO-Offload", 2021; Rajbhandari et al., "ZeRO-Infinity",
/// 2021, section 6; Pudipeddi et al., "Training large neural networks with constant memory", L2L, 2020).
///
/// Activations of a microbatch are evicted only if more passes lie before their use than it takes to fetch them ahead.
///
/// # Panics
/// If something is to be offloaded that is not apart from what operations read: parameters and gradients that are not
/// sharded, or gradients of several microbatches.
pub fn offload(program: Program, offload: Offload) -> Program {
    let Program { mut outline, mut actions } = program;
    let (stage, num_microbatches) = (outline.zero_stage, outline.num_microbatches);
    let is_away = |class| offload.tier(class) != Tier::Device;
    assert!(
        !is_away(StateClass::Optimizer) || stage >= ZeroStage::One,
        "updates are apart from the first stage on"
    );
    assert!(
        !is_away(StateClass::Parameters) || stage == ZeroStage::Three,
        "parameters are shared out in the third stage"
    );
    assert!(
        !is_away(StateClass::Gradients) || stage >= ZeroStage::Two,
        "sums are shared out from the second stage on"
    );
    let is_one = num_microbatches == 1;
    assert!(
        is_one || offload.gradients != Tier::Disk,
        "gradients of several microbatches are summed in memory"
    );
    let is_step = |action: Action| matches!(action, Action::Step { .. });
    let reads_shard = |action: Action| matches!(action, Action::Unshard { .. } | Action::Step { .. });
    let prefetch = offload.prefetch;
    for class in StateClass::ALL.into_iter().filter(|&class| offload.moves(class)) {
        actions = match class {
            StateClass::Optimizer => swap_around(&actions, class, is_step, prefetch),
            StateClass::Parameters => swap_around(&actions, class, reads_shard, prefetch),
            StateClass::Gradients => swap_around(&evict_reduced(&actions), class, is_step, prefetch),
            StateClass::Activations => swap_activations(&actions, &outline.chain, &offload),
        };
        outline.offloaded.push(class);
    }
    Program { outline, actions }
}

/// The places of the actions that work with a class.
fn uses(actions: &[Action], is_use: impl Fn(Action) -> bool) -> Vec<usize> {
    (0..actions.len()).filter(|&place| is_use(actions[place])).collect()
}

/// Fetches before each use, as early as the use `prefetch` places before it but after the last use of the same state, and
/// evicts after it. What is fetched for the first uses of updates goes along with the end of the passes.
fn swap_around(
    actions: &[Action],
    class: StateClass,
    is_use: impl Fn(Action) -> bool,
    prefetch: usize,
) -> Vec<Action> {
    let uses = uses(actions, is_use);
    let last_pass = actions.iter().rposition(|action| action.is_pass()).unwrap_or(0);
    let mut before: Vec<Vec<Action>> = vec![Vec::new(); actions.len() + 1];
    let mut after: Vec<Vec<Action>> = vec![Vec::new(); actions.len() + 1];
    for (index, &place) in uses.iter().enumerate() {
        let unit = actions[place].unit();
        let state = StateOf { class, unit, microbatch: 0 };
        let ahead = match index.checked_sub(prefetch) {
            Some(earlier) => uses[earlier],
            None => uses[0].min(last_pass),
        };
        let is_step = matches!(actions[place], Action::Step { .. });
        let ahead = if is_step && index >= prefetch { ahead.max(last_pass.min(place)) } else { ahead };
        let previous = uses[..index].iter().rev().find(|&&earlier| actions[earlier].unit() == unit);
        // A gradient is evicted when it was reduced.
        let reduced = (class == StateClass::Gradients)
            .then(|| actions.iter().position(|action| *action == Action::Evict(state)))
            .flatten();
        let earliest = previous.copied().max(reduced).map_or(0, |place| place + 1);
        before[ahead.max(earliest).min(place)].push(Action::Fetch(state));
        // What the update has made may be gathered at once.
        let is_gathered = is_step && actions.get(place + 1) == Some(&Action::Unshard { unit });
        after[place + usize::from(is_gathered)].push(Action::Evict(state));
    }
    let mut swapped = Vec::with_capacity(actions.len() + 2 * uses.len());
    for (place, &action) in actions.iter().enumerate() {
        swapped.append(&mut before[place]);
        swapped.push(action);
        swapped.append(&mut after[place]);
    }
    swapped
}

/// Evicts each reduced gradient when the next reduction begins: by then it has had time to end.
fn evict_reduced(actions: &[Action]) -> Vec<Action> {
    let mut evicted = Vec::with_capacity(actions.len() * 2);
    let mut reduced = None;
    let evict = |unit: usize| Action::Evict(StateOf { class: StateClass::Gradients, unit, microbatch: 0 });
    for &action in actions {
        let is_step = matches!(action, Action::Step { .. });
        evicted.extend(reduced.filter(|_| is_step).map(evict));
        evicted.push(action);
        match action {
            Action::ReduceGrad { unit } => evicted.extend(reduced.replace(unit).map(evict)),
            Action::Step { .. } => reduced = None,
            _ => (),
        }
    }
    evicted
}

/// Evicts what forward passes of the first units keep, of those that keep something, and fetches it `prefetch` passes before it
/// is used.
fn swap_activations(actions: &[Action], chain: &Chain, offload: &Offload) -> Vec<Action> {
    let Offload { num_units, prefetch, .. } = *offload;
    let mut is_moved = vec![false; chain.num_units];
    let kept = (0..chain.num_units).filter(|&unit| chain.keeps(unit));
    kept.take(num_units).for_each(|unit| is_moved[unit] = true);
    let passes = uses(actions, Action::is_pass);
    let mut before: Vec<Vec<Action>> = vec![Vec::new(); actions.len()];
    let mut after: Vec<Vec<Action>> = vec![Vec::new(); actions.len()];
    for (pass, &place) in passes.iter().enumerate() {
        let Action::Forward { unit, microbatch, keep } = actions[place] else { continue };
        if keep == Keep::Nothing || !is_moved[unit] {
            continue;
        }
        let is_use = |&place: &usize| {
            let action = actions[place];
            let is_later = !matches!(action, Action::Forward { .. });
            is_later && (action.unit(), action.microbatch()) == (unit, Some(microbatch))
        };
        let later = &passes[pass + 1..];
        let Some(distance) = later.iter().position(is_use) else { continue };
        if distance > 2 * prefetch {
            let state = StateOf { class: StateClass::Activations, unit, microbatch };
            after[place].push(Action::Evict(state));
            before[later[distance - prefetch]].push(Action::Fetch(state));
        }
    }
    let mut swapped = Vec::with_capacity(2 * actions.len());
    for (place, &action) in actions.iter().enumerate() {
        swapped.append(&mut before[place]);
        swapped.push(action);
        swapped.append(&mut after[place]);
    }
    swapped
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lowering::{Sharding, shard};
    use crate::single;

    fn text(zero_stage: ZeroStage, choice: Offload) -> String {
        let sharding = Sharding { zero_stage, prefetch: 0, keep_after_forward: false };
        let program = offload(shard(single::program(&Chain::of_units(3), 1), sharding), choice).to_string();
        program.lines().collect::<Vec<_>>().join(", ")
    }

    #[test]
    fn the_optimizer_is_fetched_an_update_ahead() {
        let choice = Offload { optimizer: Tier::Disk, ..Offload::default() };
        let expected = "units 3 microbatches 1 zero_stage 1 offload optimizer, F 0 0, F 1 0, F 2 0, B 2 0, REDUCE_GRAD 2, \
                        B 1 0, REDUCE_GRAD 1, FETCH optimizer 0, B 0 0, REDUCE_GRAD 0, FETCH optimizer 1, STEP 0, \
                        UNSHARD 0, EVICT optimizer 0, FETCH optimizer 2, STEP 1, UNSHARD 1, EVICT optimizer 1, STEP 2, \
                        UNSHARD 2, EVICT optimizer 2";
        assert_eq!(text(ZeroStage::One, choice), expected);
    }

    #[test]
    fn activations_leave_for_as_long_as_it_pays() {
        let choice = Offload { activations: Tier::Host, ..Offload::default() };
        let program =
            offload(single::program(&Chain { unkept: vec![0, 3], ..Chain::of_units(4) }, 1), choice)
                .to_string();
        let expected = "units 4 microbatches 1 offload activations unkept 0 unkept 3, F 0 0, F 1 0, EVICT activations 1 0, F 2 0, F 3 0, B 3 0, \
                        REDUCE_GRAD 3, FETCH activations 1 0, B 2 0, REDUCE_GRAD 2, B 1 0, REDUCE_GRAD 1, B 0 0, \
                        REDUCE_GRAD 0, STEP 0, STEP 1, STEP 2, STEP 3";
        assert_eq!(program.lines().collect::<Vec<_>>().join(", "), expected);
    }
}
