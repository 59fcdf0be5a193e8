use std::time::Duration;

/// What a group has done since it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CommStatistics {
    /// Operations that ended.
    pub num_operations: u64,
    /// Bytes of user data this rank moved: sent over sockets (without frame headers), or read from and written to peers' shared
    /// memory. The formulas are from [`trireme_schedule::collective`].
    pub payload_bytes: u64,
    /// Bytes of user data in messages that this rank has sent ([`Group::send`](crate::Group::send)).
    pub message_bytes: u64,
    /// Time spent executing operations, waiting for peers included.
    pub busy: Duration,
    /// The part of `busy` spent asleep or spinning until a peer came.
    pub waiting: Duration,
}
