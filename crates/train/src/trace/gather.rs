use super::{RankPlace, RankTimeline, TRACE_FILE, TracedAction, TracedStep, file};
use crate::error::TrainError;
use crate::utilization::Utilization;
use rustix::time::{ClockId, clock_gettime};
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use trireme_base::Rank;
use trireme_parallel::{ActionTime, Executor};
use trireme_schedule::Action;

/// Maximum number of steps in a trace.
const STEPS_MAX: usize = 8;
/// Maximum number of actions of all ranks in a trace, unless its last step alone has more.
const ACTIONS_MAX: usize = 1 << 18;

/// A writer of the timelines of the newest traced steps.
pub(crate) struct Tracer {
    path: PathBuf,
    /// The newest traced steps. Empty on ranks other than 0.
    steps: VecDeque<TracedStep>,
}

impl Tracer {
    /// Creates the writer for a run in `folder`. An earlier trace there remains until the first step is written.
    pub(crate) fn new(folder: &Path) -> Self {
        Tracer { path: folder.join(TRACE_FILE), steps: VecDeque::new() }
    }

    /// Drops the steps so far, because later steps have other programs.
    pub(crate) fn clear(&mut self) {
        self.steps.clear();
    }

    /// Gathers the timeline of the last step from all ranks, and writes it with the earlier steps that are kept. `duration` is the duration
    /// of the step on this rank. Collective.
    pub(crate) fn write(
        &mut self,
        step: u64,
        executor: &Executor,
        utilization: &Utilization,
        duration: Duration,
    ) -> Result<(), TrainError> {
        let Some(mut ranks) = gather(executor, duration)? else { return Ok(()) };
        ranks.iter_mut().zip(&utilization.peaks).for_each(|(rank, peak)| rank.peak_flops = *peak);
        let model_flops = utilization.model_flops * executor.program().header.num_steps() as f64;
        self.steps.push_back(align(step, model_flops, ranks));
        let is_too_much = |steps: &VecDeque<TracedStep>| {
            let num_actions: usize = steps.iter().map(TracedStep::num_actions).sum();
            steps.len() > STEPS_MAX || (steps.len() > 1 && num_actions > ACTIONS_MAX)
        };
        while is_too_much(&self.steps) {
            self.steps.pop_front();
        }
        let failed = |source| TrainError::RunFolder { path: self.path.clone(), source };
        file::write(&self.path, self.steps.make_contiguous()).map_err(failed)
    }
}

/// Returns the timeline of this rank's last step, on its host's clock.
fn timeline(executor: &Executor, duration: Duration) -> Result<RankTimeline, TrainError> {
    let ranks = executor.ranks();
    let (world, rank) = (ranks.world(), ranks.world().rank());
    let num_per_pipeline_rank = world.world_size() / ranks.pipeline().world_size();
    let place = RankPlace {
        rank: rank.0,
        pipeline_rank: ranks.pipeline().rank().0,
        data_rank: rank.0 % num_per_pipeline_rank,
        host: world.hosts().host_of(rank),
    };
    let kernels = executor.kernel_intervals()?;
    // Read after the kernels have ended, because `duration_since` is 0 for later times.
    let (now, since_boot) = (Instant::now(), monotonic());
    // A GPU's clock may be ahead.
    let on_clock = |at: Instant| {
        (since_boot + at.saturating_duration_since(now) - now.saturating_duration_since(at)).as_nanos() as u64
    };
    let program = executor.program();
    let traced = |(index, (&action, time)): (usize, (&Action, &ActionTime))| {
        let issued = on_clock(time.issued);
        TracedAction {
            action,
            issued,
            start: on_clock(time.start),
            end: on_clock(time.end),
            product_flops: time.product_operations,
            // The clocks are aligned only to some microseconds, so a kernel may seem to begin before its action was issued.
            kernels: kernels.get(index).map(|times| times.map(|at| on_clock(at).max(issued))),
        }
    };
    let actions = program.actions.iter().zip(executor.timeline()).enumerate().map(traced).collect();
    let (header, duration) = (program.header.clone(), duration.as_nanos() as u64);
    Ok(RankTimeline { place, header, peak_flops: None, duration, actions })
}

/// Returns the time on the clock of [`Instant`], which the processes of a host share.
fn monotonic() -> Duration {
    let time = clock_gettime(ClockId::Monotonic);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or_default())
}

/// Gathers the timelines of all ranks at rank 0, each on its host's clock. Returns `None` on other ranks.
fn gather(executor: &Executor, duration: Duration) -> Result<Option<Vec<RankTimeline>>, TrainError> {
    let world = executor.group();
    let encoded = serde_json::to_vec(&timeline(executor, duration)?).expect("numbers and texts are JSON");
    let lengths = world.all_gather_bytes(&(encoded.len() as u64).to_le_bytes()).wait()?;
    if world.rank() != Rank::ROOT {
        let mut message = world.buffer::<u8>(encoded.len())?;
        message.copy_from_slice(&encoded);
        world.send(message, Rank::ROOT).wait()?;
        return Ok(None);
    }
    let mut ranks = Vec::with_capacity(lengths.len());
    for (rank, length) in lengths.iter().enumerate() {
        let received;
        let encoded = if rank == 0 {
            &encoded[..]
        } else {
            let length = length.as_slice().try_into().map_or(0, u64::from_le_bytes);
            received = world.receive(world.buffer::<u8>(length as usize)?, Rank(rank)).wait()?;
            &received[..]
        };
        let unreadable = |source| TrainError::UnreadableMessage { rank: Rank(rank), source };
        ranks.push(serde_json::from_slice(encoded).map_err(unreadable)?);
    }
    Ok(Some(ranks))
}

/// Converts all times to one clock, relative to the beginning of the step. Clocks of hosts are aligned at the first update of each host's
/// lowest rank.
fn align(step: u64, model_flops: f64, mut ranks: Vec<RankTimeline>) -> TracedStep {
    let first_update = |rank: &RankTimeline| {
        let is_step = |traced: &&TracedAction| matches!(traced.action, Action::Step { .. });
        rank.actions.iter().find(is_step).map_or(0, |traced| traced.start)
    };
    let root = first_update(&ranks[0]);
    // The time of the first update of the lowest rank on each host.
    let mut hosts: Vec<u64> = Vec::new();
    for rank in &ranks {
        if rank.place.host == hosts.len() {
            hosts.push(first_update(rank));
        }
    }
    for rank in &mut ranks {
        let ahead = hosts[rank.place.host];
        let shift = |time: &mut u64| *time = time.wrapping_sub(ahead).wrapping_add(root);
        rank.actions.iter_mut().for_each(|traced| for_each_time(traced, shift));
    }
    let began =
        ranks.iter().filter_map(|rank| rank.actions.first()).map(|first| first.issued).min().unwrap_or(0);
    for rank in &mut ranks {
        rank.actions.iter_mut().for_each(|traced| for_each_time(traced, |time| *time -= began));
    }
    TracedStep { step, began, model_flops, ranks }
}

fn for_each_time(traced: &mut TracedAction, change: impl Fn(&mut u64)) {
    let times = [&mut traced.issued, &mut traced.start, &mut traced.end];
    times.into_iter().chain(traced.kernels.iter_mut().flatten()).for_each(change);
}

#[cfg(test)]
mod tests {
    use super::super::tests::rank;
    use super::*;

    #[test]
    fn hosts_are_aligned_by_their_first_update_and_ranks_of_a_host_by_its_clock() {
        let mut ranks = vec![rank(0, 2), rank(1, 2), rank(2, 2)];
        let set = |rank: &mut RankTimeline, host, began: u64| {
            rank.place.host = host;
            rank.actions.iter_mut().for_each(|traced| for_each_time(traced, |time| *time += began));
        };
        set(&mut ranks[0], 0, 1_000_000);
        // Rank 1 began later, and rank 2 has another clock.
        set(&mut ranks[1], 0, 1_000_007);
        set(&mut ranks[2], 1, 50);
        let step = align(3, 1e9, ranks);
        assert_eq!((step.step, step.began), (3, 1_000_000));
        let begins: Vec<u64> = step.ranks.iter().map(|rank| rank.actions[0].issued).collect();
        assert_eq!(begins, [0, 7, 0]);
        assert_eq!(step.makespan(), rank(0, 2).actions.last().unwrap().end + 7);
    }
}
