use crate::listener::{LineListener, Listener};
use crate::{RecorderOptions, Secret};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;
use trireme_base::Rank;
use trireme_schedule::collective::{Algorithm, CostModel, DirectCost, LinkCost};

/// How a group runs its operations; the same on all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct GroupOptions {
    /// How long an operation may wait without a sign of progress, of its own or of ranks that have not reached it, before it fails; at most a year.
    pub timeout: Duration,
    /// How long a network between hosts may carry nothing before a silent rank counts as lost; from a second to
    /// [`NETWORK_PAUSE_MAX`](GroupOptions::NETWORK_PAUSE_MAX). The end of a process is known at once.
    pub network_pause: Duration,
    /// Vectors up to this size go through stages of shared memory, with one synchronisation; longer ones are read and
    /// written where they lie. At most [`SHORT_BYTES_LIMIT`](GroupOptions::SHORT_BYTES_LIMIT).
    pub short_bytes_max: usize,
    /// Work on long vectors proceeds by pieces of this size, so that a piece stays in cache.
    pub chunk_bytes: usize,
    /// Whether every reduction follows the canonical order of [`trireme_schedule::collective`], so that all world
    /// layouts, transports and algorithms give the same bits. Without it the same group gives the same bits.
    pub keeps_order: bool,
    /// The algorithm to take wherever it fits; the quickest one where it does not, or where none is named.
    pub algorithm: Option<Algorithm>,
    /// What is known of the costs of communication, by which the quickest algorithm is found.
    pub costs: GivenCosts,
    /// Whether every frame of a link carries a CRC-32C of header and payload, and a mismatch ends the group. TCP's 16-bit sum
    /// misses one error in 65536. Data in shared memory without a link has no checksum.
    pub checksums: bool,
    /// TCP connections to each peer for collective operations, and as many for messages; bytes go over them in turns, in
    /// stripes of 128 KiB. At most [`SOCKETS_PER_PEER_MAX`](GroupOptions::SOCKETS_PER_PEER_MAX).
    pub sockets_per_peer: usize,
    /// Whether long payloads go by TCP without a copy, where the kernel has that and it saves one.
    pub zero_copy: bool,
}

impl GroupOptions {
    /// Upper bound of [`short_bytes_max`](GroupOptions::short_bytes_max).
    pub const SHORT_BYTES_LIMIT: usize = 1 << 20;
    /// Bounds of [`chunk_bytes`](GroupOptions::chunk_bytes): a cache line, and what no cache holds.
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

/// Costs that need not be measured. The others are measured when a world is made if [`keeps_order`](GroupOptions::keeps_order),
/// for then no choice of an algorithm changes a bit; else they are typical ones. All are positive.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct GivenCosts {
    /// Messages between two ranks of a host.
    pub within: Option<LinkCost>,
    /// Messages between ranks of different hosts.
    pub across: Option<LinkCost>,
    /// Memory that ranks of a host share; of no meaning where they share none.
    pub direct: Option<DirectCost>,
}

impl GivenCosts {
    /// The model with what is given in the place of its own.
    pub fn over(&self, model: CostModel) -> CostModel {
        CostModel {
            within: self.within.unwrap_or(model.within),
            across: self.across.unwrap_or(model.across),
            direct: model.direct.map(|own| self.direct.unwrap_or(own)),
            ..model
        }
    }

    /// Whether all are numbers that costs can be.
    pub(crate) fn are_positive(&self) -> bool {
        let links = [self.within, self.across].into_iter().flatten();
        let links = links.map(|cost| [cost.latency_seconds, cost.seconds_per_byte]);
        let direct = self.direct.map(|cost| [cost.synchronisation_seconds, cost.seconds_per_byte]);
        links.chain(direct).flatten().all(|seconds| seconds > 0.0 && seconds.is_finite())
    }
}

/// How a worker process finds the others of its world.
#[derive(Debug, Clone)]
pub struct JoinOptions {
    /// This worker.
    pub rank: Rank,
    /// Number of workers.
    pub world_size: usize,
    /// Host name or address where rank 0 listens, on that address only. IPv4 or IPv6, also in brackets.
    pub master_addr: String,
    /// Port where rank 0 listens.
    pub master_port: u16,
    /// What carries the data.
    pub transport: TransportChoice,
    /// Name of the job: workers of another job are refused.
    pub job: String,
    /// What all workers of the job know: who does not is refused. Without one, anybody who can connect may join.
    pub secret: Option<Secret>,
    /// Whether workers need a secret to listen on anything but a loopback address.
    pub requires_secret: bool,
    /// Encrypts what goes over TCP. Needs the cargo feature `tls`.
    pub tls: Option<TlsOptions>,
    /// Where rank 0 listens, if not at `master_addr`: on all addresses (`0.0.0.0` or `::`) where that is the name of a service.
    pub listen: Option<IpAddr>,
    /// The network interface where this worker listens for the others: by its name (`eth0`) or the beginning of it, an address of it, or a
    /// network (`10.0.0.0/8`); the first that fits of several, separated by commas. `=` before a name asks for exactly that, `^` for any other.
    /// By default that from which it reaches rank 0, or where rank 0 listens.
    pub interface: Option<String>,
    /// The ports where this worker listens for the others; any by default.
    pub ports: Option<RangeInclusive<u16>>,
    /// The host that this worker counts as being on, by any name; workers of one name share memory. By default the system's.
    pub host: Option<String>,
    /// Is told of those who are refused.
    pub on_refusal: Option<OnRefusal>,
    /// Whether to renumber ranks so that those of a host are neighbours. Rank 0 stays. Must be equal on all ranks.
    pub orders_by_host: bool,
    /// Is told lines for the user while the world joins: who is waited for, and how ranks were renumbered.
    pub on_note: Option<LineListener>,
    /// How long to wait for all workers to come; at most a year.
    pub join_timeout: Duration,
    /// How the group runs its operations.
    pub group: GroupOptions,
    /// What is done when something goes wrong, beside returning errors.
    pub flight_recorder: RecorderOptions,
}

impl JoinOptions {
    /// The options of one rank, the rest at their defaults: rendezvous at 127.0.0.1:29500 within 60 s, automatic transport.
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

/// What a worker needs for TLS 1.3 with the others: both sides of a connection show a certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsOptions {
    /// PEM file with this worker's certificate chain, for servers and clients of the DNS name [`name`](TlsOptions::name).
    pub certificate: PathBuf,
    /// PEM file with the certificate's private key, which nobody but its owner may read.
    pub key: PathBuf,
    /// PEM file with the certificates of the authorities that have signed those of the workers.
    pub authority: PathBuf,
    /// The DNS name that every worker's certificate is for; it says that the holder is a worker, not where it runs.
    pub name: String,
}

/// A connection that was turned away while a world joined; it changed nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// Where it came from; none for a process of this host.
    pub address: Option<SocketAddr>,
    /// Why it was turned away.
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

/// Is told of the first refusals of a rendezvous, from the thread that joins.
pub type OnRefusal = Listener<Refusal>;

trireme_base::named! {
    /// The transport that the user requests.
    #[derive(Default)]
    pub enum TransportChoice {
        /// Shared memory between ranks that are on one host and can map each other's memory, TCP between others.
        #[default]
        Auto = "auto",
        /// Shared memory, or fail.
        Shm = "shm",
        /// TCP.
        Tcp = "tcp",
        /// MPI, whose launcher has started the workers; only in programs built with the feature `mpi`.
        Mpi = "mpi",
    }
}

trireme_base::named! {
    /// The transport of a group's data.
    pub enum TransportKind {
        /// Nothing: a world of one.
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
