//! Exchanging momentum gives the same results as exchanging gradients.

use crate::common::{DEFAULT, OPTIMIZER_CASES, device, options, random, table, weights};
use trireme_optim::{
    Optimizer, OptimizerName, OptimizerOptions, OptimizerSettings, ParameterGroup, ReducedQuantity,
    StepSettings, Unsharded,
};
use trireme_tensor::{View, ViewMut};

#[test]
fn momentum_may_be_summed_instead_of_gradients() {
    let (table, device) = (table(5), device(1));
    let parts = table.shards(0, 1);
    let unit = 1;
    let len = table.units()[unit].num_elements;
    let shape = [len].into();
    let kinds = [OPTIMIZER_CASES[9], OPTIMIZER_CASES[10]];
    for (kind, first) in kinds.into_iter().flat_map(|kind| [(kind, 1), (kind, 501)]) {
        let options = OptimizerOptions { weight_decay: 0.1, ..options(kind) };
        let new = || {
            let mut optimizer = Optimizer::new(&options, &table, &parts, &device).unwrap();
            for parameter in 0..table.parameters().len() {
                optimizer.set_state_start(parameter, first - 1);
            }
            optimizer
        };
        let (mut ranks, mut oracle) = ([new(), new()], new());
        let start = weights(&table).swap_remove(unit);
        let (mut found, mut expected) = ([start.clone(), start.clone()], start);
        let mut exchanges = Vec::new();
        for number in first..first + 6 {
            let own = [0, 1].map(|rank| random(len, &format!("{number} {rank}"), 1.0));
            let sum: Vec<f32> = own[0].iter().zip(&own[1]).map(|(a, b)| a + b).collect();
            let settings = StepSettings { step: number, lr: 0.01, grad_scale: 0.5 };
            let (parameters, grads) =
                (ViewMut::from_f32s(&mut expected, shape), View::from_f32s(&sum, shape));
            oracle.step_unit(&device, unit, parameters, grads, settings, &mut Unsharded).unwrap();
            exchanges.push(oracle.reduced_quantity(unit, number));
            let momentum = match oracle.reduced_quantity(unit, number) {
                ReducedQuantity::Gradients => sum,
                ReducedQuantity::Momentum => {
                    let mut momenta = own;
                    for (rank, momentum) in ranks.iter_mut().zip(&mut momenta) {
                        let settings = StepSettings { grad_scale: 1.0, ..settings };
                        rank.gradient_to_momentum(
                            &device,
                            unit,
                            ViewMut::from_f32s(momentum, shape),
                            settings,
                        );
                    }
                    momenta[0].iter().zip(&momenta[1]).map(|(a, b)| a + b).collect()
                }
            };
            for (rank, found) in ranks.iter_mut().zip(&mut found) {
                let (parameters, sum) = (ViewMut::from_f32s(found, shape), View::from_f32s(&momentum, shape));
                match rank.reduced_quantity(unit, number) {
                    ReducedQuantity::Gradients => {
                        rank.step_unit(&device, unit, parameters, sum, settings, &mut Unsharded).unwrap();
                    }
                    ReducedQuantity::Momentum => {
                        rank.step_from_momentum(&device, unit, parameters, sum, settings)
                    }
                }
            }
            assert_eq!(found[0], found[1]);
            for (found, expected) in found[0].iter().zip(&expected) {
                assert!((found - expected).abs() < 1e-6, "step {number}: {found} {expected}");
            }
        }
        assert!(exchanges.contains(&ReducedQuantity::Momentum) && exchanges[0] == ReducedQuantity::Gradients);
    }
}

/// A frozen parameter has no momentum. Its gradient must be cleared, so that it does not affect compressed momentum.
#[test]
fn frozen_parameters_have_no_part_in_the_exchange_of_momentum() {
    let (table, device) = (table(5), device(1));
    let parts = table.shards(0, 1);
    let kind = (OptimizerName::OneBitAdam, OptimizerSettings { freeze_step: 1, ..DEFAULT });
    let frozen = |pattern: &str| {
        let group = ParameterGroup {
            pattern: pattern.to_owned(),
            frozen: true,
            lr_scale: 1.0,
            weight_decay: None,
            beta1: None,
            beta2: None,
        };
        let options = OptimizerOptions { groups: vec![group], ..options(kind) };
        Optimizer::new(&options, &table, &parts, &device).unwrap()
    };
    let all = frozen("wte.*");
    assert_eq!(
        [0, 1, 2].map(|unit| all.reduced_quantity(unit, 3)),
        [ReducedQuantity::Gradients, ReducedQuantity::Momentum, ReducedQuantity::Momentum]
    );
    let mut part = frozen("in.*");
    let unit = 1;
    let mut grads = random(table.units()[unit].num_elements, "grads", 1.0);
    let shape = [grads.len()].into();
    let settings = StepSettings { step: 3, lr: 0.01, grad_scale: 1.0 };
    part.gradient_to_momentum(&device, unit, ViewMut::from_f32s(&mut grads, shape), settings);
    for info in table.parameters().iter().filter(|info| info.unit == unit) {
        let is_zero = grads[info.range()].iter().all(|value| *value == 0.0);
        assert_eq!(is_zero, info.name.starts_with("in."), "{}", info.name);
    }
}
