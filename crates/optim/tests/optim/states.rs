//! States in f32 and fewer bits: saving them, restoring them, and their memory.

use crate::common::{
    DEFAULT, OPTIMIZER_CASES, OptimizerCase, Weights, bits, device, grads, step, table, train, weights,
};
use std::sync::Arc;
use trireme_optim::{
    Optimizer, OptimizerName, OptimizerOptions, ParameterGroup, StateDType, StateInfo, StepSettings,
    Unsharded,
};
use trireme_tensor::{Category, Device, ParameterTable};

const DTYPES: [StateDType; 3] = [StateDType::F32, StateDType::Bf16, StateDType::Int8];

/// States with their values; a name combines the names of state and parameter.
type Saved = Vec<(String, Vec<f32>)>;

fn save(optimizer: &Optimizer, device: &Device) -> Saved {
    let units = 0..optimizer.num_units();
    let named = units.flat_map(|unit| optimizer.states(unit)).map(|state| {
        let (info, values) = (&state.info, state.values(device).unwrap());
        assert_eq!(info.held, 0..info.shape.num_elements());
        assert_eq!(values.len(), info.held.len());
        (format!("{}.{}", info.name, info.parameter.name), values)
    });
    named.collect()
}

fn load(optimizer: &mut Optimizer, device: &Device, saved: &Saved) {
    for unit in 0..optimizer.num_units() {
        let read = |info: &StateInfo<'_>, out: &mut [f32]| {
            let name = format!("{}.{}", info.name, info.parameter.name);
            let (_, values) = saved.iter().find(|(found, _)| *found == name).ok_or(name)?;
            out.copy_from_slice(values);
            Ok::<(), String>(())
        };
        optimizer.load_states(unit, device, read).unwrap();
    }
}

fn run(
    optimizer: &mut Optimizer,
    device: &Device,
    table: &Arc<ParameterTable>,
    weights: &mut Weights,
    steps: std::ops::RangeInclusive<u64>,
) {
    let parts = table.shards(0, 1);
    for number in steps {
        let settings = StepSettings { step: number, lr: 0.01, grad_scale: 1.0 };
        step(optimizer, device, weights, &grads(table, number, 1.0), &parts, settings, &mut Unsharded);
    }
}

fn options(kind: OptimizerCase, state_dtype: StateDType) -> OptimizerOptions {
    OptimizerOptions { weight_decay: 0.1, state_dtype, ..crate::common::options(kind) }
}

#[test]
fn a_run_resumes_with_the_same_bits_from_saved_states() {
    let (table, device) = (table(100), device(1));
    let parts = table.shards(0, 1);
    for kind in OPTIMIZER_CASES {
        for dtype in DTYPES {
            let new = || Optimizer::new(&options(kind, dtype), &table, &parts, &device).unwrap();
            let (mut optimizer, mut found) = (new(), weights(&table));
            run(&mut optimizer, &device, &table, &mut found, 1..=3);
            let mut resumed = new();
            let saved = save(&optimizer, &device);
            load(&mut resumed, &device, &saved);
            assert!(save(&resumed, &device) == saved, "{kind:?} in {dtype:?}");
            let mut again = found.clone();
            run(&mut optimizer, &device, &table, &mut found, 4..=6);
            run(&mut resumed, &device, &table, &mut again, 4..=6);
            assert!(found == again, "{kind:?} in {dtype:?} goes on with other bits");
        }
    }
}

#[test]
fn states_of_any_dtype_load_from_any_other() {
    let (table, device) = (table(100), device(1));
    let parts = table.shards(0, 1);
    for from in DTYPES {
        for to in DTYPES {
            let new = |dtype| {
                let options = options((OptimizerName::AdamW, DEFAULT), dtype);
                Optimizer::new(&options, &table, &parts, &device).unwrap()
            };
            let (mut optimizer, mut found) = (new(from), weights(&table));
            run(&mut optimizer, &device, &table, &mut found, 1..=3);
            let saved = save(&optimizer, &device);
            let mut other = new(to);
            load(&mut other, &device, &saved);
            for ((name, expected), (_, found)) in saved.iter().zip(save(&other, &device)) {
                let root = |value: &f32| if name.starts_with("exp_avg_sq") { value.sqrt() } else { *value };
                let largest = expected.iter().map(|value| root(value).abs()).fold(0.0, f32::max);
                for (expected, found) in expected.iter().zip(&found) {
                    assert!(
                        (root(expected) - root(found)).abs() <= largest / 120.0,
                        "{from:?} to {to:?}: {name}"
                    );
                }
            }
        }
    }
}

#[test]
fn narrow_states_save_memory() {
    let bytes = |kind, dtype| {
        let (table, device) = (table(800), device(1));
        let _optimizer = Optimizer::new(&options(kind, dtype), &table, &table.shards(0, 1), &device).unwrap();
        device.memory().usage(Category::Optimizer).current as f64 / table.num_elements() as f64
    };
    let adamw = (OptimizerName::AdamW, DEFAULT);
    for (kind, dtype, expected) in [
        (adamw, StateDType::F32, 8.0),
        (adamw, StateDType::Bf16, 4.0),
        (adamw, StateDType::Int8, 2.0 + 2.0 * 4.0 / 256.0),
        (OPTIMIZER_CASES[3], StateDType::Int8, 1.0 + 4.0 / 256.0),
        (OPTIMIZER_CASES[4], StateDType::F32, 0.0),
    ] {
        let found = bytes(kind, dtype);
        assert!((found - expected).abs() < 0.1, "{kind:?} in {dtype:?}: {found} bytes an element");
    }
}

#[test]
fn neither_zeros_nor_tiny_nor_huge_gradients_make_nan() {
    let table = table(100);
    for kind in OPTIMIZER_CASES {
        for dtype in DTYPES {
            for size in [0.0, 1e-30, 1e-20, 1e15, 1e18] {
                let weights = train(&options(kind, dtype), &table, 3, size);
                let bad = weights.iter().flatten().find(|weight| !weight.is_finite());
                assert_eq!(bad, None, "{kind:?} in {dtype:?}, gradients of {size}");
            }
        }
    }
}

#[test]
fn zero_gradients_move_nothing_without_decay() {
    let table = table(100);
    for kind in OPTIMIZER_CASES {
        for dtype in DTYPES {
            let options = OptimizerOptions { weight_decay: 0.0, ..options(kind, dtype) };
            assert!(train(&options, &table, 2, 0.0) == weights(&table), "{kind:?} in {dtype:?}");
        }
    }
}

#[test]
fn the_first_group_that_matches_counts() {
    let table = table(5);
    let group = |pattern: &str, lr_scale| ParameterGroup {
        pattern: pattern.to_owned(),
        frozen: false,
        lr_scale,
        weight_decay: None,
        beta1: None,
        beta2: None,
    };
    for kind in OPTIMIZER_CASES {
        let groups = vec![group("in.*", 0.0), group("*.bias", 2.0)];
        let grouped = OptimizerOptions { groups, ..options(kind, StateDType::F32) };
        let (plain, found) =
            (train(&options(kind, StateDType::F32), &table, 2, 1.0), train(&grouped, &table, 2, 1.0));
        let before = weights(&table);
        for info in table.parameters() {
            let values = |weights: &Weights| bits(&weights[info.unit][info.range()]);
            let expected = match info.name.as_str() {
                "in.weight" | "in.bias" => values(&before),
                "out.bias" => {
                    assert!(values(&found) != values(&plain), "{kind:?}: {} goes twice as far", info.name);
                    continue;
                }
                _ => values(&plain),
            };
            assert!(values(&found) == expected, "{kind:?}: {}", info.name);
        }
    }
}

#[test]
fn frozen_parameters_stay_whatever_their_gradients_are() {
    let table = table(5);
    let group = ParameterGroup {
        pattern: "in.*".to_owned(),
        frozen: true,
        lr_scale: 1.0,
        weight_decay: None,
        beta1: None,
        beta2: None,
    };
    let (device, parts) = (device(1), table.shards(0, 1));
    for kind in OPTIMIZER_CASES {
        let options = options(kind, StateDType::F32);
        let frozen = OptimizerOptions { groups: vec![group.clone()], ..options.clone() };
        let mut found = weights(&table);
        let mut optimizer = Optimizer::new(&frozen, &table, &parts, &device).unwrap();
        let mut gradients = grads(&table, 1, 1.0);
        for info in table.parameters().iter().filter(|info| info.name.starts_with("in.")) {
            gradients[info.unit][info.range()].fill(f32::NAN);
        }
        let settings = StepSettings { step: 1, lr: 0.01, grad_scale: 1.0 };
        step(&mut optimizer, &device, &mut found, &gradients, &parts, settings, &mut Unsharded);
        let (before, mut plain) = (weights(&table), weights(&table));
        let mut unfrozen = Optimizer::new(&options, &table, &parts, &device).unwrap();
        run(&mut unfrozen, &device, &table, &mut plain, 1..=1);
        for info in table.parameters() {
            let values = |weights: &Weights| bits(&weights[info.unit][info.range()]);
            let expected = if info.name.starts_with("in.") { &before } else { &plain };
            assert!(values(&found) == values(expected), "{kind:?}: {}", info.name);
        }
        let has_state = |name: &str| save(&optimizer, &device).iter().any(|(state, _)| state.ends_with(name));
        assert!(!has_state("in.weight") && !has_state("in.bias"), "{kind:?}");
    }
}

#[test]
fn matrices_decay_and_vectors_only_if_asked() {
    let table = table(5);
    let kind = (OptimizerName::AdamW, DEFAULT);
    let decayed = |decay_norms_and_biases, groups| {
        let options = OptimizerOptions { decay_norms_and_biases, groups, ..options(kind, StateDType::F32) };
        let (after, before) = (train(&options, &table, 1, 0.0), weights(&table));
        let names = table
            .parameters()
            .iter()
            .filter(|info| after[info.unit][info.range()] != before[info.unit][info.range()]);
        names.map(|info| info.name.clone()).collect::<Vec<_>>()
    };
    assert_eq!(decayed(false, vec![]), ["wte.weight", "in.weight", "out.weight"]);
    assert_eq!(decayed(true, vec![]).len(), 7);
    let none = ParameterGroup {
        pattern: "wte*".into(),
        frozen: false,
        lr_scale: 1.0,
        weight_decay: Some(0.0),
        beta1: None,
        beta2: None,
    };
    assert_eq!(decayed(false, vec![none]), ["in.weight", "out.weight"]);
}

/// If the state of every parameter is created in the middle of a run, updates equal the updates of a new run.
#[test]
fn a_state_that_begins_late_counts_its_own_updates() {
    // If Adafactor counted the steps of the run, its bound of `1 / sqrt(step)` would be below the learning rate.
    const START: u64 = 1_000_000;
    let (table, device) = (table(100), device(1));
    let parts = table.shards(0, 1);
    for kind in OPTIMIZER_CASES {
        let train = |start: u64| {
            let options = options(kind, StateDType::F32);
            let mut optimizer = Optimizer::new(&options, &table, &parts, &device).unwrap();
            (0..table.parameters().len()).for_each(|parameter| optimizer.set_state_start(parameter, start));
            let mut weights = weights(&table);
            for number in 1..=4 {
                let settings = StepSettings { step: start + number, lr: 0.01, grad_scale: 1.0 };
                let grads = grads(&table, number, 1.0);
                step(&mut optimizer, &device, &mut weights, &grads, &parts, settings, &mut Unsharded);
            }
            (weights, optimizer.reduced_quantity(1, start + 4))
        };
        assert!(train(START) == train(0), "{kind:?}");
    }
}

/// Training a part of a unit from the middle of a run does not change the updates of the rest.
#[test]
fn parameters_of_a_unit_may_begin_at_different_times() {
    const LATE: u64 = 5;
    let (table, device) = (table(100), device(1));
    let parts = table.shards(0, 1);
    let is_late = |name: &str| name.starts_with("in.");
    for kind in OPTIMIZER_CASES {
        let train = |late_start: Option<u64>| {
            let options = options(kind, StateDType::F32);
            let mut optimizer = Optimizer::new(&options, &table, &parts, &device).unwrap();
            for (index, info) in table.parameters().iter().enumerate() {
                optimizer.set_state_start(index, late_start.filter(|_| is_late(&info.name)).unwrap_or(0));
            }
            let mut weights = weights(&table);
            run(&mut optimizer, &device, &table, &mut weights, LATE + 1..=LATE + 3);
            weights
        };
        let (late, early) = (train(Some(LATE)), train(None));
        let fresh = {
            let options = options(kind, StateDType::F32);
            let mut optimizer = Optimizer::new(&options, &table, &parts, &device).unwrap();
            let mut weights = weights(&table);
            for number in 1..=3 {
                let settings = StepSettings { step: number, lr: 0.01, grad_scale: 1.0 };
                let grads = grads(&table, LATE + number, 1.0);
                step(&mut optimizer, &device, &mut weights, &grads, &parts, settings, &mut Unsharded);
            }
            weights
        };
        for info in table.parameters() {
            let values = |weights: &Weights| bits(&weights[info.unit][info.range()]);
            let expected = if is_late(&info.name) { &fresh } else { &early };
            assert!(values(&late) == values(expected), "{kind:?}: {}", info.name);
        }
    }
}
