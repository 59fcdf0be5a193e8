//! Process groups, their collectives, point-to-point messages, and the transports that carry them.
//!
//! A [`Group`] is one rank's handle to a world whose members issue the same operations in the same order. Operations are asynchronous: each
//! returns a [`Work`], whose `wait` returns the result. The group's communication thread executes the operations in the order of issue.
//!
//! # Invariants
//! - This crate knows ranks, not mesh axes, and bytes with a dtype, not tensors.
//! - Unless [`GroupOptions::keeps_order`] is off, all reductions follow the canonical order of [`trireme_schedule::collective`]. The same
//!   inputs give the same bits with every transport and every algorithm.
//! - The first failed operation ends a group: all pending and all later operations return that failure. A rank that fails notifies its
//!   peers at once, with the cause.
//! - A steady state allocates nothing: repeated operations reuse the memory that the first ones allocated.
//! - The length of peer input is checked before memory is allocated for it.
//!
//! # Layers
//! `group`, `collectives` and `work` are the public interface. `queue` keeps operations in order and `engine` executes one at a time.
//! `transport::link_transport` runs the steps of the chosen algorithm (`selection`) over one link to each peer. Where ranks share memory,
//! it passes operations to `transport::shm` instead. `messages` has links of its own. `control` keeps the connections over which ranks
//! learn that a peer failed or left. `rendezvous` sets all of this up, and `recorder` records the operations.

mod backoff;
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
pub use element::{BufferElement, Element, Untyped};
pub use error::{CommError, GroupDeadlock};
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
    IssuedOperation, MessagePeer, Occasion, OperationReport, OperationState, OperationVariant, Place,
    ProgramLine, RankReport, ReadReportsError, RecorderOptions, Source, read_reports, remove_reports,
    report_path,
};
pub use secret::Secret;
pub use selection::Choice;
pub use statistics::CommStatistics;
pub use transport::CONTROL_BYTES_MAX;
pub use work::{Outcome, Work};
pub use world::{inproc_world_on, inproc_world_with, join, report_failure, single};
