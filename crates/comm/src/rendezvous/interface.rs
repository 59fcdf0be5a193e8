//! Selects the address on which this rank listens for its peers.

use crate::{CommError, JoinOptions};
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

/// The address of the interface that the options name, preferably of the same family as `addresses`. `None` if they name no interface.
pub(super) fn address(options: &JoinOptions, addresses: &[SocketAddr]) -> Result<Option<IpAddr>, CommError> {
    let Some(interface) = &options.interface else { return Ok(None) };
    let fail = |source| CommError::Interface { interface: interface.clone(), source: Arc::new(source) };
    let present = if_addrs::get_if_addrs().map_err(fail)?;
    let present: Vec<(String, IpAddr)> =
        present.into_iter().map(|found| (found.name.clone(), found.ip())).collect();
    let wants_v4 = addresses.first().is_some_and(SocketAddr::is_ipv4);
    choose(interface, &present, wants_v4).map(Some).ok_or_else(|| fail(not_found(interface, &present)))
}

/// The best of the `present` addresses that match the option `interface`: one of the wanted family, if there is one.
fn choose(interface: &str, present: &[(String, IpAddr)], wants_v4: bool) -> Option<IpAddr> {
    let fitting = |fits: &dyn Fn(&str, IpAddr) -> bool| {
        let candidates = present.iter().filter(|(name, ip)| !is_link_local(*ip) && fits(name, *ip));
        candidates.map(|(_, ip)| *ip).min_by_key(|ip| ip.is_ipv4() != wants_v4)
    };
    if let Some(unwanted) = interface.strip_prefix('^') {
        let unwanted: Vec<&str> = names(unwanted).collect();
        let is_unwanted = |name: &str, unwanted: &str| match unwanted.strip_prefix('=') {
            Some(exact) => name == exact,
            None => name.starts_with(unwanted),
        };
        let is_wanted = |name: &str| !unwanted.iter().any(|unwanted| is_unwanted(name, unwanted));
        return fitting(&|name, ip| is_wanted(name) && !ip.is_loopback());
    }
    let (is_exact, wanted) = match interface.strip_prefix('=') {
        Some(exact) => (true, exact),
        None => (false, interface),
    };
    names(wanted).find_map(|wanted| {
        if let Ok(wanted) = wanted.parse::<IpAddr>() {
            return fitting(&|_, ip| ip == wanted);
        }
        if let Some(network) = Network::parse(wanted) {
            // A network whose own address is not loopback, such as 0.0.0.0/0, does not match loopback addresses.
            return fitting(&|_, ip| network.has(ip) && ip.is_loopback() == network.ip.is_loopback());
        }
        let begins = || fitting(&|name, _| !is_exact && name.starts_with(wanted));
        fitting(&|name, _| name == wanted).or_else(begins)
    })
}

fn names(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim).filter(|name| !name.is_empty())
}

/// A network: all addresses with the same leading bits.
struct Network {
    ip: IpAddr,
    num_bits: u32,
}

impl Network {
    fn parse(text: &str) -> Option<Self> {
        let (ip, num_bits) = text.split_once('/')?;
        let (ip, num_bits) = (ip.parse::<IpAddr>().ok()?, num_bits.parse().ok()?);
        let length = if ip.is_ipv4() { 32 } else { 128 };
        (num_bits <= length).then_some(Network { ip, num_bits })
    }

    fn has(&self, ip: IpAddr) -> bool {
        let begins_alike = |one: u128, other: u128, length: u32| {
            self.num_bits == 0 || (one ^ other) >> (length - self.num_bits) == 0
        };
        match (self.ip, ip) {
            (IpAddr::V4(own), IpAddr::V4(ip)) => begins_alike(own.to_bits().into(), ip.to_bits().into(), 32),
            (IpAddr::V6(own), IpAddr::V6(ip)) => begins_alike(own.to_bits(), ip.to_bits(), 128),
            _ => false,
        }
    }
}

/// A link-local address is valid only together with an interface of this host, which other ranks do not have.
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
    fn an_interface_is_found_by_name_address_or_network() {
        let present = [
            ("lo", "127.0.0.1"),
            ("lo", "::1"),
            ("eth0", "fe80::1"),
            ("eth0", "192.0.2.7"),
            ("eth0", "2001:db8::7"),
            ("eth1", "fe80::2"),
            ("eth9", "198.51.100.9"),
        ]
        .map(|(name, ip)| (name.to_owned(), ip.parse().expect("an address")));
        let chosen = |interface, wants_v4| choose(interface, &present, wants_v4).map(|ip| ip.to_string());
        assert_eq!(chosen("eth0", true).as_deref(), Some("192.0.2.7"));
        assert_eq!(chosen("eth0", false).as_deref(), Some("2001:db8::7"));
        assert_eq!(chosen("2001:db8::7", true).as_deref(), Some("2001:db8::7"));
        assert_eq!(chosen("lo", true).as_deref(), Some("127.0.0.1"));
        for (interface, found) in [
            ("eth", "192.0.2.7"),
            ("ib, eth0", "192.0.2.7"),
            ("=eth0", "192.0.2.7"),
            ("^lo,docker", "192.0.2.7"),
            ("^eth1", "192.0.2.7"),
            ("^=eth0", "198.51.100.9"),
            ("^=eth", "192.0.2.7"),
            ("192.0.2.0/24", "192.0.2.7"),
            ("2001:db8::/32", "2001:db8::7"),
            ("10.0.0.0/8,192.0.0.0/8", "192.0.2.7"),
            ("::/0", "2001:db8::7"),
        ] {
            assert_eq!(chosen(interface, true).as_deref(), Some(found), "{interface}");
        }
        for unknown in [
            "=eth",
            "eth2",
            "192.0.2.8",
            "fe80::1",
            "eth1",
            "",
            "^eth",
            "10.0.0.0/8",
            "192.0.2.0/33",
            "fe80::/16",
        ] {
            assert_eq!(chosen(unknown, true), None, "{unknown}");
        }
        let error = not_found("eth2", &present).to_string();
        assert!(error.contains("eth0 (192.0.2.7)"), "{error}");
    }
}
