//! Programs that need no pipeline schedule: training without a pipeline, and forward-only programs.

use crate::action::{Action, Keep, Message};
use crate::program::{Program, ProgramHeader, UnitChain};

/// Returns the program of a rank that runs all units for each of its microbatches in turn, with unsharded training state.
///
/// A unit's gradient is reduced after the last microbatch, while backward continues below. Without data parallelism, the reduction is over
/// a group of one. [`lowering`](crate::lowering) adds everything else that a layout requires.
pub fn program(chain: &UnitChain, num_microbatches: usize) -> Program {
    let num_units = chain.num_units;
    let mut actions = Vec::with_capacity(2 * num_units * (num_microbatches + 1));
    for microbatch in 0..num_microbatches {
        actions.extend(forward(num_units, microbatch, Keep::All));
        for unit in (0..num_units).rev() {
            actions.push(Action::Backward { unit, microbatch });
            if microbatch + 1 == num_microbatches {
                actions.push(Action::ReduceGrad { unit });
            }
        }
    }
    actions.extend((0..num_units).map(|unit| Action::Step { unit }));
    let header = ProgramHeader { chain: chain.clone(), num_microbatches, ..ProgramHeader::default() };
    Program { header, actions }
}

/// Returns the program that runs forward of one microbatch on the units of a rank, and keeps no activations. `training` is the header of
/// the rank's training program. Used for evaluation and generation.
pub fn forward_only(training: &ProgramHeader) -> Program {
    let ProgramHeader { chain, stages, rank, .. } = training.clone();
    let num_units = chain.num_units;
    let header = ProgramHeader { chain, num_microbatches: 1, stages, rank, ..ProgramHeader::default() };
    let is_elsewhere = |unit: usize| unit < num_units && !header.holds(unit);
    let mut actions = Vec::new();
    for action in forward(num_units, 0, Keep::Nothing).filter(|action| header.holds(action.unit())) {
        let (unit, microbatch) = (action.unit(), 0);
        if let Some(below) = unit.checked_sub(1).filter(|&below| is_elsewhere(below)) {
            actions.push(Action::Receive(Message::activation(below, microbatch)));
        }
        actions.push(action);
        actions.extend(is_elsewhere(unit + 1).then_some(Action::Send(Message::activation(unit, microbatch))));
    }
    Program { header, actions }
}

fn forward(num_units: usize, microbatch: usize, keep: Keep) -> impl Iterator<Item = Action> {
    (0..num_units).map(move |unit| Action::Forward { unit, microbatch, keep })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_two_units_and_two_microbatches() {
        let expected = "\
units 2 microbatches 2
F 0 0
F 1 0
B 1 0
B 0 0
F 0 1
F 1 1
B 1 1
REDUCE_GRAD 1
B 0 1
REDUCE_GRAD 0
STEP 0
STEP 1
";
        assert_eq!(program(&UnitChain::of_units(2), 2).to_string(), expected);
        let tied = UnitChain { ties: vec![(1, 0)], ..UnitChain::of_units(2) };
        let text = forward_only(&program(&tied, 1).header).to_string();
        assert_eq!(text, "units 2 microbatches 1 ties 1:0\nF 0 0 keep nothing\nF 1 0 keep nothing\n");
    }
}
