//! Blockwise attention that never stores all scores (Dao, Fu, Ermon, Rudra, Ré: "FlashAttention", 2022, and "FlashAttention-2", 2023), with
//! rotary position embedding (Su et al., "RoFormer", 2021).
//!
//! A row of `qkv` holds query heads, then key heads, then value heads. Alternatively, one array holds the queries, and the rows of another
//! hold key heads, then value heads. With fewer key-value heads than query heads, consecutive query heads share one (Ainslie et al., "GQA",
//! 2023).
//!
//! Masked keys have weight 0 in a matmul over their block of keys. If an element of the values is not finite, the results of all queries
//! that read its block are therefore NaN, even if the mask hides the key. Queries that skip the block are not affected.

mod head;
mod latent;
mod operands;
mod rule;
mod shape;

pub use latent::LatentHeadShape;
pub use rule::AttentionRule;
pub(crate) use rule::AttentionScope;
pub use shape::AttentionShape;

use super::element::Element;
use super::matmul::{Matrix, MicroKernel};
use super::simd::for_each_simd_level;
use super::{Cpu, SharedSlice};
use head::{ForwardRows, Head, HeadGrads, OutputBlock, QUERY_BLOCK, Scratch};
use operands::{KEY_BLOCK, KeysValues};
use rule::SequenceMask;
use trireme_base::Positions;

/// Number of queries of a task in forward. They share packed keys and values.
const TASK_QUERIES: usize = 4 * QUERY_BLOCK;

/// Queries, keys and values: `F` is an array of floats, `I` an array of u32. Arrays are views, operands or slices.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttentionInputs<F, I = F> {
    pub(crate) queries: F,
    /// Rows of key heads and value heads; `None` if they follow the query heads in the rows of `queries`.
    pub(crate) keys_values: Option<F>,
    /// For each sequence, the position from which on its keys are padding; `None` if there is no padding.
    pub(crate) padding_starts: Option<I>,
    /// For each query, the position at which its document begins: a causal query does not see earlier keys. `None` if a sequence is one
    /// document.
    pub(crate) document_starts: Option<I>,
}

impl<F, I> AttentionInputs<F, I> {
    /// Wraps rows that hold queries, keys and values, without padding.
    pub(crate) fn packed_qkv(rows: F) -> Self {
        AttentionInputs { queries: rows, keys_values: None, padding_starts: None, document_starts: None }
    }

    /// Applies a function to each array.
    pub(crate) fn map<G, J>(
        self,
        floats: impl Fn(F) -> G,
        integers: impl Fn(I) -> J,
    ) -> AttentionInputs<G, J> {
        AttentionInputs {
            queries: floats(self.queries),
            keys_values: self.keys_values.map(floats),
            padding_starts: self.padding_starts.map(&integers),
            document_starts: self.document_starts.map(&integers),
        }
    }
}

/// The output `y` of attention, the logarithms of its sums of exponentials, and the gradient `dy` of `y`. `V` is an array of floats, `S` an
/// array of f32. Arrays are views, operands or slices.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttentionOutput<V, S = V> {
    pub(crate) y: V,
    pub(crate) log_sums: S,
    pub(crate) dy: V,
}

impl<V> AttentionOutput<V> {
    /// Applies a function to each array.
    pub(crate) fn map<U>(self, mut array: impl FnMut(V) -> U) -> AttentionOutput<U> {
        AttentionOutput { y: array(self.y), log_sums: array(self.log_sums), dy: array(self.dy) }
    }
}

/// The destination of rows of results.
pub(crate) enum RowDestination<'a, T> {
    /// Rounded elements.
    Elements(SharedSlice<'a, T>),
    /// f32 sums over earlier keys, to be updated.
    Sums(SharedSlice<'a, f32>),
}

/// The destinations of the results of forward.
pub(crate) struct ForwardResults<'a, T> {
    /// Outputs, [`AttentionShape::output_cols`] per row.
    pub(crate) y: RowDestination<'a, T>,
    /// The logarithm of the sum of exponentials of each head and row (`batch x num_heads x seq_len`).
    pub(crate) log_sums: &'a mut [f32],
}

/// The destinations of the gradients of queries, and of keys and values if they are separate.
pub(crate) struct AttentionGrads<'a, T> {
    pub(crate) queries: RowDestination<'a, T>,
    pub(crate) keys_values: Option<RowDestination<'a, T>>,
}

impl<T: Element> RowDestination<'_, T> {
    fn len(&self) -> usize {
        match self {
            RowDestination::Elements(elements) => elements.len,
            RowDestination::Sums(sums) => sums.len,
        }
    }

    /// Copies the results for earlier keys to `rows` of `dim` elements. Returns whether there are any.
    ///
    /// # Safety
    /// No other code accesses these rows.
    unsafe fn load(&self, rows: &mut [f32], start: usize, stride: usize, dim: usize) -> bool {
        let RowDestination::Sums(sums) = self else { return false };
        for (row, to) in rows.chunks_exact_mut(dim).enumerate() {
            // SAFETY: only the caller accesses the row.
            to.copy_from_slice(unsafe { sums.range(start + row * stride, dim) });
        }
        true
    }

    /// Writes rows of `dim` elements: rounded, or as f32 sums that replace the sums read by [`load`](RowDestination::load).
    ///
    /// # Safety
    /// No other code accesses these rows.
    unsafe fn store(&self, cpu: &Cpu, rows: &[f32], start: usize, stride: usize, dim: usize) {
        for (row, from) in rows.chunks_exact(dim).enumerate() {
            let start = start + row * stride;
            // SAFETY: only the caller accesses the row.
            unsafe {
                match self {
                    RowDestination::Elements(out) => round_row(cpu.simd_level, from, out.range(start, dim)),
                    RowDestination::Sums(out) => out.range(start, dim).copy_from_slice(from),
                }
            }
        }
    }
}

/// The layout of rows of heads.
#[derive(Debug, Clone, Copy)]
struct Layout {
    query_cols: usize,
    key_value_cols: usize,
    /// First column of the key heads.
    key_col: usize,
}

impl Layout {
    fn new(shape: AttentionShape, is_separate: bool) -> Self {
        if is_separate {
            Layout { query_cols: shape.query_cols(), key_value_cols: shape.kv_cols(), key_col: 0 }
        } else {
            let cols = shape.qkv_cols();
            Layout { query_cols: cols, key_value_cols: cols, key_col: shape.query_cols() }
        }
    }

    /// Returns the first columns of a head's keys and values.
    fn key_value(&self, shape: AttentionShape, kv_head: usize) -> [usize; 2] {
        let first_value = self.key_col + shape.key_cols();
        [self.key_col + kv_head * shape.head_dim, first_value + kv_head * shape.value_dim]
    }
}

impl<'a, T: Element> AttentionInputs<&'a [T], &'a [u32]> {
    fn layout(&self, shape: AttentionShape, scope: &AttentionScope) -> Layout {
        assert_eq!((scope.queries.len(), scope.keys.len()), (shape.seq_len, shape.num_keys), "{scope:?}");
        let layout = Layout::new(shape, self.keys_values.is_some());
        let keys_values = self.keys_values.unwrap_or(self.queries);
        assert_eq!(self.queries.len(), shape.rows() * layout.query_cols, "rows of queries");
        assert_eq!(keys_values.len(), shape.batch * shape.num_keys * layout.key_value_cols, "rows of keys");
        layout
    }

    fn matrices(&self, layout: Layout) -> [Matrix<'a>; 2] {
        let queries = Matrix::row_major(T::floats(self.queries), layout.query_cols, false);
        let keys_values = self.keys_values.unwrap_or(self.queries);
        [queries, Matrix::row_major(T::floats(keys_values), layout.key_value_cols, false)]
    }

    /// Returns the mask of a sequence.
    fn mask(&self, shape: AttentionShape, scope: AttentionScope, sequence: usize) -> SequenceMask<'a> {
        let end = self.padding_starts.map_or(usize::MAX, |num_keys| num_keys[sequence] as usize);
        let of_sequence = |starts: &'a [u32]| &starts[sequence * shape.seq_len..][..shape.seq_len];
        SequenceMask { scope, end, document_starts: self.document_starts.map(of_sequence) }
    }
}

/// Cosines and sines of a rotary embedding: row `p` holds `head_dim / 2` values for position `p`. Arrays are views, operands or slices.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rotary<V> {
    pub(crate) cos: V,
    pub(crate) sin: V,
    /// Positions of the rows of each sequence.
    pub(crate) positions: Positions,
}

impl<V> Rotary<V> {
    /// Applies a function to each array.
    pub(crate) fn map<U>(self, mut array: impl FnMut(V) -> U) -> Rotary<U> {
        Rotary { cos: array(self.cos), sin: array(self.sin), positions: self.positions }
    }
}

/// The KV cache of a layer: `batch x capacity` rows of keys and as many rows of values.
#[derive(Debug)]
pub(crate) struct LayerKvCache<'a> {
    /// Keys, after rotation.
    pub(crate) keys: &'a mut [f32],
    pub(crate) values: &'a mut [f32],
    pub(crate) capacity: usize,
    /// Number of cached positions.
    pub(crate) len: usize,
}

for_each_simd_level! {
    fn rotate_row<T: Element>(row: &mut [T], head_dim: usize, cos: &[f32], sin: &[f32], direction: f32) {
        for head in row.chunks_exact_mut(head_dim) {
            let (a, b) = head.split_at_mut(head_dim / 2);
            for (((a, b), &cos), &sin) in a.iter_mut().zip(b).zip(cos).zip(sin) {
                let sin = sin * direction;
                let (x, y) = (a.to_f32(), b.to_f32());
                *a = T::from_f32(x * cos - y * sin);
                *b = T::from_f32(y * cos + x * sin);
            }
        }
    }

    fn round_row<T: Element>(sums: &[f32], out: &mut [T]) {
        out.iter_mut().zip(sums).for_each(|(out, &sum)| *out = T::from_f32(sum));
    }
}

impl Cpu {
    pub(crate) fn rotary<T: Element>(
        &self,
        qkv: &mut [T],
        shape: AttentionShape,
        rotary: Rotary<&[f32]>,
        inverse: bool,
    ) {
        let cols = shape.qkv_cols();
        let rotated = shape.value_col(0);
        let half = shape.head_dim / 2;
        let direction = if inverse { -1.0 } else { 1.0 };
        self.for_each_row(qkv, cols, |row, qkv| {
            let start = rotary.positions.at(row % shape.seq_len) * half;
            let (cos, sin) = (&rotary.cos[start..start + half], &rotary.sin[start..start + half]);
            rotate_row(self.simd_level, &mut qkv[..rotated], shape.head_dim, cos, sin, direction);
        });
    }

    /// Returns the number of f32 elements of scratch memory that attention needs. Per thread: blocks of scores, a block of outputs, packed
    /// keys and values of a head, and in backward the gradient sums of a key-value head. `num_earlier` is the number of cached positions.
    pub(crate) fn attention_scratch<T: Element>(
        &self,
        shape: AttentionShape,
        num_earlier: usize,
        backward: bool,
    ) -> usize {
        self.threads.num_threads() * self.scratch_len::<T>(shape, num_earlier, backward)
    }

    /// Returns the number of f32 elements of scratch memory of one thread.
    fn scratch_len<T: Element>(&self, shape: AttentionShape, num_earlier: usize, backward: bool) -> usize {
        let (micro, dims) =
            (MicroKernel::new(self.simd_level, T::PRECISION), [shape.head_dim, shape.value_dim]);
        let num_keys = num_earlier + shape.num_keys;
        let num_sums = if backward {
            QUERY_BLOCK * shape.head_dim + num_keys * (shape.head_dim + shape.value_dim)
        } else {
            QUERY_BLOCK * shape.value_dim
        };
        Scratch::<T>::num_elements(micro, dims, backward)
            + KeysValues::num_words(micro, num_keys, dims, backward)
            + num_sums
    }

    /// Computes attention within each sequence. If `results.y` is [`RowDestination::Sums`], `results` must hold the results for earlier
    /// keys, and the kernel merges the new ones into them. Before the first keys, `y` must be zero and `log_sums` negative infinity.
    pub(crate) fn attention<T: Element>(
        &self,
        inputs: AttentionInputs<&[T], &[u32]>,
        shape: AttentionShape,
        scope: AttentionScope,
        results: ForwardResults<'_, T>,
        scratch: &mut [f32],
    ) {
        let layout = inputs.layout(shape, &scope);
        assert_eq!(results.log_sums.len(), shape.rows() * shape.num_heads);
        let [queries, keys_values] = inputs.matrices(layout);
        let view = |sequence| inputs.mask(shape, scope, sequence);
        self.attention_forward(shape, 0, &view, results, scratch, &|sequence, head| {
            let first_key = sequence * shape.num_keys;
            let key_value = layout.key_value(shape, head / shape.heads_per_kv_head());
            let [keys, values] = key_value.map(|col| keys_values.submatrix(first_key, col));
            [queries.submatrix(sequence * shape.seq_len, head * shape.head_dim), keys, values]
        });
    }

    /// Like [`Cpu::attention`], for queries that follow the positions of `cache`. Appends their keys and values to the cache. There is no
    /// backward kernel.
    pub(crate) fn attention_cached(
        &self,
        qkv: &[f32],
        shape: AttentionShape,
        rule: AttentionRule,
        cache: &mut LayerKvCache<'_>,
        results: ForwardResults<'_, f32>,
        scratch: &mut [f32],
    ) {
        let (cols, capacity) = (shape.qkv_cols(), cache.capacity);
        let (key_cols, value_cols) = (shape.key_cols(), shape.value_cols());
        assert!(cache.len + shape.seq_len <= capacity, "the cache has room for {capacity} positions");
        for (row, qkv) in qkv.chunks_exact(cols).enumerate() {
            let position = row / shape.seq_len * capacity + cache.len + row % shape.seq_len;
            let of_keys = &qkv[shape.key_col(0)..][..key_cols];
            cache.keys[position * key_cols..][..key_cols].copy_from_slice(of_keys);
            let of_values = &qkv[shape.value_col(0)..][..value_cols];
            cache.values[position * value_cols..][..value_cols].copy_from_slice(of_values);
        }
        let queries = Matrix::row_major(f32::floats(qkv), cols, false);
        let keys = Matrix::row_major(f32::floats(cache.keys), key_cols, false);
        let values = Matrix::row_major(f32::floats(cache.values), value_cols, false);
        let num_earlier = cache.len;
        let scope = AttentionScope::after(num_earlier, shape, rule);
        let view = |_| SequenceMask { scope, end: usize::MAX, document_starts: None };
        self.attention_forward(shape, num_earlier, &view, results, scratch, &|sequence, head| {
            let (kv_head, first) = (head / shape.heads_per_kv_head(), sequence * capacity);
            let queries = queries.submatrix(sequence * shape.seq_len, head * shape.head_dim);
            let keys = keys.submatrix(first, kv_head * shape.head_dim);
            [queries, keys, values.submatrix(first, kv_head * shape.value_dim)]
        });
    }

    /// Runs forward. `mask_of(sequence)` returns the mask of a sequence. `parts_of(sequence, head)` returns rows of queries, keys and
    /// values.
    fn attention_forward<'a, T: Element>(
        &self,
        shape: AttentionShape,
        num_earlier: usize,
        mask_of: &(dyn Fn(usize) -> SequenceMask<'a> + Sync),
        results: ForwardResults<'_, T>,
        scratch: &mut [f32],
        parts_of: &(dyn Fn(usize, usize) -> [Matrix<'a>; 3] + Sync),
    ) {
        let AttentionShape { seq_len, head_dim, value_dim, num_heads, .. } = shape;
        let ForwardResults { y, log_sums } = results;
        let dims = [head_dim, value_dim];
        let (micro, out_cols) = (MicroKernel::new(self.simd_level, T::PRECISION), shape.output_cols());
        let scratch_len = self.scratch_len::<T>(shape, num_earlier, false);
        let (log_sums, scratch) = (SharedSlice::new(log_sums), SharedSlice::new(scratch));
        let tasks_per_head = seq_len.div_ceil(TASK_QUERIES);
        self.threads.run_on_threads(shape.batch * num_heads * tasks_per_head, &|thread, task| {
            let (sequence_head, first) = (task / tasks_per_head, task % tasks_per_head * TASK_QUERIES);
            let (sequence, head) = (sequence_head / num_heads, sequence_head % num_heads);
            let end = seq_len.min(first + TASK_QUERIES);
            // SAFETY: each thread has its own part.
            let scratch = unsafe { scratch.range(thread * scratch_len, scratch_len) };
            let (blocks, scratch) = scratch.split_at_mut(Scratch::<T>::num_elements(micro, dims, false));
            let (sums, words) = scratch.split_at_mut(QUERY_BLOCK * value_dim);
            let [queries, keys, values] = parts_of(sequence, head);
            let mask = mask_of(sequence);
            let seen = mask.keys_of_queries(first..end);
            let first_packed = seen.start / KEY_BLOCK * KEY_BLOCK;
            let (keys, values) = (keys.submatrix(first_packed, 0), values.submatrix(first_packed, 0));
            let num_keys = seen.end.max(first_packed) - first_packed;
            let keys_values = KeysValues { keys, values, num_keys, dims };
            let factors = keys_values.forward_operands(micro, bytemuck::cast_slice_mut(words));
            let head_inputs = Head { queries, mask, first_packed, dims };
            let mut blocks = Scratch::<T>::new(blocks);
            for first in (first..end).step_by(QUERY_BLOCK) {
                let num_queries = QUERY_BLOCK.min(end - first);
                let sums = &mut sums[..num_queries * value_dim];
                let start = (sequence * seq_len + first) * out_cols + head * value_dim;
                // SAFETY: only this task accesses these rows of this head.
                unsafe {
                    let log_sums = log_sums.range(sequence_head * seq_len + first, num_queries);
                    let has_earlier_keys = y.load(sums, start, out_cols, value_dim);
                    let rows = ForwardRows { out: &mut *sums, log_sums, has_earlier_keys };
                    head_inputs.forward(self, first, factors, &mut blocks, rows);
                    y.store(self, sums, start, out_cols, value_dim);
                }
            }
        });
    }

    /// Computes the gradient of [`Cpu::attention`] with respect to queries, keys and values. If keys and values follow the queries in the
    /// same rows, `grads.keys_values` is `None`, and `grads.queries` receives all gradients. Gradients are added to
    /// [`RowDestination::Sums`]; they overwrite [`RowDestination::Elements`]. `output` must be the output for all keys.
    pub(crate) fn attention_backward<T: Element>(
        &self,
        inputs: AttentionInputs<&[T], &[u32]>,
        shape: AttentionShape,
        scope: AttentionScope,
        output: AttentionOutput<&[T], &[f32]>,
        grads: AttentionGrads<'_, T>,
        scratch: &mut [f32],
    ) {
        let AttentionOutput { y, log_sums, dy } = output;
        let AttentionGrads { queries: d_queries, keys_values: d_keys_values } = grads;
        let AttentionShape { seq_len, num_keys, head_dim: dim, value_dim, .. } = shape;
        let (out_cols, dims) = (shape.output_cols(), [dim, value_dim]);
        let layout = inputs.layout(shape, &scope);
        assert!(inputs.queries.len() == d_queries.len() && y.len() == dy.len());
        assert_eq!(inputs.keys_values.map(<[T]>::len), d_keys_values.as_ref().map(RowDestination::len));
        assert_eq!(y.len(), shape.rows() * out_cols);
        let [query_rows, key_value_rows] = inputs.matrices(layout);
        let d_keys_values = d_keys_values.as_ref().unwrap_or(&d_queries);
        let scratch = SharedSlice::new(scratch);
        let scratch_len = self.scratch_len::<T>(shape, 0, true);
        let micro = MicroKernel::new(self.simd_level, T::PRECISION);
        self.threads.run_on_threads(shape.batch * shape.num_kv_heads, &|thread, task| {
            let (sequence, kv_head) = (task / shape.num_kv_heads, task % shape.num_kv_heads);
            let (first, first_key) = (sequence * seq_len, sequence * num_keys);
            // SAFETY: each thread has its own part.
            let sums = unsafe { scratch.range(thread * scratch_len, scratch_len) };
            let (sums, scratch) = sums.split_at_mut(QUERY_BLOCK * dim + num_keys * (dim + value_dim));
            let (blocks, words) = scratch.split_at_mut(Scratch::<T>::num_elements(micro, dims, true));
            let mut blocks = Scratch::new(blocks);
            let key_value = layout.key_value(shape, kv_head);
            let [keys, values] = key_value.map(|col| key_value_rows.submatrix(first_key, col));
            let keys_values = KeysValues { keys, values, num_keys, dims };
            let factors = keys_values.backward_operands(micro, bytemuck::cast_slice_mut(words));
            let (queries, keys_values) = sums.split_at_mut(QUERY_BLOCK * dim);
            let (keys, values) = keys_values.split_at_mut(num_keys * dim);
            let stride = layout.key_value_cols;
            let start_of = |col: usize| first_key * stride + col;
            for ((sums, col), dim) in [&mut *keys, &mut *values].into_iter().zip(key_value).zip(dims) {
                // SAFETY: only this task accesses the columns of this key-value head in this sequence.
                if !unsafe { d_keys_values.load(sums, start_of(col), stride, dim) } {
                    sums.fill(0.0);
                }
            }
            let mut grads = HeadGrads { queries, keys, values, has_earlier_keys: false };
            let per_kv_head = shape.heads_per_kv_head();
            let mask = inputs.mask(shape, scope, sequence);
            for head in kv_head * per_kv_head..(kv_head + 1) * per_kv_head {
                let queries = query_rows.submatrix(first, head * dim);
                let head_inputs = Head { queries, mask, first_packed: 0, dims };
                for query in (0..seq_len).step_by(QUERY_BLOCK) {
                    let num_queries = QUERY_BLOCK.min(seq_len - query);
                    let saved = (sequence * shape.num_heads + head) * seq_len + query;
                    let offset = (first + query) * out_cols + head * value_dim;
                    let output = OutputBlock {
                        y: &y[offset..],
                        dy: &dy[offset..],
                        cols: out_cols,
                        log_sums: &log_sums[saved..saved + num_queries],
                    };
                    let (len, stride) = (num_queries * dim, layout.query_cols);
                    let start = (first + query) * stride + head * dim;
                    // SAFETY: only this task accesses the query heads of its key-value head in this sequence.
                    unsafe {
                        grads.has_earlier_keys =
                            d_queries.load(&mut grads.queries[..len], start, stride, dim);
                        head_inputs.backward(self, query, factors, &mut blocks, output, &mut grads);
                        d_queries.store(self, &grads.queries[..len], start, stride, dim);
                    }
                }
            }
            for ((sums, col), dim) in [&*grads.keys, &*grads.values].into_iter().zip(key_value).zip(dims) {
                // SAFETY: as above.
                unsafe { d_keys_values.store(self, sums, start_of(col), stride, dim) };
            }
        });
    }
}

#[cfg(test)]
mod tests;
