//! Listening sockets on any free port, or on one of the ports that a firewall admits.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::ops::RangeInclusive;

/// Listens on an address, ignoring its port, at the first free port of `ports`, or at any free port.
pub(super) fn listen_at(
    mut address: SocketAddr,
    ports: Option<&RangeInclusive<u16>>,
) -> io::Result<TcpListener> {
    let Some(ports) = ports else {
        address.set_port(0);
        return TcpListener::bind(address);
    };
    for port in ports.clone() {
        address.set_port(port);
        match TcpListener::bind(address) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            bound => return bound,
        }
    }
    let why = format!("none of the ports {}-{} is free", ports.start(), ports.end());
    Err(io::Error::new(io::ErrorKind::AddrInUse, why))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_free_port_is_taken() {
        let any: SocketAddr = "127.0.0.1:9".parse().expect("an address");
        // Two consecutive ports that no other program uses.
        let (first, second) = (0..100)
            .find_map(|_| {
                let first = listen_at(any, None).ok()?;
                let next = first.local_addr().ok()?.port().checked_add(1)?;
                Some((first, TcpListener::bind(("127.0.0.1", next)).ok()?))
            })
            .expect("free ports");
        let [first_port, second_port] =
            [&first, &second].map(|listener| listener.local_addr().expect("an address").port());
        let ports = first_port..=second_port;
        let refused = listen_at(any, Some(&ports)).expect_err("both are taken");
        assert!(
            refused.to_string().contains(&format!("none of the ports {first_port}-{second_port}")),
            "{refused}"
        );
        drop(second);
        let found = listen_at(any, Some(&ports)).expect("the second is free");
        assert_eq!(found.local_addr().expect("an address").port(), second_port);
    }
}
