//! The expert axis, and experts that are replicated on all of its ranks.
//!
//! Ranks of the axis have different experts and are otherwise data-parallel. A unit has the same layout on all of them, so flat buffers,
//! shards and messages are alike. In the crate `parallel`, `RankGrid::state_of` returns the ranks that reduce, shard and save the state of
//! a unit: all data-parallel ranks for units without experts, and the ranks with the same experts for the others. In a unit with experts,
//! the gradients of parameters that belong to no expert are first summed over the axis (`ReplicatedParameters`).
//!
//! # Operations of a layer
//! Without the axis, [`GroupRows`](super::GroupRows) sorts the choices of all tokens by expert, and [`GroupedLinear`](super::GroupedLinear)
//! multiplies the rows of each expert. With it, four operations replace the `GroupedLinear` layers:
//!
//! - [`GatherLoads`](super::GatherLoads) tells all ranks how many choices each expert has.
//! - [`DispatchRows`](super::DispatchRows) starts to send the first chunk of rows. In backward, it ends the last exchange.
//! - [`LocalExperts`](super::LocalExperts) receives, multiplies and returns chunk by chunk. It is one operation because several exchanges
//!   are in flight within it, which a tape of values cannot express.
//! - [`ReturnRows`](super::ReturnRows) waits for the last chunk. In backward, it starts the first exchange.
//!
//! Operations that a unit applies between `DispatchRows` and `LocalExperts`, or between `LocalExperts` and `ReturnRows`, run while a chunk
//! is exchanged.
//!
//! # Bits
//! The gradient of an expert's matrix is computed for the rows of each rank separately, and added along the canonical tree over ranks (the
//! third input of `GroupedLinear`). So neither the exchange of tokens nor shadowed experts change any bits.

use super::AxisOps;
use crate::parameter_table::ParameterId;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The expert axis of a tape.
#[derive(Debug, Clone)]
pub struct ExpertAxis {
    /// Communication with the other ranks of the axis.
    pub ops: Arc<dyn AxisOps>,
    /// The experts that are replicated (shadowed) on all ranks.
    pub shadowed: Arc<ShadowedExperts>,
}

/// The shadowed experts of each layer: all ranks of the axis have copies of them, so that their tokens need no exchange (He et al.,
/// "FasterMoE", 2022, section 5.1). [`choose`](ShadowedExperts::choose) selects the experts with the most tokens since its last call. All
/// ranks of an axis count the same tokens and therefore select the same experts.
#[derive(Debug, Default)]
pub struct ShadowedExperts(Mutex<BTreeMap<ParameterId, Layer>>);

#[derive(Debug)]
struct Layer {
    num_shadowed: usize,
    /// Tokens per expert since the last call of [`ShadowedExperts::choose`].
    num_tokens: Vec<u64>,
    is_shadowed: Vec<bool>,
}

impl ShadowedExperts {
    fn layers(&self) -> MutexGuard<'_, BTreeMap<ParameterId, Layer>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns, for each of `num_experts` experts of a layer, whether it is one of the `num_shadowed` shadowed ones. Before the first call
    /// of [`choose`](ShadowedExperts::choose), these are the first experts.
    pub(super) fn of_layer(&self, layer: ParameterId, num_experts: usize, num_shadowed: usize) -> Vec<bool> {
        let mut layers = self.layers();
        let layer = layers.entry(layer).or_insert_with(|| Layer {
            num_shadowed,
            num_tokens: vec![0; num_experts],
            is_shadowed: (0..num_experts).map(|expert| expert < num_shadowed).collect(),
        });
        layer.is_shadowed.clone()
    }

    /// Adds one rank's token counts of a layer. `numbers` begins with the count of each expert. [`of_layer`](ShadowedExperts::of_layer)
    /// must have been called for the layer.
    pub(super) fn count(&self, layer: ParameterId, numbers: &[u32]) {
        let mut layers = self.layers();
        let num_tokens = &mut layers.get_mut(&layer).expect("it was asked for").num_tokens;
        num_tokens.iter_mut().zip(numbers).for_each(|(sum, &number)| *sum += u64::from(number));
    }

    /// Shadows the experts with the most tokens since the last call; of equal ones, the first. Call it between steps, while no microbatch
    /// is between its forward and its backward.
    pub fn choose(&self) {
        for layer in self.layers().values_mut().filter(|layer| layer.num_shadowed > 0) {
            let mut order: Vec<usize> = (0..layer.num_tokens.len()).collect();
            order.sort_by_key(|&expert| Reverse(layer.num_tokens[expert]));
            layer.is_shadowed.fill(false);
            order[..layer.num_shadowed].iter().for_each(|&expert| layer.is_shadowed[expert] = true);
            layer.num_tokens.fill(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::declaration::{Initial, Parameter};
    use crate::parameter_table::ParameterTable;

    #[test]
    fn the_highest_loads_are_chosen() {
        let mut table = ParameterTable::default();
        table.begin_unit("unit");
        let layer = table.add(Parameter::matrix("weight", &[1, 1], Initial::ZEROS)).first;
        let shadowed = ShadowedExperts::default();
        let first = shadowed.of_layer(layer, 4, 2);
        assert_eq!(first, [true, true, false, false]);
        // Two ranks and two microbatches.
        shadowed.count(layer, &[1, 2, 3, 0]);
        shadowed.count(layer, &[1, 0, 0, 0]);
        shadowed.count(layer, &[0, 0, 0, 2]);
        assert_eq!(shadowed.of_layer(layer, 4, 2), first, "not before the step has ended");
        shadowed.choose();
        // Totals: 2, 2, 3 and 2 tokens.
        assert_eq!(shadowed.of_layer(layer, 4, 2), [true, false, true, false]);
        shadowed.count(layer, &[0, 0, 0, 9]);
        shadowed.choose();
        assert_eq!(shadowed.of_layer(layer, 4, 2), [true, false, false, true]);
    }
}
