//! Compares swap files with an oracle, and injects faults.

mod creation;
mod faults;
mod oracle;
mod support;
