//! Ranks with different experts, and the experts of which all ranks have shadows.

use super::AxisOps;
use crate::parameter_table::ParameterId;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The expert axis of a tape.
#[derive(Debug, Clone)]
pub struct ExpertAxis {
    /// This rank, and the others.
    pub ops: Arc<dyn AxisOps>,
    /// The experts of which all ranks have shadows.
    pub shadowed: Arc<ShadowedExperts>,
}

/// Which experts of each layer are shadowed: all ranks of the axis have copies of them, so that their rows do not travel (He et al., "FasterMoE", 2022, section 5.1). They are
/// those that most tokens have chosen since the last time. All ranks of an axis see the same numbers, and so come to the same.
#[derive(Debug, Default)]
pub struct ShadowedExperts(Mutex<BTreeMap<ParameterId, Layer>>);

#[derive(Debug)]
struct Layer {
    num_shadowed: usize,
    /// Of each expert, since the last choice.
    num_tokens: Vec<u64>,
    is_shadowed: Vec<bool>,
}

impl ShadowedExperts {
    fn layers(&self) -> MutexGuard<'_, BTreeMap<ParameterId, Layer>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether each of `num_experts` experts of a layer is one of `num_shadowed`: the first ones, until others were chosen.
    pub(super) fn of_layer(&self, layer: ParameterId, num_experts: usize, num_shadowed: usize) -> Vec<bool> {
        let mut layers = self.layers();
        let layer = layers.entry(layer).or_insert_with(|| Layer {
            num_shadowed,
            num_tokens: vec![0; num_experts],
            is_shadowed: (0..num_experts).map(|expert| expert < num_shadowed).collect(),
        });
        layer.is_shadowed.clone()
    }

    /// Counts a rank's choices of a layer that was [asked for](ShadowedExperts::of_layer): those of each expert come first in `numbers`.
    pub(super) fn count(&self, layer: ParameterId, numbers: &[u32]) {
        let mut layers = self.layers();
        let num_tokens = &mut layers.get_mut(&layer).expect("it was asked for").num_tokens;
        num_tokens.iter_mut().zip(numbers).for_each(|(sum, &number)| *sum += u64::from(number));
    }

    /// Chooses the experts with the highest loads since the last time, the first of equal ones. To be called between steps, where no microbatch is between its
    /// forward and its backward.
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
        // Of two ranks, in two microbatches.
        shadowed.count(layer, &[1, 2, 3, 0]);
        shadowed.count(layer, &[1, 0, 0, 0]);
        shadowed.count(layer, &[0, 0, 0, 2]);
        assert_eq!(shadowed.of_layer(layer, 4, 2), first, "not before the step has ended");
        shadowed.choose();
        // 2, 2, 3 and 2 tokens.
        assert_eq!(shadowed.of_layer(layer, 4, 2), [true, false, true, false]);
        shadowed.count(layer, &[0, 0, 0, 9]);
        shadowed.choose();
        assert_eq!(shadowed.of_layer(layer, 4, 2), [true, false, false, true]);
    }
}
