//! Changes of a config that would fit into its memory.

use super::{Plan, Workers};
use std::path::Path;
use trireme_base::{Bytes, Category};
use trireme_schedule::StateClass;
use trireme_train::config::{ActivationCheckpointMode, Config, Tier, TrainingDtype};

/// How many changes are told.
const NUM_TOLD: usize = 3;

/// Where a config came from, so that it can be read again with changes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source<'a> {
    pub(crate) path: &'a Path,
    pub(crate) overrides: &'a [String],
    /// Workers, where another launcher has started them.
    pub(crate) world_size: Option<usize>,
}

/// Values for keys, which users may give as `--set`.
type Change = Vec<String>;

/// What a plan that does not fit takes, and what would fit in its place.
pub(crate) fn advice(
    source: Source<'_>,
    config: &Config,
    plan: &Plan,
    vocabulary_size: usize,
    workers: Workers,
) -> String {
    let (total, bound) = (plan.prediction.total(), plan.bound.unwrap_or(usize::MAX));
    let share =
        |category: Category| format!("{category} {}", Bytes(plan.prediction.at_peak.get(category) as u64));
    let shares: Vec<String> = Category::ALL.into_iter().map(share).collect();
    if plan.excess() == 0 {
        return host_advice(plan);
    }
    format!(
        "a step is predicted to take {} of worker {}'s memory, {} more than the {} that it may; at the peak, {}, these are {}\n{}",
        Bytes(total as u64),
        plan.rank,
        Bytes(plan.excess() as u64),
        Bytes(bound as u64),
        plan.prediction.moment(&plan.program),
        shares.join(", "),
        changes(source, config, (total, bound), vocabulary_size, workers)
    )
}

/// What a plan takes whose device suffices, but not the host's memory.
fn host_advice(plan: &Plan) -> String {
    format!(
        "the state that does not live on worker {}'s device is predicted to take {} of the host's memory, {} more than the {} that it \
         may; have more of it live on \"disk\" (docs/memory.md), take a smaller [offload] prefetch, more workers on more \
         hosts, or raise [memory] host_budget",
        plan.rank,
        Bytes(plan.prediction.host as u64),
        Bytes(plan.host_excess() as u64),
        Bytes(plan.host_bound as u64)
    )
}

/// The changes of a config that takes `now`, which fit into `bound`: at most three, each with what it takes; or the one that
/// takes least.
pub(crate) fn changes(
    source: Source<'_>,
    config: &Config,
    (now, bound): (usize, usize),
    vocabulary_size: usize,
    workers: Workers,
) -> String {
    let total = |change: &Change| predicted(source, change, vocabulary_size, workers);
    let (mut tried, mut told) = (Vec::new(), Vec::new());
    let mut smallest: Option<(usize, Change)> = None;
    for family in candidates(config, source.world_size.is_none()) {
        if told.len() == NUM_TOLD {
            break;
        }
        for change in family {
            // Families that have nothing to offer leave their combinations as they are without them.
            if tried.contains(&change) {
                continue;
            }
            tried.push(change.clone());
            let Some(total) = total(&change) else { continue };
            if total < smallest.as_ref().map_or(now, |(least, _)| *least) {
                smallest = Some((total, change.clone()));
            }
            if total <= bound {
                told.push((total, change));
                break;
            }
        }
    }
    let line = |(total, change): &(usize, Change)| {
        let keys: Vec<String> = change.iter().map(|key| format!("--set {key}")).collect();
        format!("\n    {:>10} with {}", Bytes(*total as u64), keys.join(" "))
    };
    match (told.is_empty(), smallest) {
        (false, _) => format!("  what would fit:{}", told.iter().map(line).collect::<String>()),
        (true, Some(smallest)) => {
            format!("  nothing that was tried fits; this takes least:{}", line(&smallest))
        }
        (true, None) => "  no change of the config was found that would take less".to_owned(),
    }
}

/// What a step would take with a change, if the config allows it.
fn predicted(source: Source<'_>, change: &Change, vocabulary_size: usize, workers: Workers) -> Option<usize> {
    let overrides = [source.overrides, change].concat();
    let config = Config::load(source.path, &overrides, source.world_size).ok()?;
    let is_same = config.world_size() == workers.world_size;
    let workers = if is_same { workers } else { Workers::local(&config) };
    let plan = Plan::largest(&config, vocabulary_size, workers).ok()?;
    (plan.host_excess() == 0).then(|| plan.prediction.total())
}

/// Families of changes, those that cost least first; within a family each takes less than the one before.
fn candidates(config: &Config, may_start_workers: bool) -> Vec<Vec<Change>> {
    let (training, stage) = (config.training(), config.parallelism().zero_stage);
    let global = format!("training.global_batch_size={}", training.global_batch_size);
    let recomputed: Vec<Change> = match config.activation_checkpoint().mode {
        ActivationCheckpointMode::Auto | ActivationCheckpointMode::Block => Vec::new(),
        ActivationCheckpointMode::Selective => [change(&["activation_checkpoint.mode=block"])].into(),
        _ => {
            ["selective", "block"].map(|mode| change(&[&format!("activation_checkpoint.mode={mode}")])).into()
        }
    };
    let shares = (stage + 1..=3).filter(|_| config.world_size() > 1);
    let sharded: Vec<Change> =
        shares.map(|stage| change(&[&format!("parallelism.zero_stage={stage}")])).collect();
    // What is there to leave, of the classes that the stage sets apart.
    let open: Vec<String> =
        stays(config).iter().map(|class| format!("offload.{}=auto", class.name())).collect();
    let moved: Vec<Change> = if open.is_empty() { Vec::new() } else { [open].into() };
    let halves = std::iter::successors(Some(training.local_batch_size / 2), |half| Some(half / 2));
    let smaller: Vec<Change> = halves
        .take_while(|&half| half > 0)
        .map(|half| change(&[&format!("training.local_batch_size={half}"), &global]))
        .collect();
    let narrow: Vec<Change> = match training.dtype {
        TrainingDtype::F32 => [change(&["training.dtype=bf16"])].into(),
        _ => Vec::new(),
    };
    let workers = (1..=3).map(|power| config.world_size() << power);
    let workers = workers
        .map(|workers| change(&[&format!("launch.workers={workers}"), "parallelism.zero_stage=3", &global]));
    let more_workers: Vec<Change> = if may_start_workers { workers.collect() } else { Vec::new() };
    let strongest = |family: &[Change]| family.last().cloned().unwrap_or_default();
    let [recompute, shard, moves, shrink, narrowed] =
        [&recomputed, &sharded, &moved, &smaller, &narrow].map(|f| strongest(f));
    let combined = [
        [&recompute[..], &shard].concat(),
        [&recompute[..], &moves].concat(),
        [&recompute[..], &shrink].concat(),
        [&shard[..], &shrink].concat(),
        [&recompute[..], &shard, &shrink].concat(),
        [&recompute[..], &shard, &shrink, &narrowed].concat(),
        [&recompute[..], &moves, &shrink, &narrowed].concat(),
    ];
    let combined = combined.into_iter().filter(|change| !change.is_empty()).map(|change| [change].into());
    [recomputed, sharded, moved, smaller, narrow, more_workers].into_iter().chain(combined).collect()
}

/// Classes of state that stay on the device and could leave it as it is.
fn stays(config: &Config) -> Vec<StateClass> {
    let offload = config.offload();
    let classes = [
        (StateClass::Optimizer, offload.optimizer, 1),
        (StateClass::Parameters, offload.parameters, 3),
        (StateClass::Gradients, offload.gradients, 2),
        (StateClass::Activations, offload.activations, 0),
    ];
    let is_possible = |(_, tier, stage_min): &(StateClass, Tier, u32)| {
        *tier == Tier::Device && config.parallelism().zero_stage >= *stage_min
    };
    classes.into_iter().filter(is_possible).map(|(class, ..)| class).collect()
}

fn change(keys: &[&str]) -> Change {
    keys.iter().map(|key| (*key).to_owned()).collect()
}
