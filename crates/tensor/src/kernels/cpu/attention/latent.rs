//! Heads of multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1). A head consists of a part computed from latent
//! vectors and a rotary part. All heads share the rotary part of keys.

use super::Rotary;
use crate::kernels::cpu::element::Element;
use crate::kernels::cpu::{Cpu, SharedSlice};

/// Sizes of the heads of latent attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatentHeadShape {
    /// Number of heads, equal for queries, keys and values.
    pub num_heads: usize,
    /// Dim of the part of a query or key that is not rotated.
    pub nope_dim: usize,
    /// Dim of the rotary part; even.
    pub rotary_dim: usize,
    /// Dim of a value head.
    pub value_dim: usize,
    /// Whether the two elements of a rotated pair are adjacent, such as 0 and 1. Otherwise, they are `rotary_dim / 2` apart. In the result,
    /// the first elements of all pairs precede the second ones.
    pub is_interleaved: bool,
}

impl LatentHeadShape {
    /// Returns the dim of a query or key head.
    pub fn head_dim(&self) -> usize {
        self.nope_dim + self.rotary_dim
    }

    /// Returns the length of a row of queries.
    pub fn query_cols(&self) -> usize {
        self.num_heads * self.head_dim()
    }

    /// Returns the length of a row of the per-head parts of keys and values.
    pub fn kv_cols(&self) -> usize {
        self.num_heads * (self.nope_dim + self.value_dim)
    }

    /// Returns the length of a row of queries, keys and values.
    pub fn qkv_cols(&self) -> usize {
        2 * self.query_cols() + self.num_heads * self.value_dim
    }

    /// Returns the indices of a pair in a rotary part.
    fn pair(&self, index: usize) -> [usize; 2] {
        let half = self.rotary_dim / 2;
        if self.is_interleaved { [2 * index, 2 * index + 1] } else { [index, index + half] }
    }

    fn rotate<T: Element>(&self, x: &[T], (cos, sin): (&[f32], &[f32]), out: &mut [T]) {
        let (first, second) = out.split_at_mut(self.rotary_dim / 2);
        for (index, ((a, b), (cos, sin))) in first.iter_mut().zip(second).zip(cos.iter().zip(sin)).enumerate()
        {
            let [x, y] = self.pair(index).map(|place| x[place].to_f32());
            *a = T::from_f32(x * cos - y * sin);
            *b = T::from_f32(y * cos + x * sin);
        }
    }

    /// Inverts [`rotate`](LatentHeadShape::rotate). `of(index)` returns element `index` of the rotated part.
    fn rotate_back<T: Element>(
        &self,
        of: impl Fn(usize) -> f32,
        (cos, sin): (&[f32], &[f32]),
        out: &mut [T],
    ) {
        let half = self.rotary_dim / 2;
        for (index, (cos, sin)) in cos.iter().zip(sin).enumerate() {
            let ([x, y], a, b) = (self.pair(index), of(index), of(index + half));
            out[x] = T::from_f32(a * cos + b * sin);
            out[y] = T::from_f32(b * cos - a * sin);
        }
    }
}

impl<'a> Rotary<&'a [f32]> {
    fn angles(&self, row: usize, seq_len: usize, half: usize) -> (&'a [f32], &'a [f32]) {
        let start = self.positions.at(row % seq_len) * half;
        (&self.cos[start..start + half], &self.sin[start..start + half])
    }
}

impl Cpu {
    /// Assembles rows of query heads, key heads and value heads from rows of queries, of the per-head parts of keys and values, and of the
    /// shared part of keys.
    pub(crate) fn latent_heads<T: Element>(
        &self,
        shape: LatentHeadShape,
        [queries, keys_values, shared_key]: [&[T]; 3],
        rotary: Rotary<&[f32]>,
        seq_len: usize,
        qkv: &mut [T],
    ) {
        let LatentHeadShape { num_heads, nope_dim, rotary_dim, value_dim, .. } = shape;
        let (cols, dim, half) = (shape.qkv_cols(), shape.head_dim(), rotary_dim / 2);
        self.for_each_row(qkv, cols, |row, out| {
            let angles = rotary.angles(row, seq_len, half);
            let (out_queries, out) = out.split_at_mut(num_heads * dim);
            let (out_keys, out_values) = out.split_at_mut(num_heads * dim);
            let queries = queries[row * num_heads * dim..].chunks_exact(dim);
            let keys_values = keys_values[row * shape.kv_cols()..].chunks_exact(nope_dim + value_dim);
            let shared = &shared_key[row * rotary_dim..][..rotary_dim];
            let (rotated, others) = out_keys[nope_dim..].split_at_mut(rotary_dim);
            shape.rotate(shared, angles, rotated);
            others.chunks_exact_mut(dim).for_each(|rest| rest[nope_dim..].copy_from_slice(rotated));
            for (query, out) in queries.zip(out_queries.chunks_exact_mut(dim)) {
                out[..nope_dim].copy_from_slice(&query[..nope_dim]);
                shape.rotate(&query[nope_dim..], angles, &mut out[nope_dim..]);
            }
            let heads = out_keys.chunks_exact_mut(dim).zip(out_values.chunks_exact_mut(value_dim));
            for (key_value, (key, value)) in keys_values.zip(heads) {
                key[..nope_dim].copy_from_slice(&key_value[..nope_dim]);
                value.copy_from_slice(&key_value[nope_dim..]);
            }
        });
    }

    /// Computes the gradients of the three inputs of [`latent_heads`](Cpu::latent_heads).
    pub(crate) fn latent_heads_backward<T: Element>(
        &self,
        shape: LatentHeadShape,
        grad: &[T],
        rotary: Rotary<&[f32]>,
        seq_len: usize,
        [d_queries, d_keys_values, d_shared_key]: [&mut [T]; 3],
    ) {
        let LatentHeadShape { num_heads, nope_dim, rotary_dim, value_dim, .. } = shape;
        let (cols, dim, half, kv_cols) =
            (shape.qkv_cols(), shape.head_dim(), rotary_dim / 2, shape.kv_cols());
        let [d_queries, d_keys_values, d_shared_key] =
            [d_queries, d_keys_values, d_shared_key].map(SharedSlice::new);
        self.for_row_blocks(grad.len() / cols, cols, |first, num| {
            for row in first..first + num {
                let angles = rotary.angles(row, seq_len, half);
                let grad = &grad[row * cols..][..cols];
                let (of_queries, grad) = grad.split_at(num_heads * dim);
                let (of_keys, of_values) = grad.split_at(num_heads * dim);
                // SAFETY: rows do not overlap.
                let (d_queries, d_keys_values, d_shared) = unsafe {
                    (
                        d_queries.range(row * num_heads * dim, num_heads * dim),
                        d_keys_values.range(row * kv_cols, kv_cols),
                        d_shared_key.range(row * rotary_dim, rotary_dim),
                    )
                };
                for (query, out) in of_queries.chunks_exact(dim).zip(d_queries.chunks_exact_mut(dim)) {
                    out[..nope_dim].copy_from_slice(&query[..nope_dim]);
                    shape.rotate_back(|place| query[nope_dim + place].to_f32(), angles, &mut out[nope_dim..]);
                }
                let heads = of_keys.chunks_exact(dim).zip(of_values.chunks_exact(value_dim));
                for ((key, value), out) in heads.zip(d_keys_values.chunks_exact_mut(nope_dim + value_dim)) {
                    out[..nope_dim].copy_from_slice(&key[..nope_dim]);
                    out[nope_dim..].copy_from_slice(value);
                }
                let sum =
                    |place: usize| of_keys.chunks_exact(dim).map(|key| key[nope_dim + place].to_f32()).sum();
                shape.rotate_back(sum, angles, d_shared);
            }
        });
    }
}
