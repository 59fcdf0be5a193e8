//! The `trireme` command line.
fn main() {}
