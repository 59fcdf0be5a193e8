//! Validation of programs before they run.
//!
//! Data-parallel ranks that run copies of one program issue their collectives in one order. [`validate_data_parallel`] checks this for
//! programs that may differ.

mod pipeline;
mod state;
#[cfg(test)]
mod tests;

use crate::action::{Action, Keep, Stream};
use crate::program::Program;
use state::State;

pub use pipeline::validate_pipeline;

/// The reason why a program must not run. `index` counts the program's actions from 0.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "messages explain the fields")]
pub enum ProgramError {
    #[error("action {index} ({}) {fault}", .action.words())]
    Action { index: usize, action: Action, fault: ActionFault },
    #[error("unit {reader} reads the parameters of unit {owner}, but may need a different version of them")]
    TiedVersions { reader: usize, owner: usize },
    #[error(
        "the stages in the program of pipeline rank {rank} do not cover {num_units} units on {num_ranks} ranks in order"
    )]
    Stages { rank: usize, num_units: usize, num_ranks: usize },
    #[error(
        "deadlock: pipeline rank {rank} waits at action {index} ({}) for rank {peer}, which {}",
        .action.words(),
        .next.map_or_else(|| "has finished".to_owned(), |next| format!("waits at: {}", next.words()))
    )]
    Deadlock { rank: usize, index: usize, action: Action, peer: usize, next: Option<Action> },
    #[error("the program lacks an action: {}", .missing.words())]
    Missing { missing: Action },
    #[error("collective {place} of rank {rank} is '{found}', but rank 0 issues '{expected}'")]
    OrdersDiffer { rank: usize, place: usize, found: String, expected: String },
}

/// The reason why an action must not be at its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "messages explain the fields")]
pub enum ActionFault {
    #[error("is out of range: the program has {num_units} units and {num_microbatches} microbatches")]
    OutOfRange { num_units: usize, num_microbatches: usize },
    #[error("repeats an earlier action")]
    Repeated,
    #[error("comes before the action it depends on ({})", .0.words())]
    TooEarly(Action),
    #[error("does not belong to pipeline rank {0}")]
    WrongRank(usize),
    #[error("is only valid in programs that train")]
    OnlyInTraining,
    #[error("is only valid in pipelines that do not drain between updates")]
    OnlyAsynchronous,
    #[error("brings the unit to {in_flight} microbatches in flight; the bound is {bound}")]
    TooManyInFlight { in_flight: usize, bound: usize },
}

/// Checks that a program is valid:
/// - every unit runs forward and backward once for every microbatch, in an order that data dependencies allow;
/// - activations that forward does not keep are recomputed;
/// - microbatches add to gradients in their order;
/// - parameters are gathered wherever they are read, and at the end they are sharded or full as at the start;
/// - gradients are reduced once they are complete, and every parameter is updated once all are reduced;
/// - no unit holds the activations of more than `in_flight_max` microbatches.
///
/// For a program that does not [train](crate::StateLayout::is_trained), checks that every unit runs forward once for every microbatch, and
/// that nothing else runs.
///
/// Cost: linear in the number of actions; each `STEP` looks at all units.
///
/// # Errors
/// The first fault that is found.
pub fn validate(program: &Program, in_flight_max: usize) -> Result<(), ProgramError> {
    let header = &program.header;
    let is_versioned = |action: &Action| matches!(action, Action::Stash { .. } | Action::Unstash { .. });
    let versioned = program.actions.iter().position(is_versioned);
    if let Some(index) = versioned.filter(|_| header.asynchronous.is_none()) {
        let (action, fault) = (program.actions[index], ActionFault::OnlyAsynchronous);
        return Err(ProgramError::Action { index, action, fault });
    }
    if let Some(&(reader, owner)) = header.chain.ties.first().filter(|_| header.asynchronous.is_some()) {
        return Err(ProgramError::TiedVersions { reader, owner });
    }
    let mut state = State::new(header);
    state.run(&program.actions, in_flight_max)?;
    let forward = |unit| {
        let microbatches = 0..header.num_microbatches;
        microbatches.map(move |microbatch| Action::Forward { unit, microbatch, keep: Keep::Nothing })
    };
    let lacks = |action: &Action| !state.is_done(*action);
    let missing = if header.state.is_trained() {
        header.held().map(|unit| Action::Step { unit }).find(lacks)
    } else {
        header.held().flat_map(forward).find(lacks)
    };
    match missing.or_else(|| state.missing_at_end()) {
        Some(missing) => Err(ProgramError::Missing { missing }),
        None => Ok(()),
    }
}

/// Checks the programs of all ranks that run the same units of a pipeline: that each is valid, and that all issue their collectives,
/// including the collectives within passes, in the same order.
///
/// # Errors
/// The first fault that is found.
pub fn validate_data_parallel(programs: &[Program], in_flight_max: usize) -> Result<(), ProgramError> {
    let collectives = |program: &Program| -> Vec<Action> {
        let is_collective = |action: &Action| {
            action.stream() == Stream::DataParallel || !program.header.exchanges(*action).is_empty()
        };
        program.actions.iter().copied().filter(is_collective).collect()
    };
    let Some(first) = programs.first() else { return Ok(()) };
    let expected = collectives(first);
    for (rank, program) in programs.iter().enumerate() {
        validate(program, in_flight_max)?;
        let found = collectives(program);
        let name = |actions: &[Action], place: usize| {
            actions.get(place).map_or_else(|| "nothing".to_owned(), Action::to_string)
        };
        let places = 0..found.len().max(expected.len());
        if let Some(place) = places.into_iter().find(|&place| found.get(place) != expected.get(place)) {
            let (found, expected) = (name(&found, place), name(&expected, place));
            return Err(ProgramError::OrdersDiffer { rank, place, found, expected });
        }
    }
    Ok(())
}
