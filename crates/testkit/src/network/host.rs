use super::link::Link;
use super::namespace::DEVICE;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::process::Command;

/// A host of a [`Network`](super::Network): a network namespace with a loopback device and one link. The namespace ends when this value is
/// dropped. Processes on the host must be ended by the code that started them.
#[derive(Debug)]
pub struct Host {
    link: Link,
    number: u8,
}

impl Host {
    pub(super) fn new(link: Link, number: u8) -> Self {
        let host = Host { link, number };
        for command in [
            "ip link set lo up".to_owned(),
            format!("ip link set {DEVICE} up"),
            format!("ip addr add {}/24 dev {DEVICE}", host.ipv4()),
            // No other host has the address, and duplicate address detection would make it usable only seconds later.
            format!("ip addr add {}/64 dev {DEVICE} nodad", host.ipv6()),
        ] {
            host.link.host.run(&command);
        }
        host
    }

    /// The address in the network's IPv4 subnet, 10.77.0.0/24.
    pub fn ipv4(&self) -> Ipv4Addr {
        Ipv4Addr::new(10, 77, 0, self.number)
    }

    /// The unique local address in the network's IPv6 subnet, fd77::/64.
    pub fn ipv6(&self) -> Ipv6Addr {
        Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, self.number.into())
    }

    /// The link to the other hosts.
    pub fn link(&self) -> &Link {
        &self.link
    }

    /// Returns a command that runs `program` on this host, for the caller to complete. The spawned process is the program itself, so
    /// signals reach it.
    pub fn command(&self, program: &str) -> Command {
        self.link.host.command(program)
    }

    /// Runs `body` on a thread that is on this host. Threads that it starts are on the host as well, and sockets that it creates stay
    /// there.
    ///
    /// # Panics
    /// If `body` panics.
    pub fn enter<T: Send>(&self, body: impl FnOnce() -> T + Send) -> T {
        self.link.host.enter(body)
    }
}
