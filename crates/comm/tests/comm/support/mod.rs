//! Test worlds: ranks as threads of this process, on every transport.
pub(crate) mod operations;
pub(crate) mod oracle;

use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;
use trireme_base::Rank;
use trireme_comm::{
    CommError, GivenCosts, Group, GroupOptions, JoinOptions, TransportChoice, TransportKind, inproc_world_on,
    join,
};
use trireme_schedule::collective::{DirectCost, LinkCost};
use trireme_testkit::on_threads;

pub(crate) const TRANSPORTS: [TransportKind; 4] =
    [TransportKind::Inproc, TransportKind::Shm, TransportKind::Tcp, TransportKind::ShmAndTcp];

/// Options with thresholds so low that short vectors take the paths of long ones, in several chunks.
pub(crate) fn small_pieces() -> GroupOptions {
    let timeout = Duration::from_secs(60);
    let link = LinkCost::of(10.0, 1.0);
    // Given, because measured costs would choose different algorithms from run to run.
    let costs =
        GivenCosts { within: Some(link), across: Some(link), direct: Some(DirectCost::of(1.0, 10.0)) };
    GroupOptions { timeout, short_bytes_max: 64, chunk_bytes: 128, costs, ..GroupOptions::default() }
}

/// Options of one world, with a loopback address that no other world of these tests uses.
pub(crate) fn join_options(
    world_size: usize,
    transport: TransportChoice,
    group: &GroupOptions,
) -> JoinOptions {
    static NUM_WORLDS: AtomicU16 = AtomicU16::new(0);
    let [.., high, low] = std::process::id().to_be_bytes();
    let number = NUM_WORLDS.fetch_add(1, Ordering::Relaxed);
    JoinOptions {
        master_addr: format!("127.{high}.{low}.{}", 1 + number % 254),
        master_port: 29_501 + number / 254,
        transport,
        group: group.clone(),
        ..JoinOptions::new(Rank(0), world_size)
    }
}

/// Runs `body` once per rank, each in its own thread, and returns the results in rank order. Ranks 0 and 1 are on one host, ranks 2 and 3
/// on another one, unless the transport supports only one host.
pub(crate) fn on_ranks<R: Send>(
    transport: TransportKind,
    world_size: usize,
    options: &GroupOptions,
    body: impl Fn(Group) -> R + Sync,
) -> Vec<R> {
    let host_of = |rank: usize| match transport {
        TransportKind::Inproc | TransportKind::Shm => 0,
        _ => rank / 2,
    };
    on_hosts(transport, &Vec::from_iter((0..world_size).map(host_of)), options, body)
}

/// Like [`on_ranks`], with rank `r` on host `hosts[r]`.
pub(crate) fn on_hosts<R: Send>(
    transport: TransportKind,
    hosts: &[usize],
    options: &GroupOptions,
    body: impl Fn(Group) -> R + Sync,
) -> Vec<R> {
    let world_size = hosts.len();
    if transport == TransportKind::Inproc {
        return on_threads(inproc_world_on(hosts, options), &body);
    }
    let choice = match transport {
        TransportKind::Shm => TransportChoice::Shm,
        TransportKind::ShmAndTcp => TransportChoice::Auto,
        _ => TransportChoice::Tcp,
    };
    let options = join_options(world_size, choice, options);
    let host = |rank: usize| Some(format!("host {}", hosts[rank]));
    let rank = |rank| JoinOptions { rank: Rank(rank), host: host(rank), ..options.clone() };
    // If all ranks are on one host, there is no TCP.
    let expected = match transport {
        TransportKind::ShmAndTcp if hosts.iter().all(|host| *host == hosts[0]) => TransportKind::Shm,
        other => other,
    };
    on_threads((0..world_size).map(rank).collect(), &|options| {
        let group = join(&options).expect("the world joins");
        assert!(world_size == 1 || group.transport() == expected, "{group:?}");
        body(group)
    })
}

/// Joins all ranks at the same time. Returns their results in order.
pub(crate) fn join_all(options: &[JoinOptions]) -> Vec<Result<Group, CommError>> {
    on_threads(options.iter().collect(), &join)
}

/// The options of the given ranks of a world.
pub(crate) fn ranks(options: &JoinOptions, ranks: &[usize]) -> Vec<JoinOptions> {
    ranks.iter().map(|&rank| JoinOptions { rank: Rank(rank), ..options.clone() }).collect()
}

/// Asserts that all ranks have joined by `transport` and can communicate.
pub(crate) fn check_world(groups: Vec<Result<Group, CommError>>, transport: TransportKind) {
    std::thread::scope(|scope| {
        for group in groups {
            let group = group.expect("joined");
            assert_eq!(group.transport(), transport);
            scope.spawn(move || group.barrier().wait().expect("everybody is connected"));
        }
    });
}
