//! The context of a rank's attempt to join a world.

use super::key::Key;
use super::refusals::Refusals;
use super::waiting::Waiting;
use crate::{CommError, JoinOptions};
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::time::Instant;

/// Who joins whom, and how it knows the others.
#[derive(Clone, Copy)]
pub(super) struct Joining<'a> {
    pub(super) options: &'a JoinOptions,
    /// Where rank 0 listens.
    pub(super) addresses: &'a [SocketAddr],
    /// Where this rank listens for the others, if not where it meets rank 0.
    pub(super) interface: Option<IpAddr>,
    /// The key that follows from the job's secret.
    pub(super) key: &'a Key,
    pub(super) refusals: &'a Refusals,
    pub(super) waiting: &'a Waiting<'a>,
    pub(super) deadline: Instant,
}

/// The addresses of rank 0's host; at least one.
pub(super) fn look_up(options: &JoinOptions) -> io::Result<Vec<SocketAddr>> {
    let name = options.master_addr.as_str();
    // As in a URL.
    let name = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    // One of IPv6 may end with the name of a link.
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

/// Whether the text can be the name of a host (RFC 1123, section 2.1), with the underscores that some systems allow.
fn is_host_name(text: &str) -> bool {
    let is_label = |label: &str| {
        let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
        (1..=63).contains(&label.len()) && label.chars().all(fits)
    };
    text.strip_suffix('.').unwrap_or(text).split('.').all(is_label)
}

/// Refuses to be reachable by strangers without a secret to tell them by.
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
