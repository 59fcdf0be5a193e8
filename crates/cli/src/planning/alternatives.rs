//! Changes of a config that would fit into the memory limits.

use super::plan::{Limit, Plan};
use super::planned_run::{PlannedRun, Workers};
use anyhow::{Result, bail};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};
use trireme_base::{Bytes, Category};
use trireme_parallel::Determinism;
use trireme_planner::peak_location;
use trireme_schedule::{StateClass, Tier as StateTier};
use trireme_tensor::Precision;
use trireme_train::config::{ActivationCheckpointMode, Config, Tier};

const NUM_SUGGESTIONS_MAX: usize = 3;

/// Time after which no other change is tried: an error should not keep its reader waiting.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(5);

/// Keys with values, as users give them to `--set`.
type Change = Vec<String>;

impl Plan {
    /// Refuses the plan of `job` if it exceeds a limit, and suggests what would fit.
    pub(crate) fn check(&self, job: PlannedRun<'_>) -> Result<()> {
        if let Some(limit) = self.exceeded_limit() {
            bail!(advice(job, self, limit));
        }
        Ok(())
    }
}

/// Returns why a plan of `job` that exceeds `limit` is refused, and what would fit instead.
pub(super) fn advice(job: PlannedRun<'_>, plan: &Plan, limit: Limit) -> String {
    let (taken, bound) = plan.used_and_limit(limit);
    let [taken_bytes, excess, bound] = [taken, taken - bound, bound].map(|bytes| Bytes(bytes as u64));
    let share =
        |category: Category| format!("{category} {}", Bytes(plan.prediction.at_peak.get(category) as u64));
    let shares = Category::ALL.map(share).join(", ");
    let moment = peak_location(&plan.prediction, &plan.program);
    let refusal = match limit {
        Limit::Device => format!(
            "a step is predicted to take {taken_bytes} of memory on worker {}, {excess} more than its limit of \
             {bound}; at the peak, {moment}, the memory holds {shares}",
            plan.rank
        ),
        Limit::Offload => format!(
            "the offloaded state of worker {} is predicted to take {taken_bytes} of host memory, {excess} more \
             than its limit of {bound}; move more of it to \"disk\" (docs/memory.md), lower [offload] prefetch, \
             use more workers on more hosts, or raise [memory] host_budget",
            plan.rank
        ),
        Limit::Host(index) => format!(
            "{} predicted to take {taken_bytes} in total, {excess} more than {}; worker {} takes the most, {}: at its \
             peak, {moment}, the memory holds {shares}",
            match plan.on_host.num_sharing(index) {
                1 => "a worker is".to_owned(),
                number => format!("the {number} workers that share the limit are"),
            },
            plan.on_host.limit(index),
            plan.rank,
            Bytes(plan.prediction.on_machine() as u64)
        ),
    };
    format!("{refusal}\n{}", changes(job, taken, limit))
}

/// Returns at most three config changes that fit, as text. `now` is the number of bytes of the limited memory that the job takes without
/// a change. If no change fits, the text names the change that takes the least.
pub(crate) fn changes(job: PlannedRun<'_>, now: usize, limit: Limit) -> String {
    let (mut tried, mut suggestions) = (Vec::new(), Vec::new());
    let mut smallest: Option<(usize, Change)> = None;
    let began = Instant::now();
    'families: for family in candidates(job.config, job.source.world_size.is_none()) {
        if suggestions.len() == NUM_SUGGESTIONS_MAX {
            break;
        }
        for change in family {
            if began.elapsed() > SEARCH_TIMEOUT {
                break 'families;
            }
            // Different combinations may be the same change once repeated keys are removed.
            if tried.contains(&change) {
                continue;
            }
            tried.push(change.clone());
            let Some(plan) = planned(job, &change) else { continue };
            let (taken, _) = plan.used_and_limit(limit);
            if taken < smallest.as_ref().map_or(now, |(least, _)| *least) {
                smallest = Some((taken, change.clone()));
            }
            if plan.exceeded_limit().is_none() {
                suggestions.push((taken, change));
                break;
            }
        }
    }
    let line = |(taken, change): &(usize, Change)| {
        let keys: Vec<String> = change.iter().map(|key| format!("--set {key}")).collect();
        format!("\n    {:>10} with {}", Bytes(*taken as u64), keys.join(" "))
    };
    match (suggestions.is_empty(), smallest) {
        (false, _) => format!("  what would fit:{}", suggestions.iter().map(line).collect::<String>()),
        (true, Some(smallest)) => {
            format!("  none of the changes tried fits; the smallest takes:{}", line(&smallest))
        }
        (true, None) => "  no config change was found that would take less".to_owned(),
    }
}

fn planned(job: PlannedRun<'_>, change: &Change) -> Option<Plan> {
    let PlannedRun { source, workers, .. } = job;
    let config = source.load(change).ok()?;
    let is_same = config.world_size() == workers.world_size;
    let workers = if is_same { workers } else { Workers::local(&config, workers.limits, workers.simd_level) };
    Plan::largest(PlannedRun { config: &config, workers, ..job }).ok()
}

/// Returns families of changes, cheapest first. Within a family, each change takes less memory than the one before.
fn candidates(config: &Config, may_start_workers: bool) -> Vec<Vec<Change>> {
    let (training, stage) = (config.training(), config.parallelism().zero_stage);
    let global = format!("training.global_batch_size={}", training.global_batch_size);
    let stage_3 = "parallelism.zero_stage=3".to_owned();
    let modes: &[&str] = match config.activation_checkpoint().mode {
        ActivationCheckpointMode::Auto | ActivationCheckpointMode::Block => &[],
        ActivationCheckpointMode::Selective => &["block"],
        _ => &["selective", "block"],
    };
    let recomputed: Vec<Change> =
        modes.iter().map(|mode| vec![format!("activation_checkpoint.mode={mode}")]).collect();
    let only_if = |applies: bool, key: &str| Vec::from_iter(applies.then(|| vec![key.to_owned()]));
    let unless_empty = |change: Change| Vec::from_iter(Some(change).filter(|change| !change.is_empty()));
    let higher_stages = (stage + 1..=3).filter(|_| config.world_size() > 1);
    let sharded: Vec<Change> =
        higher_stages.map(|stage| vec![format!("parallelism.zero_stage={stage}")]).collect();
    // Classes on the device that can leave it at this ZeRO stage.
    let open = movable_classes(config).iter().map(|class| format!("offload.{}=auto", class.name())).collect();
    let moved = unless_empty(open);
    // Classes in host memory can move to a disk.
    let onto_disk = on_host(config).iter().map(|class| format!("offload.{}=disk", class.name())).collect();
    let onto_disk = unless_empty(onto_disk);
    // All classes, at the stage at which each of them can leave the device, even on one worker.
    let all_moved: Change = std::iter::once(stage_3.clone())
        .chain(config.offload().tiers().iter().map(|(class, _)| format!("offload.{}=auto", class.name())))
        .collect();
    let halves = std::iter::successors(Some(training.local_batch_size / 2), |half| Some(half / 2));
    let smaller: Vec<Change> = halves
        .take_while(|&half| half > 0)
        .map(|half| vec![format!("training.local_batch_size={half}"), global.clone()])
        .collect();
    let narrow = only_if(training.dtype == Precision::F32, "training.dtype=bf16");
    // If the bits of sums may depend on the layout, fewer partial sums are kept in memory.
    let unordered = only_if(training.determinism == Determinism::Layout, "training.determinism=run");
    // A run that clips would get other weights.
    let may_free = training.max_norm == 0.0 && !config.memory().free_gradients;
    let freed = only_if(may_free, "memory.free_gradients=true");
    let more_workers: Vec<Change> = (1..=3)
        .filter(|_| may_start_workers)
        .map(|power| config.world_size() << power)
        .map(|workers| vec![format!("launch.workers={workers}"), stage_3.clone(), global.clone()])
        .collect();
    // On one host, fewer workers hold fewer copies of the state.
    let fewer = std::iter::successors(Some(config.world_size() / 2), |half| Some(half / 2));
    let fewer = fewer.take_while(|&workers| may_start_workers && workers > 0);
    let fewer_workers: Vec<Change> =
        fewer.map(|workers| vec![format!("launch.workers={workers}"), global.clone()]).collect();
    let unsampled = only_if(config.generate().num_tokens > 0, "generate.num_tokens=0");
    let strongest = |family: &[Change]| family.last().cloned().unwrap_or_default();
    let [recompute, shard, moves, shrink, reorder, narrowed, alone] =
        [&recomputed, &sharded, &moved, &smaller, &unordered, &narrow, &fewer_workers].map(|f| strongest(f));
    // Each with its rough cost per step. Combinations are tried in the order of the sums of these costs.
    let single_changes = [
        (1, reorder),
        (1, narrowed),
        (1, shrink),
        (2, shard),
        (3, recompute),
        (5, moves),
        (7, all_moved.clone()),
        (8, alone),
    ];
    let combined = combinations(single_changes).into_iter().map(|change| [change].into());
    let all_moved: Vec<Change> = [all_moved].into();
    let families = [
        unsampled,
        freed,
        recomputed,
        sharded,
        unordered,
        narrow,
        smaller,
        moved,
        onto_disk,
        all_moved,
        more_workers,
        fewer_workers,
    ];
    families.into_iter().chain(combined).collect()
}

/// Returns all combinations of two or more of the given changes, cheapest first. Empty changes are left out.
fn combinations<const N: usize>(single_changes: [(u32, Change); N]) -> Vec<Change> {
    let has = |set: usize, index: usize| set & 1 << index != 0;
    let mut sets: Vec<(u32, Change)> = (0_usize..1 << N)
        .filter(|set| {
            set.count_ones() > 1
                && (0..N).all(|index| !has(*set, index) || !single_changes[index].1.is_empty())
        })
        .map(|set| {
            let chosen = || {
                single_changes
                    .iter()
                    .enumerate()
                    .filter(|(index, _)| has(set, *index))
                    .map(|(_, costed_change)| costed_change)
            };
            let change = chosen().flat_map(|(_, change)| change.iter().cloned()).collect();
            (chosen().map(|(cost, _)| cost).sum(), deduplicated(change))
        })
        .collect();
    sets.sort_by_key(|(cost, change)| (*cost, change.len()));
    sets.into_iter().map(|(_, change)| change).collect()
}

/// Removes repeated keys from a combination of several changes.
fn deduplicated(mut change: Change) -> Change {
    let mut seen = BTreeSet::new();
    change.retain(|key| seen.insert(key.clone()));
    change
}

/// Returns the classes of state that the config keeps in host memory.
fn on_host(config: &Config) -> Vec<StateClass> {
    let on_host = config.offload().tiers().into_iter().filter(|(_, tier)| *tier == Tier::Host);
    on_host.map(|(class, _)| class).collect()
}

/// Returns the classes of state that are on the device and could leave it without another change.
fn movable_classes(config: &Config) -> Vec<StateClass> {
    let state = config.parallelism().state_layout();
    let can_leave = |&(class, tier): &(StateClass, Tier)| {
        tier == Tier::Device && state.can_reside(class, StateTier::Host, 1)
    };
    config.offload().tiers().into_iter().filter(can_leave).map(|(class, _)| class).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn combinations_begin_with_the_cheapest_and_name_a_key_once() {
        let change = |keys: &[&str]| -> Change { keys.iter().map(|&key| key.to_owned()).collect() };
        let single_changes =
            [(3, change(&["a"])), (1, change(&["b", "c"])), (0, change(&[])), (1, change(&["c"]))];
        let expected = [vec!["b", "c"], vec!["a", "c"], vec!["a", "b", "c"], vec!["a", "b", "c"]];
        assert_eq!(combinations(single_changes), expected.map(|keys| change(&keys)));
    }
}
