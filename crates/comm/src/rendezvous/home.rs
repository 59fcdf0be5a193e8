use super::key::Key;
use crate::transport::link::Tls;
use std::net::SocketAddr;
use std::ops::RangeInclusive;

/// The state that splitting a group needs: key, addresses, ports and TLS.
#[derive(Clone)]
pub(crate) struct Home {
    pub(super) key: Key,
    /// Where other hosts reach this process, and where it reaches rank 0 of the world; unset where all ranks are threads of it.
    pub(super) addresses: Option<[SocketAddr; 2]>,
    /// Where it may listen, if not at any port.
    pub(super) ports: Option<RangeInclusive<u16>>,
    /// What encrypts data that goes by TCP.
    pub(super) tls: Option<Tls>,
}

impl Home {
    /// Of ranks that are threads of one process.
    pub(crate) fn inproc() -> Self {
        Home { key: Key::of(None), addresses: None, ports: None, tls: None }
    }
}
