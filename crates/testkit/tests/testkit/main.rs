//! Tests of the networks and relays for tests.

mod network;
mod relay;
mod support;
