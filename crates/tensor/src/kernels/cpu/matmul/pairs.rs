//! Packing of bf16 pairs with AVX-512 instructions: right panels from f32 (weights, gradients of the residual stream), and left panels from
//! transposed bf16 operands.

use super::pack::{BLOCK_SIDE, PREFETCH_DISTANCE, PanelSpan, prefetch, transpose_16x16};
use std::arch::x86_64::*;
use trireme_base::Bf16;

/// Like [`super::pack::right_panel`], from f32. Subnormal values become zero, as in the matmul itself.
///
/// # Safety
/// The machine has AVX-512 (F, BW, VL, DQ) and AVX512-BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
pub(super) unsafe fn right_panel(
    source: &[f32],
    row_stride: usize,
    col_stride: usize,
    span: PanelSpan,
    width: usize,
    out: &mut [u32],
) {
    assert!(out.len() == span.len * width && width.is_multiple_of(BLOCK_SIDE));
    if col_stride == 1 {
        pack_interleaved(source, row_stride, span, width, out);
    } else {
        pack_contiguous(source, col_stride, span, width, out);
    }
}

/// Prefetch distance along a line, in elements.
const LINE_PREFETCH_DISTANCE: usize = 64;

/// Packs the first words of a narrow panel of bf16, like `super::pack::pack_interleaved_narrow`. Stops before the first word for which
/// `source` does not have sixteen elements at both indices of the inner dim. Returns the number of packed words.
///
/// # Safety
/// The machine has AVX-512 (F, BW, VL).
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn narrow_panel(
    source: &[Bf16],
    stride: usize,
    span: PanelSpan,
    width: usize,
    out: &mut [u32],
) -> usize {
    let whole_lines = if source.len() < BLOCK_SIDE { 0 } else { (source.len() - BLOCK_SIDE) / stride + 1 };
    let num_words = (whole_lines.min(span.inner) / 2).min(span.len);
    assert!(num_words == 0 || (num_words - 1) * width + BLOCK_SIDE <= out.len());
    for word in 0..num_words {
        // SAFETY: `source` has sixteen elements at each of the indices `2 word` and `2 word + 1` of the inner dim; the destination was
        // checked above.
        unsafe {
            let line = |line: usize| {
                _mm512_cvtepu16_epi32(_mm256_loadu_si256(source.as_ptr().add(line * stride).cast()))
            };
            let words = _mm512_or_si512(line(2 * word), _mm512_slli_epi32::<16>(line(2 * word + 1)));
            _mm512_storeu_si512(out.as_mut_ptr().add(word * width).cast(), words);
        }
    }
    num_words
}

/// Returns a mask of the sixteen lanes from `first` on; a lane is set if its index is less than `num`.
fn mask(first: usize, num: usize) -> __mmask16 {
    let lanes = num.saturating_sub(first).min(BLOCK_SIDE) as u32;
    ((1_u32 << lanes) - 1) as __mmask16
}

/// Loads elements from `first` on; zero where the mask is not set.
#[inline]
#[target_feature(enable = "avx512f")]
fn load(source: &[f32], first: usize, mask: __mmask16) -> __m512 {
    let lanes = (__mmask16::BITS - mask.leading_zeros()) as usize;
    assert!(lanes == 0 || first + lanes <= source.len());
    // SAFETY: the loaded lanes are in the source; masked lanes are not accessed.
    unsafe { _mm512_maskz_loadu_ps(mask, source.as_ptr().wrapping_add(first)) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(out: &mut [u32], words: __m512i) {
    // SAFETY: sixteen words.
    unsafe { _mm512_storeu_si512(out[..BLOCK_SIDE].as_mut_ptr().cast(), words) };
}

/// Packs lines that are interleaved in memory: two rows of elements form a row of words.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn pack_interleaved(source: &[f32], stride: usize, span: PanelSpan, width: usize, out: &mut [u32]) {
    // Lane `l` of the first row goes to half-word `2l`, lane `l` of the second row to `2l + 1`.
    let mut order = [0_u16; 2 * BLOCK_SIDE];
    for (index, place) in order.iter_mut().enumerate() {
        *place = (index / 2 + index % 2 * BLOCK_SIDE) as u16;
    }
    // SAFETY: 32 half-words.
    let order = unsafe { _mm512_loadu_si512(order.as_ptr().cast()) };
    for (word, out) in out.chunks_exact_mut(width).enumerate() {
        for first in (0..width).step_by(BLOCK_SIDE) {
            let row = |index: usize| {
                let mask = if index < span.inner { mask(first, span.lines) } else { 0 };
                prefetch(source, (index + PREFETCH_DISTANCE) * stride + first);
                load(source, index * stride + first, mask)
            };
            let halves = _mm512_cvtne2ps_pbh(row(2 * word + 1), row(2 * word));
            // SAFETY: both are 512 bits.
            let halves = unsafe { std::mem::transmute::<__m512bh, __m512i>(halves) };
            store(&mut out[first..], _mm512_permutexvar_epi16(order, halves));
        }
    }
}

/// Packs lines with contiguous elements: transposes blocks of sixteen lines of sixteen words.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn pack_contiguous(source: &[f32], stride: usize, span: PanelSpan, width: usize, out: &mut [u32]) {
    let mut block = [0_u32; BLOCK_SIDE * BLOCK_SIDE];
    let mut columns = [0_u32; BLOCK_SIDE * BLOCK_SIDE];
    for first_word in (0..span.len).step_by(BLOCK_SIDE) {
        for first_line in (0..width).step_by(BLOCK_SIDE) {
            for (line, words) in block.as_chunks_mut::<BLOCK_SIDE>().0.iter_mut().enumerate() {
                let line = first_line + line;
                let term = |first: usize| {
                    let mask = if line < span.lines { mask(first, span.inner) } else { 0 };
                    prefetch(source, line * stride + first + LINE_PREFETCH_DISTANCE);
                    load(source, line * stride + first, mask)
                };
                let halves = _mm512_cvtne2ps_pbh(term(2 * first_word + BLOCK_SIDE), term(2 * first_word));
                // SAFETY: both are 512 bits.
                store(words, unsafe { std::mem::transmute::<__m512bh, __m512i>(halves) });
            }
            let num_words = BLOCK_SIDE.min(span.len - first_word);
            let (source, row_bytes) = (block.as_ptr().cast(), BLOCK_SIDE * size_of::<u32>());
            if num_words == BLOCK_SIDE {
                let out = &mut out[first_word * width + first_line..];
                // SAFETY: the block has sixteen lines of sixteen words.
                unsafe { transpose_16x16(source, row_bytes, out, width) };
                continue;
            }
            // SAFETY: as above.
            unsafe { transpose_16x16(source, row_bytes, &mut columns, BLOCK_SIDE) };
            for (word, columns) in columns.as_chunks::<BLOCK_SIDE>().0.iter().enumerate().take(num_words) {
                out[(first_word + word) * width + first_line..][..BLOCK_SIDE].copy_from_slice(columns);
            }
        }
    }
}
