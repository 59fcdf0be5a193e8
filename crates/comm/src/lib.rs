//! Groups of ranks, their collectives and the transports under them.
//!
//! A [`Group`] is one rank's end of a world whose members issue the same operations in the same order. Operations are
//! asynchronous: each returns a [`Work`] that must be resolved, and the group's communication thread executes them in the order of
//! issue.
//!
//! # Invariants
//! - This crate knows ranks, not axes, and bytes with a dtype, not tensors.
//! - Unless [`GroupOptions::keeps_order`] is off, all reductions follow the canonical order of
//!   [`trireme_schedule::collective`], whatever the transport and the algorithm: the same inputs give the same bits.
//! - After a failed operation a group is of no use: everything pending and everything issued later
//!   returns that failure. A rank's failure, its cause included, is told to its peers at once.
//! - A steady state allocates nothing: repeating the same operations reuses what the first ones allocated.
//! - Nothing a peer sends is trusted with an allocation before its length is checked.
//!
//! # Layers
//! `group`, `collectives` and `work` (what users see) → `queue` (order, threads) → `engine` (one operation) → `transport::linked`,
//! which runs the steps that `selection` has chosen over a link to each peer, or leaves the operation to `transport::shm` where
//! ranks share memory. `messages` has links of its own. `control` is next to them: the connections over which ranks learn of each
//! other's end. `rendezvous` builds all of this, and `recorder` notes what they do.

mod buffer;
mod call;
mod collectives;
mod control;
mod element;
mod engine;
mod error;
mod fusion;
#[cfg(test)]
mod fuzz;
mod group;
mod host_name;
mod listener;
mod messages;
#[cfg(all(test, feature = "loom"))]
mod models;
mod notice;
mod operation;
mod options;
mod page_size;
mod patience;
mod probe;
mod queue;
mod recorder;
mod rendezvous;
mod secret;
mod selection;
mod statistics;
mod sync;
mod transport;
mod words;
mod work;
mod world;

pub use buffer::Buffer;
pub use element::{Content, Element, Untyped};
pub use error::{CommError, Crossing};
pub use fusion::{FusedWork, Fusion};
pub use group::Group;
pub use host_name::host_name;
pub use listener::{LineListener, Listener};
pub use operation::Operation;
pub use options::{
    GivenCosts, GroupOptions, JoinOptions, OnRefusal, Refusal, TlsOptions, TransportChoice, TransportKind,
};
pub use page_size::PageSize;
pub use recorder::{
    Diagnosis, Difference, Direction, Disagreement, FailureReport, Finding, FlightRecorder, GroupReport,
    IssuedOperation, MessagePeer, Occasion, OperationReport, OperationState, Place, ProgramLine, RankReport,
    ReadReportsError, RecorderOptions, Side, Source, read_reports, remove_reports, report_path,
};
pub use secret::Secret;
pub use selection::Choice;
pub use statistics::CommStatistics;
pub use transport::CONTROL_BYTES_MAX;
pub use work::{Outcome, Work};
pub use world::{inproc_world_on, inproc_world_with, join, report_failure, single};
