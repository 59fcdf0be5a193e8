//! Optimizers over flat shards, clipping, learning-rate schedules.
