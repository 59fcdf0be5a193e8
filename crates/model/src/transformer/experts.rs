//! A mixture of experts, as a part of blocks.

use super::{Projection, Sublayer};
use crate::rehearsal::EXPERT_DROPS;
use crate::unit::UnitContext;
use std::sync::Arc;
use trireme_tensor::tape::{
    Argument, BalanceLoss, CombineRows, CopyToRanks, DispatchRows, DroppedChoices, GatherLoads, GroupRows,
    GroupedLinear, Linear, Norm, Op, PeakLoad, ReturnRows, Router, RouterEntropy, RouterZLoss, SpreadRows,
    TopK,
};
use trireme_tensor::{DeviceError, Var};

/// Feed-forward layers of which each token goes through a few (Shazeer et al., "Outrageously large neural networks", 2017), and perhaps one that all go through
/// (Dai et al., "DeepSeekMoE", 2024, section 3.2).
#[derive(Debug)]
pub(crate) struct MixtureOfExperts {
    pub(crate) norm: Arc<Norm>,
    pub(crate) router: Arc<Router>,
    /// What makes scores of the router's logits.
    pub(crate) scores: Op,
    pub(crate) top_k: Arc<TopK>,
    pub(crate) groups: Arc<GroupRows>,
    /// To the ranks that have the experts.
    pub(crate) dispatch: Arc<DispatchRows>,
    /// Into the width of experts: what the activation reads.
    pub(crate) into: Arc<GroupedLinear>,
    /// The activation, and back.
    pub(crate) back: Arc<GroupedLinear>,
    pub(crate) combine: Arc<CombineRows>,
    /// The largest load of an expert.
    pub(crate) peak: Arc<PeakLoad>,
    /// What all tokens go through.
    pub(crate) shared: Option<(Arc<Linear>, Projection)>,
    pub(crate) losses: RouterLosses,
}

/// Weights of losses that keep a router in shape; 0 for none.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct RouterLosses {
    pub(crate) balance: f32,
    pub(crate) z: f32,
}

impl MixtureOfExperts {
    /// The weights and the experts of each token.
    fn route(&self, cx: &mut UnitContext<'_>, normed: &Var) -> Result<[Var; 2], DeviceError> {
        let logits = cx.apply(&self.router, [normed])?;
        let logits = cx.all_rows(logits)?;
        if self.losses.z > 0.0 {
            cx.apply_auxiliary_loss("router_z_loss", &RouterZLoss, [&logits], self.losses.z)?;
        }
        let scores = cx.apply(self.scores.clone(), [logits])?;
        let [weights, experts] = outputs(cx.apply_many(&self.top_k, [&scores])?);
        cx.apply_metric("expert_load_max", &self.peak, [&experts])?;
        cx.apply_metric("router_entropy", &RouterEntropy, [&scores])?;
        match self.losses.balance {
            0.0 => cx.apply_metric("balance_loss", &BalanceLoss, (scores, &experts))?,
            weight => cx.apply_auxiliary_loss("balance_loss", &BalanceLoss, (scores, &experts), weight)?,
        }
        Ok([weights, experts])
    }

    /// Runs the experts on the ranks that have them.
    fn run_on_owners(
        &self,
        cx: &mut UnitContext<'_>,
        rows: Var,
        [starts, own_order, own_places]: [&Var; 3],
    ) -> Result<Var, DeviceError> {
        let [loads, own_starts, parts] = outputs(cx.apply_many(&GatherLoads, [starts, own_places])?);
        let sent = [Argument::from(rows), (&loads).into(), own_places.into()];
        let rows = cx.apply(&self.dispatch, sent)?;
        let inner = cx.apply(&self.into, [rows.into(), Argument::from(&own_starts), (&parts).into()])?;
        let rows = cx.apply(&self.back, [inner, own_starts, parts])?;
        let returned = [Argument::from(rows), loads.into(), own_order.into()];
        cx.apply(&ReturnRows, returned)
    }
}

impl Sublayer for MixtureOfExperts {
    fn apply(&self, cx: &mut UnitContext<'_>, x: Var) -> Result<Var, DeviceError> {
        let normed = cx.apply(&self.norm, [&x])?;
        let [mut weights, experts] = self.route(cx, &normed)?;
        let [starts, order, places] = outputs(cx.apply_many(&self.groups, [experts])?);
        if self.groups.capacity.is_some() {
            cx.apply_metric(EXPERT_DROPS, &DroppedChoices, [&starts, &order])?;
        }
        let x = match &self.shared {
            Some((into, back)) => {
                let inner = cx.apply(into, [&normed])?;
                back.add_to(cx, x, inner)?
            }
            None => x,
        };
        let mut tokens = normed;
        if self.combine.adds_up {
            tokens = cx.apply(&CopyToRanks, [tokens])?;
            weights = cx.apply(&CopyToRanks, [weights])?;
        }
        let rows = cx.apply(&SpreadRows, (tokens, &order, &places))?;
        let rows = if self.into.num_groups < self.groups.num_groups {
            self.run_on_owners(cx, rows, [&starts, &order, &places])?
        } else {
            let inner = cx.apply(&self.into, (rows, &starts))?;
            cx.apply(&self.back, (inner, starts))?
        };
        cx.apply(&self.combine, [rows, order, places, weights, x])
    }
}

fn outputs<const N: usize>(mut all: impl Iterator<Item = Var>) -> [Var; N] {
    std::array::from_fn(|_| all.next().expect("an operation has its outputs"))
}
