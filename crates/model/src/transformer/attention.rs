//! Attention sublayers.

use super::{ResidualProjection, Sublayer};
use crate::unit::UnitContext;
use std::sync::Arc;
use trireme_tensor::tape::{
    Attention, Concat, CopyToRanks, LatentHeads, Linear, NewDim, Norm, Reshape, Slice,
};
use trireme_tensor::{DeviceError, Var};

/// Self-attention whose heads are projections of the residual stream.
#[derive(Debug)]
pub(crate) struct SelfAttention {
    pub(crate) norm: Arc<Norm>,
    pub(crate) qkv: Arc<Linear>,
    pub(crate) qk_norms: Option<QkNorms>,
    pub(crate) attention: Arc<Attention>,
    pub(crate) output: ResidualProjection,
}

impl Sublayer for SelfAttention {
    fn apply(&self, cx: &mut UnitContext<'_>, x: Var) -> Result<Var, DeviceError> {
        let normed = cx.apply(&self.norm, [&x])?;
        let mut qkv = cx.apply(&self.qkv, [normed])?;
        if let Some(norms) = &self.qk_norms {
            qkv = norms.apply(cx, qkv)?;
        }
        let attended = cx.attention(&self.attention, qkv)?;
        self.output.add_to(cx, x, attended)
    }
}

/// Normalization of the heads of queries and keys (Henry et al., "Query-key normalization for transformers", 2020).
#[derive(Debug)]
pub(crate) struct QkNorms {
    parts: [HeadNorm; 2],
    values: Arc<Slice>,
}

#[derive(Debug)]
struct HeadNorm {
    slice: Arc<Slice>,
    by_head: Arc<Reshape>,
    norm: Arc<Norm>,
    by_row: Arc<Reshape>,
}

impl QkNorms {
    /// Creates the norms of the query heads and of the key heads of an attention.
    pub(crate) fn new(norms: [Arc<Norm>; 2], attention: &Attention) -> Self {
        let Attention { num_heads, num_kv_heads, head_dim, .. } = *attention;
        let mut end = 0;
        let mut slice = |heads: usize| {
            let start = end;
            end += heads * head_dim;
            Arc::new(Slice { dim: 2, range: start..end })
        };
        let rows = |last: &[usize]| {
            let dims = [NewDim::Same; 2].into_iter().chain(last.iter().copied().map(NewDim::Size));
            Arc::new(Reshape(dims.collect()))
        };
        let [queries, keys] = norms;
        let mut part = |heads: usize, norm| HeadNorm {
            slice: slice(heads),
            by_head: rows(&[heads, head_dim]),
            norm,
            by_row: rows(&[heads * head_dim]),
        };
        let parts = [part(num_heads, queries), part(num_kv_heads, keys)];
        QkNorms { parts, values: slice(num_kv_heads) }
    }

    fn apply(&self, cx: &mut UnitContext<'_>, qkv: Var) -> Result<Var, DeviceError> {
        let [queries, keys] = &self.parts;
        let (queries, keys) = (queries.apply(cx, &qkv)?, keys.apply(cx, &qkv)?);
        let values = cx.apply(&self.values, [qkv])?;
        cx.apply(&Concat { dim: 2 }, [queries, keys, values])
    }
}

impl HeadNorm {
    fn apply(&self, cx: &mut UnitContext<'_>, qkv: &Var) -> Result<Var, DeviceError> {
        let rows = cx.apply(&self.slice, [qkv])?;
        let heads = cx.apply(&self.by_head, [rows])?;
        let normed = cx.apply(&self.norm, [heads])?;
        cx.apply(&self.by_row, [normed])
    }
}

/// Multi-head latent attention, whose heads are computed from latent vectors (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1).
#[derive(Debug)]
pub(crate) struct LatentAttention {
    pub(crate) norm: Arc<Norm>,
    /// Projects to the latent vector of queries (if there is one), the latent vector of keys and values, and the part of the keys that all
    /// heads share, concatenated.
    pub(crate) down: Arc<Linear>,
    pub(crate) queries: LatentQueries,
    /// Selects the latent vector of keys and values.
    pub(crate) kv_slice: Arc<Slice>,
    pub(crate) kv_norm: Arc<Norm>,
    /// Projects to the parts of keys and values that heads do not share.
    pub(crate) kv_up: Arc<Linear>,
    pub(crate) key_slice: Arc<Slice>,
    pub(crate) heads: Arc<LatentHeads>,
    pub(crate) attention: Arc<Attention>,
    pub(crate) output: ResidualProjection,
}

#[derive(Debug)]
pub(crate) enum LatentQueries {
    /// Projected from the residual stream.
    Direct(Arc<Linear>),
    /// Projected from a latent vector.
    Latent { slice: Arc<Slice>, norm: Arc<Norm>, up: Arc<Linear> },
}

impl Sublayer for LatentAttention {
    fn apply(&self, cx: &mut UnitContext<'_>, x: Var) -> Result<Var, DeviceError> {
        let normed = cx.apply(&self.norm, [&x])?;
        let down = cx.apply(&self.down, [&normed])?;
        let queries = match &self.queries {
            LatentQueries::Direct(linear) => cx.apply(linear, [normed])?,
            LatentQueries::Latent { slice, norm, up } => {
                let latent = cx.apply(slice, [&down])?;
                let latent = cx.apply(norm, [latent])?;
                cx.apply(up, [latent])?
            }
        };
        let latent = cx.apply(&self.kv_slice, [&down])?;
        let latent = cx.apply(&self.kv_norm, [latent])?;
        let keys_values = cx.apply(&self.kv_up, [latent])?;
        let mut shared_key = cx.apply(&self.key_slice, [down])?;
        if self.kv_up.weight.shard.is_some() {
            shared_key = cx.apply(&CopyToRanks, [shared_key])?;
        }
        let qkv = cx.latent_heads(&self.heads, [queries, keys_values, shared_key])?;
        let attended = cx.attention(&self.attention, qkv)?;
        self.output.add_to(cx, x, attended)
    }
}
