//! The networks and relays that other tests use.

mod network;
mod relay;
mod support;
