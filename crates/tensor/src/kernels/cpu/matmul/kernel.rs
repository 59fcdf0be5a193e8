//! The micro-kernels: a few rows times a panel, with the sums in registers.

use super::Matrix;
use crate::kernels::cpu::simd::CpuFeatures;

/// Most columns and rows of any micro-kernel.
pub(super) const COLS_MAX: usize = 32;
pub(super) const ROWS_MAX: usize = 12;

/// The micro-kernel of a SIMD level.
#[derive(Clone, Copy, Debug)]
pub(super) struct Micro {
    features: CpuFeatures,
    /// Columns of a panel.
    pub(super) cols: usize,
    /// Rows of one call at most. Rows x columns fill the registers: 24 of 32, or 12 of 16, hold sums.
    pub(super) rows: usize,
}

/// The part of a result that one call makes.
#[derive(Clone, Copy, Debug)]
pub(super) struct MicroTile {
    pub(super) start: *mut f32,
    pub(super) row_stride: usize,
    pub(super) rows: usize,
    pub(super) cols: usize,
}

impl Micro {
    pub(super) fn new(features: CpuFeatures) -> Self {
        match features {
            CpuFeatures::Avx512 => Micro { features, cols: 32, rows: 12 },
            CpuFeatures::Avx2 => Micro { features, cols: 16, rows: 6 },
            CpuFeatures::Portable => Micro { features, cols: 16, rows: 4 },
        }
    }

    /// `tile = left panel`, plus the tile where `accumulate` is set; `panel` holds `len` rows of `self.cols`.
    ///
    /// # Safety
    /// The tile's elements are in bounds and belong to the caller.
    #[inline]
    pub(super) unsafe fn run(
        &self,
        len: usize,
        left: Matrix<'_>,
        panel: &[f32],
        tile: MicroTile,
        accumulate: bool,
    ) {
        assert!(left.covers(tile.rows, len) && panel.len() == len * self.cols);
        assert!(tile.rows <= self.rows && tile.cols <= self.cols);
        if tile.cols == self.cols {
            self.dispatch(len, left, panel, tile, accumulate);
            return;
        }
        // A panel that reaches beyond the result goes through a whole tile on the stack.
        let mut whole = [0.0_f32; COLS_MAX * ROWS_MAX];
        let start = whole.as_mut_ptr();
        let wide = MicroTile { start, row_stride: self.cols, cols: self.cols, ..tile };
        self.dispatch(len, left, panel, wide, false);
        for (row, sums) in whole.chunks_exact(self.cols).take(tile.rows).enumerate() {
            // SAFETY: the tile's rows lie in memory that the caller owns.
            let out =
                unsafe { std::slice::from_raw_parts_mut(tile.start.add(row * tile.row_stride), tile.cols) };
            for (out, &sum) in out.iter_mut().zip(sums) {
                *out = if accumulate { *out + sum } else { sum };
            }
        }
    }

    #[inline]
    fn dispatch(&self, len: usize, left: Matrix<'_>, panel: &[f32], tile: MicroTile, accumulate: bool) {
        macro_rules! by_rows {
            ($kernel:ident: $($rows:literal)+) => {
                match tile.rows {
                    // SAFETY: the SIMD level was detected; `run` has checked that left and panel cover the product,
                    // and the tile belongs to the caller.
                    $($rows => unsafe { $kernel::<$rows>(len, left, panel, tile, accumulate) },)+
                    rows => unreachable!("a micro-kernel of {rows} rows"),
                }
            };
        }
        match self.features {
            #[cfg(target_arch = "x86_64")]
            CpuFeatures::Avx512 => by_rows!(avx512: 1 2 3 4 5 6 7 8 9 10 11 12),
            #[cfg(target_arch = "x86_64")]
            CpuFeatures::Avx2 => by_rows!(avx2: 1 2 3 4 5 6),
            _ => by_rows!(portable: 1 2 3 4),
        }
    }
}

/// # Safety
/// The machine has AVX-512F; `left` covers `ROWS x len`; `panel` holds `len x 32` elements; the tile's `ROWS x 32` elements
/// belong to the caller.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn avx512<const ROWS: usize>(
    len: usize,
    left: Matrix<'_>,
    panel: &[f32],
    tile: MicroTile,
    accumulate: bool,
) {
    use std::arch::x86_64::*;
    let (a, b) = (left.data.as_ptr(), panel.as_ptr());
    let mut sums = [[_mm512_setzero_ps(); 2]; ROWS];
    for k in 0..len {
        // SAFETY: row `k` of the panel.
        let (b0, b1) = unsafe { (_mm512_loadu_ps(b.add(k * 32)), _mm512_loadu_ps(b.add(k * 32 + 16))) };
        for (row, sum) in sums.iter_mut().enumerate() {
            // SAFETY: `left` covers element `(row, k)`.
            let a = _mm512_set1_ps(unsafe { *a.add(row * left.row_stride + k * left.col_stride) });
            sum[0] = _mm512_fmadd_ps(a, b0, sum[0]);
            sum[1] = _mm512_fmadd_ps(a, b1, sum[1]);
        }
    }
    for (row, sum) in sums.into_iter().enumerate() {
        for (half, sum) in sum.into_iter().enumerate() {
            // SAFETY: the tile's elements belong to the caller.
            unsafe {
                let out = tile.start.add(row * tile.row_stride + half * 16);
                let sum = if accumulate { _mm512_add_ps(_mm512_loadu_ps(out), sum) } else { sum };
                _mm512_storeu_ps(out, sum);
            }
        }
    }
}

/// # Safety
/// The machine has AVX2 and FMA; otherwise as [`avx512`], with 16 columns.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2<const ROWS: usize>(
    len: usize,
    left: Matrix<'_>,
    panel: &[f32],
    tile: MicroTile,
    accumulate: bool,
) {
    use std::arch::x86_64::*;
    let (a, b) = (left.data.as_ptr(), panel.as_ptr());
    let mut sums = [[_mm256_setzero_ps(); 2]; ROWS];
    for k in 0..len {
        // SAFETY: row `k` of the panel.
        let (b0, b1) = unsafe { (_mm256_loadu_ps(b.add(k * 16)), _mm256_loadu_ps(b.add(k * 16 + 8))) };
        for (row, sum) in sums.iter_mut().enumerate() {
            // SAFETY: `left` covers element `(row, k)`.
            let a = _mm256_set1_ps(unsafe { *a.add(row * left.row_stride + k * left.col_stride) });
            sum[0] = _mm256_fmadd_ps(a, b0, sum[0]);
            sum[1] = _mm256_fmadd_ps(a, b1, sum[1]);
        }
    }
    for (row, sum) in sums.into_iter().enumerate() {
        for (half, sum) in sum.into_iter().enumerate() {
            // SAFETY: the tile's elements belong to the caller.
            unsafe {
                let out = tile.start.add(row * tile.row_stride + half * 8);
                let sum = if accumulate { _mm256_add_ps(_mm256_loadu_ps(out), sum) } else { sum };
                _mm256_storeu_ps(out, sum);
            }
        }
    }
}

/// # Safety
/// As [`avx512`], with 16 columns and no demand on the machine.
unsafe fn portable<const ROWS: usize>(
    len: usize,
    left: Matrix<'_>,
    panel: &[f32],
    tile: MicroTile,
    accumulate: bool,
) {
    let mut sums = [[0.0_f32; 16]; ROWS];
    for (k, b) in panel.as_chunks::<16>().0.iter().enumerate().take(len) {
        for (row, sums) in sums.iter_mut().enumerate() {
            let a = left.data[row * left.row_stride + k * left.col_stride];
            for (sum, &b) in sums.iter_mut().zip(b) {
                *sum += a * b;
            }
        }
    }
    for (row, sums) in sums.iter().enumerate() {
        // SAFETY: the tile's elements belong to the caller.
        let out = unsafe { std::slice::from_raw_parts_mut(tile.start.add(row * tile.row_stride), 16) };
        for (out, &sum) in out.iter_mut().zip(sums) {
            *out = if accumulate { *out + sum } else { sum };
        }
    }
}
