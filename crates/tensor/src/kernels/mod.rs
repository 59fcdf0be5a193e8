//! The one place of this crate with `unsafe`: memory, threads, SIMD and machine code.
#![allow(unsafe_code)]

pub(crate) mod cpu;

pub use cpu::attention::AttentionShape;
pub(crate) use cpu::attention::{CacheSpan, Rotary};
pub(crate) use cpu::matmul::MatmulEpilogue;
pub use cpu::optimizer::{AdamWStep, MomentumStep};
pub use cpu::peak::{Traffic, Unit};
pub use cpu::simd::CpuFeatures;
