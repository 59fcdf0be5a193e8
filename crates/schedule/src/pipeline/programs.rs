//! From passes of stages to programs of units.

use super::messages::{self, Event};
use super::pass::{Pass, PassKind};
use super::schedule::{Schedule, WeightVersions};
use super::timeline::Timeline;
use crate::action::{Action, Keep};
use crate::program::{Outline, Program, Stage};
use std::ops::Range;

/// The program of each rank of a synchronous schedule. `units` are those of each stage, `ties` as of
/// [`Outline::ties`]; `timeline` orders messages ([`messages::place`]). A unit's gradient is reduced when the last microbatch has
/// added to it. Whatever else a layout asks for is put into the programs by [`lowering`](crate::lowering).
///
/// # Panics
/// If the stages do not follow each other, or the schedule updates weights without a drain or halves backward passes.
pub fn programs(
    schedule: &Schedule,
    timeline: &Timeline,
    units: &[Range<usize>],
    ties: &[(usize, usize)],
) -> Vec<Program> {
    assert_eq!(schedule.weights, WeightVersions::Drained, "the schedule drains before the update");
    assert_eq!(units.len(), schedule.num_stages(), "each stage has units");
    let follows = |pair: &[Range<usize>]| pair[0].end == pair[1].start;
    assert!(units[0].start == 0 && units.windows(2).all(follows), "stages follow each other: {units:?}");
    let stage = |(units, &rank): (&Range<usize>, &usize)| Stage { units: units.clone(), rank };
    let stages: Vec<Stage> = units.iter().zip(&schedule.stage_ranks).map(stage).collect();
    let program = |(rank, events): (usize, Vec<Event>)| {
        let outline = Outline {
            num_units: units[units.len() - 1].end,
            num_microbatches: schedule.num_microbatches,
            ties: ties.to_vec(),
            stages: stages.clone(),
            rank,
            ..Outline::default()
        };
        let actions = actions(&events, units, &outline);
        Program { outline, actions }
    };
    messages::place(schedule, timeline).into_iter().enumerate().map(program).collect()
}

fn actions(events: &[Event], units: &[Range<usize>], outline: &Outline) -> Vec<Action> {
    let mut actions = Vec::new();
    let mut num_backwards = vec![0; units.len()];
    for &event in events {
        match event {
            Event::Pass(Pass { kind: PassKind::Forward, stage, microbatch }) => {
                let forward = |unit| Action::Forward { unit, microbatch, keep: Keep::All };
                actions.extend(units[stage].clone().map(forward));
            }
            Event::Pass(Pass { kind: PassKind::Backward, stage, microbatch }) => {
                num_backwards[stage] += 1;
                let is_last = num_backwards[stage] == outline.num_microbatches;
                for unit in units[stage].clone().rev() {
                    actions.push(Action::Backward { unit, microbatch });
                    actions.extend(is_last.then_some(Action::ReduceGrad { unit }));
                }
            }
            Event::Pass(pass) => panic!("{pass} has no actions of units"),
            Event::Send { result_of, .. } => actions.push(message(result_of, units, true)),
            Event::Receive { result_of, .. } => actions.push(message(result_of, units, false)),
        }
    }
    actions.extend(outline.held().map(|unit| Action::Step { unit }));
    actions
}

/// The message with the result of a pass, which its last unit has made.
fn message(result_of: Pass, units: &[Range<usize>], is_sent: bool) -> Action {
    let Pass { kind, stage, microbatch } = result_of;
    let Range { start, end } = units[stage];
    match (kind, is_sent) {
        (PassKind::Forward, true) => Action::SendForward { unit: end - 1, microbatch },
        (PassKind::Forward, false) => Action::ReceiveForward { unit: end - 1, microbatch },
        (_, true) => Action::SendBackward { unit: start, microbatch },
        (_, false) => Action::ReceiveBackward { unit: start, microbatch },
    }
}
