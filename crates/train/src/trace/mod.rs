//! Timelines of steps: the times of each rank's actions.
//!
//! The trainer gathers the timeline of a step at rank 0, which writes it to the run's folder. [`read`] reads the file, which contains the
//! programs of all ranks.

mod file;
mod gather;
#[cfg(test)]
mod tests;

pub use file::read;
pub(crate) use gather::Tracer;

use crate::as_text;
use serde::{Deserialize, Serialize};
use trireme_schedule::{Action, Program, ProgramHeader};

/// Name of the trace file in a run's folder.
pub const TRACE_FILE: &str = "trace.json";

/// The place of a rank. The ranks of one pipeline have the same `data_rank`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankPlace {
    /// The rank in the world.
    pub rank: usize,
    /// The rank in its pipeline.
    pub pipeline_rank: usize,
    /// The rank among the ranks that run the same units.
    pub data_rank: usize,
    /// The index of the host.
    pub host: usize,
}

/// An action of a step. Times are in nanoseconds since the first rank began the step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TracedAction {
    /// The action.
    #[serde(with = "as_text")]
    pub action: Action,
    /// The time at which the rank reached the action.
    pub issued: u64,
    /// The time at which the action had everything that it needs, and its own work began.
    pub start: u64,
    /// The time at which the rank continued with the next action.
    pub end: u64,
    /// Floating-point operations of the matrix products that the action issued.
    pub product_flops: u64,
    /// The times at which the action's kernels began and ended on a GPU. Kernels of a CPU run between `start` and `end`.
    pub kernels: Option<[u64; 2]>,
}

/// The actions of one rank in a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RankTimeline {
    /// The place of the rank.
    pub place: RankPlace,
    /// The header of the rank's program.
    #[serde(with = "as_text")]
    pub header: ProgramHeader,
    /// Peak FLOP/s of the rank's device, if it is known.
    pub peak_flops: Option<f64>,
    /// Duration of the step on the rank in nanoseconds, including the reading of its samples.
    pub duration: u64,
    /// The actions in the program's order.
    pub actions: Vec<TracedAction>,
}

impl RankTimeline {
    /// Returns the nanoseconds from the rank's first action to the end of its last one.
    pub fn program_time(&self) -> u64 {
        let ends = self.actions.first().zip(self.actions.last());
        ends.map_or(0, |(first, last)| last.end - first.issued)
    }

    /// Returns the program that the rank ran.
    pub fn program(&self) -> Program {
        let actions = self.actions.iter().map(|traced| traced.action).collect();
        Program { header: self.header.clone(), actions }
    }
}

/// The actions of all ranks in a step. Ranks on one host share a clock. Clocks of hosts are aligned at the start of the first update, which
/// waits for the sum of the gradients' squares over all ranks. That sum ends on all ranks at about the same time: within the time of a
/// message and a sum.
#[derive(Debug, Clone, PartialEq)]
pub struct TracedStep {
    /// The number of the step, from 1.
    pub step: u64,
    /// The time at which the step began, in nanoseconds: on the clock of rank 0, or, if the step was read from a file, since the first step
    /// of the file.
    pub began: u64,
    /// Floating-point operations that the model needs for the step, on all ranks together.
    pub model_flops: f64,
    /// The timelines by rank.
    pub ranks: Vec<RankTimeline>,
}

impl TracedStep {
    /// Returns the nanoseconds from the beginning of the step on the first rank to its end on the last one.
    pub fn makespan(&self) -> u64 {
        self.ranks.iter().filter_map(|rank| rank.actions.last()).map(|last| last.end).max().unwrap_or(0)
    }

    fn num_actions(&self) -> usize {
        self.ranks.iter().map(|rank| rank.actions.len()).sum()
    }
}
