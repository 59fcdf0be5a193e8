//! One stage: every rank holds the whole model, with data parallelism or without.

use crate::action::Action;
use crate::program::Program;

/// The program of a rank that runs all units for each of its microbatches in turn.
///
/// A unit's gradient is reduced as soon as the last microbatch has added to it, while backward goes on below.
/// Without data parallelism the reductions are still there, over a group of one: there is no second kind of program.
pub fn program(num_units: usize, num_microbatches: usize) -> Program {
    let mut actions = Vec::with_capacity(2 * num_units * (num_microbatches + 1));
    for microbatch in 0..num_microbatches {
        actions.extend((0..num_units).map(|unit| Action::Forward { unit, microbatch }));
        for unit in (0..num_units).rev() {
            actions.push(Action::Backward { unit, microbatch });
            if microbatch + 1 == num_microbatches {
                actions.push(Action::ReduceGrad { unit });
            }
        }
    }
    actions.extend((0..num_units).map(|unit| Action::Step { unit }));
    Program { num_units, num_microbatches, actions }
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
        assert_eq!(program(2, 2).to_string(), expected);
    }
}
