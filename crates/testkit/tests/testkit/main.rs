//! Tests of the test networks and relays.

mod network;
mod relay;
mod support;
