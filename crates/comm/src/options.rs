use crate::listener::{LineListener, Listener};
use crate::{RecorderOptions, Secret};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;
use trireme_base::Rank;
use trireme_schedule::collective::{Algorithm, CostModel, DirectCost, LinkCost};

/// Options of a group's operations. Must be equal on all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct GroupOptions {
    /// Maximum time without progress. An operation fails if a rank that has not reached it makes no progress for this long, or, once all
    /// ranks have reached it, if none of them makes progress. At most a year.
    pub timeout: Duration,
    /// How long the network between hosts may be interrupted before the unreachable ranks count as lost; from one second to
    /// [`NETWORK_PAUSE_MAX`](GroupOptions::NETWORK_PAUSE_MAX). The end of a process is noticed at once.
    pub network_pause: Duration,
    /// Maximum bytes of a vector that is copied through staging buffers in shared memory, which takes one barrier for up to 256 KiB.
    /// Vectors above this maximum are read and written in place if they are in shared memory. At most
    /// [`SHORT_BYTES_LIMIT`](GroupOptions::SHORT_BYTES_LIMIT).
    pub short_bytes_max: usize,
    /// Bytes of the chunks in which long vectors are processed, chosen so that a chunk stays in cache.
    pub chunk_bytes: usize,
    /// Whether every reduction follows the canonical order of [`trireme_schedule::collective`], so that all world layouts, transports and
    /// algorithms give the same bits. If off, results are reproducible only for the same group.
    pub keeps_order: bool,
    /// The algorithm to use for all operations that it fits. The fastest one is chosen for the other operations, or for all if this is
    /// `None`.
    pub algorithm: Option<Algorithm>,
    /// Known communication costs, by which the fastest algorithm is chosen.
    pub costs: GivenCosts,
    /// Whether every frame on a link carries a CRC-32C of its header and payload. A mismatch ends the group. TCP's 16-bit checksum misses
    /// one error in 65536. Data in shared memory that does not go over a link has no checksum.
    pub checksums: bool,
    /// Number of TCP connections to each peer for collectives. Messages have as many of their own. Bytes are striped over the connections,
    /// 128 KiB at a time. At most [`SOCKETS_PER_PEER_MAX`](GroupOptions::SOCKETS_PER_PEER_MAX).
    pub sockets_per_peer: usize,
    /// Whether long payloads are sent over TCP without a copy (`MSG_ZEROCOPY`). Has no effect with TLS, with several sockets per peer, or
    /// if the kernel does not support it or copies anyway.
    pub zero_copy: bool,
}

impl GroupOptions {
    /// Upper bound of [`short_bytes_max`](GroupOptions::short_bytes_max).
    pub const SHORT_BYTES_LIMIT: usize = 1 << 20;
    /// Bounds of [`chunk_bytes`](GroupOptions::chunk_bytes): one cache line, and 16 MiB, which exceeds a core's own cache.
    pub const CHUNK_BYTES_BOUNDS: std::ops::RangeInclusive<usize> = 64..=1 << 24;
    /// Upper bound of [`network_pause`](GroupOptions::network_pause).
    pub const NETWORK_PAUSE_MAX: Duration = Duration::from_secs(3600);
    /// Upper bound of [`sockets_per_peer`](GroupOptions::sockets_per_peer).
    pub const SOCKETS_PER_PEER_MAX: usize = 16;
}

impl Default for GroupOptions {
    fn default() -> Self {
        GroupOptions {
            timeout: Duration::from_secs(300),
            network_pause: Duration::from_secs(30),
            short_bytes_max: 16 << 10,
            chunk_bytes: 64 << 10,
            keeps_order: true,
            algorithm: None,
            costs: GivenCosts::default(),
            checksums: false,
            sockets_per_peer: 1,
            zero_copy: true,
        }
    }
}

/// Costs that are known and need not be measured. When a world is created, the other costs are measured if
/// [`keeps_order`](GroupOptions::keeps_order) is on, because then the choice of an algorithm changes no bit; otherwise typical costs are
/// used. All must be positive.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct GivenCosts {
    /// Cost of messages between two ranks of a host.
    pub within: Option<LinkCost>,
    /// Cost of messages between ranks of different hosts.
    pub across: Option<LinkCost>,
    /// Cost of access to memory that the ranks of a host share. Ignored where they share none.
    pub direct: Option<DirectCost>,
}

impl GivenCosts {
    /// Returns `model` with the given costs in place of its own.
    pub fn apply_to(&self, model: CostModel) -> CostModel {
        CostModel {
            within: self.within.unwrap_or(model.within),
            across: self.across.unwrap_or(model.across),
            direct: model.direct.map(|own| self.direct.unwrap_or(own)),
            ..model
        }
    }

    /// Whether all given costs are positive and finite.
    pub(crate) fn are_positive(&self) -> bool {
        let links = [self.within, self.across].into_iter().flatten();
        let links = links.map(|cost| [cost.latency_seconds, cost.seconds_per_byte]);
        let direct = self.direct.map(|cost| [cost.synchronization_seconds, cost.seconds_per_byte]);
        links.chain(direct).flatten().all(|seconds| seconds > 0.0 && seconds.is_finite())
    }
}

/// Options by which a worker process finds the other workers of its world and joins them.
#[derive(Debug, Clone)]
pub struct JoinOptions {
    /// Rank of this worker.
    pub rank: Rank,
    /// Number of workers.
    pub world_size: usize,
    /// Host name or address at which rank 0 listens; it listens on that address only. IPv4 or IPv6, optionally in brackets.
    pub master_addr: String,
    /// Port at which rank 0 listens.
    pub master_port: u16,
    /// The requested transport.
    pub transport: TransportChoice,
    /// Name of the job. Workers of another job are refused.
    pub job: String,
    /// Secret that all workers of the job share. Workers without it are refused. If `None`, any process that can connect may join.
    pub secret: Option<Secret>,
    /// Whether a secret is required to listen on any address but loopback.
    pub requires_secret: bool,
    /// Encrypts TCP connections. Needs the cargo feature `tls`.
    pub tls: Option<TlsOptions>,
    /// Address on which rank 0 listens, if not `master_addr`. If `master_addr` is the name of a service, use all addresses (`0.0.0.0` or
    /// `::`).
    pub listen: Option<IpAddr>,
    /// Network interface on which this worker listens for its peers: a name (`eth0`) or its beginning, an address, or a network
    /// (`10.0.0.0/8`). If several are given, separated by commas, the first one that matches is used. `=` before a name requires an exact
    /// match, `^` excludes it. The default is the interface from which this worker reaches rank 0; for rank 0, the address at which it
    /// listens.
    pub interface: Option<String>,
    /// Ports on which this worker may listen for its peers. Any port by default.
    pub ports: Option<RangeInclusive<u16>>,
    /// Name of the host on which this worker is assumed to be. Workers with equal names share memory. The system's host name by default.
    pub host: Option<String>,
    /// Receives the connections that were refused.
    pub on_refusal: Option<OnRefusal>,
    /// Whether to renumber ranks so that the ranks of a host are adjacent. Rank 0 stays. Must be equal on all ranks.
    pub orders_by_host: bool,
    /// Receives lines for the user while the world joins: which ranks are missing, and how ranks were renumbered.
    pub on_note: Option<LineListener>,
    /// How long to wait for all workers to join. At most a year.
    pub join_timeout: Duration,
    /// Options of the group's operations.
    pub group: GroupOptions,
    /// Options of the flight recorder, which reports failures in addition to the returned errors.
    pub flight_recorder: RecorderOptions,
}

impl JoinOptions {
    /// Options of one rank with defaults for the rest: rendezvous at 127.0.0.1:29500 within 60 s, automatic transport.
    pub fn new(rank: Rank, world_size: usize) -> Self {
        JoinOptions {
            rank,
            world_size,
            master_addr: "127.0.0.1".to_owned(),
            master_port: 29500,
            transport: TransportChoice::Auto,
            job: String::new(),
            secret: None,
            requires_secret: true,
            tls: None,
            listen: None,
            interface: None,
            ports: None,
            host: None,
            on_refusal: None,
            orders_by_host: false,
            on_note: None,
            join_timeout: Duration::from_secs(60),
            group: GroupOptions::default(),
            flight_recorder: RecorderOptions::default(),
        }
    }
}

/// Files and name for TLS 1.3 between workers. Both ends of a connection present a certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsOptions {
    /// PEM file with this worker's certificate chain. The certificate must be valid for the DNS name [`name`](TlsOptions::name), as a
    /// server and as a client.
    pub certificate: PathBuf,
    /// PEM file with the certificate's private key, which only its owner may read.
    pub key: PathBuf,
    /// PEM file with the certificates of the authorities that signed the workers' certificates.
    pub authority: PathBuf,
    /// The DNS name in every worker's certificate. It says that the holder is a worker, not where it runs.
    pub name: String,
}

/// A connection that was refused while a world joined. It has no effect on the world.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// Address of the peer. `None` for a process of this host.
    pub address: Option<SocketAddr>,
    /// Why the connection was refused.
    pub reason: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.address {
            Some(address) => write!(f, "{address}: {}", self.reason),
            None => write!(f, "a process of this host: {}", self.reason),
        }
    }
}

/// A callback that receives the first refusals of a rendezvous, on the thread that joins.
pub type OnRefusal = Listener<Refusal>;

trireme_base::named! {
    /// The transport that the user requests.
    #[derive(Default)]
    pub enum TransportChoice {
        /// Shared memory between ranks that are on one host and can map each other's memory, TCP between the others.
        #[default]
        Auto = "auto",
        /// Shared memory between all ranks. Joining fails if they cannot share memory.
        Shm = "shm",
        /// TCP.
        Tcp = "tcp",
        /// MPI. Its launcher must have started the workers, and the program must be built with the feature `mpi`.
        Mpi = "mpi",
    }
}

trireme_base::named! {
    /// The transport that carries a group's data.
    pub enum TransportKind {
        /// No transport: a world of one rank.
        Single = "single",
        /// Socket pairs between threads of one process.
        Inproc = "inproc",
        /// Shared memory between processes of one host.
        Shm = "shm",
        /// TCP connections.
        Tcp = "tcp",
        /// Shared memory between the processes of each host, TCP connections between hosts.
        ShmAndTcp = "shm+tcp",
        /// MPI.
        Mpi = "mpi",
    }
}
