//! The mixture-of-experts sublayer.

use super::{ResidualProjection, Sublayer};
use crate::profile::EXPERT_DROPS;
use crate::tokens::TOKEN_WEIGHTS;
use crate::unit::UnitContext;
use std::sync::Arc;
use trireme_tensor::tape::{
    Argument, BalanceLoss, CombineRows, CopyToRanks, DispatchRows, DroppedChoices, ExpertExchange,
    GatherLoads, GroupRows, GroupedLinear, Linear, LocalExperts, Norm, Op, PeakLoad, PermuteRows, ReturnRows,
    Router, RouterEntropy, RouterZLoss, TopK,
};
use trireme_tensor::{DeviceError, Var};

/// A mixture of experts: a router sends each token to a few feed-forward layers (Shazeer et al., "Outrageously large neural networks",
/// 2017). An optional shared expert processes all tokens (Dai et al., "DeepSeekMoE", 2024, section 3.2).
#[derive(Debug)]
pub(crate) struct MixtureOfExperts {
    pub(crate) norm: Arc<Norm>,
    pub(crate) router: Arc<Router>,
    pub(crate) scores: Op,
    pub(crate) top_k: Arc<TopK>,
    pub(crate) groups: Arc<GroupRows>,
    pub(crate) experts: Experts,
    pub(crate) combine: Arc<CombineRows>,
    /// The metric for the largest load of an expert.
    pub(crate) peak: Arc<PeakLoad>,
    /// The shared expert.
    pub(crate) shared: Option<(Arc<Linear>, ResidualProjection)>,
    pub(crate) losses: RouterLosses,
}

/// The routed experts.
#[derive(Debug)]
pub(crate) enum Experts {
    /// All experts are on this rank. The first layer projects to the experts' width. The second applies the activation and projects back.
    Local([Arc<GroupedLinear>; 2]),
    Distributed {
        gather: Arc<GatherLoads>,
        dispatch: Arc<DispatchRows>,
        local: Arc<LocalExperts>,
        return_rows: Arc<ReturnRows>,
    },
}

impl Experts {
    /// Creates this rank's experts from their two layers. If other ranks have experts too, rows are exchanged with them.
    pub(crate) fn new([up, down]: [GroupedLinear; 2], exchange: ExpertExchange) -> Self {
        if up.num_groups == exchange.num_experts {
            return Experts::Local([up, down].map(Arc::new));
        }
        Experts::Distributed {
            gather: Arc::new(GatherLoads(exchange)),
            dispatch: Arc::new(DispatchRows(exchange)),
            local: Arc::new(LocalExperts { up, down, exchange }),
            return_rows: Arc::new(ReturnRows(exchange)),
        }
    }
}

/// Weights of the router's auxiliary losses; 0 for none.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct RouterLosses {
    pub(crate) balance: f32,
    pub(crate) z: f32,
}

impl MixtureOfExperts {
    /// Returns the weights and the experts of each token. `token_weights` are the tokens' weights in the means of losses and metrics.
    /// Padding has weight 0 and is sent to no expert.
    fn route(
        &self,
        cx: &mut UnitContext<'_>,
        normed: &Var,
        token_weights: Option<&Var>,
    ) -> Result<[Var; 2], DeviceError> {
        let token_weights_arg = || token_weights.map(Argument::from);
        let logits = cx.apply(&self.router, [normed])?;
        let logits = cx.all_rows(logits)?;
        if self.losses.z > 0.0 {
            cx.apply_auxiliary_loss(
                "router_z_loss",
                &RouterZLoss,
                (&logits, token_weights_arg()),
                self.losses.z,
            )?;
        }
        let scores = cx.apply(self.scores.clone(), [logits])?;
        let [weights, experts] = outputs(cx.apply_many(&self.top_k, (&scores, token_weights_arg()))?);
        cx.apply_metric("expert_load_max", &self.peak, [&experts])?;
        cx.apply_metric("router_entropy", &RouterEntropy, (&scores, token_weights_arg()))?;
        let loads = (scores, &experts, token_weights_arg());
        match self.losses.balance {
            0.0 => cx.apply_metric("balance_loss", &BalanceLoss, loads)?,
            weight => cx.apply_auxiliary_loss("balance_loss", &BalanceLoss, loads, weight)?,
        }
        Ok([weights, experts])
    }

    /// Returns the outputs of the experts for `rows`, and the sum of `x` and the shared expert's output. The shared expert is computed
    /// while rows are in flight.
    fn apply_experts(
        &self,
        cx: &mut UnitContext<'_>,
        rows: Var,
        [starts, places]: [&Var; 2],
        for_shared: Option<Var>,
        x: Var,
    ) -> Result<[Var; 2], DeviceError> {
        match &self.experts {
            Experts::Local([up, down]) => {
                let inner = self.shared_inner(cx, for_shared)?;
                let rows = cx.apply(up, (rows, starts))?;
                let rows = cx.apply(down, (rows, starts))?;
                Ok([rows, self.add_shared(cx, inner, x)?])
            }
            Experts::Distributed { gather, dispatch, local, return_rows } => {
                let [loads, own_starts, parts] = outputs(cx.apply_many(gather, [starts, places])?);
                let sent = [Argument::from(rows), (&loads).into(), places.into()];
                let rows = cx.apply(dispatch, sent)?;
                let inner = self.shared_inner(cx, for_shared)?;
                let inputs =
                    [rows.into(), Argument::from(&loads), own_starts.into(), parts.into(), places.into()];
                let rows = cx.apply(local, inputs)?;
                let x = self.add_shared(cx, inner, x)?;
                let returned = [Argument::from(rows), loads.into(), places.into()];
                Ok([cx.apply(return_rows, returned)?, x])
            }
        }
    }

    /// Computes the shared expert's first layer.
    fn shared_inner(
        &self,
        cx: &mut UnitContext<'_>,
        normed: Option<Var>,
    ) -> Result<Option<Var>, DeviceError> {
        let shared = self.shared.as_ref().zip(normed);
        shared.map(|((up, _), normed)| cx.apply(up, [normed])).transpose()
    }

    fn add_shared(&self, cx: &mut UnitContext<'_>, inner: Option<Var>, x: Var) -> Result<Var, DeviceError> {
        match (&self.shared, inner) {
            (Some((_, down)), Some(inner)) => down.add_to(cx, x, inner),
            _ => Ok(x),
        }
    }
}

impl Sublayer for MixtureOfExperts {
    fn apply(&self, cx: &mut UnitContext<'_>, x: Var) -> Result<Var, DeviceError> {
        let normed = cx.apply(&self.norm, [&x])?;
        let token_weights = cx.optional_batch(TOKEN_WEIGHTS);
        let [mut weights, experts] = self.route(cx, &normed, token_weights.as_ref())?;
        let [starts, order, places] = outputs(cx.apply_many(&self.groups, [experts])?);
        if self.groups.capacity.is_some() {
            let token_weights_arg = token_weights.as_ref().map(Argument::from);
            cx.apply_metric(EXPERT_DROPS, &DroppedChoices, (&starts, &places, token_weights_arg))?;
        }
        let (mut tokens, for_shared) = match self.shared {
            Some(_) => (Argument::from(&normed), Some(normed)),
            None => (normed.into(), None),
        };
        if self.combine.sums_over_ranks {
            tokens = cx.apply(&CopyToRanks, [tokens])?.into();
            weights = cx.apply(&CopyToRanks, [weights])?;
        }
        let rows = cx.apply(&PermuteRows, [tokens, (&order).into(), (&places).into()])?;
        let [rows, x] = self.apply_experts(cx, rows, [&starts, &places], for_shared, x)?;
        cx.apply(&self.combine, [rows, order, places, weights, x])
    }
}

fn outputs<const N: usize>(mut all: impl Iterator<Item = Var>) -> [Var; N] {
    std::array::from_fn(|_| all.next().expect("an operation has its outputs"))
}
