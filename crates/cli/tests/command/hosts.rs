//! Workers on hosts of their own, with links whose traffic is counted and which fail.

use crate::common::{Fixture, Outcome, Running, assert_contains, kill};
use rustix::process::{Signal, kill_process};
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::Duration;
use trireme_testkit::network::{Host, IPV4_TCP_HEADER_BYTES, IPV6_TCP_HEADER_BYTES, Network};
use trireme_testkit::or_skip;
use trireme_testkit::relay::{Conditions, Direction, FrameLoss, FrameRelay};

/// Costs of links. With them nothing is measured, so all bytes that are sent belong to the run.
const GIVEN_COSTS: &str = "--set comm.within_hosts_latency_microseconds=30 --set comm.within_hosts_gigabytes_per_second=2 \
     --set comm.across_hosts_latency_microseconds=50 --set comm.across_hosts_gigabytes_per_second=1 \
     --set comm.shared_memory_latency_microseconds=5 --set comm.shared_memory_gigabytes_per_second=5";

const ENDLESS: &str = "--set comm.transport=tcp --set training.steps=1000000000";

/// Returns a network; `None` if the test is skipped.
pub(crate) fn network() -> Option<Network> {
    or_skip("networks of hosts", Network::available()).map(|()| Network::new())
}

/// Returns the hosts for a world of two; `None` if the test is skipped.
pub(crate) fn hosts() -> Option<[Host; 2]> {
    network().map(|network| [(); 2].map(|()| network.add_host()))
}

/// Starts `trireme` on each host, as torchrun starts one worker per host. The workers meet at an address of the first host.
pub(crate) fn start(
    fixture: &Fixture,
    hosts: &[Host; 2],
    master_addr: IpAddr,
    arguments: &str,
) -> [Running; 2] {
    start_several(fixture, hosts, master_addr, arguments)
}

/// Starts `N / 2` workers per host in the same way.
fn start_several<const N: usize>(
    fixture: &Fixture,
    hosts: &[Host; 2],
    master_addr: IpAddr,
    arguments: &str,
) -> [Running; N] {
    let num_local = N / 2;
    std::array::from_fn(|rank| {
        let (host, local_rank) = (rank / num_local, rank % num_local);
        let worker = Worker { rank, world_size: N, host, local_rank, num_local };
        start_at(fixture, hosts, &worker, master_addr, arguments)
    })
}

/// A worker of a world of several workers per host.
struct Worker {
    rank: usize,
    world_size: usize,
    /// The index of the worker's host.
    host: usize,
    local_rank: usize,
    /// Number of workers on the host.
    num_local: usize,
}

/// Starts one worker of a world.
fn start_at(
    fixture: &Fixture,
    hosts: &[Host; 2],
    worker: &Worker,
    master_addr: IpAddr,
    arguments: &str,
) -> Running {
    let &Worker { rank, world_size, host, local_rank, num_local } = worker;
    let mut command = hosts[host].command(env!("CARGO_BIN_EXE_trireme"));
    command.args(arguments.split_whitespace());
    set_worker_environment(fixture, &mut command, rank, world_size, &master_addr.to_string());
    command.env("LOCAL_RANK", local_rank.to_string()).env("LOCAL_WORLD_SIZE", num_local.to_string());
    Running::start(command)
}

/// Makes `command` the only worker of its host, in a world that meets at `master_addr`, an address or a name.
pub(crate) fn set_worker_environment(
    fixture: &Fixture,
    command: &mut Command,
    rank: usize,
    world_size: usize,
    master_addr: &str,
) {
    fixture.isolate(command);
    command.env("RANK", rank.to_string()).env("WORLD_SIZE", world_size.to_string());
    command.env("LOCAL_RANK", "0").env("LOCAL_WORLD_SIZE", "1");
    command.env("TRIREME_SECRET", "the secret of a test on its own network");
    command.env("MASTER_ADDR", master_addr).env("MASTER_PORT", "29500");
}

/// Asserts that the run ended because `rank` was lost, and that the error says so.
fn assert_loss_of(rank: usize, outcome: Outcome) {
    assert_eq!(outcome.code, Some(74), "{outcome:?}");
    assert_contains(&outcome.one_error(), &[&format!("rank {rank} was lost"), "its log may say why"]);
}

/// Asserts that all workers of a run succeed, that rank 0 prints these facts, and that the others log them.
fn assert_all_report<const N: usize>(fixture: &Fixture, run: &str, workers: [Running; N], facts: &[&str]) {
    let outputs = workers.map(|worker| worker.end().succeeded());
    assert_contains(&outputs[0], facts);
    for (rank, output) in outputs.iter().enumerate().skip(1) {
        assert_eq!(output, "");
        assert_contains(&fixture.read(&format!("runs/{run}/logs/rank-{rank}.log")), facts);
    }
}

#[test]
fn memory_on_several_hosts_is_as_planned() {
    let Some(hosts) = hosts() else { return };
    let fixture = Fixture::with_corpus();
    for (index, settings) in [
        "--set training.reduce_dtype=bf16 --set training.dtype=bf16",
        "--set parallelism.zero_stage=2 --set parallelism.data_parallel_shard_degree=2",
        "--set parallelism.zero_stage=3 --set parallelism.zero_hpz=true --set parallelism.zero_quantized_weights=true \
         --set parallelism.zero_quantized_gradients=int4 --set training.determinism=run",
    ]
    .into_iter()
    .enumerate()
    {
        let train = format!("train tiny.toml --set run.name=run-{index} {settings}");
        let workers = start_several::<4>(&fixture, &hosts, hosts[0].ipv4().into(), &train);
        assert_all_report(&fixture, &format!("run-{index}"), workers, &["over shm+tcp"]);
        let record = fixture.records(&format!("run-{index}")).pop().unwrap();
        for category in ["parameters", "gradients", "optimizer", "activations", "communication"] {
            let [predicted, measured] =
                ["memory_predicted_bytes", "memory_peak_bytes"].map(|what| &record[what][category]);
            assert_eq!(predicted, measured, "{settings}, {category}: {record}");
        }
    }
}

#[test]
fn several_hosts_train_the_same_model_and_send_the_reported_bytes() {
    let Some(hosts) = hosts() else { return };
    let fixture = Fixture::with_corpus();
    // With this setting nothing is measured, so all bytes that are sent belong to the run.
    let unmeasured = "--set training.determinism=run";
    fixture.run(&format!("train tiny.toml --set run.name=local {unmeasured}")).succeeded();
    let [ipv4, ipv6] = [IpAddr::from(hosts[0].ipv4()), hosts[0].ipv6().into()];
    for (transport, address, header_bytes) in
        [("auto", ipv4, IPV4_TCP_HEADER_BYTES), ("tcp", ipv6, IPV6_TCP_HEADER_BYTES)]
    {
        let before = hosts[0].link().traffic();
        let train = format!(
            "train tiny.toml --set run.name={transport} --set comm.transport={transport} {unmeasured}"
        );
        assert_all_report(
            &fixture,
            transport,
            start(&fixture, &hosts, address, &train),
            &["over tcp", "step: 4 "],
        );
        assert_eq!(fixture.losses(transport), fixture.losses("local"));
        let traffic = hosts[0].link().traffic() - before;
        // In addition to the gradients, frames, joining and the coordination of checkpoints are sent.
        let reduced: u64 =
            fixture.records(transport).iter().map(|record| record["comm_bytes"].as_u64().unwrap()).sum();
        let bound = reduced + reduced / 50 + 8192;
        for volume in [traffic.sent, traffic.received] {
            let payload = volume.payload_bytes(header_bytes);
            let is_resent = traffic.num_retransmitted_segments > 0;
            assert!(
                reduced <= payload && (payload <= bound || is_resent),
                "{reduced} <= {payload} <= {bound}"
            );
        }
    }
}

#[test]
fn a_link_that_delays_and_loses_changes_no_bit() {
    let Some(()) = or_skip("relays", FrameRelay::available()) else { return };
    let Some(network) = network() else { return };
    let conditions = Conditions { delay: Duration::from_millis(1), bits_per_second: Some(100_000_000) };
    let (far, relay) = network.add_host_with_relay(conditions, FrameLoss { fraction: 0.02, seed: 1 });
    let hosts = [network.add_host(), far];
    let fixture = Fixture::with_corpus();
    let train = "train tiny.toml --set comm.transport=tcp";
    for worker in start(&fixture, &hosts, hosts[0].ipv4().into(), &format!("{train} --set run.name=far")) {
        worker.end().succeeded();
    }
    assert!([Direction::Near, Direction::Far].iter().all(|&towards| relay.counts(towards).num_lost > 0));
    fixture.run(&format!("{train} --set run.name=local")).succeeded();
    assert_eq!(fixture.losses("far"), fixture.losses("local"));
}

#[test]
fn each_rank_names_the_other_when_their_link_is_cut() {
    let Some(hosts) = hosts() else { return };
    let fixture = Fixture::with_corpus();
    let train = format!("train tiny.toml {ENDLESS} --set comm.network_pause_seconds=2");
    let mut workers = start(&fixture, &hosts, hosts[0].ipv4().into(), &train);
    workers[0].until("step: 5 ");
    hosts[1].link().cut();
    for (worker, other) in workers.into_iter().zip([1, 0]) {
        assert_loss_of(other, worker.end_after_death());
    }
    assert!(fixture.complete_checkpoints("tiny") > 0);
}

/// As `srun -m cyclic` places them: neighboring ranks are on different hosts.
#[test]
fn ranks_placed_round_robin_send_no_more() {
    let Some(hosts) = hosts() else { return };
    let fixture = Fixture::with_corpus();
    let traffic = |name: &str, host_of: &dyn Fn(usize) -> usize| {
        let before = hosts[0].link().traffic();
        let train = format!("train tiny.toml {GIVEN_COSTS} --set run.name={name}");
        let workers: [Running; 4] = std::array::from_fn(|rank| {
            let host = host_of(rank);
            let local_rank = (0..rank).filter(|&other| host_of(other) == host).count();
            let worker = Worker { rank, world_size: 4, host, local_rank, num_local: 2 };
            start_at(&fixture, &hosts, &worker, hosts[0].ipv4().into(), &train)
        });
        let [first, others @ ..] = workers.map(Running::end);
        others.into_iter().for_each(|other| drop(other.succeeded()));
        assert_eq!(first.code, Some(0), "{first:?}");
        let sent = hosts[0].link().traffic() - before;
        (sent.sent.payload_bytes(IPV4_TCP_HEADER_BYTES), first.stderr)
    };
    let (in_blocks, told) = traffic("blocks", &|rank| rank / 2);
    assert_eq!(told, "");
    let (in_turns, told) = traffic("turns", &|rank| rank % 2);
    assert_contains(
        &told,
        &[
            "note: the launcher placed neighboring ranks on different hosts",
            "rank 2 is now rank 1, 1 is now rank 2",
        ],
    );
    assert!(in_turns < in_blocks + in_blocks / 20, "{in_turns} and {in_blocks} bytes");
    assert_eq!(fixture.losses("turns"), fixture.losses("blocks"));
}

/// As on a cluster where only the home folders are shared, and the run's folder is elsewhere.
#[test]
fn a_run_folder_that_hosts_do_not_share_is_reported_with_all_other_differences() {
    let Some(hosts) = hosts() else { return };
    let fixtures = [Fixture::with_corpus(), Fixture::with_corpus()];
    let worker = |rank: usize| {
        let train = format!("train tiny.toml --set training.seed={}", 7 + rank);
        let [first, second] = start(&fixtures[rank], &hosts, hosts[0].ipv4().into(), &train);
        if rank == 0 { first } else { second }
    };
    for error in [0, 1].map(worker).map(|worker| worker.end().one_error()) {
        assert_contains(
            &error,
            &[
                "the ranks disagree about the run",
                "training.seed: 7 on rank 0; 8 on rank 1",
                "[run] folder, which all hosts must share: runs/tiny has the file that rank 0 has just written there on rank 0; \
                 runs/tiny lacks the file that rank 0 has just written there on rank 1",
            ],
        );
    }
    let is_left = |path: &PathBuf| path.to_string_lossy().contains("preflight");
    assert!(fixtures.iter().all(|fixture| !fixture.everything().keys().any(is_left)));
}

/// Pauses of the network that ranks survive, in seconds.
const PAUSES: [u64; 3] = [2, 10, 25];

#[test]
fn a_pause_of_the_network_changes_no_bit() {
    let Some(network) = network() else { return };
    let fixture = Fixture::with_corpus();
    let train = "train tiny.toml --set comm.transport=tcp --set training.steps=200 --set lr_scheduler.decay_steps=200";
    let pause = |seconds: u64, hosts: [Host; 2]| {
        let named = format!("{train} --set run.name=pause-{seconds}");
        let mut workers = start(&fixture, &hosts, hosts[0].ipv4().into(), &named);
        workers[0].until("step: 5 ");
        hosts[1].link().cut();
        workers[0].until_silent_for(Duration::from_secs(seconds));
        hosts[1].link().restore();
        workers.into_iter().for_each(|worker| drop(worker.end().succeeded()));
    };
    thread::scope(|scope| {
        for seconds in PAUSES {
            let hosts = [(); 2].map(|()| network.add_host());
            scope.spawn(move || pause(seconds, hosts));
        }
    });
    fixture.run(&format!("{train} --set run.name=local")).succeeded();
    for seconds in PAUSES {
        assert_eq!(fixture.losses(&format!("pause-{seconds}")), fixture.losses("local"), "{seconds}");
    }
}

#[test]
fn a_worker_whose_process_is_killed_is_named() {
    let Some(hosts) = hosts() else { return };
    let fixture = Fixture::with_corpus();
    let [mut survivor, victim] =
        start(&fixture, &hosts, hosts[0].ipv4().into(), &format!("train tiny.toml {ENDLESS}"));
    survivor.until("step: 5 ");
    kill(victim.process());
    assert_loss_of(1, survivor.end_after_death());
    assert_eq!(victim.end().code, None);
}

#[test]
fn a_worker_whose_process_is_stopped_is_named() {
    let Some(hosts) = hosts() else { return };
    for stopped in [0, 1] {
        let fixture = Fixture::with_corpus();
        // Without checkpoints, the reductions of the steps are the only operations that can stop.
        let train = format!(
            "train tiny.toml {ENDLESS} --set comm.timeout_seconds=1 --set checkpoint.interval=1000000000"
        );
        let mut workers = start(&fixture, &hosts, hosts[0].ipv4().into(), &train);
        workers[0].until("step: 5 ");
        let stopped_process = workers[stopped].process();
        kill_process(stopped_process, Signal::STOP).unwrap();
        let [first, second] = workers;
        let (waiting, stopped_worker) = if stopped == 0 { (second, first) } else { (first, second) };
        let outcome = waiting.end_after_death();
        assert_eq!(outcome.code, Some(1), "{outcome:?}");
        let names_it = format!("ranks that have not reached it: {stopped}");
        let row = format!("     {stopped}  silent");
        assert_contains(
            &outcome.stderr,
            &["warning: rank", "made no progress for 1s", &names_it, &row, " in all_"],
        );
        kill_process(stopped_process, Signal::CONT).unwrap();
        // The continued worker learns that it is alone.
        let outcome = stopped_worker.end_after_death();
        assert!(outcome.code.is_some_and(|code| code != 0), "{outcome:?}");
        assert_contains(&outcome.stderr, &["error: "]);
    }
}
