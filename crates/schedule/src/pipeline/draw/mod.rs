//! Pictures of schedules: one row per rank, to scale in time.

mod svg;
mod text;

pub use svg::{draw_svg, draw_svg_together};
pub use text::{draw_error, draw_text, draw_text_together};

use super::pass::{Pass, PassKind};
use super::schedule::{Schedule, WeightVersions};
use super::timeline::Timeline;

/// One of several pictures that are drawn below each other, with the same scale in time.
#[derive(Debug, Clone, Copy)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Picture<'a> {
    pub title: &'a str,
    pub schedule: &'a Schedule,
    pub timeline: &'a Timeline,
}

fn longest(pictures: &[Picture<'_>]) -> u64 {
    pictures.iter().map(|picture| picture.timeline.makespan).max().unwrap_or(0)
}

/// Returns the number in the label of a pass: the microbatch. Empty for an update after a drain, because the update applies the gradients
/// of all microbatches.
fn label_number(schedule: &Schedule, pass: Pass) -> String {
    match (pass.kind, schedule.weights) {
        (PassKind::Update, WeightVersions::Drained) => String::new(),
        _ => pass.microbatch.to_string(),
    }
}

/// Returns the index of each stage among the stages of its rank, from 0.
fn stage_indices_on_rank(schedule: &Schedule) -> Vec<usize> {
    let mut num_seen = vec![0; schedule.num_ranks()];
    let mut turn = |&rank: &usize| {
        num_seen[rank] += 1;
        num_seen[rank] - 1
    };
    schedule.stage_ranks.iter().map(&mut turn).collect()
}

fn kinds(schedule: &Schedule) -> impl Iterator<Item = PassKind> + '_ {
    let has = |kind: &PassKind| schedule.ranks.iter().flatten().any(|pass| pass.kind == *kind);
    PassKind::ALL.into_iter().filter(has)
}
