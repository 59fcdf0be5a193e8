//! Reports of ranks after failures, and their combined diagnosis.

use crate::support::{TRANSPORTS, join_options, on_ranks, ranks, small_pieces};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;
use trireme_base::{DType, Rank, ReduceOp};
use trireme_comm::{
    Choice, CommError, Diagnosis, Difference, Direction, Disagreement, Element, Group, GroupDeadlock,
    GroupOptions, JoinOptions, LineListener, MessagePeer, Occasion, Operation, OperationState, ProgramLine,
    RankReport, RecorderOptions, Source, TransportChoice, TransportKind, join, read_reports, report_path,
};
use trireme_schedule::collective::{Algorithm, CollectiveKind, FlatAlgorithm};

const SUM_OF_100: Operation =
    Operation::reduction_of(CollectiveKind::AllReduce.with_len(100), ReduceOp::Sum, DType::F32);

fn sum<T: Element>(group: &Group, len: usize) -> Result<(), CommError> {
    group.all_reduce(group.buffer::<T>(len).expect("memory"), ReduceOp::Sum).wait().map(drop)
}

/// Waits until the rank knows of a failure, whether or not it executes an operation.
fn report_of_failure(group: &Group) -> RankReport {
    loop {
        let report = group.flight_recorder().report();
        if report.occasion == Occasion::Failed {
            return report;
        }
        std::thread::yield_now();
    }
}

fn options_with_timeout(timeout: Duration) -> GroupOptions {
    GroupOptions { timeout, ..small_pieces() }
}

#[test]
fn a_timeout_is_reported_by_waiting_and_by_missing_ranks() {
    for transport in TRANSPORTS {
        let reports = on_ranks(transport, 3, &options_with_timeout(Duration::from_secs(2)), |group| {
            group.set_program_line(format_args!("line {}", 6));
            sum::<f32>(&group, 100).expect("everybody is here");
            group.set_program_line(format_args!("step 2, line 7: REDUCE_GRAD 1"));
            if group.rank() != Rank(2) {
                sum::<f32>(&group, 100).expect_err("rank 2 does not come");
            }
            report_of_failure(&group)
        });
        let diagnosis = Diagnosis::of(&reports);
        assert_eq!(diagnosis.disagreement, None, "{transport}");
        for (rank, finding) in diagnosis.findings.iter().enumerate() {
            let place = finding.place.as_ref().expect("all have reported");
            let operation = place.operation.as_ref().expect("all have done something");
            assert_eq!(
                (finding.source, &*place.group, operation.operation),
                (Source::Own, "world", SUM_OF_100)
            );
            let (sequence, state, line, missing): (_, _, _, &[usize]) = match rank {
                2 => (0, OperationState::Done, "line 6", &[]),
                _ => (1, OperationState::Failed, "step 2, line 7: REDUCE_GRAD 1", &[2]),
            };
            assert_eq!((operation.sequence, operation.state, &*operation.line), (sequence, state, line));
            assert_eq!(finding.waits_for, missing, "{transport}, rank {rank}");
            assert_eq!(finding.failure.is_some(), rank != 2);
            assert!(operation.algorithm.is_some(), "{transport}, rank {rank}");
        }
    }
}

#[test]
fn algorithms_are_reported_where_there_is_a_choice() {
    let ring = Algorithm::from(FlatAlgorithm::Ring);
    let options = GroupOptions { algorithm: Some(ring), keeps_order: false, ..small_pieces() };
    for transport in TRANSPORTS {
        on_ranks(transport, 3, &options, |group| {
            assert_eq!(group.choices(), []);
            for len in [100, 100, 7] {
                sum::<f32>(&group, len).expect("everybody is here");
            }
            group.barrier().wait().expect("everybody is here");
            let report = group.flight_recorder().report();
            let operations = report.groups[0].operations.iter();
            let algorithms: Vec<_> = operations.map(|operation| operation.algorithm.as_deref()).collect();
            assert_eq!(algorithms, [Some("ring"), Some("ring"), Some("ring"), None], "{transport}");
            let choice = |len| Choice {
                collective: CollectiveKind::AllReduce.with_len(len),
                element_bytes: 4,
                algorithm: ring,
            };
            assert_eq!(group.choices(), [choice(7), choice(100)]);
            assert_eq!(group.num_choices(), 2);
        });
    }
}

#[test]
fn a_lost_rank_is_named_in_every_report() {
    for transport in TRANSPORTS {
        let all_are_ready = Barrier::new(3);
        let reports = on_ranks(transport, 3, &small_pieces(), |group| {
            group.barrier().wait().expect("everybody is here");
            all_are_ready.wait();
            if group.rank() == Rank(1) {
                let panicked = catch_unwind(AssertUnwindSafe(|| {
                    let _group = group;
                    resume_unwind(Box::new("not printed"));
                }));
                assert!(panicked.is_err());
                return None;
            }
            // Rank 2 is in no operation when it is notified.
            if group.rank() == Rank(0) {
                sum::<f32>(&group, 100).expect_err("rank 1 is gone");
            }
            Some(report_of_failure(&group))
        });
        let reports: Vec<RankReport> = reports.into_iter().flatten().collect();
        let findings = Diagnosis::of(&reports).findings;
        assert_eq!(findings[0].waits_for, [1], "{transport}");
        assert_eq!((findings[1].source, &findings[1].place), (Source::Nothing, &None));
        let operation = findings[2].place.as_ref().and_then(|place| place.operation.as_ref());
        assert!(operation.is_some_and(|operation| operation.operation == Operation::BARRIER));
    }
}

/// Issues operations that should be equal on all ranks.
type Issue = fn(&Group) -> Result<(), CommError>;

#[test]
fn the_first_mismatch_is_found_in_the_reports() {
    let cases: [(Difference, Issue, Issue); 4] = [
        (Difference::Operation, |group| group.barrier().wait(), |group| sum::<f32>(group, 7)),
        (Difference::Size, |group| sum::<f32>(group, 8), |group| sum::<f32>(group, 7)),
        (Difference::Dtype, |group| sum::<f64>(group, 7), |group| sum::<f32>(group, 7)),
        (
            Difference::Order,
            |group| {
                let later = |len| group.all_reduce(group.buffer::<f32>(len).expect("memory"), ReduceOp::Sum);
                let works = [7, 9].map(later);
                works.into_iter().try_for_each(|work| work.wait().map(drop))
            },
            |group| {
                let later = |len| group.all_reduce(group.buffer::<f32>(len).expect("memory"), ReduceOp::Sum);
                let works = [9, 7].map(later);
                works.into_iter().try_for_each(|work| work.wait().map(drop))
            },
        ),
    ];
    for transport in TRANSPORTS {
        for (expected, odd, others) in cases {
            let reports = on_ranks(transport, 4, &small_pieces(), |group| {
                group.barrier().wait().expect("everybody agrees");
                group.set_program_line(format_args!("line 4"));
                let issue = if group.rank() == Rank(3) { odd } else { others };
                issue(&group).expect_err("the operations differ");
                group.flight_recorder().report()
            });
            let found = Diagnosis::of(&reports).disagreement.expect("a mismatch");
            let Disagreement { group, sequence, difference, sides } = found;
            assert_eq!((&*group, sequence, difference), ("world", 1, expected), "{transport}");
            assert_eq!(sides.len(), 2);
            assert_eq!((&sides[0].ranks[..], &*sides[0].line), (&[0, 1, 2][..], "line 4"));
            assert_eq!((&sides[1].ranks[..], &*sides[1].line), (&[3][..], "line 4"));
        }
    }
}

/// Ranks 0 and 1 wait for rank 2 in different operations, and do not communicate with each other.
#[test]
fn ranks_in_different_operations_that_never_meet_fail_long_before_the_deadline() {
    for transport in TRANSPORTS {
        let have_failed = Barrier::new(3);
        on_ranks(transport, 3, &small_pieces(), |group| {
            let buffer = group.buffer::<f32>(3).expect("memory");
            let result = match group.rank().0 {
                0 => group.gather(buffer, Rank(2)).wait().map(drop),
                1 => group.scatter(buffer, Rank(2)).wait().map(drop),
                _ => {
                    have_failed.wait();
                    return;
                }
            };
            let failure = result.expect_err("the operations differ");
            have_failed.wait();
            let expected = [
                Operation::of(CollectiveKind::Gather.with_root(Rank(2), 3), DType::F32),
                Operation::of(CollectiveKind::Scatter.with_root(Rank(2), 3), DType::F32),
            ];
            let CommError::Mismatch { sequence: 0, rank, operation, other_rank, other_operation } = failure
            else {
                panic!("{transport}: {failure}");
            };
            assert_eq!((rank, other_rank), (Rank(0), Rank(1)));
            assert_eq!([operation, other_operation], expected);
        });
    }
}

#[test]
fn a_mismatch_between_different_program_lines_is_reported_as_operation() {
    let reports = on_ranks(TransportKind::Inproc, 2, &small_pieces(), |group| {
        group.set_program_line(format_args!("line {}", group.rank().0 + 3));
        sum::<f32>(&group, 1 + group.rank().0).expect_err("other lengths");
        group.flight_recorder().report()
    });
    let found = Diagnosis::of(&reports).disagreement.expect("a mismatch");
    assert_eq!(found.difference, Difference::Operation);
}

/// Rank 0 issues its first operation in one group, rank 1 in the other.
#[test]
fn ranks_that_wait_for_each_other_in_different_groups_fail_long_before_the_deadline() {
    for transport in TRANSPORTS {
        let failures = on_ranks(transport, 2, &small_pieces(), |world| {
            let other = world.split_by("other", |_| 0).expect("split");
            other.barrier().wait().expect("one order");
            let [first, second] = if world.rank() == Rank(0) { [&world, &other] } else { [&other, &world] };
            let failure =
                first.barrier().wait().and_then(|()| second.barrier().wait()).expect_err("orders that cross");
            (failure, world.flight_recorder().report())
        });
        for (rank, (failure, _)) in failures.iter().enumerate() {
            match failure {
                CommError::GroupDeadlock(crossing) => {
                    let GroupDeadlock { rank: own, group, other_rank, other_group, .. } = &**crossing;
                    assert_eq!((own, other_rank), (&Rank(rank), &Rank(1 - rank)), "{transport}");
                    let [world, other] = ["world", "world/other"];
                    let expected = if rank == 0 { [world, other] } else { [other, world] };
                    assert_eq!([group, other_group], expected);
                }
                // The other rank detected it first.
                CommError::PeerFailed { .. } | CommError::PeerLost { .. } | CommError::PeerLeft { .. } => {}
                other => panic!("{transport}: {other}"),
            }
        }
        assert!(failures.iter().any(|(failure, _)| matches!(failure, CommError::GroupDeadlock { .. })));
    }
}

/// The groups of a mesh's rows have the same name. Rank 2 waits for a slow rank 3 in the group of their row. Rank 0 waits for rank 2 in the
/// world, and must not take that for a deadlock.
#[test]
fn groups_of_one_name_without_a_common_rank_are_no_deadlock() {
    let (sender, has_waited) = std::sync::mpsc::channel();
    let has_waited = Mutex::new(has_waited);
    let on_stall = LineListener::new(move |_| sender.send(()).expect("rank 3 listens"));
    let options = join_options(4, TransportChoice::Tcp, &options_with_timeout(Duration::from_secs(5)));
    let options: Vec<JoinOptions> = ranks(&options, &[0, 1, 2, 3]);
    std::thread::scope(|scope| {
        for options in &options {
            let flight_recorder = RecorderOptions {
                on_stall: (options.rank == Rank(0)).then(|| on_stall.clone()),
                ..RecorderOptions::default()
            };
            let options = JoinOptions { flight_recorder, ..options.clone() };
            let has_waited = &has_waited;
            scope.spawn(move || {
                let world = join(&options).expect("joined");
                let data = world.split_by("data", |rank| rank.0 as u64 / 2).expect("split");
                data.barrier().wait().expect("both are here");
                if world.rank() == Rank(3) {
                    // Slow, until rank 0 has waited long enough to report a stall.
                    let timeout = Duration::from_secs(60);
                    has_waited.lock().expect("not poisoned").recv_timeout(timeout).expect("rank 0 waits");
                }
                if world.rank().0 / 2 == 1 {
                    data.barrier().wait().expect("both are here");
                }
                world.barrier().wait().expect("everybody comes in the end");
            });
        }
    });
}

#[test]
fn equal_operations_of_different_lines_are_reported() {
    let reports = on_ranks(TransportKind::Inproc, 2, &small_pieces(), |group| {
        group.set_program_line(format_args!("line {}", group.rank().0 + 3));
        sum::<f32>(&group, 100).expect("the group sees no difference");
        group.flight_recorder().report()
    });
    let found = Diagnosis::of(&reports).disagreement.expect("other lines");
    assert_eq!((found.difference, found.sequence), (Difference::Line, 0));
    assert_eq!([&*found.sides[0].line, &*found.sides[1].line], ["line 3", "line 4"]);
}

/// The first two of four ranks run one program of a pipeline, the others run another one.
#[test]
fn programs_of_a_pipeline_differ_by_design() {
    let found = |steps: [u64; 4], lines: [usize; 4]| {
        let reports = on_ranks(TransportKind::Inproc, 4, &small_pieces(), |group| {
            let rank = group.rank().0;
            group.set_program_line(format_args!(
                "{}",
                ProgramLine {
                    step: steps[rank],
                    pipeline_rank: Some(rank / 2),
                    line: lines[rank],
                    action: format_args!("STEP {}", rank / 2)
                }
            ));
            sum::<f32>(&group, 100).expect("the group sees no difference");
            group.flight_recorder().report()
        });
        let found = Diagnosis::of(&reports).disagreement?;
        assert_eq!((found.difference, found.sequence), (Difference::Line, 0));
        Some(found.sides.into_iter().map(|side| (side.line, side.ranks)).collect::<Vec<_>>())
    };
    assert_eq!(found([5; 4], [14, 14, 9, 9]), None);
    let line = |line| format!("step 5, pipeline rank 1, line {line}: STEP 1");
    assert_eq!(found([5; 4], [14, 14, 9, 10]), Some(vec![(line(9), vec![2]), (line(10), vec![3])]));
    let first = "step 5, pipeline rank 0, line 14: STEP 0".to_owned();
    let late = "step 4, pipeline rank 1, line 9: STEP 1".to_owned();
    assert_eq!(found([5, 5, 4, 4], [14, 14, 9, 9]), Some(vec![(first, vec![0, 1]), (late, vec![2, 3])]));
}

#[test]
fn messages_are_reported_with_their_peers() {
    for transport in TRANSPORTS {
        let done = Barrier::new(2);
        let reports = on_ranks(transport, 2, &options_with_timeout(Duration::from_secs(2)), |group| {
            let peer = Rank(1 - group.rank().0);
            let buffer = || group.buffer::<u8>(5).expect("memory");
            let first = match group.rank() {
                Rank(0) => group.send(buffer(), peer).wait(),
                _ => group.receive(buffer(), peer).wait(),
            };
            drop(first.expect("both are here"));
            if group.rank() == Rank(1) {
                group.set_program_line(format_args!("line 9: RECV_F 0 1"));
                let failure = group.receive(buffer(), peer).wait().expect_err("nothing more is sent");
                assert!(matches!(failure, CommError::TimedOut { sequence: 1, .. }), "{failure}");
            }
            let report = group.flight_recorder().report();
            done.wait();
            report
        });
        let operation = |rank: usize| reports[rank].place().operation;
        let (sent, received) = (operation(0).expect("a message"), operation(1).expect("a message"));
        assert_eq!((sent.state, sent.sequence), (OperationState::Done, 0));
        assert_eq!(sent.peer, Some(MessagePeer { direction: Direction::Send, rank: 1 }));
        assert_eq!((received.state, received.sequence), (OperationState::Failed, 1));
        assert_eq!(received.peer, Some(MessagePeer { direction: Direction::Receive, rank: 0 }));
        assert_eq!(received.line, "line 9: RECV_F 0 1");
        assert_eq!(Diagnosis::of(&reports).findings[1].waits_for, [0], "{transport}");
    }
}

#[test]
fn groups_have_names_and_report_world_ranks() {
    for transport in TRANSPORTS {
        let reports = on_ranks(transport, 4, &small_pieces(), |world| {
            let rank = world.rank().0 as u64;
            let data = world.split_by("data", |rank| rank.0 as u64 % 2).expect("split");
            let other = world.split(Some(rank / 2), 0).expect("split").expect("a member");
            let len = 100 + usize::from(rank == 3);
            let result = sum::<f32>(&data, len);
            assert_eq!(result.is_err(), rank % 2 == 1);
            sum::<f32>(&other, 3).expect("the other groups go on");
            let report = world.flight_recorder().report();
            // A group's records are kept for a while after it is dropped.
            drop((data, other));
            assert_eq!(world.flight_recorder().report().groups.len(), 3);
            report
        });
        let names: Vec<&str> = reports[3].groups.iter().map(|group| &*group.name).collect();
        assert_eq!(names, ["world", "world/data", "world/1.1"]);
        assert_eq!(reports[3].groups[1].members, [1, 3]);
        let found = Diagnosis::of(&reports).disagreement.expect("a mismatch");
        assert_eq!((&*found.group, found.sequence, found.difference), ("world/data", 0, Difference::Size));
        assert_eq!([&found.sides[0].ranks, &found.sides[1].ranks], [&[1], &[3]], "{transport}");
    }
}

fn with_flight_recorder(options: &JoinOptions, folder: &Path, on_stall: &LineListener) -> JoinOptions {
    let flight_recorder = RecorderOptions {
        folder: Some(folder.to_owned()),
        on_stall: Some(on_stall.clone()),
        peer_reports_timeout: Duration::from_secs(60),
    };
    JoinOptions { flight_recorder, ..options.clone() }
}

#[test]
fn ranks_write_files_gather_places_and_report_a_stall_once() {
    for choice in [TransportChoice::Shm, TransportChoice::Tcp] {
        let folder = tempfile::tempdir().expect("a folder");
        let told = Arc::new(Mutex::new(Vec::new()));
        let lines = Arc::clone(&told);
        let on_stall =
            LineListener::new(move |line| lines.lock().expect("not poisoned").push(line.to_owned()));
        let options = join_options(3, choice, &options_with_timeout(Duration::from_secs(2)));
        let options: Vec<JoinOptions> = ranks(&options, &[0, 1, 2]);
        let have_reported = Barrier::new(3);
        let recorders: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = options
                .iter()
                .map(|options| {
                    let options = with_flight_recorder(options, folder.path(), &on_stall);
                    let have_reported = &have_reported;
                    scope.spawn(move || {
                        let group = join(&options).expect("joined");
                        assert!(
                            report_path(folder_of(&options), options.rank.0).exists(),
                            "a rank that joins reports"
                        );
                        group.barrier().wait().expect("all are here");
                        group.set_program_line(format_args!("line 7: REDUCE_GRAD 1"));
                        if group.rank() != Rank(1) {
                            sum::<f32>(&group, 100).expect_err("rank 1 does not come");
                        }
                        report_of_failure(&group);
                        let recorder = group.flight_recorder().clone();
                        have_reported.wait();
                        drop(group);
                        recorder
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
        });
        let gathered = Diagnosis::of(&[recorders[0].report()]);
        // Dropping a recorder writes its report.
        drop(recorders);
        let files = read_reports(folder.path()).expect("reports");
        assert_eq!(
            files.iter().map(|report| (report.rank, report.occasion)).collect::<Vec<_>>(),
            [(0, Occasion::Failed), (1, Occasion::Failed), (2, Occasion::Failed)]
        );
        // The places reported to rank 0 equal those in the ranks' own reports.
        let own = Diagnosis::of(&files);
        assert_eq!(gathered.findings.len(), 3);
        for (told, own) in gathered.findings.iter().zip(&own.findings) {
            let place = |place: &Option<trireme_comm::Place>| {
                let place = place.clone().expect("a place");
                let operation = place.operation.expect("an operation");
                (place.group, operation.sequence, operation.operation, operation.line, operation.state)
            };
            assert_eq!(told.source, if told.rank == 0 { Source::Own } else { Source::Told });
            assert_eq!(place(&told.place), place(&own.place), "{choice}");
        }
        assert_eq!(gathered.findings[0].waits_for, [1]);
        let mut told = told.lock().expect("not poisoned").clone();
        told.sort();
        assert_eq!(told.len(), 2, "{told:?}");
        for (line, rank) in told.iter().zip([0, 2]) {
            let what = "in all_reduce(sum, f32 x 100) (world, operation 1, line 7: REDUCE_GRAD 1) for ";
            assert!(line.starts_with(&format!("rank {rank} has been waiting for rank 1 {what}")), "{line}");
        }
    }
}

fn folder_of(options: &JoinOptions) -> &Path {
    options.flight_recorder.folder.as_deref().expect("a folder")
}

#[test]
fn files_that_are_no_reports_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let reports = on_ranks(TransportKind::Inproc, 2, &small_pieces(), |group| {
        sum::<f32>(&group, 1 + group.rank().0).expect_err("other lengths");
        group.flight_recorder().report()
    });
    let text = serde_json::to_string(&reports[1]).expect("a document");
    let path = report_path(folder.path(), 1);
    let read = |text: &str| {
        std::fs::write(&path, text).expect("written");
        read_reports(folder.path())
    };
    std::fs::write(folder.path().join("rank-x.json"), "not read").expect("written");
    let found = read(&text).expect("a report").remove(0);
    // Times may differ in their last bits.
    assert_eq!((found.rank, found.host), (1, reports[1].host.clone()));
    assert_eq!(
        found.groups[0].failure.as_ref().map(|failure| &failure.mismatch).expect("it failed").len(),
        2
    );
    assert_eq!(found.groups[0].operations[0].operation, reports[1].groups[0].operations[0].operation);
    for (from, to) in [
        ("{\"format\":1", "{\"format\":2"),
        ("\"rank\":1", "\"rank\":0"),
        ("\"world_size\":2", "\"world_size\":1"),
        ("\"world_size\":2", "\"world_size\":70000"),
        ("\"members\":[0,1]", "\"members\":[0,2]"),
        ("\"all_reduce\"", "\"all_reduced\""),
        ("}", ""),
    ] {
        assert!(text.contains(from), "{text}");
        let refused = read(&text.replacen(from, to, 1)).expect_err(to);
        assert!(refused.to_string().contains("rank-1.json"), "{refused}");
    }
}
