use crate::{Operation, Secret};
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use trireme_base::{Rank, format_ranges};

/// The cause of a failed communication. Cheap to clone: after an operation has failed, all later ones fail with the same error. `sequence`
/// is the number of an operation within its group, from 0.
#[derive(Debug, Clone, thiserror::Error)]
#[expect(missing_docs, reason = "messages explain variants and fields")]
pub enum CommError {
    #[error("{what}")]
    Options { what: String },
    #[error("cannot resolve the rendezvous address '{address}'; check master_addr (MASTER_ADDR)")]
    Resolve { address: String, source: Arc<io::Error> },
    #[error("the workers would listen on {address}, where others can connect, but have no secret")]
    SecretMissing { address: IpAddr },
    #[error(
        "a secret has {} to {} characters, but this one has {bytes}; use the output of `openssl rand -hex 32`",
        Secret::BYTES_MIN,
        Secret::BYTES_MAX
    )]
    SecretUnfit { bytes: usize },
    #[error("cannot read the secret from {}", path.display())]
    SecretFile { path: PathBuf, source: Arc<io::Error> },
    #[error("cannot use {} for TLS", path.display())]
    TlsFile { path: PathBuf, source: Arc<io::Error> },
    #[error("this program was built without TLS")]
    TlsUnavailable,
    #[error("the system provides no random numbers")]
    Random { source: Arc<io::Error> },
    #[error("cannot listen on the network interface '{interface}'")]
    Interface { interface: String, source: Arc<io::Error> },
    #[error(
        "rank 0 cannot listen on {address}; if another program uses the port, choose another master_port \
         (MASTER_PORT); master_addr must be an address of this host"
    )]
    Listen { address: String, source: Arc<io::Error> },
    #[error("cannot listen on {ip} for the other ranks")]
    ListenForPeers { ip: IpAddr, source: Arc<io::Error> },
    #[error(
        "rank {rank} did not reach rank 0 at {address} within {waited:?}; is rank 0 running, and is the address \
         correct?"
    )]
    Unreachable { rank: Rank, address: String, waited: Duration, source: Arc<io::Error> },
    #[error("rank 0 at {address} rejected rank {rank}: {reason}")]
    Refused { rank: Rank, address: String, reason: String },
    #[error("rank {rank} failed before all ranks had joined: {reason}")]
    RankFailed {
        rank: Rank,
        reason: String,
        /// Ranks that know of the failure: the failed rank, and the ranks that had joined.
        informed: Vec<Rank>,
    },
    #[error(
        "after {waited:?}, these ranks have not joined at {address}: {}{}",
        format_ranges(missing.iter().copied()),
        refusals(refused)
    )]
    RanksMissing { missing: Vec<Rank>, address: String, waited: Duration, refused: Vec<String> },
    #[error("the rendezvous failed while {doing}")]
    Rendezvous { doing: String, source: Arc<io::Error> },
    #[error("the shm transport cannot be used: {reason}; choose transport auto or tcp")]
    ShmUnavailable { reason: String },
    #[error("the mpi transport cannot be used: {reason}")]
    MpiUnavailable { reason: String },
    #[error("cannot split the group: rank {rank} failed while {doing}: {reason}")]
    Split { rank: Rank, doing: String, reason: String },
    #[error("cannot watch the connections to the other ranks; there may be too many open files (ulimit -n)")]
    Watch { source: Arc<io::Error> },
    #[error("cannot start the communication thread")]
    Spawn { source: Arc<io::Error> },
    #[error("cannot allocate a communication buffer of {bytes} bytes")]
    Allocate { bytes: usize, source: Arc<io::Error> },
    #[error("{operation} names rank {root}, but the group has {world_size} ranks")]
    NoSuchRoot { operation: Operation, root: Rank, world_size: usize },
    #[error("the vectors given to {operation} do not fit: {what}")]
    InvalidBuffers { operation: &'static str, what: String },
    #[error("{operation} names rank {rank}; it must be another of the group's {world_size} ranks")]
    NoSuchPeer { operation: &'static str, rank: Rank, world_size: usize },
    #[error("all_gather_bytes carries at most {bytes_max} bytes per rank, but rank {rank} gave {bytes}")]
    ControlDataTooLong { rank: Rank, bytes: u64, bytes_max: usize },
    #[error(
        "operation {sequence} differs between ranks: rank {rank} issued {operation}, rank {other_rank} \
         issued {other_operation}; all ranks must issue the same operations in the same order"
    )]
    Mismatch { sequence: u64, rank: Rank, operation: Operation, other_rank: Rank, other_operation: Operation },
    #[error("{0}; all ranks must issue the operations of several groups in the same order")]
    GroupDeadlock(Box<GroupDeadlock>),
    #[error(
        "rank {rank} was lost at operation {sequence}, {operation}: its process died or its connection broke; its log \
         may say why"
    )]
    PeerLost { rank: Rank, operation: Operation, sequence: u64 },
    #[error("rank {rank} left the group before operation {sequence}, {operation}")]
    PeerLeft { rank: Rank, operation: Operation, sequence: u64 },
    #[error("rank {rank} gave up at operation {sequence}, {operation}; see its own error")]
    PeerFailed { rank: Rank, operation: Operation, sequence: u64 },
    #[error(
        "operation {sequence}, {operation}, made no progress for {timeout:?}; ranks that have not reached it: {}",
        format_ranges(missing.iter().copied())
    )]
    TimedOut {
        operation: Operation,
        sequence: u64,
        timeout: Duration,
        /// Ranks that have not reached the operation and make no other progress either. Empty if all have reached it, but no byte moves.
        missing: Vec<Rank>,
    },
    #[error("rank {rank} violated the protocol during operation {sequence}, {operation}: {what}")]
    Protocol { rank: Rank, operation: Operation, sequence: u64, what: String },
    #[error("waiting for peers failed during operation {sequence}, {operation}")]
    Wait { operation: Operation, sequence: u64, source: Arc<io::Error> },
    /// A device that uses a vector of the operation has failed. The vector is lost.
    #[error("the device failed: {cause}")]
    DeviceFailed { cause: String },
    #[error("operation {sequence}, {operation}, failed between the devices: {cause}")]
    DeviceTransport { operation: Operation, sequence: u64, cause: String },
    #[error("this rank panicked while using the group; see the panic message")]
    Panicked,
}

/// A deadlock of two ranks across two groups: `rank` waits in `operation` for `other_rank`, which waits in `other_operation` of another
/// group for `rank`. A `sequence` is the number of an operation within its group, from 0.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the message explains the fields")]
pub struct GroupDeadlock {
    pub rank: Rank,
    pub group: String,
    pub sequence: u64,
    pub operation: Operation,
    pub other_rank: Rank,
    pub other_group: String,
    pub other_sequence: u64,
    pub other_operation: Operation,
}

impl fmt::Display for GroupDeadlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let GroupDeadlock { rank, group, sequence, operation, .. } = self;
        write!(f, "rank {rank} waits in {operation} ({group} {sequence}) for rank {}, ", self.other_rank)?;
        let GroupDeadlock { other_group, other_sequence, other_operation, .. } = self;
        write!(f, "which waits in {other_operation} ({other_group} {other_sequence}) for rank {rank}")
    }
}

impl CommError {
    pub(crate) fn mismatch(sequence: u64, one: (Rank, Operation), other: (Rank, Operation)) -> Self {
        let mut sides = [one, other];
        sides.sort_by_key(|(rank, _)| *rank);
        let [(rank, operation), (other_rank, other_operation)] = sides;
        CommError::Mismatch { sequence, rank, operation, other_rank, other_operation }
    }

    pub(crate) fn rendezvous(doing: impl Into<String>, source: io::Error) -> Self {
        CommError::Rendezvous { doing: doing.into(), source: Arc::new(source) }
    }

    /// Ranks of the group that were waited for, or that have failed.
    pub(crate) fn missing(&self) -> Vec<Rank> {
        match self {
            CommError::TimedOut { missing, .. } => missing.clone(),
            CommError::PeerLost { rank, .. }
            | CommError::PeerLeft { rank, .. }
            | CommError::PeerFailed { rank, .. }
            | CommError::Protocol { rank, .. } => Vec::from([*rank]),
            CommError::GroupDeadlock(deadlock) => Vec::from([deadlock.other_rank]),
            _ => Vec::new(),
        }
    }
}

fn refusals(refused: &[String]) -> String {
    if refused.is_empty() { String::new() } else { format!("; refused: {}", refused.join("; ")) }
}
