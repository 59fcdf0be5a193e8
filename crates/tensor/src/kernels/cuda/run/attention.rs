use super::super::Cuda;
use super::super::launch::{Argument, Launch, Words, pair};
use crate::kernels::call::AttentionCall;
use crate::kernels::{
    AttentionInputs, AttentionOutput, AttentionScope, AttentionShape, LatentHeadShape, Operand, OperandMut,
};
use crate::shape::Shape;
use trireme_base::DType;

/// Rows of queries or of keys that a block has; `BLOCK_ROWS` in `sources/attention.cuh`.
const BLOCK_ROWS: usize = 128;

/// Dims of heads are rounded up to a multiple of this, so that few kernels are compiled.
const DIM_STEP: usize = 32;

/// Largest sum of both dims of heads whose tiles, of at least 16 rows (`TILE_ROWS`), fit into 48 KiB of shared memory.
const DIMS_MAX: usize = 704;

/// Largest bytes of a row of a key and its value for which a kernel has registers for the gradients of both.
const BYTES_OF_BOTH_MAX: usize = 512;

/// Arrays whose rows begin at multiples of this many bytes are read by as many bytes at a time; `Chunk` in `sources/mma.cuh`.
const CHUNK_BYTES: usize = 16;

/// Arrays of queries, keys and values, as addresses, and the layout of their rows.
struct Arrays {
    queries: usize,
    keys: usize,
    values: usize,
    query_stride: usize,
    key_stride: usize,
    value_stride: usize,
    /// Rows of keys and values per sequence.
    rows_per_sequence: usize,
}

impl Arrays {
    /// Describes rows of queries, keys and values, or of queries alone if keys and values are separate: the inputs of attention, or their
    /// gradients.
    fn new(queries: Operand, keys_values: Option<Operand>, shape: AttentionShape) -> Self {
        let size = queries.dtype().size();
        let start = |operand: Operand| operand.addresses().start;
        let (keys, query_stride, key_stride) = match keys_values {
            Some(keys_values) => (start(keys_values), shape.query_cols(), shape.kv_cols()),
            None => (start(queries) + shape.query_cols() * size, shape.qkv_cols(), shape.qkv_cols()),
        };
        let values = keys + shape.key_cols() * size;
        Arrays {
            queries: start(queries),
            keys,
            values,
            query_stride,
            key_stride,
            value_stride: key_stride,
            rows_per_sequence: shape.num_keys,
        }
    }

    /// Returns whether all rows of heads begin at multiples of a chunk, for elements of `size` bytes.
    fn is_aligned(&self, shape: AttentionShape, size: usize) -> bool {
        let dims = [shape.head_dim, shape.value_dim];
        let strides = [self.query_stride, self.key_stride, self.value_stride];
        let bytes = dims.into_iter().chain(strides).map(|num| num * size);
        bytes.chain([self.queries, self.keys, self.values]).all(|bytes| bytes.is_multiple_of(CHUNK_BYTES))
    }
}

/// `Attention` of `sources/attention.cuh`.
struct Sizes<'a> {
    shape: AttentionShape,
    scope: AttentionScope,
    arrays: &'a Arrays,
    padding_starts: Option<Operand>,
    document_starts: Option<Operand>,
    /// Whether all rows of heads begin at multiples of a chunk.
    is_aligned: bool,
}

impl Argument for Sizes<'_> {
    fn append(&self, to: &mut Words) -> usize {
        let Sizes { shape, scope, arrays, .. } = self;
        let AttentionShape { batch, seq_len, num_heads, num_kv_heads, head_dim, value_dim, num_keys } =
            *shape;
        let num_rows = seq_len * (num_heads / num_kv_heads);
        assert!(
            num_rows.max(num_keys) < u32::MAX as usize,
            "sequences of {seq_len} and {num_keys} positions"
        );
        let sizes = [batch, seq_len, num_heads, num_kv_heads, head_dim, value_dim, num_keys].append(to);
        let Arrays { query_stride, key_stride, value_stride, rows_per_sequence, .. } = **arrays;
        let strides = [query_stride, key_stride, value_stride, rows_per_sequence].append(to);
        let mask = [usize::from(scope.rule.is_causal), scope.rule.window.unwrap_or(0)].append(to);
        let positions = scope.queries.append(to) + scope.keys.append(to);
        let starts = self.padding_starts.append(to) + self.document_starts.append(to);
        let alignment = usize::from(self.is_aligned).append(to);
        let [scale, soft_cap] = [scope.rule.scale, scope.rule.soft_cap.unwrap_or(0.0)].map(f32::to_bits);
        let scales = pair(scale, soft_cap).append(to);
        sizes + strides + mask + positions + starts + alignment + scales
    }
}

/// `LatentHeads` of `sources/attention.cu`, with the shape of rows of queries, keys and values.
impl Argument for (LatentHeadShape, Shape) {
    fn append(&self, to: &mut Words) -> usize {
        let (shape, qkv) = *self;
        let LatentHeadShape { num_heads, nope_dim, rotary_dim, value_dim, is_interleaved } = shape;
        [num_heads, nope_dim, rotary_dim, value_dim, is_interleaved.into(), qkv.dims()[1]].append(to)
    }
}

impl Cuda {
    pub(super) fn run_attention(&self, call: &AttentionCall) {
        match call {
            AttentionCall::Rotary { qkv, shape, rotary, inverse } => {
                let num_heads = shape.num_heads + shape.num_kv_heads;
                let launch = self.kernel("rotary", &[qkv.dtype()]).arg(qkv).arg(shape.qkv_cols());
                let launch = launch.arg(num_heads).arg(shape.head_dim).arg(shape.seq_len);
                let launch = launch.arg(rotary.cos).arg(rotary.sin).arg(rotary.positions);
                let launch = launch.arg(if *inverse { -1.0_f32 } else { 1.0 });
                launch.over_elements([shape.rows(), num_heads, shape.head_dim / 2].into());
            }
            AttentionCall::Attention { inputs, y, log_sums, shape, scope, .. }
            | AttentionCall::AttentionBlock { inputs, y, log_sums, shape, scope, .. } => {
                let arrays = Arrays::new(inputs.queries, inputs.keys_values, *shape);
                let has_earlier_keys = matches!(call, AttentionCall::AttentionBlock { .. });
                self.attention(inputs, &arrays, [y, log_sums], (*shape, *scope), has_earlier_keys);
            }
            AttentionCall::AttentionCached {
                qkv,
                keys,
                values,
                y,
                log_sums,
                shape,
                rule,
                capacity,
                len,
                ..
            } => {
                assert!(len + shape.seq_len <= *capacity, "the cache has room for {capacity} positions");
                let append = |cache: &OperandMut, first_col: usize, cache_cols: usize| {
                    let launch = self.kernel("append_to_cache", &[]).arg(qkv).arg(shape.qkv_cols());
                    let launch = launch.arg(first_col).arg(shape.seq_len).arg(cache).arg(capacity).arg(len);
                    launch.arg(cache_cols).changing().over_elements([shape.rows(), cache_cols].into());
                };
                append(keys, shape.query_cols(), shape.key_cols());
                append(values, shape.query_cols() + shape.key_cols(), shape.value_cols());
                let scope = AttentionScope::after(*len, *shape, *rule);
                let shape = AttentionShape { num_keys: len + shape.num_keys, ..*shape };
                let arrays = Arrays {
                    keys: keys.as_operand().addresses().start,
                    values: values.as_operand().addresses().start,
                    key_stride: shape.key_cols(),
                    value_stride: shape.value_cols(),
                    rows_per_sequence: *capacity,
                    ..Arrays::new(*qkv, None, shape)
                };
                let inputs = AttentionInputs::packed_qkv(*qkv);
                self.attention(&inputs, &arrays, [y, log_sums], (shape, scope), false);
            }
            AttentionCall::AttentionBackward {
                inputs,
                output,
                d_queries,
                d_keys_values,
                scratch,
                shape,
                scope,
            } => {
                let d_keys_values = d_keys_values.as_ref();
                self.attention_backward(
                    inputs,
                    output,
                    [Some(d_queries), d_keys_values],
                    scratch,
                    (*shape, *scope),
                    false,
                );
            }
            AttentionCall::AttentionBlockBackward {
                inputs,
                output,
                d_queries,
                d_keys_values,
                scratch,
                shape,
                scope,
            } => {
                let grads = [Some(d_queries), Some(d_keys_values)];
                self.attention_backward(inputs, output, grads, scratch, (*shape, *scope), true);
            }
            AttentionCall::LatentHeads { inputs: [queries, keys_values, shared_key], rotary, qkv, shape } => {
                let launch = self.kernel("latent_heads", &[qkv.dtype()]).arg((*shape, qkv.shape()));
                let launch = launch.arg(queries).arg(keys_values).arg(shared_key).arg(rotary.cos);
                let launch = launch.arg(rotary.sin).arg(rotary.positions).arg(qkv).arg(shape.qkv_cols());
                launch.over_elements(qkv.shape());
            }
            AttentionCall::LatentHeadsBackward { grad, rotary, grads, shape } => {
                let [d_queries, d_keys_values, d_shared_key] = grads;
                let cols = shape.query_cols() + shape.kv_cols() + shape.rotary_dim;
                let launch = self.kernel("latent_heads_backward", &[grad.dtype()]);
                let launch = launch.arg((*shape, grad.shape())).arg(grad).arg(rotary.cos).arg(rotary.sin);
                let launch = launch.arg(rotary.positions).arg(d_queries).arg(d_keys_values);
                let num_rows = grad.shape().num_elements() / shape.qkv_cols();
                launch.arg(d_shared_key).arg(cols).over_elements([num_rows, cols].into());
            }
        }
    }

    /// Computes attention. `results` are the output and the logarithms of sums.
    fn attention(
        &self,
        inputs: &AttentionInputs<Operand>,
        arrays: &Arrays,
        results: [&OperandMut; 2],
        (shape, scope): (AttentionShape, AttentionScope),
        has_earlier_keys: bool,
    ) {
        let AttentionInputs { queries, padding_starts, document_starts, .. } = *inputs;
        let [y, log_sums] = results;
        let size = queries.dtype().size();
        let is_aligned = arrays.is_aligned(shape, size);
        let sizes = Sizes { shape, scope, arrays, padding_starts, document_starts, is_aligned };
        let launch = self.attention_kernel("attention", [queries.dtype(), y.dtype()], shape).arg(sizes);
        let launch = launch.arg(arrays.queries).arg(arrays.keys).arg(arrays.values).arg(y).arg(log_sums);
        launch.arg(has_earlier_keys).over_rows(num_query_blocks(shape));
    }

    /// Begins a launch of a kernel that is compiled for the dims of the heads.
    fn attention_kernel(&self, kernel: &str, [from, to]: [DType; 2], shape: AttentionShape) -> Launch<'_> {
        let [dim, value_dim] = [shape.head_dim, shape.value_dim].map(|dim| dim.next_multiple_of(DIM_STEP));
        assert!(dim + value_dim <= DIMS_MAX, "head dims {dim} and {value_dim}: at most {DIMS_MAX} together");
        let [dim, value_dim] = [dim, value_dim].map(|dim| dim.to_string());
        self.instance("attention.cuh", kernel, &[from.name(), to.name(), &dim, &value_dim])
    }

    /// Computes the gradients of queries, and of keys and values if they are separate; otherwise, one array has all of them.
    fn attention_backward(
        &self,
        inputs: &AttentionInputs<Operand>,
        output: &AttentionOutput<Operand>,
        grads: [Option<&OperandMut>; 2],
        scratch: &OperandMut,
        (shape, scope): (AttentionShape, AttentionScope),
        accumulate: bool,
    ) {
        let AttentionInputs { queries, keys_values, padding_starts, document_starts } = *inputs;
        let [d_queries, d_keys_values] = grads.map(|grad| grad.map(OperandMut::as_operand));
        let d_queries = d_queries.expect("the gradient of queries is always computed");
        let (arrays, to) =
            (Arrays::new(queries, keys_values, shape), Arrays::new(d_queries, d_keys_values, shape));
        let size = queries.dtype().size();
        let is_aligned =
            arrays.is_aligned(shape, size) && output.dy.addresses().start.is_multiple_of(CHUNK_BYTES);
        let sizes = || Sizes { shape, scope, arrays: &arrays, padding_starts, document_starts, is_aligned };
        let num_queries = shape.rows() * shape.num_heads;
        let num_bytes = num_queries * size_of::<f32>();
        let deltas = scratch.as_operand().part(0..num_bytes, (Shape::from([num_queries]), DType::F32));
        let launch = self.kernel("attention_deltas", &[queries.dtype()]).arg(output.y).arg(output.dy);
        let launch = launch.arg(shape.seq_len).arg(shape.num_heads).arg(shape.value_dim);
        launch.arg(deltas).over_warps(num_queries);
        let launch = |name: &str| {
            let launch =
                self.attention_kernel(name, [queries.dtype(), d_queries.dtype()], shape).arg(sizes());
            let launch = launch.arg(arrays.queries).arg(arrays.keys).arg(arrays.values);
            launch.arg(output.dy).arg(output.log_sums).arg(deltas)
        };
        let of_queries = launch("attention_backward_queries").arg(to.queries).arg(accumulate);
        of_queries.over_rows(num_query_blocks(shape));
        let names: &[&str] = if (shape.head_dim + shape.value_dim) * size <= BYTES_OF_BOTH_MAX {
            &["attention_backward_keys_values"]
        } else {
            &["attention_backward_keys", "attention_backward_values"]
        };
        let num_blocks = shape.batch * shape.num_kv_heads * shape.num_keys.div_ceil(BLOCK_ROWS);
        for name in names {
            launch(name).arg(to.keys).arg(to.values).arg(accumulate).over_rows(num_blocks);
        }
    }
}

/// Returns the number of blocks that have the queries of all heads as their rows.
fn num_query_blocks(shape: AttentionShape) -> usize {
    let rows_per_group = shape.seq_len * (shape.num_heads / shape.num_kv_heads);
    shape.batch * shape.num_kv_heads * rows_per_group.div_ceil(BLOCK_ROWS)
}

/// Returns the number of f32 elements of scratch memory that attention needs: in backward, one per query of each head.
pub(crate) fn attention_scratch(shape: AttentionShape, backward: bool) -> usize {
    if backward { shape.rows().saturating_mul(shape.num_heads) } else { 0 }
}
