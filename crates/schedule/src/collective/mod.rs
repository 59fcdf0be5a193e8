//! Collective algorithms as per-rank steps.
