use super::*;
use crate::action::Keep;
use crate::action::StateClass;
use crate::layout::{ClassLayout, Portion, StateLayout, Tier};
use crate::lowering::{apply_layout, recompute};
use crate::program::UnitChain;
use crate::single;
use proptest::prelude::*;

/// Programs of all kinds: sharding, prefetching, offloading, recomputation, and a head tied to the embedding.
fn any_program() -> impl Strategy<Value = Program> {
    let keeps = proptest::collection::vec(0..4_usize, 8);
    let offloaded = (any::<[bool; 4]>(), 0..8_usize);
    let shares = any::<[bool; 4]>();
    (1_usize..8, 1_usize..5, any::<bool>(), shares, 0..4_usize, any::<bool>(), (keeps, offloaded)).prop_map(
        |(units, microbatches, is_tied, shares, prefetch, keep_gathered, (keeps, offloaded))| {
            let program = single::program(&UnitChain::language_model(units, is_tied), microbatches);
            let program = recompute(program, &with_recomputable_inputs(&keeps[..units]));
            let [parameters, gradients, optimizer, is_early] = shares;
            let share = |is_sharded| ClassLayout {
                portion: if is_sharded { Portion::Shard } else { Portion::Full },
                tier: Tier::Device,
            };
            let (are_away, num_moved) = offloaded;
            let mut state = StateLayout {
                parameters: share(parameters && optimizer),
                gradients: share(gradients),
                optimizer: share(optimizer),
                activations: share(false),
                gather_ahead: prefetch,
                keep_gathered,
                updates_early: is_early && !gradients && microbatches == 1,
                fetch_ahead: prefetch,
                num_offloaded_units: num_moved,
            };
            for (class, is_away) in StateClass::ALL.into_iter().zip(are_away) {
                if is_away && state.can_reside(class, Tier::Disk, microbatches) {
                    state = state.with_tier(class, Tier::Disk);
                }
            }
            apply_layout(program, state)
        },
    )
}

/// Returns the choices, changed so that a unit that keeps nothing has a unit below that recomputes its input.
fn with_recomputable_inputs(choices: &[usize]) -> Vec<Keep> {
    let mut keeps: Vec<Keep> = Vec::new();
    for &choice in choices {
        let is_recomputed = matches!(keeps.last(), Some(Keep::Input | Keep::Nothing));
        keeps.push(match Keep::ALL[choice] {
            Keep::Nothing if !is_recomputed => Keep::Input,
            keep => keep,
        });
    }
    keeps
}

proptest! {
    #[test]
    fn lowered_programs_are_valid_and_read_back(program in any_program()) {
        prop_assert_eq!(validate(&program, 1), Ok(()), "{}", program);
        prop_assert_eq!(program.to_string().parse(), Ok(program.clone()));
        prop_assert!(validate(&program, 0).is_err());
    }

    #[test]
    fn a_program_with_an_action_lost_doubled_or_first_is_refused(
        program in any_program(), at in any::<proptest::sample::Index>(), change in 0..3
    ) {
        let mut program = program;
        let at = at.index(program.actions.len());
        let action = program.actions[at];
        match change {
            0 => { program.actions.remove(at); }
            1 => program.actions.insert(at, action),
            _ => {
                // A program may begin with a pass of the first unit, or with a gather or a fetch.
                let may_begin = matches!(
                    action,
                    Action::Forward { unit: 0, .. } | Action::Unshard { .. } | Action::Fetch(_)
                );
                prop_assume!(at > 0 && !may_begin);
                program.actions.remove(at);
                program.actions.insert(0, action);
            }
        }
        prop_assert!(validate(&program, program.header.num_microbatches).is_err(), "{}", program);
    }
}

fn refusal(text: &str) -> String {
    validate(&text.parse().unwrap(), 1).unwrap_err().to_string()
}

#[test]
fn parameters_must_be_gathered_where_they_are_read() {
    let stage_3 = "units 2 microbatches 1 optimizer shard parameters shard gradients shard ties 1:0\n";
    assert_eq!(
        refusal(&format!("{stage_3}F 0 0")),
        "action 0 (forward, unit 0, microbatch 0) comes before the action it depends on (gather parameters, unit 0)"
    );
    let tied = format!("{stage_3}UNSHARD 0\nF 0 0\nRESHARD 0\nUNSHARD 1\nF 1 0");
    assert_eq!(
        refusal(&tied),
        "action 4 (forward, unit 1, microbatch 0) comes before the action it depends on (gather parameters, unit 0)"
    );
    let twice = format!("{stage_3}UNSHARD 0\nUNSHARD 0");
    assert_eq!(refusal(&twice), "action 1 (gather parameters, unit 0) repeats an earlier action");
    let one = "units 1 microbatches 1 optimizer shard\nF 0 0\nB 0 0\nREDUCE_GRAD 0\nSTEP 0\n";
    assert_eq!(refusal(one), "the program lacks an action: gather parameters, unit 0");
    let gradients = "units 1 microbatches 1 gradients shard\nF 0 0\nB 0 0\nREDUCE_GRAD 0\nSTEP 0\n";
    assert_eq!(
        refusal(gradients),
        "action 3 (update, unit 0) comes before the action it depends on (gather gradient, unit 0)"
    );
    assert_eq!(
        refusal("units 1 microbatches 1\nRESHARD 0"),
        "action 0 (free gathered parameters, unit 0) repeats an earlier action"
    );
}

#[test]
fn activations_that_are_not_kept_must_be_recomputed() {
    let text = "units 2 microbatches 1\nF 0 0 keep input\nF 1 0 keep nothing\n";
    assert_eq!(
        refusal(&format!("{text}B 1 0")),
        "action 2 (backward, unit 1, microbatch 0) comes before the action it depends on (recomputation, unit 1, microbatch 0)"
    );
    assert_eq!(
        refusal(&format!("{text}R 1 0")),
        "action 2 (recomputation, unit 1, microbatch 0) comes before the action it depends on (recomputation, unit 0, microbatch 0)"
    );
    assert_eq!(
        refusal("units 1 microbatches 1\nF 0 0\nR 0 0"),
        "action 1 (recomputation, unit 0, microbatch 0) repeats an earlier action"
    );
}

#[test]
fn programs_without_training_only_run_forward() {
    let text = "units 2 microbatches 1 optimizer none gradients none\nF 0 0 keep nothing\n";
    let program: Program = format!("{text}F 1 0 keep nothing\n").parse().unwrap();
    assert_eq!(validate(&program, 1), Ok(()));
    assert_eq!(program.to_string().parse(), Ok(program));
    assert_eq!(refusal(text), "the program lacks an action: forward, unit 1, microbatch 0");
    assert_eq!(
        refusal(&format!("{text}F 1 0\nB 1 0")),
        "action 2 (backward, unit 1, microbatch 0) is only valid in programs that train"
    );
    for state in ["gradients none", "optimizer none", "parameters none", "activations none"] {
        assert!(format!("units 1 microbatches 1 {state}\n").parse::<Program>().is_err(), "{state}");
    }
}

#[test]
fn ranks_must_agree_on_the_order_of_collectives() {
    let program = single::program(&UnitChain::of_units(2), 1);
    assert_eq!(validate_data_parallel(&[program.clone(), program.clone()], 1), Ok(()));
    let mut other = program.clone();
    // Both reductions run after both backward passes, in the other order. The program is valid alone, but deadlocks together with the first
    // one.
    other.actions =
        "units 2 microbatches 1\nF 0 0\nF 1 0\nB 1 0\nB 0 0\nREDUCE_GRAD 0\nREDUCE_GRAD 1\nSTEP 0\nSTEP 1"
            .parse::<Program>()
            .unwrap()
            .actions;
    assert_eq!(validate(&other, 1), Ok(()));
    let error = validate_data_parallel(&[program, other], 1).unwrap_err();
    assert_eq!(
        error.to_string(),
        "collective 0 of rank 1 is 'REDUCE_GRAD 0', but rank 0 issues 'REDUCE_GRAD 1'"
    );
}

#[test]
fn ranks_must_agree_on_the_order_of_exchanges_within_units() {
    let header = "units 2 microbatches 2 exchanges 0-2:F=tensor.all_reduce/8:B=tensor.all_reduce/8";
    let backward = "B 1 0\nB 0 0\nB 1 1\nREDUCE_GRAD 1\nB 0 1\nREDUCE_GRAD 0\nSTEP 0\nSTEP 1";
    let program = |header: &str, forward: &str| -> Program {
        format!("{header}\n{forward}\n{backward}").parse().unwrap()
    };
    let [first, second] = ["F 0 0\nF 1 0\nF 0 1\nF 1 1", "F 0 0\nF 0 1\nF 1 0\nF 1 1"];
    let programs = [program(header, first), program(header, second)];
    assert_eq!(validate_data_parallel(&[programs[0].clone(), programs[0].clone()], 2), Ok(()));
    let error = validate_data_parallel(&programs, 2).unwrap_err();
    assert_eq!(error.to_string(), "collective 1 of rank 1 is 'F 0 1', but rank 0 issues 'F 1 0'");
    // No unit has exchanges.
    let alone = "units 2 microbatches 2";
    assert_eq!(validate_data_parallel(&[program(alone, first), program(alone, second)], 2), Ok(()));
    assert_eq!(programs[0].to_string().parse(), Ok(programs[0].clone()));
}

#[test]
fn refusals_name_the_place() {
    let parse = |text: &str| text.parse::<Program>().unwrap_err().to_string();
    assert!(parse("F 0 0").contains("line 1: 'F 0 0' should read"));
    for header in [
        "units 1",
        "units 1 microbatches 1 optimizer some",
        "units 1 microbatches 1 parameters shard",
        "units 1 microbatches 2 gradients shard@disk",
        "units 1 microbatches 1 ties 1",
        "units 1 microbatches 1 ties",
    ] {
        assert!(parse(header).contains("should read 'units N microbatches M'"), "{header}");
    }
    assert!(parse("units 1 microbatches 1\n\nF 0 # half\n").contains("line 3: 'F 0' is not an action"));
    assert!(
        parse("units 1 microbatches 1\nF 0 0 keep some\n")
            .contains("line 2: 'F 0 0 keep some' is not an action")
    );
    assert!(
        refusal("units 1 microbatches 1\nF 0 1")
            .contains("action 0 (forward, unit 0, microbatch 1) is out of range")
    );
    assert!(refusal("units 1 microbatches 1\nF 0 0\nB 0 0\nSTEP 0").contains("(reduce gradient, unit 0)"));
}
