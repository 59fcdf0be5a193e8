//! Pictures of schedules: a row for each rank, to scale in time.

mod svg;
mod text;

pub use svg::draw_svg;
pub use text::{draw_error, draw_text};

use super::pass::PassKind;
use super::schedule::Schedule;

/// For each stage, which of its rank's stages it is, from 0.
fn turns(schedule: &Schedule) -> Vec<usize> {
    let mut num_seen = vec![0; schedule.num_ranks()];
    let mut turn = |&rank: &usize| {
        num_seen[rank] += 1;
        num_seen[rank] - 1
    };
    schedule.stage_ranks.iter().map(&mut turn).collect()
}

/// The kinds of passes that a schedule has.
fn kinds(schedule: &Schedule) -> impl Iterator<Item = PassKind> + '_ {
    let has = |kind: &PassKind| schedule.ranks.iter().flatten().any(|pass| pass.kind == *kind);
    PassKind::ALL.into_iter().filter(has)
}
