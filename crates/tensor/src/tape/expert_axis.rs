//! Ranks with different experts, and the experts that all of them have copies of.

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
    /// The experts that all ranks have copies of.
    pub replicated: Arc<ReplicatedExperts>,
}

/// Which experts of each layer all ranks have copies of: those that most tokens have chosen since the last time. All ranks of an axis see the same numbers, and
/// so come to the same.
#[derive(Debug, Default)]
pub struct ReplicatedExperts(Mutex<BTreeMap<ParameterId, Layer>>);

#[derive(Debug)]
struct Layer {
    num_replicated: usize,
    /// Of each expert, since the last choice.
    num_tokens: Vec<u64>,
    is_replicated: Vec<bool>,
}

impl ReplicatedExperts {
    fn layers(&self) -> MutexGuard<'_, BTreeMap<ParameterId, Layer>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether each of `num_experts` experts of a layer is one of `num_replicated`: the first ones, until others were chosen.
    pub(super) fn of_layer(
        &self,
        layer: ParameterId,
        num_experts: usize,
        num_replicated: usize,
    ) -> Vec<bool> {
        let first = || (0..num_experts).map(|expert| expert < num_replicated).collect();
        let layers = self.layers();
        layers.get(&layer).map_or_else(first, |layer| layer.is_replicated.clone())
    }

    /// Counts choices of a layer: `numbers` of each expert, one rank's after the other.
    pub(super) fn count(&self, layer: ParameterId, is_replicated: &[bool], numbers: &[u32]) {
        let mut layers = self.layers();
        let layer = layers.entry(layer).or_insert_with(|| Layer {
            num_replicated: is_replicated.iter().filter(|&&is| is).count(),
            num_tokens: vec![0; is_replicated.len()],
            is_replicated: is_replicated.to_vec(),
        });
        for of_rank in numbers.chunks_exact(is_replicated.len()) {
            layer.num_tokens.iter_mut().zip(of_rank).for_each(|(sum, &number)| *sum += u64::from(number));
        }
    }

    /// Chooses the experts with the highest loads since the last time, the first of equal ones. To be called between steps, where no microbatch is between its
    /// forward and its backward.
    pub fn choose(&self) {
        for layer in self.layers().values_mut() {
            let mut order: Vec<usize> = (0..layer.num_tokens.len()).collect();
            order.sort_by_key(|&expert| Reverse(layer.num_tokens[expert]));
            layer.is_replicated.fill(false);
            order[..layer.num_replicated].iter().for_each(|&expert| layer.is_replicated[expert] = true);
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
        let replicated = ReplicatedExperts::default();
        let first = replicated.of_layer(layer, 4, 2);
        assert_eq!(first, [true, true, false, false]);
        // Of two ranks, in two microbatches.
        replicated.count(layer, &first, &[1, 2, 3, 0, 1, 0, 0, 0]);
        replicated.count(layer, &first, &[0, 0, 0, 2, 0, 0, 0, 0]);
        assert_eq!(replicated.of_layer(layer, 4, 2), first, "not before the step has ended");
        replicated.choose();
        // 2, 2, 3 and 2 tokens.
        assert_eq!(replicated.of_layer(layer, 4, 2), [true, false, true, false]);
        replicated.count(layer, &first, &[0, 0, 0, 9]);
        replicated.choose();
        assert_eq!(replicated.of_layer(layer, 4, 2), [true, false, false, true]);
    }
}
