use crate::{Operation, Secret};
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use trireme_base::{Rank, ranges};

/// Why communication failed. Cheap to clone: the failure of one operation is also that of all after it.
#[derive(Debug, Clone, thiserror::Error)]
#[expect(missing_docs, reason = "messages explain the fields")]
pub enum CommError {
    /// Options that cannot be.
    #[error("{what}")]
    Options { what: String },
    /// The rendezvous address names no host.
    #[error("cannot resolve the rendezvous address '{address}'; check master_addr (MASTER_ADDR)")]
    Resolve {
        address: String,
        #[source]
        source: Arc<io::Error>,
    },
    /// Strangers could reach the workers, and nothing would tell them from workers.
    #[error("the workers would listen on {address}, where others can connect, but have no secret")]
    SecretMissing {
        /// Where a worker would listen, or look for rank 0.
        address: IpAddr,
    },
    /// A text that is no secret.
    #[error(
        "a secret has {} to {} characters, but this one has {bytes}; use the output of `openssl rand -hex 32`",
        Secret::BYTES_MIN,
        Secret::BYTES_MAX
    )]
    SecretUnfit { bytes: usize },
    /// The file of the secret cannot be used.
    #[error("cannot read the secret from {}", path.display())]
    SecretFile {
        path: PathBuf,
        #[source]
        source: Arc<io::Error>,
    },
    /// A file of the options for TLS cannot be used.
    #[error("cannot use {} for TLS", path.display())]
    TlsFile {
        path: PathBuf,
        #[source]
        source: Arc<io::Error>,
    },
    /// TLS was asked for, and this program has none.
    #[error("this program was built without TLS")]
    TlsUnavailable,
    /// The system has no random numbers.
    #[error("the system provides no random numbers")]
    Random {
        #[source]
        source: Arc<io::Error>,
    },
    /// The network interface where this worker should listen cannot be used.
    #[error("cannot listen on the network interface '{interface}'")]
    Interface {
        interface: String,
        #[source]
        source: Arc<io::Error>,
    },
    /// Rank 0 cannot listen.
    #[error(
        "rank 0 cannot listen on {address}; if another program uses the port, choose another master_port \
         (MASTER_PORT); master_addr must be an address of this host"
    )]
    Listen {
        address: String,
        #[source]
        source: Arc<io::Error>,
    },
    /// This rank cannot listen for the others.
    #[error("cannot listen on {ip} for the other ranks")]
    ListenForPeers {
        ip: IpAddr,
        #[source]
        source: Arc<io::Error>,
    },
    /// Rank 0 was not reached.
    #[error(
        "rank {rank} did not reach rank 0 at {address} within {waited:?}; is rank 0 running, and is the address \
         correct?"
    )]
    Unreachable {
        rank: Rank,
        address: String,
        waited: Duration,
        #[source]
        source: Arc<io::Error>,
    },
    /// Rank 0 turned this rank away.
    #[error("rank 0 at {address} rejected rank {rank}: {reason}")]
    Refused { rank: Rank, address: String, reason: String },
    /// A rank could not join, and said why.
    #[error("rank {rank} failed before all ranks had joined: {reason}")]
    RankFailed {
        rank: Rank,
        reason: String,
        /// Who knows of it: that rank, and those who had joined.
        told: Vec<Rank>,
    },
    /// Not all ranks came to the rendezvous.
    #[error(
        "after {waited:?}, these ranks have not joined at {address}: {}{}",
        ranges(missing.iter().copied()),
        refusals(refused)
    )]
    RanksMissing { missing: Vec<Rank>, address: String, waited: Duration, refused: Vec<String> },
    /// The rendezvous broke off after this rank had joined.
    #[error("the rendezvous failed while {doing}")]
    Rendezvous {
        doing: String,
        #[source]
        source: Arc<io::Error>,
    },
    /// Shared memory was demanded and cannot be had.
    #[error("the shm transport cannot be used: {reason}; choose transport auto or tcp")]
    ShmUnavailable { reason: String },
    /// MPI was demanded and cannot be had.
    #[error("the mpi transport cannot be used: {reason}")]
    MpiUnavailable { reason: String },
    /// A group could not be split.
    #[error("cannot split the group: rank {rank} failed while {doing}: {reason}")]
    Split { rank: Rank, doing: String, reason: String },
    /// The connections cannot be watched.
    #[error("cannot watch the connections to the other ranks; there may be too many open files (ulimit -n)")]
    Watch {
        #[source]
        source: Arc<io::Error>,
    },
    /// The communication thread cannot be started.
    #[error("cannot start the communication thread")]
    Spawn {
        #[source]
        source: Arc<io::Error>,
    },
    /// No memory for a buffer.
    #[error("cannot allocate a communication buffer of {bytes} bytes")]
    Allocate {
        bytes: usize,
        #[source]
        source: Arc<io::Error>,
    },
    /// A root outside of the group.
    #[error("{operation} names rank {root}, but the group has {world_size} ranks")]
    NoSuchRoot { operation: Operation, root: Rank, world_size: usize },
    /// Vectors whose lengths do not fit the operation or each other.
    #[error("the vectors given to {operation} do not fit: {what}")]
    Lengths { operation: &'static str, what: String },
    /// A message to or from a rank that cannot be.
    #[error("{operation} names rank {rank}; it must be another of the group's {world_size} ranks")]
    NoSuchPeer { operation: &'static str, rank: Rank, world_size: usize },
    /// Control data above its bound.
    #[error("all_gather_bytes carries at most {bytes_max} bytes per rank, but rank {rank} gave {bytes}")]
    ControlDataTooLong { rank: Rank, bytes: u64, bytes_max: usize },
    /// Ranks issued different operations at the same place.
    #[error(
        "operation {sequence} differs between ranks: rank {rank} issued {operation}, rank {other_rank} \
         issued {other_operation}; all ranks must issue the same operations in the same order"
    )]
    Mismatch {
        /// Position in the group's sequence of operations, from 0.
        sequence: u64,
        rank: Rank,
        operation: Operation,
        other_rank: Rank,
        other_operation: Operation,
    },
    /// Two ranks wait for each other in operations of different groups.
    #[error("{0}; all ranks must issue the operations of several groups in the same order")]
    CrossedGroups(Box<Crossing>),
    /// A peer's process ended, or its connection broke, without a goodbye.
    #[error(
        "rank {rank} was lost at operation {sequence}, {operation}: its process died or its connection broke; its log \
         may say why"
    )]
    PeerLost {
        rank: Rank,
        operation: Operation,
        /// Position in the group's sequence of operations, from 0.
        sequence: u64,
    },
    /// A peer left the group in good order before an operation that needs it.
    #[error("rank {rank} left the group before operation {sequence}, {operation}")]
    PeerLeft {
        rank: Rank,
        operation: Operation,
        /// Position in the group's sequence of operations, from 0.
        sequence: u64,
    },
    /// A peer's group failed for a reason of its own, which that rank reports.
    #[error("rank {rank} gave up at operation {sequence}, {operation}; see its own error")]
    PeerFailed {
        rank: Rank,
        operation: Operation,
        /// Position in the group's sequence of operations, from 0.
        sequence: u64,
    },
    /// Nothing has happened in an operation for too long.
    #[error(
        "operation {sequence}, {operation}, made no progress for {timeout:?}; ranks that have not reached it: {}",
        ranges(missing.iter().copied())
    )]
    TimedOut {
        operation: Operation,
        /// Position in the group's sequence of operations, from 0.
        sequence: u64,
        timeout: Duration,
        /// Who has not come and does nothing else either; empty if all came, and no byte moves.
        missing: Vec<Rank>,
    },
    /// A peer sent what the protocol has no place for.
    #[error("rank {rank} violated the protocol during operation {sequence}, {operation}: {what}")]
    Protocol {
        rank: Rank,
        operation: Operation,
        /// Position in the group's sequence of operations, from 0.
        sequence: u64,
        what: String,
    },
    /// The operating system refused to continue.
    #[error("waiting for peers failed during operation {sequence}, {operation}")]
    Wait {
        operation: Operation,
        /// Position in the group's sequence of operations, from 0.
        sequence: u64,
        #[source]
        source: Arc<io::Error>,
    },
    /// A thread of this rank panicked while it used the group.
    #[error("this rank panicked while using the group; see the panic message")]
    Panicked,
}

/// Operations of different groups in which two ranks wait for each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Crossing {
    /// This rank, in its group.
    pub rank: Rank,
    /// The name of the group.
    pub group: String,
    /// Position in the group's sequence of operations, from 0.
    pub sequence: u64,
    /// What this rank waits in.
    pub operation: Operation,
    /// The rank it waits for, in the same group.
    pub other_rank: Rank,
    /// The name of the group that the other rank waits in.
    pub other_group: String,
    /// Position in that group's sequence of operations, from 0.
    pub other_sequence: u64,
    /// What the other rank waits in.
    pub other_operation: Operation,
}

impl fmt::Display for Crossing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Crossing { rank, group, sequence, operation, .. } = self;
        write!(f, "rank {rank} waits in {operation} ({group} {sequence}) for rank {}, ", self.other_rank)?;
        let Crossing { other_group, other_sequence, other_operation, .. } = self;
        write!(f, "which waits in {other_operation} ({other_group} {other_sequence}) for rank {rank}")
    }
}

impl CommError {
    /// Two ranks issued different operations at the same place.
    pub(crate) fn mismatch(sequence: u64, one: (Rank, Operation), other: (Rank, Operation)) -> Self {
        let mut sides = [one, other];
        sides.sort_by_key(|(rank, _)| *rank);
        let [(rank, operation), (other_rank, other_operation)] = sides;
        CommError::Mismatch { sequence, rank, operation, other_rank, other_operation }
    }

    /// Ranks of the group that were waited for, or lost.
    pub(crate) fn missing(&self) -> Vec<Rank> {
        match self {
            CommError::TimedOut { missing, .. } => missing.clone(),
            CommError::PeerLost { rank, .. } | CommError::PeerLeft { rank, .. } => Vec::from([*rank]),
            CommError::CrossedGroups(crossing) => Vec::from([crossing.other_rank]),
            _ => Vec::new(),
        }
    }
}

fn refusals(refused: &[String]) -> String {
    if refused.is_empty() { String::new() } else { format!("; refused: {}", refused.join("; ")) }
}
