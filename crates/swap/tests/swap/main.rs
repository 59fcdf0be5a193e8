//! Swap files: against an oracle, and with faults.

mod creation;
mod faults;
mod oracle;
mod support;
