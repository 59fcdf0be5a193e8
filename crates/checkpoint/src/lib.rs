//! Checkpoints: names and placements in, files out.
