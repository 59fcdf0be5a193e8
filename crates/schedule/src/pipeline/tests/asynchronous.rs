//! Schedules without drains: versions of weights, staleness, and steps.

use super::*;

fn without_drains(
    kind: ScheduleKind,
    num_ranks: usize,
    num_microbatches: usize,
    num_steps: usize,
) -> Schedule {
    let sizes = Sizes { num_ranks, num_microbatches, stages_per_rank: 1, num_steps };
    validated(kind, sizes, EQUAL).0
}

#[test]
fn staleness_of_pipedream_is_the_ranks_below() {
    for ranks in 1..=6 {
        let schedule = without_drains(ScheduleKind::PipeDream, ranks, 1, 3 * ranks);
        let below: Vec<usize> = (0..ranks).map(|stage| ranks - 1 - stage).collect();
        assert_eq!(schedule.staleness(), below);
        let versions: Vec<usize> = below.iter().map(|staleness| staleness + 1).collect();
        assert_eq!(schedule.versions_kept(), versions);
    }
}

#[test]
fn longer_steps_make_pipedream_less_stale() {
    for (ranks, microbatches) in [(4, 2), (4, 3), (5, 2), (6, 4), (3, 8)] {
        let schedule = without_drains(ScheduleKind::PipeDream, ranks, microbatches, 8);
        let expected: Vec<usize> =
            (0..ranks).map(|stage| (ranks - 1 - stage).div_ceil(microbatches)).collect();
        assert_eq!(schedule.staleness(), expected, "{ranks} {microbatches}");
    }
}

#[test]
fn pipedream_2bw_is_one_step_stale_with_two_versions() {
    for (ranks, microbatches) in [(1, 1), (2, 2), (4, 4), (4, 7), (6, 9)] {
        let schedule = without_drains(ScheduleKind::PipeDream2Bw, ranks, microbatches, 4);
        assert_eq!(schedule.staleness(), vec![1; ranks]);
        assert_eq!(schedule.versions_kept(), vec![2; ranks]);
        // A microbatch reads one version on all stages.
        for (passes, versions) in schedule.ranks.iter().zip(schedule.versions_read()) {
            let reads = passes.iter().zip(versions).filter(|(pass, _)| pass.kind != PassKind::Update);
            for (pass, version) in reads {
                assert_eq!(version, (pass.microbatch / microbatches).saturating_sub(1), "{pass}");
            }
        }
    }
}

#[test]
fn backward_reads_what_its_forward_read() {
    for kind in [ScheduleKind::PipeDream, ScheduleKind::PipeDream2Bw] {
        let schedule = without_drains(kind, 4, 4, 5);
        for (passes, versions) in schedule.ranks.iter().zip(schedule.versions_read()) {
            let read_by = |wanted: Pass| {
                let index = passes.iter().position(|&pass| pass == wanted).expect("a pass of the rank");
                versions[index]
            };
            for pass in passes.iter().filter(|pass| pass.kind == PassKind::Backward) {
                assert_eq!(read_by(*pass), read_by(Pass::forward(pass.stage, pass.microbatch)));
            }
        }
    }
}

#[test]
fn a_schedule_that_drains_has_one_version() {
    let (schedule, _) = validated(ScheduleKind::ZeroBubbleV, sizes(3, 6, 2), EQUAL);
    assert_eq!(schedule.staleness(), [0; 6]);
    assert_eq!(schedule.versions_kept(), [1; 6]);
}

#[test]
fn without_drains_only_the_ends_have_a_bubble() {
    for kind in [ScheduleKind::PipeDream, ScheduleKind::PipeDream2Bw] {
        for num_steps in [1, 2, 7] {
            let sizes = Sizes { num_ranks: 4, num_microbatches: 4, stages_per_rank: 1, num_steps };
            let (_, timeline) = validated(kind, sizes, EQUAL);
            let ideal_ticks = 4 * num_steps as u64 * EQUAL.total();
            assert_eq!(timeline.lost(), LostTime { ticks: 3 * EQUAL.total(), ideal_ticks });
        }
    }
}
