//! The transport `mpi`, with processes started by MPI's launcher. Skipped if there is no `mpirun`.
#![cfg(feature = "mpi")]

#[allow(dead_code, reason = "the other test binary uses the rest")]
#[path = "comm/support/mod.rs"]
mod support;

use std::process::{Command, Output};
use std::time::Duration;
use support::operations::check_algorithm;
use support::oracle::{Value, expected};
use support::{join_options, small_pieces};
use trireme_base::{Bf16, Rank, ReduceOp};
use trireme_comm::{Buffer, CommError, Element, Group, JoinOptions, TransportChoice, TransportKind, join};
use trireme_schedule::collective::{Algorithm, FlatAlgorithm, block};
use trireme_testkit::or_skip;

/// Environment variable of the processes that these tests start: role and address of the world.
const WORKER: &str = "TRIREME_COMM_TEST_MPI";

/// Lengths around short vectors, a frame's first message (1024 bytes) and fragments (128 bytes), and more fragments than are in flight at
/// once.
const LENGTHS: [usize; 12] = [0, 1, 3, 16, 17, 101, 240, 246, 247, 256, 1000, 5001];

/// Runs `role` in `num_workers` processes. `None` if they cannot be started.
fn launch(role: &str, num_workers: usize) -> Option<Output> {
    let options = join_options(num_workers, TransportChoice::Mpi, &small_pieces());
    let folder = tempfile::tempdir().expect("a folder for the launcher");
    let started = Command::new("mpirun")
        .args(["-n", &num_workers.to_string()])
        .arg(std::env::current_exe().expect("this program"))
        .args(["--exact", "worker", "--nocapture", "--test-threads=1"])
        .env(WORKER, format!("{role} {}", options.master_addr))
        .env("TMPDIR", folder.path())
        // By default, Open MPI starts no more processes than there are cores, and none as root.
        .env("OMPI_MCA_rmaps_base_oversubscribe", "1")
        .env("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        .output();
    or_skip("launcher of MPI that can be started, mpirun", started)
}

/// The workers' output, and whether the launcher exited successfully.
fn worker_output(output: &Output) -> (Vec<String>, bool) {
    let text = String::from_utf8_lossy(&output.stdout);
    let words = text.lines().filter_map(|line| line.split_once("worker: ")).map(|(_, word)| word.to_owned());
    (words.collect(), output.status.success())
}

#[test]
fn every_operation_has_the_bits_that_tcp_gives_it() {
    for num_workers in 2..=4 {
        let Some(output) = launch("operations", num_workers) else { return };
        let (words, is_success) = worker_output(&output);
        assert!(is_success && words == vec!["done"; num_workers], "{output:#?}");
    }
}

#[test]
fn every_algorithm_works_over_mpi() {
    for num_workers in [3, 4] {
        let Some(output) = launch("algorithms", num_workers) else { return };
        let (words, is_success) = worker_output(&output);
        assert!(is_success && words == vec!["done"; num_workers], "{output:#?}");
    }
}

#[test]
fn operations_that_differ_are_named_and_end_the_job() {
    let Some(output) = launch("mismatch", 2) else { return };
    let (words, is_success) = worker_output(&output);
    // The launcher kills the other worker as soon as the first one has ended.
    assert!(!is_success && !words.is_empty(), "{output:#?}");
    assert!(words.iter().all(|word| word.contains("differs between ranks")), "{output:#?}");
}

#[test]
fn a_failure_while_memory_is_lent_leaves_the_other_transports() {
    let Some(output) = launch("timeout", 2) else { return };
    let (words, _) = worker_output(&output);
    assert!(words.contains(&"went on".to_owned()), "{output:#?}");
}

#[test]
fn a_process_that_mpirun_has_not_started_fails_with_a_hint() {
    let options = join_options(2, TransportChoice::Mpi, &small_pieces());
    let child = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "worker", "--nocapture", "--test-threads=1"])
        .env(WORKER, format!("alone {}", options.master_addr))
        .output();
    let (words, is_success) = worker_output(&child.expect("a process"));
    assert!(is_success && words.len() == 1, "{words:?}");
    assert!(words[0].contains("this process is rank 0 of 1 in MPI, but rank 1 of 2 in the job"), "{words:?}");
}

/// The body of a process that these tests start. Does nothing in the process that cargo started.
#[test]
fn worker() {
    let Ok(task) = std::env::var(WORKER) else { return };
    let (role, master_addr) = task.split_once(' ').expect("two words");
    if role == "alone" {
        let failure = join(&options(1, 2, master_addr, TransportChoice::Mpi)).expect_err("refused");
        return println!("worker: {failure}");
    }
    let number = |names: [&str; 2]| {
        let value = names.into_iter().find_map(|name| std::env::var(name).ok());
        value.and_then(|value| value.parse().ok()).expect("the launcher says who this is")
    };
    let rank = number(["OMPI_COMM_WORLD_RANK", "PMI_RANK"]);
    let world_size = number(["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]);
    if role == "algorithms" {
        check_algorithms(&options(rank, world_size, master_addr, TransportChoice::Mpi));
        return println!("worker: done");
    }
    let mut mpi_options = options(rank, world_size, master_addr, TransportChoice::Mpi);
    if role == "timeout" {
        // So long that MPI waits for the receiver before it sends a fragment.
        mpi_options.group.chunk_bytes = 1 << 20;
        mpi_options.group.timeout = Duration::from_secs(1);
    }
    let mpi = join(&mpi_options).expect("joined");
    let tcp = join(&options(rank, world_size, master_addr, TransportChoice::Tcp)).expect("joined");
    assert_eq!(mpi.transport(), TransportKind::Mpi);
    match role {
        "operations" => {
            check(&mpi, &tcp);
            println!("worker: done");
        }
        "mismatch" => mismatch(&mpi),
        "timeout" => timeout(mpi, &tcp),
        _ => panic!("'{role}' is no role"),
    }
}

fn options(rank: usize, world_size: usize, master_addr: &str, transport: TransportChoice) -> JoinOptions {
    let master_addr = master_addr.to_owned();
    let options = join_options(world_size, transport, &small_pieces());
    let master_port = options.master_port + u16::from(transport == TransportChoice::Tcp);
    JoinOptions { rank: Rank(rank), master_addr, master_port, ..options }
}

/// Creates a world for each algorithm, one after the other.
fn check_algorithms(options: &JoinOptions) {
    let with_steps = FlatAlgorithm::ALL.map(Algorithm::from).into_iter().zip(1..);
    for (algorithm, index) in with_steps.filter(|(algorithm, _)| !algorithm.needs_shared_memory()) {
        let mut options = options.clone();
        options.master_port += index;
        options.group.algorithm = Some(algorithm);
        options.group.keeps_order = false;
        check_algorithm(&join(&options).expect("joined"), algorithm);
    }
}

fn check(mpi: &Group, tcp: &Group) {
    check_type::<f32>(mpi, tcp);
    check_type::<Bf16>(mpi, tcp);
    check_type::<i64>(mpi, tcp);
    check_bytes(mpi);
    check_messages(mpi);
    let rank = mpi.rank().0;
    // Halves of the world, in reverse order, and the whole world again, all used concurrently with the first group.
    for color in [rank as u64 % 2, 7] {
        let halves = [mpi, tcp].map(|group| {
            group.split(Some(color), (100 - rank) as u64).expect("split").expect("every rank has a color")
        });
        let [mpi_half, tcp_half] = &halves;
        assert_eq!(mpi_half.rank(), tcp_half.rank());
        assert!(mpi_half.world_size() == 1 || mpi_half.transport() == TransportKind::Mpi);
        let meanwhile = mpi.all_reduce(filled::<f32>(mpi, 0..5001), ReduceOp::Sum);
        check_type::<f32>(mpi_half, tcp_half);
        check_messages(mpi_half);
        check_reduced(mpi, &meanwhile.wait().expect("reduced"));
    }
    mpi.barrier().wait().expect("all are here");
}

fn filled<T: Value>(group: &Group, range: std::ops::Range<usize>) -> Buffer<T> {
    let mut buffer = group.buffer(range.len()).expect("memory");
    for (value, index) in buffer.iter_mut().zip(range) {
        *value = T::of(group.rank().0, index);
    }
    buffer
}

fn check_reduced<T: Value>(group: &Group, reduced: &[T]) {
    let expected: Vec<T> =
        (0..reduced.len()).map(|index| expected(ReduceOp::Sum, group.world_size(), index)).collect();
    assert!(bits(reduced) == bits(&expected), "the sum of {} on {group:?}", reduced.len());
}

fn bits<T: Element>(values: &[T]) -> &[u8] {
    bytemuck::cast_slice(values)
}

fn check_type<T: Value>(mpi: &Group, tcp: &Group) {
    for len in LENGTHS {
        let [by_mpi, by_tcp] = [mpi, tcp].map(|group| results::<T>(group, len).expect("it goes well"));
        for (index, (by_mpi, by_tcp)) in by_mpi.iter().zip(&by_tcp).enumerate() {
            assert!(bits(by_mpi) == bits(by_tcp), "result {index} of {len} x {} on {mpi:?}", T::DTYPE);
        }
        check_reduced(mpi, &by_mpi[0]);
    }
}

/// This rank's results of every vector operation on `len` elements, where they are specified.
fn results<T: Value>(group: &Group, len: usize) -> Result<Vec<Vec<T>>, CommError> {
    let (rank, world_size) = (group.rank(), group.world_size());
    let root = Rank(world_size - 1);
    let own = block(rank, world_size, len);
    let equal = len / world_size * world_size;
    let own_equal = block(rank, world_size, equal);
    let at_root = |len| if rank == root { len } else { 0 };
    let input = |range| filled::<T>(group, range);
    let output = |len| group.buffer::<T>(len);
    // All operations in flight at once.
    let whole = [
        group.all_reduce(input(0..len), ReduceOp::Sum),
        group.all_reduce(input(0..len), ReduceOp::Max),
        group.broadcast(input(0..len), root),
        group.all_gather(input(0..len)),
        group.all_to_all(input(0..equal)),
    ];
    let reduced = group.reduce(input(0..len), ReduceOp::Mean, root);
    let gathered = group.gather(input(0..len), root);
    let scattered = [group.scatter(input(0..len), root), group.reduce_scatter(input(0..len), ReduceOp::Sum)];
    let pairs = [
        group.all_reduce_into(input(0..len), output(len)?, ReduceOp::Prod),
        group.broadcast_into(input(0..at_root(len)), output(len)?, root),
        group.all_gather_into(input(own.clone()), output(len)?),
        group.reduce_scatter_into(input(0..len), output(own.len())?, ReduceOp::Min),
        group.all_to_all_into(input(0..equal), output(equal)?),
        group.gather_into(input(own_equal.clone()), output(at_root(equal))?, root),
        group.scatter_into(input(0..at_root(equal)), output(own_equal.len())?, root),
    ];
    let mut results = Vec::new();
    for work in whole {
        results.push(work.wait()?.to_vec());
    }
    for work in [reduced, gathered] {
        let buffer = work.wait()?;
        results.push(if rank == root { buffer.to_vec() } else { Vec::new() });
    }
    for work in scattered {
        results.push(work.wait()?[own.clone()].to_vec());
    }
    for work in pairs {
        results.push(work.wait()?.1.to_vec());
    }
    Ok(results)
}

fn check_bytes(group: &Group) {
    for len in [0, 1, 983, 984, 985, 100_000] {
        let block = |rank: usize| vec![rank as u8 + 1; len * rank];
        let gathered = group.all_gather_bytes(&block(group.rank().0)).wait().expect("gathered");
        assert!(gathered == (0..group.world_size()).map(block).collect::<Vec<_>>(), "{len} on {group:?}");
    }
}

/// Every rank sends to every other one, with all messages in flight at once, concurrently with an operation of the group.
fn check_messages(group: &Group) {
    let peers = || (0..group.world_size()).filter(|&peer| peer != group.rank().0);
    let mut sent = Vec::new();
    let mut received = Vec::new();
    for len in LENGTHS {
        for peer in peers() {
            received.push((peer, len, group.receive(group.buffer::<f32>(len).expect("memory"), Rank(peer))));
            sent.push(group.send(filled::<f32>(group, 0..len), Rank(peer)));
        }
    }
    let reduced = group.all_reduce(filled::<f32>(group, 0..5001), ReduceOp::Sum);
    for (peer, len, work) in received {
        let expected: Vec<f32> = (0..len).map(|index| f32::of(peer, index)).collect();
        assert!(bits(&work.wait().expect("received")) == bits(&expected), "{len} from {peer} on {group:?}");
    }
    for work in sent {
        work.wait().expect("sent");
    }
    check_reduced(group, &reduced.wait().expect("reduced"));
}

fn mismatch(group: &Group) {
    let len = 1000 + group.rank().0;
    let failure = group.all_reduce(filled::<f32>(group, 0..len), ReduceOp::Sum).wait();
    println!("worker: {}", failure.expect_err("the lengths differ"));
}

/// Rank 1 never receives rank 0's message: rank 0 times out with a message in flight that MPI cannot cancel.
fn timeout(mpi: Group, tcp: &Group) {
    if mpi.rank() == Rank(0) {
        let failure = mpi.send(filled::<f32>(&mpi, 0..1 << 20), Rank(1)).wait();
        assert!(matches!(failure, Err(CommError::TimedOut { .. })));
    }
    tcp.barrier().wait().expect("tcp goes on");
    drop(mpi);
    let mut buffer = tcp.buffer::<f32>(1 << 20).expect("memory");
    buffer.fill(1.0);
    let buffer = tcp.all_reduce(buffer, ReduceOp::Sum).wait().expect("tcp goes on");
    assert!(buffer.iter().all(|value| *value == 2.0));
    println!("worker: went on");
}
