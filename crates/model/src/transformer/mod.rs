//! The units of a transformer language model.

mod attention;
mod experts;

pub(crate) use attention::{LatentAttention, LatentQueries, QkNorms, SelfAttention};
pub(crate) use experts::{Experts, MixtureOfExperts, RouterLosses};

use crate::tokens::{LOGITS, LOSS_WEIGHTS, TARGETS, TOKENS};
use crate::unit::{Unit, UnitContext};
use std::fmt;
use std::sync::Arc;
use trireme_tensor::tape::{Add, Dropout, Embedding, Linear, LossHead, Norm, Scale};
use trireme_tensor::{DeviceError, Var};

/// Name of the residual stream between units: `[batch, seq_len, hidden]`, f32.
const HIDDEN: &str = "hidden";

/// The unit that maps tokens to the residual stream.
#[derive(Debug)]
pub(crate) struct TokenEmbedding {
    pub(crate) embedding: Arc<Embedding>,
    pub(crate) scale: Option<Arc<Scale>>,
    pub(crate) dropout: Option<Arc<Dropout>>,
}

impl Unit for TokenEmbedding {
    fn forward(&self, cx: &mut UnitContext<'_>) -> Result<(), DeviceError> {
        let tokens = cx.batch(TOKENS);
        let mut x = cx.apply(&self.embedding, [tokens])?;
        if let Some(scale) = &self.scale {
            x = cx.apply(scale, [x])?;
        }
        if let Some(dropout) = &self.dropout {
            x = cx.apply(dropout, [x])?;
        }
        cx.output(HIDDEN, x)
    }
}

/// A part of a block that adds its output to the residual stream.
pub(crate) trait Sublayer: fmt::Debug + Send + Sync {
    /// Returns the residual stream `x` plus the sublayer's output.
    fn apply(&self, cx: &mut UnitContext<'_>, x: Var) -> Result<Var, DeviceError>;
}

/// A unit of one or more sublayers, such as attention and the feed-forward layer after it. Families differ in their sublayers, not in how
/// they are joined.
#[derive(Debug)]
pub(crate) struct Block(pub(crate) Vec<Box<dyn Sublayer>>);

impl Unit for Block {
    fn forward(&self, cx: &mut UnitContext<'_>) -> Result<(), DeviceError> {
        let mut x = cx.input(HIDDEN);
        for sublayer in &self.0 {
            x = sublayer.apply(cx, x)?;
        }
        cx.output(HIDDEN, x)
    }
}

/// The last projection of a sublayer, whose result is added to the residual stream.
#[derive(Debug)]
pub(crate) struct ResidualProjection {
    pub(crate) linear: Arc<Linear>,
    pub(crate) norm: Option<Arc<Norm>>,
    pub(crate) dropout: Option<Arc<Dropout>>,
}

impl ResidualProjection {
    pub(crate) fn new(linear: Arc<Linear>, dropout: Option<Arc<Dropout>>) -> Self {
        ResidualProjection { linear, norm: None, dropout }
    }

    /// Returns the residual stream `x` plus the projection of `inner`.
    fn add_to(&self, cx: &mut UnitContext<'_>, x: Var, inner: Var) -> Result<Var, DeviceError> {
        if self.norm.is_none() && self.dropout.is_none() {
            return cx.apply(&self.linear, (inner, x));
        }
        let mut added = cx.apply(&self.linear, [inner])?;
        if let Some(norm) = &self.norm {
            added = cx.apply(norm, [added])?;
        }
        if let Some(dropout) = &self.dropout {
            added = cx.apply(dropout, [added])?;
        }
        cx.apply(&Add, (x, added))
    }
}

/// A feed-forward sublayer: two linear layers with an activation between them.
#[derive(Debug)]
pub(crate) struct Mlp {
    pub(crate) norm: Arc<Norm>,
    /// Projects to the feed-forward width.
    pub(crate) up: Arc<Linear>,
    /// Applies the activation and projects back.
    pub(crate) down: ResidualProjection,
}

impl Sublayer for Mlp {
    fn apply(&self, cx: &mut UnitContext<'_>, x: Var) -> Result<Var, DeviceError> {
        let normed = cx.apply(&self.norm, [&x])?;
        let inner = cx.apply(&self.up, [normed])?;
        self.down.add_to(cx, x, inner)
    }
}

/// The last unit. Computes the loss over the targets of a batch, or the logits if the batch has no targets.
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
            Some(targets) => match cx.optional_batch(LOSS_WEIGHTS) {
                Some(weights) => cx.apply_loss(&self.loss, [normed, targets, weights], 1.0),
                None => cx.apply_loss(&self.loss, [normed, targets], 1.0),
            },
            None => {
                let logits = cx.logits(&self.loss, &normed)?;
                cx.output(LOGITS, logits)
            }
        }
    }
}
