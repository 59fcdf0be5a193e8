use super::link::Link;
use super::namespace::DEVICE;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::process::Command;

/// A host of a [`Network`](super::Network): a network namespace with a loopback device and one link. It ends with this
/// value; processes that run on it are their starter's to end.
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
            // No other host has the address: looking for one would make it usable only seconds later.
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

    /// What connects it to the others.
    pub fn link(&self) -> &Link {
        &self.link
    }

    /// A command of `program` on this host, for the caller to complete. Its process is the program itself, which signals reach.
    pub fn command(&self, program: &str) -> Command {
        self.link.host.command(program)
    }

    /// Runs `body` on a thread that is on this host, as are the threads it starts. Sockets that it makes stay on this host.
    ///
    /// # Panics
    /// If `body` does.
    pub fn enter<T: Send>(&self, body: impl FnOnce() -> T + Send) -> T {
        self.link.host.enter(body)
    }
}
