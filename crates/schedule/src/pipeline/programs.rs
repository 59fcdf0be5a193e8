//! From passes of stages to programs of units.

use super::clock::simulate;
use super::costs::Costs;
use super::messages::{self, Event};
use super::pass::{Pass, PassKind};
use super::schedule::{Schedule, WeightVersions};
use crate::action::{Action, Keep};
use crate::program::{Outline, Program, Stage};
use std::ops::Range;

/// The program of each rank of a synchronous schedule. `units` are those of each stage, `ties` as of
/// [`Outline::ties`]; messages have the order that they have in time at these costs ([`messages::place`]), which must be
/// the same on all ranks. A unit's gradient is reduced when the last microbatch has
/// added to it. Whatever else a layout asks for is put into the programs by [`lowering`](crate::lowering).
///
/// # Panics
/// If the schedule is not [valid](super::validate), or updates weights without a drain, or the stages do not follow each other.
pub fn programs(
    schedule: &Schedule,
    costs: &Costs,
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
    let timeline = simulate(schedule, costs).expect("the schedule is valid");
    messages::place(schedule, &timeline).into_iter().enumerate().map(program).collect()
}

fn actions(events: &[Event], units: &[Range<usize>], outline: &Outline) -> Vec<Action> {
    let mut actions = Vec::new();
    let mut num_gradients = vec![0; units.len()];
    for &event in events {
        match event {
            Event::Pass(Pass { kind: PassKind::Forward, stage, microbatch }) => {
                let forward = |unit| Action::Forward { unit, microbatch, keep: Keep::All };
                actions.extend(units[stage].clone().map(forward));
            }
            Event::Pass(Pass { kind: PassKind::BackwardInput, stage, microbatch }) => {
                let half = |unit| Action::BackwardInput { unit, microbatch };
                actions.extend(units[stage].clone().rev().map(half));
            }
            Event::Pass(Pass {
                kind: kind @ (PassKind::Backward | PassKind::BackwardWeight),
                stage,
                microbatch,
            }) => {
                num_gradients[stage] += 1;
                let is_last = num_gradients[stage] == outline.num_microbatches;
                for unit in units[stage].clone().rev() {
                    actions.push(match kind {
                        PassKind::Backward => Action::Backward { unit, microbatch },
                        _ => Action::BackwardWeight { unit, microbatch },
                    });
                    actions.extend(is_last.then_some(Action::ReduceGrad { unit }));
                }
            }
            Event::Pass(pass @ Pass { kind: PassKind::Update, .. }) => {
                panic!("{pass} is not of a schedule that drains")
            }
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
