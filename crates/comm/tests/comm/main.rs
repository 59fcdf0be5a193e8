//! Groups of ranks: operations, messages, transports, and the errors that ranks report.

mod algorithms;
mod collectives;
mod connections;
mod costs;
mod dry;
mod failures;
mod flight_recorder;
mod fusion;
mod hosts;
mod matrix;
mod messages;
mod processes;
mod refused_connections;
mod rendezvous;
mod support;
