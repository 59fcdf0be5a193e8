//! The addresses of a rank.

use super::socket_io::{ip_to_words, words_to_ip};
use std::net::SocketAddr;

pub(super) const RANK_ADDRESS_WORDS: usize = 6;

/// The addresses at which the other ranks reach a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RankAddress {
    /// Identifier of the host, equal for all processes of a host. 0 if unknown.
    pub(super) host: u128,
    /// Number in the name of the socket at which processes of the same host reach the rank.
    pub(super) socket_id: u64,
    /// Address at which processes of other hosts connect.
    pub(super) address: SocketAddr,
}

impl RankAddress {
    pub(super) fn to_words(self) -> [u64; RANK_ADDRESS_WORDS] {
        let [ip_high, ip_low] = ip_to_words(self.address.ip());
        let port = u64::from(self.address.port());
        [(self.host >> 64) as u64, self.host as u64, self.socket_id, ip_high, ip_low, port]
    }

    /// The addresses as seen by a rank that reaches rank 0 at `root`. A link-local address is valid only on one link, which is assumed to
    /// be the link of rank 0.
    pub(super) fn with_scope_of(mut self, root: SocketAddr) -> Self {
        if let (SocketAddr::V6(address), SocketAddr::V6(root)) = (&mut self.address, root)
            && address.ip().is_unicast_link_local()
        {
            address.set_scope_id(root.scope_id());
        }
        self
    }

    /// Decodes the words of [`to_words`](RankAddress::to_words). `None` if they are not valid.
    pub(super) fn from_words(words: [u64; RANK_ADDRESS_WORDS]) -> Option<Self> {
        let [host_high, host_low, socket_id, ip_high, ip_low, port] = words;
        let address = SocketAddr::new(words_to_ip([ip_high, ip_low]), u16::try_from(port).ok()?);
        Some(RankAddress { host: u128::from(host_high) << 64 | u128::from(host_low), socket_id, address })
    }
}
