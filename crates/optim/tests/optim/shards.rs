//! Sharded optimizers compute the same bits as an unsharded one.

use crate::common::{
    Exchange, OPTIMIZER_CASES, OptimizerCase, Shards, Weights, bits, device, grads, options, step, table,
    train, weights,
};
use std::sync::Arc;
use trireme_optim::{Optimizer, OptimizerName, OptimizerOptions, StateDType, StepSettings};
use trireme_tensor::ParameterTable;

const NUM_STEPS: u64 = 3;

/// The result of a run in which each rank has one shard.
#[derive(PartialEq)]
struct Run {
    weights: Weights,
    /// Bits of all sums that a rank received.
    sum_bits: Vec<u64>,
    /// Numbers of sums and of gathers of a rank.
    calls: [usize; 2],
}

fn train_sharded(options: &OptimizerOptions, table: &Arc<ParameterTable>, num_ranks: usize) -> Run {
    let exchange = Exchange::new(num_ranks);
    let mut found = Run { weights: weights(table), sum_bits: Vec::new(), calls: [0; 2] };
    std::thread::scope(|scope| {
        let run = |rank: usize| {
            let (exchange, mut weights) = (Arc::clone(&exchange), found.weights.clone());
            move || {
                // The number of threads of a rank does not change the result.
                let device = device(1 + rank % 2);
                let parts = table.shards(rank, num_ranks);
                let mut optimizer = Optimizer::new(options, table, &parts, &device).unwrap();
                let mut shards = Shards::new(&exchange, rank);
                for number in 1..=NUM_STEPS {
                    let settings = StepSettings { step: number, lr: 0.01, grad_scale: 0.5 };
                    let grads = grads(table, number, 1.0);
                    step(&mut optimizer, &device, &mut weights, &grads, &parts, settings, &mut shards);
                }
                (weights, parts, shards)
            }
        };
        let ranks: Vec<_> = (0..num_ranks).map(|rank| scope.spawn(run(rank))).collect();
        let results: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
        for (weights, parts, shards) in results {
            for (unit, part) in parts.into_iter().enumerate() {
                found.weights[unit][part.clone()].copy_from_slice(&weights[unit][part]);
            }
            found.calls = [shards.num_sums, shards.num_gathers];
            found.sum_bits = shards.sum_bits;
        }
    });
    found
}

fn check(kind: OptimizerCase, state_dtype: StateDType, table: &Arc<ParameterTable>) {
    let options = OptimizerOptions { weight_decay: 0.1, state_dtype, ..options(kind) };
    let expected = train_sharded(&options, table, 1);
    assert!(expected.weights == train(&options, table, NUM_STEPS, 1.0));
    assert!(expected.weights != weights(table));
    for num_ranks in [2, 4, 8] {
        let found = train_sharded(&options, table, num_ranks);
        for (unit, (found, expected)) in found.weights.iter().zip(&expected.weights).enumerate() {
            assert!(
                bits(found) == bits(expected),
                "{kind:?} in {state_dtype:?}, unit {unit}: {num_ranks} ranks come to other bits"
            );
        }
        assert!(found.sum_bits == expected.sum_bits, "{kind:?}: {num_ranks} ranks come to other sums");
        // Adafactor, LAMB and LARS exchange sums for each of three units; Muon gathers the only unit with hidden matrices.
        let exchanges = match kind.0 {
            OptimizerName::Adafactor => [2 * 3, 0],
            OptimizerName::Lamb | OptimizerName::Lars => [3, 0],
            OptimizerName::Muon => [0, 1],
            _ => [0, 0],
        };
        assert_eq!(found.calls, exchanges.map(|number| number * NUM_STEPS as usize), "{kind:?}");
    }
}

#[test]
fn shards_compute_the_same_bits() {
    // Leaves that are shorter, and longer, than rows.
    for leaf_len in [5, 70] {
        let table = table(leaf_len);
        OPTIMIZER_CASES.into_iter().for_each(|kind| check(kind, StateDType::F32, &table));
    }
}

#[test]
fn narrow_states_of_shards_have_the_same_bits() {
    let table = table(100);
    assert!(table.units()[1].num_elements >= OptimizerOptions::INT8_ELEMENTS_MIN);
    for kind in OPTIMIZER_CASES {
        check(kind, StateDType::Bf16, &table);
        check(kind, StateDType::Int8, &table);
    }
}

#[test]
fn three_shards_compute_almost_the_same_weights() {
    let table = table(5);
    for kind in OPTIMIZER_CASES {
        let options = OptimizerOptions { weight_decay: 0.1, ..options(kind) };
        let expected = train(&options, &table, NUM_STEPS, 1.0);
        let found = train_sharded(&options, &table, 3);
        for (found, expected) in found.weights.iter().flatten().zip(expected.iter().flatten()) {
            assert!((found - expected).abs() < 1e-5, "{kind:?}: {found} {expected}");
        }
        assert!(train_sharded(&options, &table, 3) == found, "{kind:?}: it differs from run to run");
    }
}
