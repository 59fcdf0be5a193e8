//! Several hosts on one machine: network namespaces whose links go to one switch, a bridge in a namespace of its own.
//!
//! It takes root, util-linux, iproute2 and a kernel with `veth`, `bridge` and `tbf`; a user may become root of
//! namespaces of their own (`unshare --map-root-user cargo test …`). Nothing in it has a name outside of it, and each
//! namespace ends with the process that holds it, so nothing is left behind even when a test is killed.

mod host;
mod link;
mod namespace;
mod traffic;

pub use host::Host;
pub use link::{IPV4_TCP_HEADER_BYTES, IPV6_TCP_HEADER_BYTES, Link};
pub use traffic::{Traffic, Volume};

use crate::relay::{Conditions, FrameRelay, Loss, tap};
use namespace::{BRIDGE, DEVICE, Namespace};
use std::process::Command;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

/// All that a network is made of, once, in namespaces that end with the command.
const NEEDS: [&str; 5] = [
    "unshare --net nsenter --net=/proc/self/ns/net ip link set lo up",
    "unshare --net ip link add port1 type veth peer name eth0",
    "unshare --net ip link add br0 type bridge mcast_snooping 0",
    "unshare --net tc qdisc replace dev lo root tbf rate 1000000bit burst 16384 latency 100ms",
    "unshare --net ip addr add fd77::1/64 dev lo nodad",
];

/// Hosts that reach each other by IPv4 and IPv6 over a switch, and nothing else in the world.
///
/// Its functions panic with the words of the tool that failed; [`available`](Network::available) tells beforehand.
#[derive(Debug)]
pub struct Network {
    switch: Arc<Namespace>,
    num_hosts: AtomicU8,
}

impl Network {
    /// Whether this process may have networks on this machine, and if not, why: what a test is to skip for.
    pub fn available() -> Result<(), String> {
        static AVAILABLE: OnceLock<Result<(), String>> = OnceLock::new();
        let look = || {
            NEEDS.iter().try_for_each(|words| {
                let mut words = words.split(' ');
                namespace::run(Command::new(words.next().expect("a program")).args(words))
            })
        };
        AVAILABLE.get_or_init(look).clone()
    }

    /// A network without hosts.
    #[expect(clippy::new_without_default, reason = "it starts a process")]
    pub fn new() -> Self {
        let switch = Namespace::new();
        switch.run(&format!("ip link add {BRIDGE} type bridge mcast_snooping 0"));
        switch.run(&format!("ip link set {BRIDGE} up"));
        Network { switch: Arc::new(switch), num_hosts: AtomicU8::new(0) }
    }

    /// One more host, on a link without limits of its own. There may be 254.
    pub fn add_host(&self) -> Host {
        let (number, link) = self.new_link();
        let (port, namespace) = (&link.port, link.host.id());
        self.switch.run(&format!("ip link add {port} type veth peer name {DEVICE} netns {namespace}"));
        link.restore();
        Host::new(link, number)
    }

    /// One more host, on a link through a relay of this process, which delays and drops frames, until it is dropped itself.
    ///
    /// # Panics
    /// Besides: without [`FrameRelay::available`].
    pub fn add_host_behind(&self, conditions: Conditions, loss: Loss) -> (Host, FrameRelay) {
        let (number, link) = self.new_link();
        let open = |(namespace, device): (&Namespace, &str)| {
            namespace.enter(|| tap::open(device)).expect("a device for the relay")
        };
        let relay = FrameRelay::start(link.ends().map(open), conditions, loss);
        let host = Host::new(link, number);
        // The switch's end is the last to come up: what it sends finds a device that receives.
        host.link().restore();
        (host, relay)
    }

    /// The link of one more host, in a namespace of its own, and the host's number.
    fn new_link(&self) -> (u8, Link) {
        let number = 1 + self.num_hosts.fetch_add(1, Ordering::Relaxed);
        assert!(number < u8::MAX, "the subnet has 254 addresses");
        let (host, switch) = (Namespace::new(), Arc::clone(&self.switch));
        (number, Link { host, switch, port: format!("port{number}") })
    }
}
