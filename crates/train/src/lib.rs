//! Configuration, trainer and metrics.
