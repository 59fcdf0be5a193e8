//! The 32-bit words of packed operands.
//!
//! Words let all precisions share one packing and one loop nest: a kernel consists of a way to form words and a micro-kernel (`kernel.rs`,
//! `amx.rs`). `vdpbf16ps` and `tdpbf16ps` multiply pairs of bf16. On a machine without 16-bit multiplication, words are f32 that were
//! rounded to the precision.

use crate::kernels::cpu::element::Element;
use crate::kernels::cpu::simd::SimdLevel;
use crate::precision::Precision;
use trireme_base::{Bf16, F16};

/// The content of a word of a packed operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WordKind {
    /// An f32.
    F32,
    /// An f32 that was rounded to bf16, for machines without bf16 multiplication.
    RoundedBf16,
    /// An f32 that was rounded to f16.
    RoundedF16,
    /// Two bf16 that are adjacent along the inner dim, the lower index in the lower half.
    Bf16Pair,
}

impl WordKind {
    /// Returns the kind of words of matmuls of `precision` on a machine.
    pub(super) fn new(simd_level: SimdLevel, precision: Precision) -> Self {
        match precision {
            Precision::F32 => WordKind::F32,
            Precision::F16 => WordKind::RoundedF16,
            Precision::Bf16 if simd_level >= SimdLevel::Avx512Bf16 => WordKind::Bf16Pair,
            Precision::Bf16 => WordKind::RoundedBf16,
        }
    }

    /// Returns the number of elements of the inner dim per word.
    pub(super) fn num_terms(self) -> usize {
        if self == WordKind::Bf16Pair { 2 } else { 1 }
    }
}

/// A [`WordKind`] as a type.
pub(super) trait Word {
    const TERMS: usize;

    /// Returns the word of one element (`low`) or of two.
    fn word<T: Element>(low: T, high: T) -> u32;
}

pub(super) struct F32Word;
pub(super) struct RoundedBf16Word;
pub(super) struct RoundedF16Word;
pub(super) struct Bf16PairWord;

impl Word for F32Word {
    const TERMS: usize = 1;

    #[inline(always)]
    fn word<T: Element>(low: T, _: T) -> u32 {
        low.to_f32().to_bits()
    }
}

impl Word for RoundedBf16Word {
    const TERMS: usize = 1;

    #[inline(always)]
    fn word<T: Element>(low: T, _: T) -> u32 {
        u32::from(low.to_bf16().to_bits()) << 16
    }
}

impl Word for RoundedF16Word {
    const TERMS: usize = 1;

    #[inline(always)]
    fn word<T: Element>(low: T, _: T) -> u32 {
        F16::from_f32(low.to_f32()).to_f32().to_bits()
    }
}

impl Word for Bf16PairWord {
    const TERMS: usize = 2;

    #[inline(always)]
    fn word<T: Element>(low: T, high: T) -> u32 {
        let bits = |x: Bf16| u32::from(x.to_bits());
        bits(low.to_bf16()) | bits(high.to_bf16()) << 16
    }
}

/// Forms words from elements that are contiguous along the inner dim. Missing elements are zero.
#[inline(always)]
pub(super) fn words_of_line<W: Word, T: Element>(source: &[T], out: &mut [u32]) {
    let (out, zeros) = out.split_at_mut(source.len().div_ceil(W::TERMS));
    zeros.fill(0);
    if W::TERMS == 1 {
        for (out, &x) in out.iter_mut().zip(source) {
            *out = W::word(x, x);
        }
        return;
    }
    let (pairs, rest) = source.as_chunks::<2>();
    for (out, &[low, high]) in out.iter_mut().zip(pairs) {
        *out = W::word(low, high);
    }
    if let (Some(out), &[low]) = (out.last_mut(), rest) {
        *out = W::word(low, T::zeroed());
    }
}

/// Forms one word of each of several lines, all for the same indices of the inner dim. `low` and `high` hold the lines' elements at the
/// first and at the last of these indices; they are equal if a word has one element. Missing elements are zero.
#[inline(always)]
pub(super) fn word_of_lines<W: Word, T: Element>(low: Option<&[T]>, high: Option<&[T]>, out: &mut [u32]) {
    match (low, high) {
        (None, _) => out.fill(0),
        (Some(low), None) => {
            for (out, &low) in out.iter_mut().zip(low) {
                *out = W::word(low, T::zeroed());
            }
        }
        (Some(low), Some(high)) => {
            // In blocks of sixteen, because lines are too short for a vectorized loop with a remainder.
            let (blocks, rest) = out.as_chunks_mut::<16>();
            let ((low, low_rest), (high, high_rest)) = (low.as_chunks::<16>(), high.as_chunks::<16>());
            for ((out, low), high) in blocks.iter_mut().zip(low).zip(high) {
                for lane in 0..16 {
                    out[lane] = W::word(low[lane], high[lane]);
                }
            }
            for ((out, &low), &high) in rest.iter_mut().zip(low_rest).zip(high_rest) {
                *out = W::word(low, high);
            }
        }
    }
}
