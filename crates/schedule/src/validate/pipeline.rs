use super::{ProgramError, validate};
use crate::action::Action;
use crate::program::{Program, ProgramHeader, Stage, UnitChain};

/// Checks the programs of all ranks of one pipeline: that each is valid, with any number of microbatches in flight, and that all ranks
/// reach their ends even if a send or a receive blocks until the other rank is at the matching action.
///
/// Cost: linear in the number of actions.
///
/// # Errors
/// The first fault that is found.
pub fn validate_pipeline(programs: &[Program]) -> Result<(), ProgramError> {
    for (rank, program) in programs.iter().enumerate() {
        check_stages(&program.header, rank, programs.len())?;
        validate(program, program.header.num_microbatches)?;
    }
    let mut matcher = MessageMatcher { programs, places: vec![0; programs.len()] };
    let mut awake: Vec<usize> = (0..programs.len()).collect();
    while let Some(rank) = awake.pop() {
        while let Some(peer) = matcher.advance(rank) {
            awake.push(peer);
        }
    }
    match (0..programs.len()).find_map(|rank| matcher.next(rank).map(|message| (rank, message))) {
        Some((rank, NextMessage { index, action, peer })) => {
            let next = matcher.next(peer).map(|message| message.action);
            Err(ProgramError::Deadlock { rank, index, action, peer, next })
        }
        None => Ok(()),
    }
}

/// Checks that stages are consecutive from the first unit to the last, on ranks that exist.
fn check_stages(header: &ProgramHeader, rank: usize, num_ranks: usize) -> Result<(), ProgramError> {
    let ProgramHeader { chain: UnitChain { num_units, .. }, stages, .. } = header;
    let mut next = 0;
    let is_next = |stage: &Stage| {
        let is_next = stage.units.start == next && stage.units.end > next && stage.rank < num_ranks;
        next = stage.units.end;
        is_next
    };
    let are_in_order = stages.iter().all(is_next);
    let are_whole = stages.is_empty() || next == *num_units;
    if are_in_order && are_whole && header.rank == rank {
        return Ok(());
    }
    Err(ProgramError::Stages { rank, num_units: *num_units, num_ranks })
}

struct NextMessage {
    /// Index in the rank's program.
    index: usize,
    action: Action,
    peer: usize,
}

struct MessageMatcher<'a> {
    programs: &'a [Program],
    places: Vec<usize>,
}

impl MessageMatcher<'_> {
    /// Returns the next message of a rank, once it has run all actions before it; `None` at its end.
    fn next(&self, rank: usize) -> Option<NextMessage> {
        let program = self.programs.get(rank)?;
        let mut actions = program.actions.iter().copied().enumerate().skip(self.places[rank]);
        actions.find_map(|(index, action)| {
            Some(NextMessage { index, action, peer: program.header.peer(action)? })
        })
    }

    /// Completes a rank's next message if the other rank is at the matching action. Returns the other rank.
    fn advance(&mut self, rank: usize) -> Option<usize> {
        let NextMessage { index, action, peer } = self.next(rank)?;
        let other = self.next(peer).filter(|other| Some(other.action) == action.counterpart())?;
        (self.places[rank], self.places[peer]) = (index + 1, other.index + 1);
        Some(peer)
    }
}
