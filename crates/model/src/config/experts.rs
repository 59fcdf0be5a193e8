//! Configurations of mixtures of experts and of latent attention.

use super::reader::check_size;
use crate::error::Result;
use trireme_tensor::ExpertGroups;

/// Mixtures of experts, in which each token is sent to a few of a layer's feed-forward layers. The default has no layers; the caller must
/// set its sizes, which are 0.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ExpertsConfig {
    /// The layers that have experts, in order, counted from 0. The other layers have one feed-forward layer for all tokens.
    pub layers: Vec<usize>,
    /// Number of experts of a layer, without shared experts.
    pub num_experts: usize,
    /// Number of experts that each token is sent to (top-k).
    pub num_choices: usize,
    /// Width between the two linear layers of an expert.
    pub intermediate_size: usize,
    /// Number of shared experts, which process all tokens. They are computed as one layer of their total width.
    pub num_shared: usize,
    /// How scores are computed from router logits.
    pub scores: RouterScores,
    /// Whether the scores of a token's experts are divided by their sum.
    pub normalizes: bool,
    /// Factor by which the scores are multiplied.
    pub scale: f32,
    /// Limit on the groups that a token's experts are chosen from, if there is one.
    pub groups: Option<ExpertGroups>,
    /// Whether a bias that balances loads is added to the scores when experts are chosen.
    pub has_bias: bool,
    /// Weight of the load-balancing loss; 0 for none.
    pub balance_loss: f32,
    /// Weight of the z-loss, which keeps router logits small; 0 for none.
    pub z_loss: f32,
    /// Maximum number of a sample's tokens that each expert accepts, as a multiple of an even load; `None` for no limit.
    pub capacity_factor: Option<f64>,
    /// How tokens reach experts on other ranks.
    pub exchange: ExchangeConfig,
}

/// How tokens reach experts on other ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExchangeConfig {
    /// Number of chunks in which rows are sent.
    pub num_chunks: usize,
    /// Number of experts of a layer that are shadowed: all ranks have copies of them.
    pub num_shadowed: usize,
}

impl Default for ExchangeConfig {
    fn default() -> Self {
        ExchangeConfig { num_chunks: 1, num_shadowed: 0 }
    }
}

/// How scores are computed from router logits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum RouterScores {
    /// Softmax over the experts.
    #[default]
    Softmax,
    /// Sigmoid of each logit.
    Sigmoid,
}

/// Multi-head latent attention, whose heads are computed from latent vectors (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatentConfig {
    /// Length of the latent vector of queries; `None` if queries are projected from the residual stream.
    pub query_rank: Option<usize>,
    /// Length of the latent vector of keys and values.
    pub kv_rank: usize,
    /// Elements of a query or key head without rotary positions.
    pub nope_dim: usize,
    /// Elements of a query or key head with rotary positions.
    pub rotary_dim: usize,
    /// Elements of a value head.
    pub value_dim: usize,
    /// Whether pairs of neighboring elements are rotated together.
    pub is_interleaved: bool,
}

/// Maximum number of experts of a layer. A larger number is treated as a damaged config, because each expert has its own parameter names
/// and descriptions.
const EXPERTS_MAX: usize = 1 << 14;

/// Like [`EXPERTS_MAX`], for the experts of all layers.
const ALL_EXPERTS_MAX: usize = 1 << 18;

impl ExpertsConfig {
    /// Checks that the sizes are consistent. `key` is the family's name for the number of experts, for error messages.
    pub(crate) fn check(&self, key: &str) -> Result<()> {
        let (experts, choices) = (self.num_experts, self.num_choices);
        check_size(key, experts, experts <= EXPERTS_MAX, format!("at most {EXPERTS_MAX} experts"))?;
        let num_experts_in_layers = self.layers.len() * experts;
        let expected = format!("at most {ALL_EXPERTS_MAX} experts in all layers");
        check_size(key, experts, num_experts_in_layers <= ALL_EXPERTS_MAX, expected)?;
        check_size("num_experts_per_tok", choices, choices <= experts, format!("at most {experts} experts"))?;
        if let Some(ExpertGroups { num_groups, num_chosen }) = self.groups {
            let (max, divides) = (ExpertGroups::NUM_MAX, experts.is_multiple_of(num_groups));
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
