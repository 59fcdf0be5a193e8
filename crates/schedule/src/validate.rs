//! Proving a program before it runs.

use crate::action::Action;
use crate::program::Program;

/// A program that must not run. `index` counts the program's actions from 0.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProgramError {
    /// A unit or microbatch that does not exist.
    #[error("action {index} '{action}' is outside of {num_units} units and {num_microbatches} microbatches")]
    OutOfRange {
        /// Place in the program.
        index: usize,
        /// The action.
        action: Action,
        /// Units of the program.
        num_units: usize,
        /// Microbatches of the program.
        num_microbatches: usize,
    },
    /// The same thing done twice.
    #[error("action {index} '{action}' was done before")]
    Repeated {
        /// Place in the program.
        index: usize,
        /// The action.
        action: Action,
    },
    /// Something must come first.
    #[error("action {index} '{action}' comes before '{missing}', whose result it needs")]
    TooEarly {
        /// Place in the program.
        index: usize,
        /// The action.
        action: Action,
        /// What must come first.
        missing: Action,
    },
    /// Never done.
    #[error("the program never does '{missing}'")]
    Missing {
        /// The action.
        missing: Action,
    },
    /// More microbatches in flight than memory was planned for.
    #[error("action {index} '{action}' holds activations of {in_flight} microbatches of unit {unit}; the bound is {bound}", unit = .action.unit())]
    TooManyInFlight {
        /// Place in the program.
        index: usize,
        /// The action.
        action: Action,
        /// Microbatches whose activations the unit would hold.
        in_flight: usize,
        /// Microbatches planned for.
        bound: usize,
    },
    /// Two ranks issue collectives of one group in different orders: a deadlock.
    #[error("rank {rank} issues '{found}' as its reduction {place}, where rank 0 issues '{expected}'")]
    OrdersDiffer {
        /// The rank that differs from rank 0.
        rank: usize,
        /// Place among the reductions, from 0.
        place: usize,
        /// What it issues, or "nothing".
        found: String,
        /// What rank 0 issues, or "nothing".
        expected: String,
    },
}

/// Where each action stands.
struct Done<'a> {
    program: &'a Program,
    forward: Vec<bool>,
    backward: Vec<bool>,
    reduced: Vec<bool>,
    stepped: Vec<bool>,
}

impl Done<'_> {
    fn slot(&mut self, action: Action) -> &mut bool {
        let microbatches = self.program.num_microbatches;
        match action {
            Action::Forward { unit, microbatch } => &mut self.forward[unit * microbatches + microbatch],
            Action::Backward { unit, microbatch } => &mut self.backward[unit * microbatches + microbatch],
            Action::ReduceGrad { unit } => &mut self.reduced[unit],
            Action::Step { unit } => &mut self.stepped[unit],
        }
    }

    /// What `action` needs that has not been done.
    fn first_missing(&mut self, action: Action) -> Option<Action> {
        let Program { num_units, num_microbatches, .. } = *self.program;
        let needs: Vec<Action> = match action {
            Action::Forward { unit: 0, .. } => vec![],
            Action::Forward { unit, microbatch } => vec![Action::Forward { unit: unit - 1, microbatch }],
            Action::Backward { unit, microbatch } if unit + 1 == num_units => {
                vec![Action::Forward { unit, microbatch }]
            }
            Action::Backward { unit, microbatch } => vec![Action::Backward { unit: unit + 1, microbatch }],
            Action::ReduceGrad { unit } => {
                (0..num_microbatches).map(|microbatch| Action::Backward { unit, microbatch }).collect()
            }
            Action::Step { .. } => (0..num_units).map(|unit| Action::ReduceGrad { unit }).collect(),
        };
        needs.into_iter().find(|&need| !*self.slot(need))
    }
}

/// Proves that every unit runs forward and backward once for every microbatch, in an order that the data allows,
/// that every gradient is reduced once it is complete and every parameter stepped once all are reduced, and that
/// no unit holds the activations of more than `in_flight_max` microbatches.
///
/// Cost: linear in the actions, times the microbatches for reductions.
pub fn validate(program: &Program, in_flight_max: usize) -> Result<(), ProgramError> {
    let Program { num_units, num_microbatches, .. } = *program;
    let mut done = Done {
        program,
        forward: vec![false; num_units * num_microbatches],
        backward: vec![false; num_units * num_microbatches],
        reduced: vec![false; num_units],
        stepped: vec![false; num_units],
    };
    let mut in_flight = vec![0_usize; num_units];
    for (index, &action) in program.actions.iter().enumerate() {
        let microbatch = match action {
            Action::Forward { microbatch, .. } | Action::Backward { microbatch, .. } => microbatch,
            _ => 0,
        };
        if action.unit() >= num_units || microbatch >= num_microbatches {
            return Err(ProgramError::OutOfRange { index, action, num_units, num_microbatches });
        }
        if *done.slot(action) {
            return Err(ProgramError::Repeated { index, action });
        }
        if let Some(missing) = done.first_missing(action) {
            return Err(ProgramError::TooEarly { index, action, missing });
        }
        *done.slot(action) = true;
        let in_flight = &mut in_flight[action.unit()];
        match action {
            Action::Forward { .. } => *in_flight += 1,
            Action::Backward { .. } => *in_flight -= 1,
            _ => (),
        }
        if *in_flight > in_flight_max {
            return Err(ProgramError::TooManyInFlight {
                index,
                action,
                in_flight: *in_flight,
                bound: in_flight_max,
            });
        }
    }
    // Every other action is needed by a step.
    match (0..num_units).map(|unit| Action::Step { unit }).find(|&step| !*done.slot(step)) {
        Some(missing) => Err(ProgramError::Missing { missing }),
        None => Ok(()),
    }
}

/// Proves the programs of all ranks of one data-parallel group together: each by itself, and their reductions in one order.
pub fn validate_world(programs: &[Program], in_flight_max: usize) -> Result<(), ProgramError> {
    let reductions = |program: &Program| -> Vec<Action> {
        program.actions.iter().copied().filter(|action| matches!(action, Action::ReduceGrad { .. })).collect()
    };
    let Some(first) = programs.first() else { return Ok(()) };
    let expected = reductions(first);
    for (rank, program) in programs.iter().enumerate() {
        validate(program, in_flight_max)?;
        let found = reductions(program);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::single;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn single_stage_programs_are_valid_and_read_back(units in 1_usize..8, microbatches in 1_usize..6) {
            let program = single::program(units, microbatches);
            prop_assert_eq!(validate(&program, 1), Ok(()));
            prop_assert_eq!(program.to_string().parse(), Ok(program.clone()));
            prop_assert!(validate(&program, 0).is_err());
        }

        #[test]
        fn a_program_with_an_action_lost_doubled_or_first_is_refused(
            units in 1_usize..5, microbatches in 1_usize..4, at in any::<proptest::sample::Index>(), change in 0..3
        ) {
            let mut program = single::program(units, microbatches);
            let at = at.index(program.actions.len());
            let action = program.actions[at];
            match change {
                0 => { program.actions.remove(at); }
                1 => program.actions.insert(at, action),
                _ => {
                    prop_assume!(at > 0 && !(matches!(action, Action::Forward { unit: 0, .. })));
                    program.actions.remove(at);
                    program.actions.insert(0, action);
                }
            }
            prop_assert!(validate(&program, microbatches).is_err(), "{}", program);
        }
    }

    #[test]
    fn ranks_must_agree_on_the_order_of_reductions() {
        let program = single::program(2, 1);
        assert_eq!(validate_world(&[program.clone(), program.clone()], 1), Ok(()));
        let mut other = program.clone();
        // Both reductions after both backwards, in the other order: valid alone, a deadlock together.
        other.actions = "units 2 microbatches 1\nF 0 0\nF 1 0\nB 1 0\nB 0 0\nREDUCE_GRAD 0\nREDUCE_GRAD 1\nSTEP 0\nSTEP 1"
            .parse::<Program>()
            .unwrap()
            .actions;
        assert_eq!(validate(&other, 1), Ok(()));
        let error = validate_world(&[program, other], 1).unwrap_err();
        assert_eq!(
            error.to_string(),
            "rank 1 issues 'REDUCE_GRAD 0' as its reduction 0, where rank 0 issues 'REDUCE_GRAD 1'"
        );
    }

    #[test]
    fn refusals_name_the_place() {
        let parse = |text: &str| text.parse::<Program>().unwrap_err().to_string();
        assert!(parse("F 0 0").contains("line 1: 'F 0 0' should read"));
        assert!(parse("units 1 microbatches 1\n\nF 0 # half\n").contains("line 3: 'F 0' is no action"));
        let outside: Program = "units 1 microbatches 1\nF 0 1".parse().unwrap();
        assert!(validate(&outside, 1).unwrap_err().to_string().contains("action 0 'F 0 1' is outside"));
    }
}
