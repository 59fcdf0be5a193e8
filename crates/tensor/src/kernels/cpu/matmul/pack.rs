//! Packing of operands in the order in which the micro-kernel reads them.

use super::kernel::{INNER_BLOCK, LeftPanel, MicroKernel, ROWS_MAX};
use super::matrix::Matrix;
#[cfg(target_arch = "x86_64")]
use super::pairs;
use super::words::{
    Bf16PairWord, F32Word, RoundedBf16Word, RoundedF16Word, Word, WordKind, word_of_lines, words_of_line,
};
use crate::kernels::cpu::element::{Element, Floats, with_floats};
use crate::kernels::cpu::simd::{SimdLevel, for_each_simd_level};
use std::mem::MaybeUninit;

/// Side length, in words, of the blocks that are transposed at a time.
pub(super) const BLOCK_SIDE: usize = 16;

/// Number of words that may be written beyond the end of a left panel.
pub(super) const SLACK: usize = BLOCK_SIDE;

/// Memory for a panel of a left operand. Words are zeroed at their first use, because most matmuls need few of them.
pub(super) struct LeftBuffer {
    words: [MaybeUninit<u32>; Self::LEN],
    num_zeroed: usize,
}

impl LeftBuffer {
    const LEN: usize = INNER_BLOCK * ROWS_MAX + SLACK;

    #[inline(always)]
    pub(super) fn new() -> Self {
        LeftBuffer { words: [const { MaybeUninit::uninit() }; Self::LEN], num_zeroed: 0 }
    }

    pub(super) fn get(&mut self, len: usize) -> &mut [u32] {
        for word in &mut self.words[self.num_zeroed.min(len)..len] {
            word.write(0);
        }
        self.num_zeroed = self.num_zeroed.max(len);
        // SAFETY: the first `num_zeroed >= len` words were written.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), len) }
    }
}

/// Evaluates an expression with `$word` as the type of a kind of word.
macro_rules! with_word_kind {
    ($kind:expr => |$word:ident| $body:expr) => {
        match $kind {
            WordKind::F32 => {
                type $word = F32Word;
                $body
            }
            WordKind::RoundedBf16 => {
                type $word = RoundedBf16Word;
                $body
            }
            WordKind::RoundedF16 => {
                type $word = RoundedF16Word;
                $body
            }
            WordKind::Bf16Pair => {
                type $word = Bf16PairWord;
                $body
            }
        }
    };
}

/// Prefetch distance along the inner dim, in elements, for lines whose elements are too far apart for the hardware prefetcher.
pub(super) const PREFETCH_DISTANCE: usize = 16;

/// Prefetches the cache line of an element. The index may be out of bounds.
#[inline(always)]
pub(super) fn prefetch<T>(source: &[T], index: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch of any address has no effect on memory.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(source.as_ptr().wrapping_add(index).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (source, index);
}

/// The part of an operand that a panel contains. `lines` are rows of a left operand or columns of a right one.
#[derive(Clone, Copy)]
pub(super) struct PanelSpan {
    /// Number of elements along the inner dim.
    pub(super) inner: usize,
    pub(super) lines: usize,
    /// Number of words along the inner dim of the panel. Words beyond `inner` are zero.
    pub(super) len: usize,
}

for_each_simd_level! {
    /// Packs lines that are interleaved in memory as `len` rows of `width` words. Consecutive elements of a line are `stride` apart.
    fn pack_interleaved<W: Word, T: Element>(source: &[T], stride: usize, span: PanelSpan, width: usize, out: &mut [u32]) {
        for (word, out) in out.chunks_exact_mut(width).enumerate().take(span.len) {
            let line = |index: usize| (index < span.inner).then(|| &source[index * stride..][..span.lines]);
            let first = word * W::TERMS;
            for index in first + PREFETCH_DISTANCE..first + PREFETCH_DISTANCE + W::TERMS {
                (0..span.lines).step_by(BLOCK_SIDE).for_each(|line| prefetch(source, index * stride + line));
            }
            let (out, zeros) = out.split_at_mut(span.lines);
            word_of_lines::<W, T>(line(first), line(first + W::TERMS - 1), out);
            // A call of `fill` for no words would take as long as a short row.
            if !zeros.is_empty() {
                zeros.fill(0);
            }
        }
    }

    /// Like `pack_interleaved` for a width below sixteen, but writes sixteen words per row. The next row overwrites the excess.
    fn pack_interleaved_narrow<W: Word, T: Element>(first_word: usize, source: &[T], stride: usize, span: PanelSpan, width: usize, out: &mut [u32]) {
        for word in first_word..span.len {
            let line = |index: usize| (index < span.inner).then(|| &source[index * stride..]);
            let (low, high) = (line(word * W::TERMS), line(word * W::TERMS + W::TERMS - 1));
            // The sixteen elements may span two cache lines.
            let ahead = (word * W::TERMS + PREFETCH_DISTANCE) * stride;
            prefetch(source, ahead);
            prefetch(source, ahead + BLOCK_SIDE - 1);
            let out = &mut out[word * width..][..BLOCK_SIDE];
            match (low.and_then(|x| x.first_chunk::<BLOCK_SIDE>()), high.and_then(|x| x.first_chunk::<BLOCK_SIDE>())) {
                (Some(low), Some(high)) => word_of_lines::<W, T>(Some(low), Some(high), out),
                _ => {
                    let (low, high) = (low.map(|x| &x[..span.lines]), high.map(|x| &x[..span.lines]));
                    word_of_lines::<W, T>(low, high, &mut out[..span.lines]);
                }
            }
        }
    }

    /// Packs lines with contiguous elements, which begin `stride` elements apart, as `len` rows of `width` words.
    fn pack_contiguous_transposed<W: Word, T: Element>(level: SimdLevel, in_place: bool, source: &[T], stride: usize, span: PanelSpan, width: usize, out: &mut [u32]) {
        for first_word in (0..span.len).step_by(BLOCK_SIDE) {
            let first = first_word * W::TERMS;
            let num_words = BLOCK_SIDE.min(span.len - first_word);
            let inner = (BLOCK_SIDE * W::TERMS).min(span.inner.saturating_sub(first));
            for first_line in (0..width).step_by(BLOCK_SIDE) {
                let num_lines = BLOCK_SIDE.min(span.lines.saturating_sub(first_line));
                let out = &mut out[first_word * width + first_line..];
                let whole = num_words == BLOCK_SIDE && width - first_line >= BLOCK_SIDE;
                if in_place && whole && num_lines == BLOCK_SIDE && inner == BLOCK_SIDE * W::TERMS {
                    let block = &source[first_line * stride + first..][..(BLOCK_SIDE - 1) * stride + inner];
                    // SAFETY: sixteen lines of sixteen words, in bounds by the line above.
                    unsafe { transpose(level, block.as_ptr().cast(), stride * size_of::<T>(), out, width) };
                    continue;
                }
                let mut block = [0; BLOCK_SIDE * BLOCK_SIDE];
                for (line, words) in block.as_chunks_mut::<BLOCK_SIDE>().0.iter_mut().enumerate().take(num_lines) {
                    words_of_line::<W, T>(&source[(first_line + line) * stride + first..][..inner], words);
                }
                if whole {
                    // SAFETY: the block has sixteen lines of sixteen words.
                    unsafe { transpose(level, block.as_ptr().cast(), BLOCK_SIDE * size_of::<u32>(), out, width) };
                    continue;
                }
                for word in 0..num_words {
                    for line in 0..BLOCK_SIDE.min(width - first_line) {
                        out[word * width + line] = block[line * BLOCK_SIDE + word];
                    }
                }
            }
        }
    }

    /// Packs lines that are interleaved in memory as rows of `len` words, a multiple of sixteen. Consecutive elements of a line are
    /// `stride` apart. `out` has room for a multiple of sixteen rows.
    fn pack_interleaved_transposed<W: Word, T: Element>(level: SimdLevel, source: &[T], stride: usize, span: PanelSpan, out: &mut [u32]) {
        for first_word in (0..span.len).step_by(BLOCK_SIDE) {
            for first_line in (0..span.lines).step_by(BLOCK_SIDE) {
                let num_lines = BLOCK_SIDE.min(span.lines - first_line);
                let mut block = [0; BLOCK_SIDE * BLOCK_SIDE];
                for (word, words) in block.as_chunks_mut::<BLOCK_SIDE>().0.iter_mut().enumerate() {
                    let first = (first_word + word) * W::TERMS;
                    let line = |index: usize| {
                        (index < span.inner).then(|| &source[index * stride + first_line..][..num_lines])
                    };
                    word_of_lines::<W, T>(line(first), line(first + W::TERMS - 1), &mut words[..num_lines]);
                }
                let out = &mut out[first_line * span.len + first_word..];
                // SAFETY: the block has sixteen lines of sixteen words.
                unsafe { transpose(level, block.as_ptr().cast(), BLOCK_SIDE * size_of::<u32>(), out, span.len) };
            }
        }
    }

    /// Packs lines with contiguous elements, which begin `stride` elements apart, as rows of `len` words.
    fn pack_contiguous<W: Word, T: Element>(source: &[T], stride: usize, span: PanelSpan, out: &mut [u32]) {
        for (line, out) in out.chunks_exact_mut(span.len).enumerate().take(span.lines) {
            words_of_line::<W, T>(&source[line * stride..][..span.inner], out);
        }
    }
}

/// Returns whether packed words have the same bits as the stored elements, so that an operand can be read in place.
fn matches_word_bits(kind: WordKind, values: Floats<'_>) -> bool {
    matches!((kind, values), (WordKind::F32, Floats::F32(_)) | (WordKind::Bf16Pair, Floats::Bf16(_)))
}

/// Packs a panel of the right operand: `span.len` rows of `micro.cols` words, padded with zeros.
pub(super) fn right_panel(micro: MicroKernel, right: Matrix<'_>, span: PanelSpan, out: &mut [u32]) {
    let (simd_level, width) = (micro.simd_level, micro.cols);
    assert!(span.lines <= width && out.len() == span.len * width && right.covers(span.inner, span.lines));
    #[cfg(target_arch = "x86_64")]
    if let (WordKind::Bf16Pair, Floats::F32(source)) = (micro.words, right.values) {
        // SAFETY: words of pairs are used only on machines with AVX512-BF16.
        unsafe { pairs::right_panel(source, right.row_stride, right.col_stride, span, width, out) };
        return;
    }
    let in_place = matches_word_bits(micro.words, right.values);
    with_word_kind!(micro.words => |W| with_floats!(right.values => |source| {
        if right.col_stride == 1 {
            pack_interleaved::<W, _>(simd_level, source, right.row_stride, span, width, out);
        } else {
            assert_eq!(right.row_stride, 1, "a factor is row-major or transposed");
            pack_contiguous_transposed::<W, _>(simd_level, simd_level, in_place, source, right.col_stride, span, width, out);
        }
    }));
}

/// Returns the words of a packed panel of a left operand.
pub(super) fn num_left_words(micro: MicroKernel, len: usize) -> usize {
    micro.rows * len + SLACK
}

/// Returns whether full panels of a left operand are read in place.
pub(super) fn can_read_in_place(micro: MicroKernel, left: Matrix<'_>, inner: usize) -> bool {
    let row_bytes = left.row_stride * size_of::<u32>() / micro.words.num_terms();
    left.col_stride == 1
        && matches_word_bits(micro.words, left.values)
        && inner == micro.padded_words(inner) * micro.words.num_terms()
        && micro.reads_rows(row_bytes)
}

/// Returns whether packed panels consist of rows of words; otherwise, of columns.
pub(super) fn is_packed_by_rows(micro: MicroKernel, left: Matrix<'_>) -> bool {
    micro.row_major || left.col_stride == 1
}

/// Returns a panel of the left operand for the micro-kernel: in place, or packed in `buffer`.
pub(super) fn left_panel<'a>(
    micro: MicroKernel,
    left: Matrix<'a>,
    span: PanelSpan,
    buffer: &'a mut LeftBuffer,
) -> LeftPanel<'a> {
    if can_read_in_place(micro, left, span.inner) && micro.accepts_rows(span.lines) {
        let num_terms = micro.words.num_terms();
        assert!(left.covers(span.lines, span.inner) && span.inner == span.len * num_terms);
        return with_floats!(left.values => |source| LeftPanel::new(source, left.row_stride, 1, num_terms));
    }
    let out = buffer.get(num_left_words(micro, span.len));
    pack_left_panel(micro, left, span, out);
    packed_left(micro, is_packed_by_rows(micro, left), span.len, out)
}

/// Packs a panel of the left operand into [`num_left_words`] words.
pub(super) fn pack_left_panel(micro: MicroKernel, left: Matrix<'_>, span: PanelSpan, out: &mut [u32]) {
    let simd_level = micro.simd_level;
    assert!(span.lines <= micro.rows && left.covers(span.lines, span.inner));
    assert_eq!(out.len(), num_left_words(micro, span.len));
    let whole = micro.rows * span.len;
    with_word_kind!(micro.words => |W| with_floats!(left.values => |source| {
        if left.col_stride == 1 {
            pack_contiguous::<W, _>(simd_level, source, left.row_stride, span, &mut out[..whole]);
        } else {
            assert_eq!(left.row_stride, 1, "a factor is row-major or transposed");
            if micro.row_major {
                pack_interleaved_transposed::<W, _>(simd_level, simd_level, source, left.col_stride, span, out);
            } else {
                let first_word = narrow_panel_of_pairs(micro, left, span, out);
                pack_interleaved_narrow::<W, _>(simd_level, first_word, source, left.col_stride, span, micro.rows, out);
            }
        }
    }));
}

/// Packs the first words of a narrow panel with special instructions, if the machine has them. Returns the number of packed words.
fn narrow_panel_of_pairs(micro: MicroKernel, left: Matrix<'_>, span: PanelSpan, out: &mut [u32]) -> usize {
    #[cfg(target_arch = "x86_64")]
    if let (WordKind::Bf16Pair, Floats::Bf16(source)) = (micro.words, left.values) {
        // SAFETY: words of pairs are used only on machines with AVX512-BF16.
        return unsafe { pairs::narrow_panel(source, left.col_stride, span, micro.rows, out) };
    }
    let _ = (micro, left, span, out);
    0
}

/// Wraps a packed panel of `len` words per row.
pub(super) fn packed_left(micro: MicroKernel, by_rows: bool, len: usize, words: &[u32]) -> LeftPanel<'_> {
    assert_eq!(words.len(), num_left_words(micro, len));
    if by_rows { LeftPanel::new(words, len, 1, 1) } else { LeftPanel::new(words, 1, micro.rows, 1) }
}

/// Transposes sixteen lines of sixteen words, `row_bytes` apart, to rows of `out` that are `width` words apart.
///
/// # Safety
/// The words must be readable. They need not be aligned.
#[inline(always)]
unsafe fn transpose(level: SimdLevel, source: *const u8, row_bytes: usize, out: &mut [u32], width: usize) {
    assert!(out.len() >= (BLOCK_SIDE - 1) * width + BLOCK_SIDE);
    #[cfg(target_arch = "x86_64")]
    if level >= SimdLevel::Avx512 {
        // SAFETY: AVX-512 was detected, and the caller guarantees that the source is readable.
        unsafe { transpose_16x16(source, row_bytes, out, width) };
        return;
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = level;
    for line in 0..BLOCK_SIDE {
        for word in 0..BLOCK_SIDE {
            // SAFETY: the caller guarantees that the source is readable.
            let value = unsafe { source.add(line * row_bytes).cast::<u32>().add(word).read_unaligned() };
            out[word * width + line] = value;
        }
    }
}

/// Writes word `j` of line `i` to `out[j * width + i]`, for `i, j < 16`.
///
/// # Safety
/// The machine has AVX-512F; sixteen lines of sixteen words, `row_bytes` apart, can be read at `source`.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn transpose_16x16(source: *const u8, row_bytes: usize, out: &mut [u32], width: usize) {
    use std::arch::x86_64::*;
    assert!(out.len() >= 15 * width + 16);
    // `quads[g][c]` lane `l` holds rows `4g..4g + 4` of column `4l + c`.
    let mut quads = [[_mm512_setzero_ps(); 4]; 4];
    for (group, quad) in quads.iter_mut().enumerate() {
        // SAFETY: sixteen words of one line; the caller guarantees that they are readable.
        let row =
            |index: usize| unsafe { _mm512_loadu_ps(source.add((4 * group + index) * row_bytes).cast()) };
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
            unsafe { _mm512_storeu_ps(out.as_mut_ptr().add((4 * lane + col) * width).cast(), column) };
        }
    }
}
