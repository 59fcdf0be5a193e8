//! Timelines of steps: when each rank did what.
//!
//! The trainer gathers the timeline of a step to rank 0, which writes it to the run's folder; [`read`] reads it again. The file
//! alone is enough to know the programs of all ranks.

mod file;
mod gather;
#[cfg(test)]
mod tests;

pub use file::read;
pub(crate) use gather::Tracer;

use crate::as_text;
use serde::{Deserialize, Serialize};
use trireme_schedule::{Action, Outline, Program};

/// Name of the file in a run's folder.
pub const TRACE_FILE: &str = "trace.json";

/// Where a rank lies. Ranks of one pipeline have the same place in data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankPlace {
    /// In the world.
    pub rank: usize,
    /// In its pipeline.
    pub pipeline_rank: usize,
    /// Among the ranks that run the same units.
    pub data_rank: usize,
    /// The host, counted from 0.
    pub host: usize,
}

/// An action of a step, in nanoseconds from when the first rank began the step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TracedAction {
    /// What was done.
    #[serde(with = "as_text")]
    pub action: Action,
    /// The rank came to it.
    pub issued: u64,
    /// It had what it needed, and its own work began.
    pub start: u64,
    /// The rank went on.
    pub end: u64,
    /// Floating-point operations of the matrix products that it issued.
    pub product_flops: u64,
}

/// What a rank did in a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RankTimeline {
    /// Which rank.
    pub place: RankPlace,
    /// What its program is for.
    #[serde(with = "as_text")]
    pub outline: Outline,
    /// Peak FLOP/s of the rank's device, where it is known.
    pub peak_flops: Option<f64>,
    /// Nanoseconds that the step took the rank, with reading its samples.
    pub duration: u64,
    /// In the program's order.
    pub actions: Vec<TracedAction>,
}

impl RankTimeline {
    /// Nanoseconds from its first action to the end of its last one.
    pub fn program_time(&self) -> u64 {
        let ends = self.actions.first().zip(self.actions.last());
        ends.map_or(0, |(first, last)| last.end - first.issued)
    }

    /// The program that the rank ran.
    pub fn program(&self) -> Program {
        let actions = self.actions.iter().map(|traced| traced.action).collect();
        Program { outline: self.outline.clone(), actions }
    }
}

/// What all ranks did in a step. Times of ranks on one host are of one clock. Hosts are aligned by the sum of the gradients'
/// squares in the step, which ends on all ranks at about the same time: to within a message and a sum.
#[derive(Debug, Clone, PartialEq)]
pub struct TracedStep {
    /// Its number, from 1.
    pub step: u64,
    /// When it began, in nanoseconds on the clock of rank 0, or after the first step of its file.
    pub began: u64,
    /// Floating-point operations that the model needs for the step, on all ranks together.
    pub model_flops: f64,
    /// By rank.
    pub ranks: Vec<RankTimeline>,
}

impl TracedStep {
    /// Nanoseconds from when the first rank began until the last one ended.
    pub fn makespan(&self) -> u64 {
        self.ranks.iter().filter_map(|rank| rank.actions.last()).map(|last| last.end).max().unwrap_or(0)
    }

    fn num_actions(&self) -> usize {
        self.ranks.iter().map(|rank| rank.actions.len()).sum()
    }
}
