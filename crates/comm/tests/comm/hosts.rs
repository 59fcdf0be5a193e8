//! Ranks on separate hosts: bytes that cross the link between the hosts.

use crate::support::small_pieces;
use std::sync::Barrier;
use std::thread;
use trireme_base::{Rank, ReduceOp};
use trireme_comm::{Group, GroupOptions, JoinOptions, Secret, TransportKind, join};
use trireme_schedule::collective::Algorithm;
use trireme_testkit::network::{Host, IPV4_TCP_HEADER_BYTES, Network};
use trireme_testkit::or_skip;

const LEN: usize = 1 << 20;
const BYTES: u64 = 4 * LEN as u64;

/// Runs four ranks, assigned to two hosts alternately.
fn on_two_hosts(hosts: &[Host; 2], options: &GroupOptions, body: impl Fn(&Group) + Sync) {
    let secret = Secret::random().expect("random numbers");
    thread::scope(|scope| {
        for rank in 0..4 {
            let options = JoinOptions {
                master_addr: hosts[0].ipv4().to_string(),
                secret: Some(secret.clone()),
                group: options.clone(),
                ..JoinOptions::new(Rank(rank), 4)
            };
            let body = &body;
            scope.spawn(move || hosts[rank % 2].enter(|| body(&join(&options).expect("the world joins"))));
        }
    });
}

/// Payload bytes that leave the first host while all ranks reduce a vector, and whether any were retransmitted.
fn bytes_across(hosts: &[Host; 2], algorithm: &str) -> (u64, bool) {
    let algorithm: Algorithm = algorithm.parse().expect("an algorithm");
    let options = GroupOptions {
        algorithm: Some(algorithm),
        keeps_order: false,
        chunk_bytes: GroupOptions::default().chunk_bytes,
        ..small_pieces()
    };
    let counted = std::sync::Mutex::new((0, false));
    let all = Barrier::new(4);
    on_two_hosts(hosts, &options, |group| {
        assert_eq!(group.transport(), TransportKind::ShmAndTcp);
        let mut buffer = group.buffer::<f32>(LEN).expect("memory");
        buffer.fill(group.rank().0 as f32);
        all.wait();
        let before = hosts[0].link().traffic();
        all.wait();
        let buffer = group.all_reduce(buffer, ReduceOp::Sum).wait().expect("reduced");
        assert!(buffer.iter().all(|&sum| sum == 6.0));
        all.wait();
        if group.rank() == Rank(0) {
            let traffic = hosts[0].link().traffic() - before;
            let bytes = traffic.sent.payload_bytes(IPV4_TCP_HEADER_BYTES);
            *counted.lock().expect("no panic") = (bytes, traffic.num_retransmitted_segments > 0);
        }
        all.wait();
    });
    counted.into_inner().expect("no panic")
}

#[test]
fn a_hierarchy_sends_a_third_of_what_a_ring_sends_across_hosts() {
    let Some(()) = or_skip("networks of hosts", Network::available()) else { return };
    let network = Network::new();
    let hosts = [(); 2].map(|()| network.add_host());
    let is_about = |(bytes, has_resent): (u64, bool), expected: u64| {
        bytes >= expected && (has_resent || bytes < expected + expected / 50 + 8192)
    };
    // Each rank's successor is on the other host: 2 D (N - 1) / N for each of a host's two ranks.
    let ring = bytes_across(&hosts, "ring");
    assert!(is_about(ring, 3 * BYTES), "{ring:?}");
    // 2 D (H - 1) / H per host, divided among its leaders.
    for hierarchy in ["hierarchical:all:direct:ring", "hierarchical:one:direct:ring"] {
        let bytes = bytes_across(&hosts, hierarchy);
        assert!(is_about(bytes, BYTES), "{hierarchy}: {bytes:?}");
    }
}
