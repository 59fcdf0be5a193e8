//! Factors in the order in which the micro-kernel reads them.

use super::Matrix;
use super::kernel::ROWS_MAX;
use crate::kernels::cpu::simd::{CpuFeatures, for_each_simd_level};

for_each_simd_level! {
    /// Copies rows of `cols` elements, a `stride` apart, to rows of `width`, filled up with zeros. By blocks of sixteen,
    /// for a row is too short to pay for a call of `memcpy`.
    fn copy_rows(source: &[f32], stride: usize, cols: usize, width: usize, out: &mut [f32]) {
        for (row, out) in out.chunks_exact_mut(width).enumerate() {
            let source = &source[row * stride..][..cols];
            let (blocks, rest) = source.as_chunks::<16>();
            let (out_blocks, out_rest) = out.split_at_mut(blocks.len() * 16);
            for (out, block) in out_blocks.as_chunks_mut::<16>().0.iter_mut().zip(blocks) {
                *out = *block;
            }
            let (out_rest, zeros) = out_rest.split_at_mut(rest.len());
            out_rest.copy_from_slice(rest);
            zeros.fill(0.0);
        }
    }
}

/// Copies `len x cols` elements of `right` to `out`, rows of `width >= cols` filled up with zeros.
pub(super) fn right_panel(
    features: CpuFeatures,
    right: Matrix<'_>,
    len: usize,
    cols: usize,
    width: usize,
    out: &mut [f32],
) {
    debug_assert!(cols <= width && out.len() == len * width && right.covers(len, cols));
    if right.col_stride == 1 {
        copy_rows(features, right.data, right.row_stride, cols, width, out);
        return;
    }
    let mut done = (0, 0);
    #[cfg(target_arch = "x86_64")]
    if features == CpuFeatures::Avx512 && right.row_stride == 1 {
        done = (len / 16 * 16, cols / 16 * 16);
        for row in (0..done.0).step_by(16) {
            for col in (0..done.1).step_by(16) {
                let source = &right.data[row + col * right.col_stride..];
                // SAFETY: AVX-512 was detected; the 16 x 16 elements lie in the source, which covers the panel, and
                // in the panel.
                unsafe { transpose_16x16(source, right.col_stride, &mut out[row * width + col..], width) };
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = features;
    for row in 0..len {
        let first = if row < done.0 { done.1 } else { 0 };
        for col in first..cols {
            out[row * width + col] = right.data[row * right.row_stride + col * right.col_stride];
        }
        out[row * width + cols..(row + 1) * width].fill(0.0);
    }
}

/// Copies `rows x len` elements of `left` to `out`, column by column of `height >= rows`; returns them as a matrix.
pub(super) fn left_panel<'a>(
    left: Matrix<'_>,
    rows: usize,
    len: usize,
    height: usize,
    out: &'a mut [f32],
) -> Matrix<'a> {
    let out = &mut out[..len * height];
    for (col, out) in out.chunks_exact_mut(height).enumerate() {
        let source = &left.data[col * left.col_stride..];
        match out.first_chunk_mut() {
            // A whole panel of the widest micro-kernel: three registers, no call.
            Some(out) if rows == ROWS_MAX && left.row_stride == 1 => {
                *out = *source.first_chunk::<ROWS_MAX>().expect("the left factor covers the panel");
            }
            _ => {
                out[..rows].iter_mut().enumerate().for_each(|(row, out)| *out = source[row * left.row_stride])
            }
        }
    }
    Matrix { data: out, row_stride: 1, col_stride: height }
}

/// `out[j * out_stride + i] = source[i * source_stride + j]` for `i, j < 16`.
///
/// # Safety
/// The machine has AVX-512F.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn transpose_16x16(source: &[f32], source_stride: usize, out: &mut [f32], out_stride: usize) {
    use std::arch::x86_64::*;
    assert!(source.len() >= 15 * source_stride + 16 && out.len() >= 15 * out_stride + 16);
    // `quads[g][c]` lane `l` holds rows `4g..4g + 4` of column `4l + c`.
    let mut quads = [[_mm512_setzero_ps(); 4]; 4];
    for (group, quad) in quads.iter_mut().enumerate() {
        // SAFETY: 16 elements from each of 16 rows, in bounds by the assertion.
        let row = |index: usize| unsafe {
            _mm512_loadu_ps(source.as_ptr().add((4 * group + index) * source_stride))
        };
        let (r0, r1, r2, r3) = (row(0), row(1), row(2), row(3));
        let low = |a, b| _mm512_castps_pd(_mm512_unpacklo_ps(a, b));
        let high = |a, b| _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
        let (t0, t1, t2, t3) = (low(r0, r1), high(r0, r1), low(r2, r3), high(r2, r3));
        *quad = [
            _mm512_castpd_ps(_mm512_unpacklo_pd(t0, t2)),
            _mm512_castpd_ps(_mm512_unpackhi_pd(t0, t2)),
            _mm512_castpd_ps(_mm512_unpacklo_pd(t1, t3)),
            _mm512_castpd_ps(_mm512_unpackhi_pd(t1, t3)),
        ];
    }
    let [q0, q1, q2, q3] = quads;
    for (col, ((a, b), (c, d))) in q0.into_iter().zip(q1).zip(q2.into_iter().zip(q3)).enumerate() {
        let even = |a, b| _mm512_shuffle_f32x4::<0x88>(a, b);
        let odd = |a, b| _mm512_shuffle_f32x4::<0xdd>(a, b);
        let (even_low, even_high, odd_low, odd_high) = (even(a, b), even(c, d), odd(a, b), odd(c, d));
        let columns = [
            even(even_low, even_high),
            even(odd_low, odd_high),
            odd(even_low, even_high),
            odd(odd_low, odd_high),
        ];
        for (lane, column) in columns.into_iter().enumerate() {
            // SAFETY: 16 elements to each of 16 rows, in bounds by the assertion.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr().add((4 * lane + col) * out_stride), column) };
        }
    }
}
