//! The micro-kernels: a few rows times a panel, with sums in registers or AMX tiles.

#[cfg(target_arch = "x86_64")]
use super::amx;
use super::words::WordKind;
use crate::kernels::cpu::simd::SimdLevel;
use crate::precision::Precision;
use std::marker::PhantomData;

/// Maximum columns and rows of any micro-kernel.
pub(super) const COLS_MAX: usize = 32;
pub(super) const ROWS_MAX: usize = 32;

/// Number of words of the inner dim that are summed in registers before they are added to the result. A panel of the right operand (32 KiB)
/// then fits into the L1 cache.
pub(super) const INNER_BLOCK: usize = 256;

/// The micro-kernel for a SIMD level and a precision.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MicroKernel {
    pub(super) simd_level: SimdLevel,
    pub(super) words: WordKind,
    /// Number of columns of a panel.
    pub(super) cols: usize,
    /// Maximum rows of one call. The sums take 24 of 32 registers with AVX-512 and 12 of 16 with AVX2.
    pub(super) rows: usize,
    /// The number of words in a block of the inner dim is a multiple of this.
    pub(super) step: usize,
    /// Whether the kernel reads the left operand by rows of words, always `rows` of them.
    pub(super) row_major: bool,
}

/// The left operand as a micro-kernel reads it: words with strides in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct LeftPanel<'a> {
    start: *const u8,
    row_bytes: usize,
    word_bytes: usize,
    lifetime: PhantomData<&'a [u32]>,
}

impl<'a> LeftPanel<'a> {
    /// Wraps words of `num_terms` elements each. Strides are in elements.
    pub(super) fn new<T>(source: &'a [T], row_stride: usize, term_stride: usize, num_terms: usize) -> Self {
        let [row_bytes, word_bytes] = [row_stride, term_stride * num_terms].map(|len| len * size_of::<T>());
        LeftPanel { start: source.as_ptr().cast(), row_bytes, word_bytes, lifetime: PhantomData }
    }
}

/// The part of a result that one call computes.
#[derive(Clone, Copy, Debug)]
pub(super) struct MicroTile {
    pub(super) start: *mut f32,
    pub(super) row_stride: usize,
    pub(super) rows: usize,
    pub(super) cols: usize,
}

/// State that a thread holds while it runs micro-kernels.
pub(super) struct Session {
    #[cfg(target_arch = "x86_64")]
    _tiles: Option<amx::TileConfig>,
}

impl MicroKernel {
    pub(crate) fn new(simd_level: SimdLevel, precision: Precision) -> Self {
        let words = WordKind::new(simd_level, precision);
        let (rows, cols) = match simd_level {
            SimdLevel::Portable => (4, 16),
            SimdLevel::Avx2 => (6, 16),
            SimdLevel::Avx512 | SimdLevel::Avx512Bf16 | SimdLevel::AmxBf16 => (12, 32),
        };
        let micro = MicroKernel { simd_level, words, cols, rows, step: 1, row_major: false };
        #[cfg(target_arch = "x86_64")]
        if simd_level == SimdLevel::AmxBf16 && words == WordKind::Bf16Pair {
            return MicroKernel {
                rows: amx::ROWS,
                cols: amx::COLS,
                step: amx::STEP,
                row_major: true,
                ..micro
            };
        }
        micro
    }

    /// Returns the first word and the length of each block of an inner dim of `inner` elements. All blocks but the last are equal.
    pub(super) fn inner_blocks(&self, inner: usize) -> impl Iterator<Item = (usize, usize)> {
        let num_words = self.padded_words(inner);
        let len =
            num_words.div_ceil(num_words.div_ceil(INNER_BLOCK).max(1)).next_multiple_of(self.step).max(1);
        (0..num_words).step_by(len).map(move |first| (first, len.min(num_words - first)))
    }

    /// Returns the number of words of the inner dim, with padding.
    pub(super) fn padded_words(&self, inner: usize) -> usize {
        inner.div_ceil(self.words.num_terms()).next_multiple_of(self.step)
    }

    /// Returns the first element and the number of elements of the block of `len` words from word `first` on.
    pub(super) fn terms(&self, first: usize, len: usize, inner: usize) -> (usize, usize) {
        let (first, len) = (first * self.words.num_terms(), len * self.words.num_terms());
        (first, len.min(inner.saturating_sub(first)))
    }

    /// Returns whether one call can compute `rows` rows.
    pub(super) fn accepts_rows(&self, rows: usize) -> bool {
        !self.row_major || rows == self.rows
    }

    /// Returns whether rows of a left operand, `row_bytes` apart, are best read in place. AMX tiles are loaded by rows: each row is one
    /// cache line if rows are aligned, and rows must not collide in the sets of the L1 cache.
    pub(super) fn reads_rows(&self, row_bytes: usize) -> bool {
        !self.row_major || (row_bytes.is_multiple_of(64) && !row_bytes.is_multiple_of(2048))
    }

    /// Begins a session, which a thread must hold while it calls [`MicroKernel::run`].
    pub(super) fn begin(&self) -> Session {
        Session {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: only AMX micro-kernels read rows of words, and AMX was detected.
            _tiles: self.row_major.then(|| unsafe { amx::TileConfig::load() }),
        }
    }

    /// Computes `tile = left panel`, or adds the product if `accumulate` is set. `panel` holds `len` rows of `self.cols` words.
    ///
    /// # Safety
    /// The left operand has `len` words in each row of the tile (in `self.rows` rows if `row_major`). The tile's elements are in bounds,
    /// are exclusively the caller's and, if `accumulate` is set, are initialized. This thread holds the session.
    #[inline]
    pub(super) unsafe fn run(
        &self,
        len: usize,
        left: LeftPanel<'_>,
        panel: &[u32],
        tile: MicroTile,
        accumulate: bool,
    ) {
        assert!(panel.len() == len * self.cols && tile.rows <= self.rows && tile.cols <= self.cols);
        if tile.cols == self.cols && self.accepts_rows(tile.rows) {
            // SAFETY: guaranteed by the caller.
            unsafe { self.dispatch(len, left, panel, tile, accumulate) };
            return;
        }
        // A panel that exceeds the result is computed in a full tile on the stack.
        let mut whole = [0.0_f32; COLS_MAX * ROWS_MAX];
        let rows = if self.row_major { self.rows } else { tile.rows };
        // Pointers instead of references: unless the call accumulates, the elements may be uninitialized.
        let out = |row: usize, col: usize| tile.start.wrapping_add(row * tile.row_stride + col);
        // AMX starts from the previous values, the other kernels add them at the end. Doing the same here gives edges the bits of full
        // tiles.
        let is_added_first = accumulate && self.row_major;
        if is_added_first {
            for (row, sums) in whole.chunks_exact_mut(self.cols).take(tile.rows).enumerate() {
                // SAFETY: the elements of a row of the tile, which the caller has initialized.
                unsafe { sums.as_mut_ptr().copy_from_nonoverlapping(out(row, 0), tile.cols) };
            }
        }
        let wide = MicroTile { start: whole.as_mut_ptr(), row_stride: self.cols, cols: self.cols, rows };
        // SAFETY: the caller guarantees the operands; the tile is on the stack.
        unsafe { self.dispatch(len, left, panel, wide, is_added_first) };
        for (row, sums) in whole.chunks_exact(self.cols).take(tile.rows).enumerate() {
            for (col, &sum) in sums.iter().enumerate().take(tile.cols) {
                // SAFETY: an element of the tile, which the caller has initialized if it is accumulated.
                unsafe { write_or_add(out(row, col), sum, accumulate && !is_added_first) };
            }
        }
    }

    /// # Safety
    /// As for [`MicroKernel::run`], for a tile of full width.
    #[inline]
    unsafe fn dispatch(
        &self,
        len: usize,
        left: LeftPanel<'_>,
        panel: &[u32],
        tile: MicroTile,
        accumulate: bool,
    ) {
        macro_rules! by_rows {
            ($kernel:ident: $($rows:literal)+) => {
                match tile.rows {
                    // SAFETY: the SIMD level was detected; the caller guarantees the operands.
                    $($rows => unsafe { $kernel::<$rows>(len, left, panel, tile, accumulate) },)+
                    rows => unreachable!("a micro-kernel of {rows} rows"),
                }
            };
        }
        match (self.simd_level, self.words) {
            #[cfg(target_arch = "x86_64")]
            (SimdLevel::AmxBf16, WordKind::Bf16Pair) => {
                let (start, stride) = (tile.start, tile.row_stride);
                // SAFETY: AMX was detected and its tiles are configured; the caller guarantees the operands.
                unsafe {
                    amx::multiply(len, left.start, left.row_bytes, panel.as_ptr(), start, stride, accumulate)
                }
            }
            #[cfg(target_arch = "x86_64")]
            (_, WordKind::Bf16Pair) => by_rows!(avx512_bf16: 1 2 3 4 5 6 7 8 9 10 11 12),
            #[cfg(target_arch = "x86_64")]
            (SimdLevel::Avx2, _) => by_rows!(avx2: 1 2 3 4 5 6),
            #[cfg(target_arch = "x86_64")]
            (simd_level, _) if simd_level >= SimdLevel::Avx512 => {
                by_rows!(avx512: 1 2 3 4 5 6 7 8 9 10 11 12)
            }
            _ => by_rows!(portable: 1 2 3 4),
        }
    }
}

/// Defines a micro-kernel whose sums take two registers per row. Each word of the left operand is multiplied by a row of the panel.
macro_rules! register_kernel {
    ($(#[$doc:meta])* $name:ident, $features:literal, $lanes:literal,
        $zero:ident, $load:ident, $broadcast:ident, $add:ident, $store:ident, |$a:ident, $b:ident, $sum:ident| $multiply:expr) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// The machine has the features. `left` has `len` words in each of `ROWS` rows. `panel` holds `len` rows. The tile's `ROWS` rows
        /// are exclusively the caller's.
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = $features)]
        unsafe fn $name<const ROWS: usize>(len: usize, left: LeftPanel<'_>, panel: &[u32], tile: MicroTile, accumulate: bool) {
            use std::arch::x86_64::*;
            let (start, panel) = (left.start, panel.as_ptr().cast::<f32>());
            let mut sums = [[$zero(); 2]; ROWS];
            for word in 0..len {
                // SAFETY: a row of the panel.
                let b = unsafe { [$load(panel.add(word * 2 * $lanes)), $load(panel.add(word * 2 * $lanes + $lanes))] };
                for (row, sums) in sums.iter_mut().enumerate() {
                    // SAFETY: the left operand has this word.
                    let a = unsafe { start.add(row * left.row_bytes + word * left.word_bytes).cast::<f32>().read_unaligned() };
                    let $a = $broadcast(a);
                    for (sum, $b) in sums.iter_mut().zip(b) {
                        let $sum = *sum;
                        *sum = $multiply;
                    }
                }
            }
            for (row, sums) in sums.into_iter().enumerate() {
                for (half, sum) in sums.into_iter().enumerate() {
                    // SAFETY: the tile's elements are exclusively the caller's.
                    unsafe {
                        let out = tile.start.add(row * tile.row_stride + half * $lanes);
                        $store(out, if accumulate { $add($load(out), sum) } else { sum });
                    }
                }
            }
        }
    };
}

register_kernel!(
    /// Panels of 32 f32.
    avx512, "avx512f", 16,
    _mm512_setzero_ps, _mm512_loadu_ps, _mm512_set1_ps, _mm512_add_ps, _mm512_storeu_ps,
    |a, b, sum| _mm512_fmadd_ps(a, b, sum)
);

register_kernel!(
    /// Panels of 32 pairs of bf16. The sum of a pair's products is added to an f32. Subnormal values count as zero (`vdpbf16ps`: Intel,
    /// "Software developer's manual", volume 2).
    avx512_bf16, "avx512f,avx512bf16", 16,
    _mm512_setzero_ps, _mm512_loadu_ps, _mm512_set1_ps, _mm512_add_ps, _mm512_storeu_ps,
    |a, b, sum| {
        // SAFETY: both types have 512 bits, and loads as f32 keep the bits of words.
        let pairs = |words| unsafe { std::mem::transmute::<__m512, __m512bh>(words) };
        _mm512_dpbf16_ps(sum, pairs(a), pairs(b))
    }
);

register_kernel!(
    /// Panels of 16 f32.
    avx2, "avx2,fma", 8,
    _mm256_setzero_ps, _mm256_loadu_ps, _mm256_set1_ps, _mm256_add_ps, _mm256_storeu_ps,
    |a, b, sum| _mm256_fmadd_ps(a, b, sum)
);

/// Panels of 16 f32.
///
/// # Safety
/// As for [`avx512`], without requirements on the machine.
unsafe fn portable<const ROWS: usize>(
    len: usize,
    left: LeftPanel<'_>,
    panel: &[u32],
    tile: MicroTile,
    accumulate: bool,
) {
    let mut sums = [[0.0_f32; 16]; ROWS];
    for (word, b) in panel.as_chunks::<16>().0.iter().enumerate().take(len) {
        for (row, sums) in sums.iter_mut().enumerate() {
            let offset = row * left.row_bytes + word * left.word_bytes;
            // SAFETY: the left operand has this word.
            let a = unsafe { left.start.add(offset).cast::<f32>().read_unaligned() };
            for (sum, &b) in sums.iter_mut().zip(b) {
                *sum += a * f32::from_bits(b);
            }
        }
    }
    for (row, sums) in sums.iter().enumerate() {
        for (col, &sum) in sums.iter().enumerate() {
            // SAFETY: the tile's elements are exclusively the caller's.
            unsafe { write_or_add(tile.start.add(row * tile.row_stride + col), sum, accumulate) };
        }
    }
}

/// Writes or adds a sum to `out`.
///
/// # Safety
/// `out` must be writable and, if `accumulate` is set, initialized.
#[inline(always)]
unsafe fn write_or_add(out: *mut f32, sum: f32, accumulate: bool) {
    // SAFETY: guaranteed by the caller.
    unsafe { out.write(if accumulate { out.read() + sum } else { sum }) };
}
