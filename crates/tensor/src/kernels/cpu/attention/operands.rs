//! Keys and values as right matmul operands, packed once for many blocks of queries.

use crate::kernels::cpu::matmul::{Matrix, MicroKernel, RightPanels};

/// Number of keys per block of scores, and per block of packed keys or values.
pub(super) const KEY_BLOCK: usize = 256;

/// Keys and values that the queries of a task see.
#[derive(Clone, Copy)]
pub(super) struct KeysValues<'a> {
    pub(super) keys: Matrix<'a>,
    pub(super) values: Matrix<'a>,
    pub(super) num_keys: usize,
    /// Dims of a key and of a value.
    pub(super) dims: [usize; 2],
}

/// The packed operands of forward.
#[derive(Clone, Copy)]
pub(super) struct ForwardOperands<'a> {
    pub(super) keys_transposed: RightPanels<'a>,
    pub(super) values: RowBlocks<'a>,
}

/// The packed operands of backward.
#[derive(Clone, Copy)]
pub(super) struct BackwardOperands<'a> {
    pub(super) keys_transposed: RightPanels<'a>,
    pub(super) values_transposed: RightPanels<'a>,
    pub(super) keys: RowBlocks<'a>,
}

impl KeysValues<'_> {
    /// Returns the words of the packed operands for at most `num_keys` keys.
    pub(super) fn num_words(micro: MicroKernel, num_keys: usize, dims: [usize; 2], backward: bool) -> usize {
        let [keys, values] = dims.map(|dim| RightPanels::num_words(micro, dim, num_keys));
        let [key_blocks, value_blocks] = dims.map(|dim| RowBlocks::num_words(micro, num_keys, dim));
        if backward { keys + values + key_blocks } else { keys + value_blocks }
    }

    pub(super) fn forward_operands<'a>(
        &self,
        micro: MicroKernel,
        words: &'a mut [u32],
    ) -> ForwardOperands<'a> {
        let [dim, value_dim] = self.dims;
        let (keys, values) = words.split_at_mut(RightPanels::num_words(micro, dim, self.num_keys));
        ForwardOperands {
            keys_transposed: self.transposed(micro, self.keys, dim, keys),
            values: self.row_blocks(micro, self.values, value_dim, values),
        }
    }

    pub(super) fn backward_operands<'a>(
        &self,
        micro: MicroKernel,
        words: &'a mut [u32],
    ) -> BackwardOperands<'a> {
        let [dim, value_dim] = self.dims;
        let num_words = |dim: usize| RightPanels::num_words(micro, dim, self.num_keys);
        let (keys_transposed, words) = words.split_at_mut(num_words(dim));
        let (values_transposed, keys) = words.split_at_mut(num_words(value_dim));
        BackwardOperands {
            keys_transposed: self.transposed(micro, self.keys, dim, keys_transposed),
            values_transposed: self.transposed(micro, self.values, value_dim, values_transposed),
            keys: self.row_blocks(micro, self.keys, dim, keys),
        }
    }

    fn transposed<'a>(
        &self,
        micro: MicroKernel,
        rows: Matrix<'_>,
        dim: usize,
        words: &'a mut [u32],
    ) -> RightPanels<'a> {
        RightPanels::pack(micro, (dim, self.num_keys), rows.transposed(), words)
    }

    fn row_blocks<'a>(
        &self,
        micro: MicroKernel,
        rows: Matrix<'_>,
        dim: usize,
        words: &'a mut [u32],
    ) -> RowBlocks<'a> {
        RowBlocks::pack(micro, (self.num_keys, dim), rows, words)
    }
}

/// Keys or values, one per row, in blocks of [`KEY_BLOCK`] rows.
#[derive(Clone, Copy)]
pub(super) struct RowBlocks<'a> {
    micro: MicroKernel,
    num_rows: usize,
    cols: usize,
    words: &'a [u32],
}

impl<'a> RowBlocks<'a> {
    fn num_words(micro: MicroKernel, num_rows: usize, cols: usize) -> usize {
        num_rows.div_ceil(KEY_BLOCK) * RightPanels::num_words(micro, KEY_BLOCK, cols)
    }

    fn pack(
        micro: MicroKernel,
        (num_rows, cols): (usize, usize),
        rows: Matrix<'_>,
        words: &'a mut [u32],
    ) -> Self {
        let blocks = words.chunks_mut(RightPanels::num_words(micro, KEY_BLOCK, cols));
        for (first, words) in (0..num_rows).step_by(KEY_BLOCK).zip(blocks) {
            let len = KEY_BLOCK.min(num_rows - first);
            RightPanels::pack(micro, (len, cols), rows.submatrix(first, 0), words);
        }
        RowBlocks { micro, num_rows, cols, words }
    }

    /// Returns the block that begins at row `first`.
    pub(super) fn block(self, first: usize) -> RightPanels<'a> {
        let RowBlocks { micro, num_rows, cols, words } = self;
        assert!(first.is_multiple_of(KEY_BLOCK) && first < num_rows);
        let start = first / KEY_BLOCK * RightPanels::num_words(micro, KEY_BLOCK, cols);
        RightPanels::new(micro, (KEY_BLOCK.min(num_rows - first), cols), &words[start..])
    }
}
