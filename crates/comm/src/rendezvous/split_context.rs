use super::key::Key;
use crate::transport::link::Tls;
use std::net::SocketAddr;
use std::ops::RangeInclusive;

/// Key, addresses, ports and TLS of a world, which splits of its groups need.
#[derive(Clone)]
pub(crate) struct SplitContext {
    pub(super) key: Key,
    /// Address at which other hosts reach this process, and address at which it reaches rank 0 of the world. `None` if all ranks are
    /// threads of this process.
    pub(super) addresses: Option<[SocketAddr; 2]>,
    /// Ports on which this process may listen. Any port if `None`.
    pub(super) ports: Option<RangeInclusive<u16>>,
    /// Encrypts data connections over TCP.
    pub(super) tls: Option<Tls>,
}

impl SplitContext {
    /// The context of ranks that are threads of one process.
    pub(crate) fn inproc() -> Self {
        SplitContext { key: Key::of(None), addresses: None, ports: None, tls: None }
    }
}
