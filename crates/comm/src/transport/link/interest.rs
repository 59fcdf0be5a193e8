//! Types that all links share.

/// The connection is of no more use: it ended, broke, or carries what it cannot.
#[derive(Debug)]
pub(crate) struct Broken;

/// The direction in which a thread waits for a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Interest {
    Send,
    Receive,
}

/// Which side of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Connecting,
    Accepting,
}
