//! Builds decoder models.

use super::{ExpertNames, Style};
use crate::config::{ExpertsConfig, LatentConfig, ModelConfig, RouterScores};
use crate::families::layers::{
    attention, dropout, kv_head_split, normal_initial, output_weight, token_table,
};
use crate::model::Model;
use crate::transformer::{
    Block, Experts, Head, LatentAttention, LatentQueries, MixtureOfExperts, Mlp, QkNorms, ResidualProjection,
    RouterLosses, SelfAttention, Sublayer, TokenEmbedding,
};
use crate::unit::Unit;
use std::sync::Arc;
use trireme_tensor::tape::{
    Attention, Capacity, CombineRows, Embedding, ExpertExchange, GroupRows, GroupedLinear, InputActivation,
    LatentHeads, Linear, LossHead, Norm, Op, PeakLoad, RotaryTable, Router, Scale, Sigmoid, Slice, Softmax,
    TopK, WeightLayout,
};
use trireme_tensor::{AxisSplit, Initial, LatentHeadShape, Parameter, ParameterTable, RoutingRule};

pub(in crate::families) fn build(
    config: &ModelConfig,
    rotary: Option<&Arc<RotaryTable>>,
    table: ParameterTable,
    style: Style,
) -> Model {
    let mut builder = Builder { config, style, table };
    builder.table.begin_unit("embedding");
    let tokens = builder.table.add(token_table("model.embed_tokens.weight", config));
    let scale = style.scales_embedding.then(|| Arc::new(Scale((config.hidden_size as f32).sqrt())));
    let embedding = Arc::new(Embedding { tokens, positions: None });
    let mut units: Vec<Arc<dyn Unit>> =
        vec![Arc::new(TokenEmbedding { embedding, scale, dropout: dropout(config, "embedding") })];
    for layer in 0..config.num_layers {
        units.extend(builder.layer(layer, rotary));
    }
    builder.table.begin_unit("head");
    let norm = builder.norm("model.norm", config.hidden_size);
    let weight = output_weight(config, &mut builder.table, tokens);
    let loss = Arc::new(LossHead { weight, soft_cap: config.logit_soft_cap });
    units.push(Arc::new(Head { norm, loss }));
    Model::new(units, builder.table)
}

struct Builder<'a> {
    config: &'a ModelConfig,
    style: Style,
    table: ParameterTable,
}

impl Builder<'_> {
    /// Returns the units of a layer: one, or two if it has experts (attention, and the experts).
    fn layer(&mut self, layer: usize, rotary: Option<&Arc<RotaryTable>>) -> Vec<Arc<dyn Unit>> {
        let name = format!("model.layers.{layer}");
        self.table.begin_unit(&name);
        let attention = self.attention(&name, layer, rotary);
        match self.config.experts_of(layer) {
            None => {
                let mlp: Box<dyn Sublayer> = Box::new(self.mlp(&name));
                vec![Arc::new(Block(vec![attention, mlp]))]
            }
            Some(experts) => {
                self.table.begin_unit(format!("{name}.{}", self.style.expert_names.module));
                let experts = Box::new(self.experts(&name, experts));
                vec![Arc::new(Block(vec![attention])), Arc::new(Block(vec![experts]))]
            }
        }
    }

    fn attention(
        &mut self,
        name: &str,
        layer: usize,
        rotary: Option<&Arc<RotaryTable>>,
    ) -> Box<dyn Sublayer> {
        let config = self.config;
        let norm = self.norm(&format!("{name}.input_layernorm"), config.hidden_size);
        if let (Some(latent), Some(rotary)) = (config.latent, rotary) {
            return Box::new(self.latent_attention(name, norm, layer, latent, rotary));
        }
        let dim = config.head_dim;
        let (queries, keys) = (config.num_heads * dim, config.num_kv_heads * dim);
        let part = |part: &str| format!("{name}.self_attn.{part}");
        let (heads, kv_heads) = (AxisSplit::along(0).with_granule(dim), kv_head_split(dim));
        let qkv = [("q_proj", queries, heads), ("k_proj", keys, kv_heads), ("v_proj", keys, kv_heads)];
        let qkv = qkv.map(|(name, outputs, split)| (part(name), outputs, Some(split)));
        let attention = attention(config, layer, rotary, &self.table);
        Box::new(SelfAttention {
            norm,
            qkv: self.projections(&qkv, config.hidden_size, config.qkv_bias),
            qk_norms: self.style.has_qk_norms.then(|| {
                let norms = ["q_norm", "k_norm"].map(|norm| self.norm(&part(norm), dim));
                QkNorms::new(norms, &attention)
            }),
            attention,
            output: self.residual_projection(
                &part("o_proj"),
                queries,
                dim,
                config.attention_output_bias,
                InputActivation::Identity,
                &format!("{name}.post_attention_layernorm"),
            ),
        })
    }

    /// Builds latent attention. Tensor parallelism splits the heads; all ranks compute the latent vectors.
    fn latent_attention(
        &mut self,
        name: &str,
        norm: Arc<Norm>,
        layer: usize,
        latent: LatentConfig,
        rotary: &Arc<RotaryTable>,
    ) -> LatentAttention {
        let config = self.config;
        let LatentConfig { query_rank, kv_rank, nope_dim, rotary_dim, value_dim, is_interleaved } = latent;
        let part = |part: &str| format!("{name}.self_attn.{part}");
        let heads = |dim: usize| (config.num_heads * dim, Some(AxisSplit::along(0).with_granule(dim)));
        let slice = |start: usize, len: usize| Arc::new(Slice { dim: 2, range: start..start + len });
        let ranks = query_rank.map(|rank| (part("q_a_proj"), rank, None));
        let down = (part("kv_a_proj_with_mqa"), kv_rank + rotary_dim, None);
        let down: Vec<_> = ranks.into_iter().chain([down]).collect();
        let down = self.projections(&down, config.hidden_size, config.qkv_bias);
        let (outputs, split) = heads(nope_dim + rotary_dim);
        let queries = match query_rank {
            None => {
                let queries = [(part("q_proj"), outputs, split)];
                LatentQueries::Direct(self.projections(&queries, config.hidden_size, false))
            }
            Some(rank) => LatentQueries::Latent {
                slice: slice(0, rank),
                norm: self.norm(&part("q_a_layernorm"), rank),
                up: self.projections(&[(part("q_b_proj"), outputs, split)], rank, false),
            },
        };
        let first = query_rank.unwrap_or(0);
        let kv_norm = self.norm(&part("kv_a_layernorm"), kv_rank);
        let (outputs, split) = heads(nope_dim + value_dim);
        let num_heads = self.table.part_len(AxisSplit::along(0), config.num_heads);
        let shape = LatentHeadShape { num_heads, nope_dim, rotary_dim, value_dim, is_interleaved };
        let dims = [nope_dim + rotary_dim, value_dim];
        LatentAttention {
            norm,
            down,
            queries,
            kv_slice: slice(first, kv_rank),
            kv_norm,
            kv_up: self.projections(&[(part("kv_b_proj"), outputs, split)], kv_rank, false),
            key_slice: slice(first + kv_rank, rotary_dim),
            heads: Arc::new(LatentHeads { shape, rotary: Arc::clone(rotary) }),
            attention: Arc::new(Attention::with_value_dim(
                [num_heads; 2],
                dims,
                config.attention_rule(layer),
            )),
            output: self.residual_projection(
                &part("o_proj"),
                config.num_heads * value_dim,
                value_dim,
                config.attention_output_bias,
                InputActivation::Identity,
                &format!("{name}.post_attention_layernorm"),
            ),
        }
    }

    fn mlp(&mut self, name: &str) -> Mlp {
        let (hidden, inner, bias) =
            (self.config.hidden_size, self.config.intermediate_size, self.config.mlp_bias);
        let before = if self.style.has_output_norms { "pre_feedforward" } else { "post_attention" };
        let norm = self.norm(&format!("{name}.{before}_layernorm"), hidden);
        let inputs =
            ["gate", "up"].map(|part| (format!("{name}.mlp.{part}_proj"), inner, Some(AxisSplit::along(0))));
        Mlp {
            norm,
            up: self.projections(&inputs, hidden, bias),
            down: self.residual_projection(
                &format!("{name}.mlp.down_proj"),
                inner,
                1,
                bias,
                self.gated(),
                &format!("{name}.post_feedforward_layernorm"),
            ),
        }
    }

    fn gated(&self) -> InputActivation {
        InputActivation::Gated(self.config.activation)
    }

    /// Builds a mixture of experts. The matrices of all experts are stacked along dim 0. Tensor parallelism splits the matrices of each
    /// expert as in a dense feed-forward layer.
    fn experts(&mut self, name: &str, experts: &ExpertsConfig) -> MixtureOfExperts {
        let (hidden, inner) = (self.config.hidden_size, experts.intermediate_size);
        let &ExpertsConfig { num_experts, num_choices, normalizes, scale, groups, .. } = experts;
        let ExpertNames { module: part, projections: [gate, up, down] } = self.style.expert_names;
        let norm = self.norm(&format!("{name}.post_attention_layernorm"), hidden);
        let module = format!("{name}.{part}");
        let router = Parameter::embedding(
            format!("{module}.gate.weight"),
            &[num_experts, hidden],
            normal_initial(self.config),
        );
        let router = Arc::new(Router { weight: self.table.add(router) });
        let bias = experts.has_bias.then(|| {
            self.table.add(Parameter::balance(format!("{module}.gate.e_score_correction_bias"), num_experts))
        });
        // Parameters that every rank of the expert axis holds come first, so that their offsets do not depend on the degree of expert
        // parallelism.
        let shared = (experts.num_shared > 0).then(|| {
            let inner = experts.num_shared * inner;
            let shared = |part: &str| format!("{module}.shared_experts.{part}");
            let inputs = [gate, up].map(|part| (shared(part), inner, Some(AxisSplit::along(0))));
            let into = self.projections(&inputs, hidden, false);
            let back = self.row_parallel(&shared(down), inner, 1, false, self.gated());
            (into, ResidualProjection::new(back, dropout(self.config, &format!("{name}.shared"))))
        });
        let matrix = |expert: usize, part: &str, dims: [usize; 2], split: AxisSplit| {
            let name = format!("{module}.experts.{expert}.{part}.weight");
            let matrix = Parameter::matrix(name, &dims, normal_initial(self.config)).with_split(split);
            matrix.of_expert(expert, num_experts)
        };
        let into = (0..num_experts).flat_map(|expert| {
            [gate, up].map(|part| matrix(expert, part, [inner, hidden], AxisSplit::along(0)))
        });
        let back = (0..num_experts).map(|expert| matrix(expert, down, [hidden, inner], AxisSplit::along(1)));
        let [into, back] =
            [into.collect::<Vec<_>>(), back.collect()].map(|parts| self.table.add_stacked(parts));
        let num_local = self.table.own_experts(num_experts).len();
        let grouped = |weight, activation| GroupedLinear { weight, num_groups: num_local, activation };
        let rule = RoutingRule { num_choices, normalizes, scale, groups };
        let capacity = experts.capacity_factor.map(|factor| Capacity { factor });
        MixtureOfExperts {
            norm,
            router,
            scores: match experts.scores {
                RouterScores::Softmax => Op::from(&Softmax),
                RouterScores::Sigmoid => Op::from(&Sigmoid),
            },
            top_k: Arc::new(TopK { rule, bias }),
            groups: Arc::new(GroupRows { num_groups: num_experts, capacity }),
            combine: Arc::new(CombineRows { sums_over_ranks: back.shard.is_some() }),
            experts: Experts::new(
                [grouped(into, InputActivation::Identity), grouped(back, self.gated())],
                ExpertExchange {
                    num_experts,
                    capacity,
                    num_chunks: experts.exchange.num_chunks,
                    num_shadowed: experts.exchange.num_shadowed,
                    layer: into.first,
                },
            ),
            peak: Arc::new(PeakLoad { num_experts }),
            shared,
            losses: RouterLosses { balance: experts.balance_loss, z: experts.z_loss },
        }
    }

    fn norm(&mut self, name: &str, cols: usize) -> Arc<Norm> {
        let offset = self.style.norm_weight_offset;
        let weight = Parameter::vector(format!("{name}.weight"), cols, Initial::Constant(1.0 - offset));
        Arc::new(Norm {
            weight: self.table.add(weight),
            weight_offset: offset,
            bias: None,
            epsilon: self.config.norm_epsilon,
            is_centered: false,
        })
    }

    /// Adds projections of one input, stacked so that one matrix product computes them. A split projection is split by its outputs, with
    /// its bias.
    fn projections(
        &mut self,
        parts: &[(String, usize, Option<AxisSplit>)],
        inputs: usize,
        has_bias: bool,
    ) -> Arc<Linear> {
        let with_split = |parameter: Parameter, split: &Option<AxisSplit>| match *split {
            Some(split) => parameter.with_split(split),
            None => parameter,
        };
        let weight = |(name, outputs, split): &(String, usize, Option<AxisSplit>)| {
            let dims = [*outputs, inputs];
            with_split(Parameter::matrix(format!("{name}.weight"), &dims, normal_initial(self.config)), split)
        };
        let bias = |(name, outputs, split): &(String, usize, Option<AxisSplit>)| {
            with_split(Parameter::vector(format!("{name}.bias"), *outputs, Initial::ZEROS), split)
        };
        Arc::new(Linear {
            weight: self.table.add_stacked(parts.iter().map(weight)),
            layout: WeightLayout::OutputsFirst,
            bias: has_bias.then(|| self.table.add_stacked(parts.iter().map(bias))),
            activation: InputActivation::Identity,
        })
    }

    /// Adds a projection back to the residual stream, followed by the norm `norm_name` if the style has output norms.
    fn residual_projection(
        &mut self,
        name: &str,
        inputs: usize,
        granule: usize,
        has_bias: bool,
        activation: InputActivation,
        norm_name: &str,
    ) -> ResidualProjection {
        let linear = self.row_parallel(name, inputs, granule, has_bias, activation);
        let norm = self.style.has_output_norms.then(|| self.norm(norm_name, self.config.hidden_size));
        ResidualProjection { linear, norm, dropout: dropout(self.config, name) }
    }

    /// Adds a row-parallel linear layer, which is split by its inputs.
    fn row_parallel(
        &mut self,
        name: &str,
        inputs: usize,
        granule: usize,
        has_bias: bool,
        activation: InputActivation,
    ) -> Arc<Linear> {
        let dims = [self.config.hidden_size, inputs];
        let weight = Parameter::matrix(format!("{name}.weight"), &dims, normal_initial(self.config));
        let bias = Parameter::vector(format!("{name}.bias"), dims[0], Initial::ZEROS);
        Arc::new(Linear {
            weight: self.table.add(weight.with_split(AxisSplit::along(1).with_granule(granule))),
            layout: WeightLayout::OutputsFirst,
            bias: has_bias.then(|| self.table.add(bias)),
            activation,
        })
    }
}
