//! Storage, fused kernels and the tape.
