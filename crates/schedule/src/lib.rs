//! The step program and the collective algorithms, as pure data.
//!
//! A training step of one rank is a list of [`Action`]s, made by a pure function before anything runs. The runtime executes
//! it, the validator proves it, reports print it. Nothing here does IO, starts a thread or reads a clock.

mod action;
pub mod collective;
pub mod engine;
mod exchanges;
mod layout;
pub mod lowering;
mod parse;
pub mod pipeline;
mod program;
pub mod single;
mod validate;

pub use action::{Action, Keep, Message, MessageKind, StateClass, StateOf, Stream};
pub use exchanges::UnitExchanges;
pub use layout::{ClassLayout, Share, StateLayout, Tier};
pub use parse::ParseError;
pub use program::{Asynchronous, Chain, Outline, Program, Stage};
pub use validate::{ActionFault, ProgramError, validate, validate_pipeline, validate_world};
