//! On which address this rank listens for the others.

use crate::{CommError, JoinOptions};
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

/// The address of the interface that the options name, of the same family as `addresses` if it has one; none if they
/// name none.
pub(super) fn address(options: &JoinOptions, addresses: &[SocketAddr]) -> Result<Option<IpAddr>, CommError> {
    let Some(interface) = &options.interface else { return Ok(None) };
    let fail = |source| CommError::Interface { interface: interface.clone(), source: Arc::new(source) };
    let present = if_addrs::get_if_addrs().map_err(fail)?;
    let present: Vec<(String, IpAddr)> =
        present.into_iter().map(|found| (found.name.clone(), found.ip())).collect();
    let wants_v4 = addresses.first().is_some_and(SocketAddr::is_ipv4);
    choose(interface, &present, wants_v4).map(Some).ok_or_else(|| fail(not_found(interface, &present)))
}

/// The best address, among those that are present, of the interface with this name or address.
fn choose(interface: &str, present: &[(String, IpAddr)], wants_v4: bool) -> Option<IpAddr> {
    let wanted: Option<IpAddr> = interface.parse().ok();
    let candidates =
        present.iter().filter(|(name, ip)| wanted.map_or(name == interface, |wanted| *ip == wanted));
    let fitting = candidates.map(|(_, ip)| *ip).filter(|ip| !is_link_local(*ip));
    fitting.max_by_key(|ip| ip.is_ipv4() == wants_v4)
}

/// Such an address means something together with an interface only, which the other ranks do not have.
fn is_link_local(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if Ipv6Addr::is_unicast_link_local(&ip))
}

fn not_found(interface: &str, present: &[(String, IpAddr)]) -> io::Error {
    let known: Vec<String> = present.iter().map(|(name, ip)| format!("{name} ({ip})")).collect();
    let why = format!(
        "this host has no interface '{interface}' that other hosts can reach; available: {}",
        known.join(", ")
    );
    io::Error::new(io::ErrorKind::NotFound, why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_is_found_by_name_or_address() {
        let present = [
            ("lo", "127.0.0.1"),
            ("lo", "::1"),
            ("eth0", "fe80::1"),
            ("eth0", "192.0.2.7"),
            ("eth0", "2001:db8::7"),
            ("eth1", "fe80::2"),
        ]
        .map(|(name, ip)| (name.to_owned(), ip.parse().expect("an address")));
        let chosen = |interface, wants_v4| choose(interface, &present, wants_v4).map(|ip| ip.to_string());
        assert_eq!(chosen("eth0", true).as_deref(), Some("192.0.2.7"));
        assert_eq!(chosen("eth0", false).as_deref(), Some("2001:db8::7"));
        assert_eq!(chosen("2001:db8::7", true).as_deref(), Some("2001:db8::7"));
        assert_eq!(chosen("lo", true).as_deref(), Some("127.0.0.1"));
        for unknown in ["eth", "eth2", "192.0.2.8", "fe80::1", "eth1", ""] {
            assert_eq!(chosen(unknown, true), None, "{unknown}");
        }
        let error = not_found("eth2", &present).to_string();
        assert!(error.contains("eth0 (192.0.2.7)"), "{error}");
    }
}
