//! Tests of swap files against an in-memory oracle, and with injected faults.

mod creation;
mod faults;
mod oracle;
mod support;
