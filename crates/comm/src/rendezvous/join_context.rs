//! The context of a rank's attempt to join a world.

use super::join_progress::JoinProgress;
use super::key::Key;
use super::refusals::Refusals;
use crate::{CommError, JoinOptions};
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::time::Instant;

/// Options, addresses and keys of an attempt to join a world.
#[derive(Clone, Copy)]
pub(super) struct JoinContext<'a> {
    pub(super) options: &'a JoinOptions,
    /// Addresses at which rank 0 listens.
    pub(super) addresses: &'a [SocketAddr],
    /// Address of the interface that the options name, on which this rank listens for its peers. If `None`, it listens on the address of
    /// its connection to rank 0, and rank 0 on its own address.
    pub(super) interface: Option<IpAddr>,
    /// The key derived from the job's secret.
    pub(super) key: &'a Key,
    pub(super) refusals: &'a Refusals,
    pub(super) progress: &'a JoinProgress<'a>,
    pub(super) deadline: Instant,
}

/// Resolves the addresses of rank 0's host. Returns at least one.
pub(super) fn look_up(options: &JoinOptions) -> io::Result<Vec<SocketAddr>> {
    let name = options.master_addr.as_str();
    // Brackets as in a URL.
    let name = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    // An IPv6 address may end with a scope, the name of an interface.
    let is_address = name.split('%').next().is_some_and(|ip| ip.parse::<IpAddr>().is_ok());
    if !is_address && !is_host_name(name) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "it is neither an address nor the name of a host",
        ));
    }
    let found = (name, options.master_port).to_socket_addrs()?;
    let addresses: Vec<SocketAddr> = found.collect();
    if addresses.is_empty() { Err(io::ErrorKind::NotFound.into()) } else { Ok(addresses) }
}

/// Whether the text can be a host name (RFC 1123, section 2.1), with the underscores that some systems allow.
fn is_host_name(text: &str) -> bool {
    let is_label = |label: &str| {
        let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
        (1..=63).contains(&label.len()) && label.chars().all(fits)
    };
    text.strip_suffix('.').unwrap_or(text).split('.').all(is_label)
}

/// Fails if strangers could connect to one of `addresses`, and there is no secret to tell members from strangers.
pub(super) fn check_secret(
    options: &JoinOptions,
    mut addresses: impl Iterator<Item = IpAddr>,
) -> Result<(), CommError> {
    if options.secret.is_some() || !options.requires_secret {
        return Ok(());
    }
    match addresses.find(|address| !address.to_canonical().is_loopback()) {
        Some(address) => Err(CommError::SecretMissing { address }),
        None => Ok(()),
    }
}
