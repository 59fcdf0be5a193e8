//! Mixtures of experts, and latent attention.

use super::reader::check_size;
use crate::error::Result;
use trireme_tensor::ChosenGroups;

/// Feed-forward layers of which each token goes through a few. The default has no layers; its sizes are 0, for the caller to set.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ExpertsConfig {
    /// The layers that have experts, counted from 0, in order; the others have one feed-forward layer for all tokens.
    pub layers: Vec<usize>,
    /// Experts of a layer.
    pub num_experts: usize,
    /// Experts of a token.
    pub num_choices: usize,
    /// Width between the two linear layers of an expert.
    pub intermediate_size: usize,
    /// Experts that all tokens go through, as one layer of their width together.
    pub num_shared: usize,
    /// What makes scores of a router's logits.
    pub scores: RouterScores,
    /// Whether the scores of a token's experts are divided by their sum.
    pub normalizes: bool,
    /// What they are multiplied by.
    pub scale: f32,
    /// The groups of which a token's experts are, if not all are.
    pub groups: Option<ChosenGroups>,
    /// Whether a bias that balances loads is added to scores where they are compared.
    pub has_bias: bool,
    /// Weight of the loss that balances loads; 0 for none.
    pub balance_loss: f32,
    /// Weight of the loss that keeps a router's logits small; 0 for none.
    pub z_loss: f32,
    /// How many choices of a sample an expert takes, as a multiple of an even load; all if absent.
    pub capacity_factor: Option<f64>,
    /// How tokens reach experts on other ranks.
    pub exchange: ExchangeConfig,
}

/// How tokens reach experts on other ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExchangeConfig {
    /// In how many chunks rows travel.
    pub num_chunks: usize,
    /// How many experts of a layer are shadowed: all ranks have copies of them.
    pub num_shadowed: usize,
}

impl Default for ExchangeConfig {
    fn default() -> Self {
        ExchangeConfig { num_chunks: 1, num_shadowed: 0 }
    }
}

/// What makes scores of a router's logits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum RouterScores {
    /// Parts of one.
    #[default]
    Softmax,
    /// Each by itself.
    Sigmoid,
}

/// Heads of attention that are made from latent vectors (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatentConfig {
    /// Elements of the latent vector of queries; `None` if queries are made from the residual stream.
    pub query_rank: Option<usize>,
    /// Elements of the latent vector of keys and values.
    pub kv_rank: usize,
    /// Elements of the part of a query or key that has no position.
    pub plain_dim: usize,
    /// Elements of the part that is rotated.
    pub rotary_dim: usize,
    /// Elements of a head of values.
    pub value_dim: usize,
    /// Whether neighbours are rotated together.
    pub is_interleaved: bool,
}

/// Experts of a layer beyond which a config is taken for damaged: each has names and descriptions of its own.
const EXPERTS_MAX: usize = 1 << 14;

/// As [`EXPERTS_MAX`], for the experts of all layers.
const ALL_EXPERTS_MAX: usize = 1 << 18;

impl ExpertsConfig {
    /// Checks that the sizes fit each other; a family calls the number of experts `key`.
    pub(crate) fn check(&self, key: &str) -> Result<()> {
        let (experts, choices) = (self.num_experts, self.num_choices);
        check_size(key, experts, experts <= EXPERTS_MAX, format!("at most {EXPERTS_MAX} experts"))?;
        let of_layers = self.layers.len() * experts;
        let expected = format!("at most {ALL_EXPERTS_MAX} experts in all layers");
        check_size(key, experts, of_layers <= ALL_EXPERTS_MAX, expected)?;
        check_size("num_experts_per_tok", choices, choices <= experts, format!("at most {experts} experts"))?;
        if let Some(ChosenGroups { num_groups, num_chosen }) = self.groups {
            let (max, divides) = (ChosenGroups::NUM_MAX, experts.is_multiple_of(num_groups));
            let expected = format!("a divisor of {experts} experts, at most {max}");
            check_size("n_group", num_groups, num_groups <= max && divides, expected)?;
            check_size(
                "topk_group",
                num_chosen,
                num_chosen <= num_groups,
                format!("at most {num_groups} groups"),
            )?;
            let left = experts / num_groups * num_chosen;
            let expected = format!("at most the {left} experts of {num_chosen} groups");
            check_size("num_experts_per_tok", choices, choices <= left, expected)?;
        }
        Ok(())
    }
}
