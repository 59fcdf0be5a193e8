//! Several hosts on one machine: network namespaces with links to one switch, which is a bridge in a namespace of its own.
//!
//! Requires root, util-linux, iproute2 and a kernel with `veth`, `bridge` and `tbf`. Another user can become root of their own namespaces
//! (`unshare --map-root-user cargo test …`). Nothing in a network has a name outside of it, and each namespace ends with the process that
//! holds it, so nothing is left behind even if a test is killed.

mod host;
mod link;
mod namespace;
mod traffic;

pub use host::Host;
pub use link::{IPV4_TCP_HEADER_BYTES, IPV6_TCP_HEADER_BYTES, Link};
pub use traffic::{Traffic, Volume};

use crate::relay::{Conditions, FrameLoss, FrameRelay, tap};
use namespace::{BRIDGE, DEVICE, Namespace};
use std::process::Command;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

/// Commands that together use every tool and kernel feature that a network needs, in namespaces that end with the command.
const PROBE_COMMANDS: [&str; 5] = [
    "unshare --net nsenter --net=/proc/self/ns/net ip link set lo up",
    "unshare --net ip link add port1 type veth peer name eth0",
    "unshare --net ip link add br0 type bridge mcast_snooping 0",
    "unshare --net tc qdisc replace dev lo root tbf rate 1000000bit burst 16384 latency 100ms",
    "unshare --net ip addr add fd77::1/64 dev lo nodad",
];

/// Hosts that reach each other by IPv4 and IPv6 over a switch, and nothing outside of this network.
///
/// The functions panic with the error output of the tool that failed. [`available`](Network::available) checks beforehand.
#[derive(Debug)]
pub struct Network {
    switch: Arc<Namespace>,
    num_hosts: AtomicU8,
}

impl Network {
    /// Checks that this process can create networks on this machine.
    ///
    /// # Errors
    /// If it cannot. The error is the reason to skip a test.
    pub fn available() -> Result<(), String> {
        static AVAILABLE: OnceLock<Result<(), String>> = OnceLock::new();
        let look = || {
            PROBE_COMMANDS.iter().try_for_each(|words| {
                let mut words = words.split(' ');
                namespace::run(Command::new(words.next().expect("a program")).args(words))
            })
        };
        AVAILABLE.get_or_init(look).clone()
    }

    /// Creates a network without hosts.
    #[expect(clippy::new_without_default, reason = "it starts a process")]
    pub fn new() -> Self {
        let switch = Namespace::new();
        switch.run(&format!("ip link add {BRIDGE} type bridge mcast_snooping 0"));
        switch.run(&format!("ip link set {BRIDGE} up"));
        Network { switch: Arc::new(switch), num_hosts: AtomicU8::new(0) }
    }

    /// Adds a host, on a link without limits. There may be 254 hosts.
    pub fn add_host(&self) -> Host {
        let (number, link) = self.new_link();
        let (port, namespace) = (&link.port, link.host.id());
        self.switch.run(&format!("ip link add {port} type veth peer name {DEVICE} netns {namespace}"));
        link.restore();
        Host::new(link, number)
    }

    /// Adds a host, on a link through a relay in this process, which delays and drops frames. The link works as long as the relay exists.
    ///
    /// # Panics
    /// If [`FrameRelay::available`] returns an error, and for the reasons of [`Network`].
    pub fn add_host_with_relay(&self, conditions: Conditions, loss: FrameLoss) -> (Host, FrameRelay) {
        let (number, link) = self.new_link();
        let open = |(namespace, device): (&Namespace, &str)| {
            namespace.enter(|| tap::open(device)).expect("a device for the relay")
        };
        let relay = FrameRelay::start(link.ends().map(open), conditions, loss);
        let host = Host::new(link, number);
        // The switch's end comes up last, so that its frames find a device that receives.
        host.link().restore();
        (host, relay)
    }

    /// Returns the number of a new host, and its link in a namespace of its own.
    fn new_link(&self) -> (u8, Link) {
        let number = 1 + self.num_hosts.fetch_add(1, Ordering::Relaxed);
        assert!(number < u8::MAX, "the subnet has 254 addresses");
        let (host, switch) = (Namespace::new(), Arc::clone(&self.switch));
        (number, Link { host, switch, port: format!("port{number}") })
    }
}
