use super::costs::Costs;
use super::schedule::Schedule;

/// The time in which a pass runs, in ticks from the common start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub struct PassInterval {
    pub start: u64,
    pub end: u64,
}

impl PassInterval {
    /// Returns the duration in ticks.
    pub fn ticks(self) -> u64 {
        self.end - self.start
    }
}

/// The simulated times and memory of a schedule. All times are in ticks of the costs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timeline {
    /// The times of each rank's passes, in the order of the schedule.
    pub ranks: Vec<Vec<PassInterval>>,
    /// The end of the last pass.
    pub makespan: u64,
    /// The total time of each rank's passes.
    pub busy: Vec<u64>,
    /// The most activations that each rank holds at the same time, in the unit of the costs.
    pub activations_max: Vec<u64>,
}

/// The time that a schedule loses ([`Timeline::lost`]), and the time to compare it with: the work of the busiest rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LostTime {
    /// Ticks lost.
    pub ticks: u64,
    /// Ticks without any loss.
    pub ideal_ticks: u64,
}

impl Timeline {
    pub(super) fn new(schedule: &Schedule, costs: &Costs, ranks: Vec<Vec<PassInterval>>) -> Timeline {
        let busy = |spans: &Vec<PassInterval>| spans.iter().map(|span| span.ticks()).sum();
        Timeline {
            makespan: ranks.iter().filter_map(|spans| spans.last()).map(|span| span.end).max().unwrap_or(0),
            busy: ranks.iter().map(busy).collect(),
            activations_max: activations_max(schedule, costs),
            ranks,
        }
    }

    /// Returns the ticks from the start of a rank's first pass to the end of its last.
    pub fn extent(&self, rank: usize) -> u64 {
        let spans = &self.ranks[rank];
        spans.first().zip(spans.last()).map_or(0, |(first, last)| last.end - first.start)
    }

    /// Returns the bubble: the part of all ranks' time, from the start of the first pass to the end of the last, in which a rank runs no
    /// pass. 0 without any pass.
    pub fn bubble(&self) -> f64 {
        let spans = || self.ranks.iter().flatten();
        let (Some(start), Some(end)) =
            (spans().map(|span| span.start).min(), spans().map(|span| span.end).max())
        else {
            return 0.0;
        };
        let all = (end - start) as f64 * self.ranks.len() as f64;
        let busy: u64 = self.busy.iter().sum();
        if all == 0.0 { 0.0 } else { 1.0 - busy as f64 / all }
    }

    /// Returns the bubble of a schedule as papers define it: the longest time of a rank from its first pass to its last, minus the work of
    /// the busiest rank. For GPipe, 1F1B and their interleaved forms, the first rank works from the common start to the common end, so this
    /// longest time is the makespan. Zero-bubble schedules begin and end on one rank after another, and the papers do not count the time
    /// before a rank's first pass and after its last (Qi et al., 2023, section 2.2); [`bubble`](Timeline::bubble) does.
    pub fn lost(&self) -> LostTime {
        let longest = (0..self.ranks.len()).map(|rank| self.extent(rank)).max().unwrap_or(0);
        let ideal_ticks = self.busy.iter().copied().max().unwrap_or(0);
        LostTime { ticks: longest - ideal_ticks, ideal_ticks }
    }
}

/// Returns the most activations that each rank holds at the same time. They follow from the order of its passes alone.
pub(super) fn activations_max(schedule: &Schedule, costs: &Costs) -> Vec<u64> {
    let peak = |passes: &Vec<_>| {
        let (mut held, mut peak) = (0_u64, 0);
        for &pass in passes {
            let (taken, freed) = costs.activations(pass);
            held = (held + taken).saturating_sub(freed);
            peak = peak.max(held);
        }
        peak
    };
    schedule.ranks.iter().map(peak).collect()
}
