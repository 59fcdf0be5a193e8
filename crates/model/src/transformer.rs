//! The units of a transformer that predicts tokens.

use crate::tokens::{LOGITS, TARGETS, TOKENS};
use crate::unit::{Unit, UnitContext};
use std::sync::Arc;
use trireme_tensor::tape::{
    Add, Attention, Concat, Embedding, Linear, LossHead, NewDim, Norm, Reshape, Scale, Slice,
};
use trireme_tensor::{DeviceError, Var};

/// Name of the residual stream between units: `[batch, seq_len, hidden]`, f32.
const HIDDEN: &str = "hidden";

/// From tokens to the residual stream.
#[derive(Debug)]
pub(crate) struct TokenEmbedding {
    pub(crate) embedding: Arc<Embedding>,
    pub(crate) scale: Option<Arc<Scale>>,
}

impl Unit for TokenEmbedding {
    fn forward(&self, cx: &mut UnitContext<'_>) -> Result<(), DeviceError> {
        let tokens = cx.batch(TOKENS);
        let mut x = cx.apply(&self.embedding, [tokens])?;
        if let Some(scale) = &self.scale {
            x = cx.apply(scale, [x])?;
        }
        cx.output(HIDDEN, x)
    }
}

/// A pre-norm block: attention and feed-forward, each behind a normalisation and around a residual. Families differ in what its
/// parts are and which they have, not in how they are joined.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) attention_norm: Arc<Norm>,
    /// All query, key and value heads at once.
    pub(crate) qkv: Arc<Linear>,
    pub(crate) qk_norms: Option<QkNorms>,
    pub(crate) attention: Arc<Attention>,
    pub(crate) attention_output: Arc<Linear>,
    /// Of what is added to the residual stream.
    pub(crate) attention_output_norm: Option<Arc<Norm>>,
    pub(crate) mlp_norm: Arc<Norm>,
    /// Into the feed-forward width: what the activation reads.
    pub(crate) mlp_in: Arc<Linear>,
    /// The activation, and back.
    pub(crate) mlp_out: Arc<Linear>,
    /// Of what is added to the residual stream.
    pub(crate) mlp_output_norm: Option<Arc<Norm>>,
}

impl Unit for Block {
    fn forward(&self, cx: &mut UnitContext<'_>) -> Result<(), DeviceError> {
        let x = cx.input(HIDDEN);
        let normed = cx.apply(&self.attention_norm, [&x])?;
        let mut qkv = cx.apply(&self.qkv, [normed])?;
        if let Some(norms) = &self.qk_norms {
            qkv = norms.apply(cx, qkv)?;
        }
        let attended = cx.attention(&self.attention, qkv)?;
        let x = add_to(x, cx, (&self.attention_output, attended), self.attention_output_norm.as_ref())?;
        let normed = cx.apply(&self.mlp_norm, [&x])?;
        let inner = cx.apply(&self.mlp_in, [normed])?;
        let x = add_to(x, cx, (&self.mlp_out, inner), self.mlp_output_norm.as_ref())?;
        cx.output(HIDDEN, x)
    }
}

/// Adds a projection of `inner` to the residual stream, normalised if there is a norm.
fn add_to(
    x: Var,
    cx: &mut UnitContext<'_>,
    (projection, inner): (&Arc<Linear>, Var),
    norm: Option<&Arc<Norm>>,
) -> Result<Var, DeviceError> {
    let Some(norm) = norm else { return cx.apply(projection, (inner, x)) };
    let projected = cx.apply(projection, [inner])?;
    let normed = cx.apply(norm, [projected])?;
    cx.apply(&Add, (x, normed))
}

/// Normalisation of the heads of queries and keys (Henry et al., "Query-key normalization for transformers", 2020).
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
    /// For the heads of queries and those of keys of an attention.
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

/// The loss over the targets of a batch; of a batch without targets, the logits.
#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) norm: Arc<Norm>,
    pub(crate) loss: Arc<LossHead>,
}

impl Unit for Head {
    fn forward(&self, cx: &mut UnitContext<'_>) -> Result<(), DeviceError> {
        let x = cx.input(HIDDEN);
        let normed = cx.apply(&self.norm, [x])?;
        match cx.optional_batch(TARGETS) {
            Some(targets) => cx.apply_loss(&self.loss, (normed, targets), 1.0),
            None => {
                let logits = cx.logits(&self.loss, &normed)?;
                cx.output(LOGITS, logits)
            }
        }
    }
}
