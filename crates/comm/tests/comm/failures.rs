//! The errors that each rank returns after a failure.

use crate::support::{TRANSPORTS, join_options, on_ranks, ranks, small_pieces};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use trireme_base::{DType, EventCompleter, Pending, Rank, ReduceOp};
use trireme_comm::{
    Buffer, CommError, Element, Fusion, Group, GroupOptions, JoinOptions, Operation, PageSize,
    RecorderOptions, TransportChoice, TransportKind, Untyped, Work, join, report_path,
};
use trireme_schedule::collective::CollectiveKind;

fn zeros<T: Element>(group: &Group, len: usize) -> Buffer<T> {
    group.buffer(len).expect("memory")
}

/// A hierarchical all-to-all with these lengths, between two vectors of 8 elements.
fn by_hosts(group: &Group, lens: [usize; 16]) -> Result<(), CommError> {
    let (input, output) = (zeros::<f32>(group, 8), zeros::<f32>(group, 8));
    group.all_to_all_variable_by_hosts(input, output, lens.into()).wait().map(drop)
}

/// Issues an operation and waits for it.
type Issue = fn(&Group) -> Result<(), CommError>;

const SUM_OF_100: Issue = |group| group.all_reduce(zeros::<f32>(group, 100), ReduceOp::Sum).wait().map(drop);
const DIFFERENT: [Issue; 7] = [
    |group| group.all_reduce(zeros::<f32>(group, 101), ReduceOp::Sum).wait().map(drop),
    |group| group.all_reduce(zeros::<f32>(group, 1), ReduceOp::Sum).wait().map(drop),
    |group| group.all_reduce(zeros::<u32>(group, 100), ReduceOp::Sum).wait().map(drop),
    |group| group.all_reduce(zeros::<f32>(group, 100), ReduceOp::Max).wait().map(drop),
    |group| group.broadcast(zeros::<f32>(group, 100), Rank(0)).wait().map(drop),
    |group| group.all_gather_bytes(&[1]).wait().map(drop),
    |group| group.barrier().wait(),
];

#[test]
fn a_mismatch_is_named_on_every_rank() {
    for transport in TRANSPORTS {
        for odd_one in [0, 3] {
            for different in DIFFERENT {
                let failures = on_ranks(transport, 4, &small_pieces(), |group| {
                    group.barrier().wait().expect("everybody agrees");
                    if group.rank().0 == odd_one { different(&group) } else { SUM_OF_100(&group) }
                });
                for failure in failures {
                    let failure = failure.expect_err("the operations differ");
                    let CommError::Mismatch { sequence, rank, operation, other_rank, other_operation } =
                        failure
                    else {
                        panic!("{transport}, {odd_one}: {failure}");
                    };
                    assert_eq!(sequence, 1);
                    assert!(rank < other_rank);
                    assert!(rank == Rank(odd_one) || other_rank == Rank(odd_one), "{transport}");
                    let sum = Operation::reduction_of(
                        CollectiveKind::AllReduce.with_len(100),
                        ReduceOp::Sum,
                        DType::F32,
                    );
                    let is_odd_first = rank == Rank(odd_one);
                    assert_eq!(if is_odd_first { other_operation } else { operation }, sum);
                    assert_ne!(if is_odd_first { operation } else { other_operation }, sum);
                }
            }
        }
    }
}

#[test]
fn all_to_alls_of_two_kinds_are_a_mismatch() {
    let straight: Issue = |group| {
        let (input, output) = (zeros::<f32>(group, 8), zeros::<f32>(group, 8));
        group.all_to_all_variable(input, &[2; 4], output, &[2; 4]).wait().map(drop)
    };
    let of_other_lens: Issue = |group| by_hosts(group, [1; 16]);
    for transport in TRANSPORTS {
        for different in [straight, of_other_lens] {
            let failures = on_ranks(transport, 4, &small_pieces(), |group| match group.rank().0 {
                3 => different(&group),
                _ => by_hosts(&group, [2; 16]),
            });
            for failure in failures {
                let is_mismatch = matches!(failure, Err(CommError::Mismatch { sequence: 0, .. }));
                assert!(is_mismatch, "{transport}: {failure:?}");
            }
        }
    }
}

#[test]
fn different_roots_are_a_mismatch_too() {
    for transport in TRANSPORTS {
        let failures = on_ranks(transport, 3, &small_pieces(), |group| {
            let root = Rank(usize::from(group.rank().0 == 2));
            group.broadcast(zeros::<f32>(&group, 40), root).wait().map(drop)
        });
        for failure in failures {
            assert!(
                matches!(failure, Err(CommError::Mismatch { sequence: 0, .. })),
                "{transport}: {failure:?}"
            );
        }
    }
}

#[test]
fn later_operations_return_the_first_failure() {
    for transport in TRANSPORTS {
        on_ranks(transport, 2, &small_pieces(), |group| {
            let len = 10 + group.rank().0;
            let works: Vec<Work<Buffer<f32>>> =
                (0..3).map(|_| group.all_reduce(zeros(&group, len), ReduceOp::Sum)).collect();
            let mut messages: Vec<String> = works
                .into_iter()
                .map(|work| work.wait().expect_err("the first operation differs").to_string())
                .collect();
            messages.push(group.barrier().wait().expect_err("the group has failed").to_string());
            messages.push(group.all_gather_bytes(&[]).wait().expect_err("the group has failed").to_string());
            assert!(messages[0].contains("operation 0 differs"), "{}", messages[0]);
            assert!(messages.iter().all(|message| *message == messages[0]), "{messages:?}");
        });
    }
}

#[test]
fn a_rank_that_panics_is_lost_to_the_others() {
    for transport in TRANSPORTS {
        let all_are_ready = std::sync::Barrier::new(3);
        let failures = on_ranks(transport, 3, &small_pieces(), |group| {
            group.barrier().wait().expect("everybody is here");
            all_are_ready.wait();
            if group.rank() == Rank(2) {
                let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    let _group = group;
                    std::panic::resume_unwind(Box::new("not printed"));
                }));
                assert!(panicked.is_err());
                return None;
            }
            Some(SUM_OF_100(&group).expect_err("a rank is gone"))
        });
        assert!(failures[2].is_none());
        for failure in failures.into_iter().flatten() {
            let CommError::PeerLost { rank, operation, sequence } = failure else {
                panic!("{transport}: {failure}");
            };
            let sum =
                Operation::reduction_of(CollectiveKind::AllReduce.with_len(100), ReduceOp::Sum, DType::F32);
            assert_eq!((rank, operation, sequence), (Rank(2), sum, 1));
        }
    }
}

#[test]
fn leaving_in_good_order_is_no_loss() {
    for transport in TRANSPORTS {
        let ends = on_ranks(transport, 3, &small_pieces(), |group| {
            SUM_OF_100(&group).expect("everybody is here");
            if group.rank() == Rank(1) { Ok(()) } else { group.barrier().wait() }
        });
        for (rank, end) in ends.into_iter().enumerate() {
            match end {
                Ok(()) => assert_eq!(rank, 1),
                Err(CommError::PeerLeft { rank: left, sequence: 1, operation: Operation::BARRIER }) => {
                    assert_eq!(left, Rank(1));
                }
                Err(other) => panic!("{transport}, rank {rank}: {other}"),
            }
        }
    }
}

#[test]
fn a_timeout_names_the_missing_ranks() {
    let options = GroupOptions { timeout: Duration::from_secs(1), ..small_pieces() };
    for transport in TRANSPORTS {
        let everybody_else_failed = std::sync::Barrier::new(4);
        let failures = on_ranks(transport, 4, &options, |group| {
            if group.rank() == Rank(3) {
                everybody_else_failed.wait();
                return SUM_OF_100(&group);
            }
            let failure = SUM_OF_100(&group);
            everybody_else_failed.wait();
            failure
        });
        for (rank, failure) in failures.into_iter().enumerate() {
            match failure.expect_err("a rank did not come") {
                CommError::TimedOut { sequence: 0, missing, timeout, .. } if rank < 3 => {
                    assert_eq!(missing, [Rank(3)], "{transport}, rank {rank}");
                    assert_eq!(timeout, options.timeout);
                }
                CommError::PeerFailed { sequence: 0, .. } if rank == 3 => {}
                other => panic!("{transport}, rank {rank}: {other}"),
            }
        }
    }
}

#[test]
fn errors_of_one_rank_do_not_end_the_group() {
    on_ranks(TransportKind::Shm, 2, &small_pieces(), |group| {
        let no_root = group.broadcast(zeros::<f32>(&group, 1), Rank(2)).wait();
        assert!(matches!(no_root, Err(CommError::NoSuchRoot { root: Rank(2), world_size: 2, .. })));
        let too_long = group.all_gather_bytes(&vec![0; trireme_comm::CONTROL_BYTES_MAX + 1]).wait();
        assert!(matches!(too_long, Err(CommError::ControlDataTooLong { .. })));
        assert!(matches!(group.buffer::<f64>(usize::MAX / 2), Err(CommError::Allocate { .. })));
        assert!(matches!(group.buffer::<u8>(usize::MAX / 4), Err(CommError::Allocate { .. })));
        group.barrier().wait().expect("the group goes on");
    });
}

/// The report of rank 0 is a pipe without a reader. Opening it like a file would block forever.
#[test]
fn a_pipe_in_the_place_of_a_report_is_not_waited_for() {
    for choice in [TransportChoice::Shm, TransportChoice::Tcp] {
        let folder = tempfile::tempdir().expect("a folder");
        let pipe = folder.path().join(".rank-0.json.partial");
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a pipe");
        let flight_recorder =
            RecorderOptions { folder: Some(folder.path().to_owned()), ..RecorderOptions::default() };
        let options = JoinOptions { flight_recorder, ..join_options(2, choice, &small_pieces()) };
        std::thread::scope(|scope| {
            for options in ranks(&options, &[0, 1]) {
                scope.spawn(move || {
                    let group = join(&options).expect("joined");
                    let buffer = zeros::<f32>(&group, 100 + group.rank().0);
                    let failure = group.all_reduce(buffer, ReduceOp::Sum).wait().expect_err("other lengths");
                    assert!(matches!(failure, CommError::Mismatch { .. }), "{choice}: {failure}");
                });
            }
        });
        assert!(report_path(folder.path(), 1).exists());
    }
}

/// A device waits for the vector, and the host for the outcome.
#[test]
fn a_pending_vector_is_ready_at_its_event_and_its_failure_is_in_the_outcome() {
    for transport in TRANSPORTS {
        on_ranks(transport, 2, &small_pieces(), |group| {
            let peer = Rank(1 - group.rank().0);
            let ones = |len| {
                let mut vector: Buffer<f32> = zeros(&group, len);
                vector.fill(1.0);
                vector
            };
            for len in [1, 1000, 70_000] {
                let works = [
                    group.all_reduce(ones(len), ReduceOp::Sum),
                    group.send(ones(len), peer),
                    group.receive(zeros(&group, len), peer),
                ];
                let passed_on = works.map(|work| work.into_pending(DType::F32, len));
                for ((vector, outcome), value) in passed_on.into_iter().zip([2.0, 1.0, 1.0]) {
                    assert!(vector.wait().iter().all(|&element| element == value), "{transport}, {len}");
                    outcome.wait().expect("nobody fails");
                }
            }
            if group.rank() == Rank(1) {
                return;
            }
            let works = [group.all_reduce(ones(1000), ReduceOp::Sum), group.receive(ones(1000), peer)];
            let [sum, message] = works.map(|work| work.into_pending(DType::F32, 1000));
            let later = group.all_reduce(ones(1000), ReduceOp::Sum);
            for (vector, outcome) in [sum, message] {
                assert_eq!(vector.wait()[..], [0.0; 1000], "{transport}");
                outcome.wait().expect_err("the peer has left");
            }
            let (vector, outcome) = later.into_pending(DType::F32, 1000);
            assert_eq!(vector.wait()[..], [0.0; 1000], "{transport}");
            outcome.wait().expect_err("the group has failed");
        });
    }
}

/// The device that computes a rank's vector fails before a collective, a message, or a vector that is fused with an earlier one.
#[test]
fn a_device_that_fails_ends_the_group_with_its_cause() {
    let failed = |group: &Group| {
        let completer = EventCompleter::new(|| ());
        let memory = Pending::until(completer.event(), Arc::default());
        let vector: Buffer<Untyped> = Buffer::pending(memory, DType::F32, 10);
        completer.complete(Err("the GPU is lost".to_owned()));
        if group.rank() == Rank(1) { vector } else { of_ten(group) }
    };
    type Exchange = fn(Arc<Group>, Buffer<Untyped>) -> Result<(), CommError>;
    let exchanges: [Exchange; 3] = [
        |group, vector| group.all_reduce(vector, ReduceOp::Sum).wait().map(drop),
        |group, vector| match group.rank() {
            Rank(1) => group.send(vector, Rank(0)).wait().map(drop),
            _ => group.receive(vector, Rank(1)).wait().map(drop),
        },
        |group, vector| {
            let fusion = Fusion::new(Arc::clone(&group), ReduceOp::Sum, 100);
            let works = [of_ten(&group), vector].map(|vector| fusion.all_reduce(vector));
            works.into_iter().try_for_each(|work| work.wait().map(drop))
        },
    ];
    for transport in TRANSPORTS {
        for exchange in exchanges {
            let failures = on_ranks(transport, 2, &small_pieces(), |group| {
                let vector = failed(&group);
                exchange(Arc::new(group), vector).expect_err("rank 1 has failed")
            });
            assert!(
                matches!(&failures[1], CommError::DeviceFailed { cause } if cause == "the GPU is lost"),
                "{transport}: {failures:?}"
            );
            assert!(!matches!(failures[0], CommError::Mismatch { .. }), "{transport}: {failures:?}");
        }
    }
}

fn of_ten(group: &Group) -> Buffer<Untyped> {
    group.buffer_of(DType::F32, 10, PageSize::Base).expect("memory")
}

/// Each rank would keep reporting the other's progress if the reported age did not grow.
#[test]
fn ranks_that_wait_for_each_other_do_not_keep_each_other_alive() {
    let options = GroupOptions { timeout: Duration::from_secs(2), ..small_pieces() };
    thread::scope(|scope| {
        for transport in TRANSPORTS {
            let options = &options;
            scope.spawn(move || {
                let failures = on_ranks(transport, 2, options, |group| {
                    let peer = Rank(1 - group.rank().0);
                    group.receive(zeros::<f32>(&group, 1), peer).wait().map(drop)
                });
                assert!(failures.iter().all(Result::is_err), "{transport}");
                let has_timed_out =
                    |failure: &Result<(), CommError>| matches!(failure, Err(CommError::TimedOut { .. }));
                assert!(failures.iter().any(has_timed_out), "{transport}: {failures:?}");
            });
        }
    });
}

/// Rank 1 waits in an operation for rank 0, which is busy for longer than the timeout, and rank 2 waits for a message from rank 1.
///
/// The timeout is several times the interval at which progress is reported, so a busy machine does not end a rank that makes progress.
#[test]
fn ranks_that_make_progress_are_waited_for() {
    let timeout = Duration::from_secs(8);
    let busy = timeout + timeout / 4;
    let options = GroupOptions { timeout, ..small_pieces() };
    let outcomes = |transport, beats: bool| {
        let (ended, has_ended) = channel::<()>();
        let (ended, has_ended) = (Mutex::new(Some(ended)), Mutex::new(has_ended));
        on_ranks(transport, 3, &options, |group| {
            let pair = group.split_by("pair", |rank| u64::from(rank == Rank(2))).expect("all are there");
            match group.rank().0 {
                0 => {
                    let began = Instant::now();
                    let has_ended = has_ended.lock().expect("no panic");
                    while began.elapsed() < busy
                        && has_ended.recv_timeout(timeout / 100) == Err(RecvTimeoutError::Timeout)
                    {
                        if beats {
                            group.heartbeat().beat();
                        }
                    }
                    pair.barrier().wait()
                }
                1 => {
                    let waited = pair.barrier().wait();
                    drop(ended.lock().expect("no panic").take());
                    waited.and_then(|()| group.send(zeros::<f32>(&group, 1), Rank(2)).wait().map(drop))
                }
                _ => group.receive(zeros::<f32>(&group, 1), Rank(1)).wait().map(drop),
            }
        })
    };
    thread::scope(|scope| {
        for transport in TRANSPORTS {
            scope.spawn(move || {
                for outcome in outcomes(transport, true) {
                    outcome.unwrap_or_else(|failure| panic!("{transport}: {failure}"));
                }
            });
            scope.spawn(move || {
                let failures = outcomes(transport, false);
                let failure = failures[1].as_ref().expect_err("rank 0 hangs");
                let names_it =
                    matches!(failure, CommError::TimedOut { missing, .. } if *missing == [Rank(0)]);
                assert!(names_it, "{transport}: {failure}");
                failures[2].as_ref().expect_err("rank 1 has failed");
            });
        }
    });
}
