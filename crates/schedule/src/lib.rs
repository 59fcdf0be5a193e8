//! The step program and the collective algorithms, as pure data.

pub mod collective;
