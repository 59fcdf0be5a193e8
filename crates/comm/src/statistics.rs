use std::time::Duration;

/// Counters of a group's operations since it was created.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CommStatistics {
    /// Number of operations that completed or failed.
    pub num_operations: u64,
    /// Bytes of user data that this rank moved in operations, without messages: sent over links, without frame headers, or read from and
    /// written to peers' shared memory. [`trireme_schedule::collective`] has the formulas.
    pub payload_bytes: u64,
    /// Bytes of user data in messages that this rank has sent ([`Group::send`](crate::Group::send)).
    pub message_bytes: u64,
    /// Time spent executing operations, waiting for peers included.
    pub busy: Duration,
    /// The part of `busy` spent waiting for peers, asleep or spinning.
    pub waiting: Duration,
}
