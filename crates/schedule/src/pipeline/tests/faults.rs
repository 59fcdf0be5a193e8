//! Invalid schedules, their error messages, and the marked places.

use super::*;

fn parse(text: &str) -> Schedule {
    text.parse().unwrap_or_else(|error| panic!("{error}"))
}

/// Returns the error of an invalid schedule, and the error's place as a rank and the index of a pass.
fn fault(text: &str) -> (String, Option<(usize, usize)>) {
    let schedule = parse(text);
    let costs = Costs::equal(schedule.num_stages(), EQUAL).expect("possible costs");
    let error = validate(&schedule, &costs, None).expect_err("a fault");
    (error.to_string(), error.place().map(|place| (place.rank, place.index)))
}

const HEADER: &str = "ranks 2 placement 0,1 microbatches 1\n";

#[test]
fn each_fault_is_named_with_its_place() {
    for (ranks, message, place) in [
        ("rank 0: F 0 0, B 0 0\nrank 1: F 1 0", "rank 1 lacks the pass 'B 1 0'", None),
        ("rank 0: F 0 0, I 0 0\nrank 1: F 1 0, B 1 0", "rank 0 lacks the pass 'W 0 0'", None),
        ("rank 0: B 0 0\nrank 1: F 1 0, B 1 0", "rank 0, pass 0: 'B 0 0' comes before 'F 0 0'", Some((0, 0))),
        (
            "rank 0: F 0 0, W 0 0, I 0 0\nrank 1: F 1 0, B 1 0",
            "rank 0, pass 1: 'W 0 0' comes before 'I 0 0'",
            Some((0, 1)),
        ),
        (
            "rank 0: F 0 0, F 0 0\nrank 1: F 1 0, B 1 0",
            "rank 0, pass 1: 'F 0 0' repeats all or part of an earlier pass",
            Some((0, 1)),
        ),
        (
            "rank 0: F 0 0, I 0 0, B 0 0\nrank 1: F 1 0, B 1 0",
            "rank 0, pass 2: 'B 0 0' repeats all or part of an earlier pass",
            Some((0, 2)),
        ),
        (
            "rank 0: F 0 0, B 0 0\nrank 1: F 1 1, B 1 1",
            "rank 1, pass 0: 'F 1 1' is out of range: there are 2 stages and 1 micro",
            Some((1, 0)),
        ),
        (
            "rank 0: F 0 0, F 1 0\nrank 1: B 1 0",
            "rank 0, pass 1: 'F 1 0' belongs to a stage on rank 1; move it there",
            Some((0, 1)),
        ),
        (
            "rank 0: F 0 0, B 0 0, U 0 0\nrank 1: F 1 0, B 1 0",
            "rank 0, pass 2: 'U 0 0' does not come after all gradients",
            Some((0, 2)),
        ),
    ] {
        let (found, found_place) = fault(&format!("{HEADER}{ranks}"));
        assert!(found.starts_with(message), "{found}\n{message}");
        assert_eq!(found_place, place, "{found}");
    }
    let nowhere = fault("ranks 1 placement 0,1 microbatches 1\nrank 0: F 0 0, B 0 0");
    let expected = "stage 1 is placed on rank 1, but there are only 1 ranks; ranks count from 0";
    assert_eq!(nowhere, (expected.to_owned(), None));
    let huge =
        fault("ranks 1 placement 0 microbatches 99999999999 steps 99999999999 weights stashed\nrank 0:").0;
    assert!(huge.starts_with("a schedule has 1 ranks, 1 stages and 99999999999 steps"), "{huge}");
}

#[test]
fn sums_are_made_in_the_order_of_microbatches() {
    let header = "ranks 2 placement 0,1 microbatches 2\n";
    for (ranks, message, place) in [
        (
            "rank 0: F 0 0, F 0 1, B 0 1, B 0 0\nrank 1: F 1 0, F 1 1, B 1 0, B 1 1",
            "rank 0, pass 2: 'B 0 1' comes before 'B 0 0'; gradients and losses must be summed in microbatch order",
            (0, 2),
        ),
        (
            "rank 0: F 0 0, F 0 1, I 0 1, I 0 0, W 0 1, W 0 0\nrank 1: F 1 0, F 1 1, B 1 0, B 1 1",
            "rank 0, pass 4: 'W 0 1' comes before 'W 0 0'; gradients",
            (0, 4),
        ),
        (
            "rank 0: F 0 0, F 0 1, B 0 0, B 0 1\nrank 1: F 1 0, F 1 1, I 1 1, I 1 0, W 1 0, W 1 1",
            "rank 1, pass 2: 'I 1 1' comes before 'I 1 0'; gradients",
            (1, 2),
        ),
    ] {
        let (found, found_place) = fault(&format!("{header}{ranks}"));
        assert!(found.starts_with(message), "{found}\n{message}");
        assert_eq!(found_place, Some(place), "{found}");
    }
    let passes = "rank 0: F 0 0, F 0 1, I 0 1, I 0 0, W 0 0, W 0 1\nrank 1: F 1 0, F 1 1, B 1 0, B 1 1";
    let schedule = parse(&format!("{header}{passes}"));
    let costs = Costs::equal(2, EQUAL).expect("possible costs");
    assert_eq!(validate(&schedule, &costs, None), Ok(()), "input halves below the last stage have no sum");
}

#[test]
fn a_misordered_sum_is_drawn_at_its_place() {
    let schedule =
        parse("ranks 1 placement 0 microbatches 2\nrank 0: F 0 0, F 0 1, I 0 0, I 0 1, W 0 1, W 0 0");
    let costs = Costs::equal(1, EQUAL).expect("possible costs");
    let error = validate(&schedule, &costs, None).expect_err("a fault");
    let expected = "\
rank 0, pass 4: 'W 0 1' comes before 'W 0 0'; gradients and losses must be summed in microbatch order
rank 0 |F0F1I0I1W1W0|
                ^^ W 0 1
F forward; I backward, input half; W backward, weight half; · idle; 1 tick: 2 columns
";
    assert_eq!(draw_error(&schedule, &costs, &error, 80), expected);
}

#[test]
fn weights_are_updated_once_per_step_and_read_while_their_version_exists() {
    let stashed = "ranks 1 placement 0 microbatches 1 steps 2 weights stashed\n";
    let (late, place) = fault(&format!("{stashed}rank 0: F 0 0, B 0 0, F 0 1, B 0 1, U 0 0, U 0 1"));
    assert!(late.starts_with("rank 0, pass 4: 'U 0 0' does not come after all gradients"), "{late}");
    assert_eq!(place, Some((0, 4)));
    let (missing, _) = fault(&format!("{stashed}rank 0: F 0 0, B 0 0, U 0 0, F 0 1, B 0 1"));
    assert_eq!(missing, "rank 0 lacks the pass 'U 0 1'; add it to that rank");
    let buffered = "ranks 1 placement 0 microbatches 1 steps 3 weights double-buffered\n";
    let passes = "rank 0: F 0 0, F 0 1, F 0 2, B 0 0, U 0 0, B 0 1, U 0 1, B 0 2, U 0 2";
    let (early, place) = fault(&format!("{buffered}{passes}"));
    assert!(early.starts_with("rank 0, pass 2: 'F 0 2' needs version 1 of its weights"), "{early}");
    assert_eq!(place, Some((0, 2)));
}

#[test]
fn a_deadlock_names_the_cycle_and_marks_its_place() {
    let schedule = parse(
        "ranks 2 placement 0,1 microbatches 2\nrank 0: F 0 0, B 0 0, F 0 1, B 0 1\nrank 1: F 1 1, F 1 0, B 1 0, B 1 1",
    );
    let costs = Costs::equal(2, EQUAL).expect("possible costs");
    let error = validate(&schedule, &costs, None).expect_err("a deadlock");
    assert_eq!(simulate(&schedule, &costs), Err(error.clone()));
    let expected = "\
deadlock: rank 0, pass 1: 'B 0 0' waits for 'B 1 0' on rank 1; rank 1, pass 0: 'F 1 1' waits for 'F 0 1' on rank 0
rank 0 |F0|
          ^ B 0 0
rank 1 |··|
F forward; B backward; · idle; 1 tick: 2 columns
";
    assert_eq!(draw_error(&schedule, &costs, &error, 80), expected);
}

#[test]
fn sizes_that_do_not_fit_are_refused_with_what_to_try() {
    let refusal = |kind: &str, sizes: Sizes| {
        let kind = ScheduleKind::named(kind).expect("a schedule");
        let num_stages = sizes.num_ranks.saturating_mul(sizes.stages_per_rank).min(100);
        let costs = Costs::equal(num_stages, EQUAL).expect("possible costs");
        generate(kind, sizes, &costs, None).expect_err("sizes that do not fit").to_string()
    };
    for (kind, sizes, message) in [
        (
            "1f1b",
            sizes(2, 4, 2),
            "schedule '1f1b' needs 1 stages per rank, not 2; set that, or choose interleaved-1f1b, breadth-first or auto",
        ),
        (
            "interleaved-1f1b",
            sizes(2, 4, 1),
            "schedule 'interleaved-1f1b' needs 2 or more stages per rank, not 1; set that, or choose 1f1b",
        ),
        (
            "zb-v",
            sizes(2, 4, 1),
            "schedule 'zb-v' needs 2 stages per rank, not 1; set that, or choose zb-h1 or zb-h2",
        ),
        (
            "dualpipe-v",
            sizes(4, 7, 2),
            "schedule 'dualpipe-v' needs at least 8 microbatches on 4 ranks, not 7; raise the global batch size, or choose zb-v",
        ),
        (
            "pipedream-2bw",
            sizes(4, 3, 1),
            "schedule 'pipedream-2bw' needs at least 4 microbatches on 4 ranks, not 3",
        ),
        (
            "gpipe",
            Sizes { num_steps: 2, ..sizes(2, 2, 1) },
            "schedule 'gpipe' needs 1 step between drains, not 2; it drains",
        ),
        ("gpipe", sizes(0, 2, 1), "a pipeline needs at least one rank"),
        ("gpipe", sizes(usize::MAX, 2, 1), "a pipeline needs at least one rank"),
        ("gpipe", sizes(1000, 1 << 20, 1), "a pipeline needs at least one rank"),
        ("auto", sizes(101, 1, 1), "costs are given for 100 stages, but the schedule has 101"),
    ] {
        let found = refusal(kind, sizes);
        assert!(found.starts_with(message), "{found}\n{message}");
    }
    let costs = Costs::equal(2, EQUAL).expect("possible costs");
    let few = generate(ScheduleKind::GPipe, sizes(2, 4, 1), &costs, Some(&[4])).expect_err("one bound");
    assert_eq!(few.to_string(), "activation bounds are given for 1 ranks, but the schedule has 2");
    let memory = generate(ScheduleKind::GPipe, sizes(2, 4, 1), &costs, Some(&[4, 3])).expect_err("no room");
    assert!(
        memory
            .to_string()
            .starts_with("schedule 'gpipe' holds 4 of activations on rank 1, but only 3 fit; choose"),
        "{memory}"
    );
    assert_eq!(ScheduleKind::named("gpip"), None);
}

#[test]
fn costs_out_of_range_are_refused() {
    let refusal =
        |stage, send| Costs::new(vec![EQUAL, stage], send).expect_err("impossible costs").to_string();
    let kept = StageCosts { activation: 1, weight_activation: 2, ..EQUAL };
    for (stage, send, message) in [
        (StageCosts::of(0, 1, 1), 0, "the time of forward of stage 1 is 0; it must be from 1"),
        (StageCosts::of(1, 0, 1), 0, "the time of backward's input half of stage 1 is 0; it"),
        (StageCosts::of(1, 1, TICKS_MAX + 1), 0, "the time of backward's weight half of stage 1 is"),
        (EQUAL, TICKS_MAX + 1, "the time of a message between stages is"),
        (kept, 0, "what stays of that after the input half of stage 1 is 2; it must be from 0 to 1"),
    ] {
        let found = refusal(stage, send);
        assert!(found.starts_with(message), "{found}");
    }
}

#[test]
fn text_that_is_no_schedule_is_refused_with_its_line() {
    for (text, message) in [
        ("", "line 1: '' should read 'ranks P placement"),
        ("ranks 1 placement 0 microbatches", "line 1: 'ranks 1 placement 0 microbatches' should"),
        ("ranks 1 placement 0,x microbatches 1", "line 1: "),
        ("ranks 1 placement 0 microbatches 1 steps", "line 1: "),
        ("ranks 1 placement 0 microbatches 1 weights new", "line 1: "),
        (
            "# first\nranks 1 placement 0 microbatches 1\nrank 1: F 0 0",
            "line 3: expected 'rank 0:' followed by its passes",
        ),
        ("ranks 1 placement 0 microbatches 1\nrank 0: F 0 0, X 0 0", "line 2: 'X 0 0' is not a pass"),
        ("ranks 1 placement 0 microbatches 1\nrank 0: F 0 0 0", "line 2: 'F 0 0 0' is not a pass"),
        ("ranks 1 placement 0 microbatches 1\nrank 0: F 0 0,", "line 2: '' is not a pass"),
        ("ranks 2 placement 0,1 microbatches 1\nrank 0: F 0 0", "the header declares 2 ranks, but 1 follow"),
    ] {
        let found = text.parse::<Schedule>().expect_err("no schedule").to_string();
        assert!(found.starts_with(message), "{found}\n{message}");
    }
}

/// An update waits for the gradient norm of an earlier step, and thus for all ranks. Without this wait, the schedule would run.
#[test]
fn a_deadlock_through_the_norm_of_an_earlier_step_is_found() {
    let text = |rank_1: &str| {
        format!(
            "ranks 3 placement 0,1,2,0 microbatches 2 steps 3 weights stashed\n\
             rank 0: F 0 0, F 0 1, F 0 2, F 0 3, F 0 4, F 3 0, B 3 0, F 3 1, B 3 1, B 0 0, B 0 1, U 0 1, U 3 1, F 3 2, B 3 2, \
             F 3 3, B 3 3, F 3 4, F 0 5, B 0 2, B 0 3, U 0 3, U 3 3, B 3 4, F 3 5, B 3 5, B 0 4, B 0 5, U 0 5, U 3 5\n\
             rank 1: F 1 0, F 1 1, F 1 2, F 1 3, F 1 4, B 1 0, B 1 1, {rank_1}, B 1 2, B 1 3, U 1 3, B 1 4, B 1 5, U 1 5\n\
             rank 2: F 2 0, F 2 1, B 2 0, B 2 1, U 2 1, F 2 2, F 2 3, B 2 2, B 2 3, U 2 3, F 2 4, F 2 5, B 2 4, B 2 5, U 2 5\n"
        )
    };
    let costs = Costs::new(vec![StageCosts::of(1, 1, 1); 4], 0).unwrap();
    let check = |rank_1| validate(&text(rank_1).parse().unwrap(), &costs, None);
    assert_eq!(check("U 1 1, F 1 5"), Ok(()));
    let error = check("F 1 5, U 1 1").unwrap_err().to_string();
    assert!(error.contains("deadlock") && error.contains("'U 2 3' waits for 'U 1 1' on rank 1"), "{error}");
}

/// A rank needs the gradients of all its stages before it updates one of them.
#[test]
fn an_update_before_gradients_of_another_stage_of_its_rank_is_refused() {
    let schedule = "ranks 1 placement 0,0 microbatches 1 steps 1 weights stashed\n\
                    rank 0: F 0 0, F 1 0, B 1 0, U 1 0, B 0 0, U 0 0\n";
    let costs = Costs::new(vec![StageCosts::of(1, 1, 1); 2], 0).unwrap();
    let error = validate(&schedule.parse().unwrap(), &costs, None).unwrap_err().to_string();
    assert!(
        error.contains("'U 1 0' does not come after all gradients of a step of its rank's stages"),
        "{error}"
    );
}
