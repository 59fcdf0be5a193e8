//! The biases that balance the load of experts change by the same amount in each update, whatever the optimizer.

use crate::common::{OPTIMIZER_CASES, device, options, random, table, weights};
use trireme_optim::{Optimizer, OptimizerOptions, StepSettings, Unsharded};
use trireme_tensor::{ParameterClass, View, ViewMut};

#[test]
fn balance_biases_move_against_the_sign_of_their_gradient() {
    let (table, device, unit, rate) = (table(5), device(1), 1, 0.125);
    let bias = table.parameters().iter().find(|info| info.class == ParameterClass::Balance).unwrap();
    let shape = [table.units()[unit].num_elements].into();
    for kind in OPTIMIZER_CASES {
        let options = OptimizerOptions {
            weight_decay: 0.1,
            decay_norms_and_biases: true,
            balance_rate: rate,
            ..options(kind)
        };
        let mut optimizer = Optimizer::new(&options, &table, &table.shards(0, 1), &device).unwrap();
        let mut found = weights(&table).swap_remove(unit);
        found[bias.range()].fill(0.5);
        let mut expected = vec![0.5; bias.range().len()];
        for step in 1..=4 {
            let mut grads = random(found.len(), &format!("{step}"), 1.0);
            grads[bias.offset] = 0.0;
            let grads_of_bias = grads[bias.range()].iter();
            expected.iter_mut().zip(grads_of_bias).filter(|(_, grad)| **grad != 0.0).for_each(|(x, grad)| {
                *x -= rate.copysign(*grad);
            });
            let settings = StepSettings { step, lr: 0.01, grad_scale: 0.5 };
            let parameters = ViewMut::from_f32s(&mut found, shape);
            let grads = View::from_f32s(&grads, shape);
            optimizer.step_unit(&device, unit, parameters, grads, settings, &mut Unsharded).unwrap();
            assert_eq!(found[bias.range()], expected, "{kind:?}, step {step}");
        }
    }
}
