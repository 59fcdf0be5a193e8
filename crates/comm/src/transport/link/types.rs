//! Types that all links share.

/// The connection cannot be used any more: it ended, broke, or violated the protocol.
#[derive(Debug)]
pub(crate) struct Broken;

/// The direction in which a thread waits on a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Interest {
    Send,
    Receive,
}

/// The role of this process in establishing a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ConnectionSide {
    Connecting,
    Accepting,
}
