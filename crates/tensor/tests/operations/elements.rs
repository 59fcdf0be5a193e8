//! Elementwise operations.

use crate::{check, no_parameters, op};
use trireme_tensor::tape::{Add, Convert, Mul, Op, Relu, Scale, Sigmoid, Silu, Tanh};
use trireme_testkit::Input;

/// An empty shape, a single element, and numbers of elements that SIMD vectors do not divide.
const SHAPES: [&[usize]; 5] = [&[0, 3], &[1], &[1, 1, 1], &[3, 5, 7], &[2, 129]];

/// Checks an operation without parameters on inputs of equal shapes.
fn check_elementwise(op: &Op, num_inputs: usize, function: impl Fn(&[f64]) -> f64) {
    for shape in SHAPES {
        let names = ["left", "right"];
        let inputs: Vec<Input> = names[..num_inputs].iter().map(|name| Input::random(shape, name)).collect();
        check(op, &no_parameters(), &inputs, &|inputs, _| {
            let element = |index| {
                let values: Vec<f64> = inputs.iter().map(|input| input[index]).collect();
                function(&values)
            };
            (0..inputs[0].len()).map(element).collect()
        });
    }
}

#[test]
fn sums_and_products_of_elements() {
    check_elementwise(&Op::from(&Add), 2, |x| x[0] + x[1]);
    check_elementwise(&Op::from(&Mul), 2, |x| x[0] * x[1]);
    check_elementwise(&op(Scale(-0.75)), 1, |x| -0.75 * x[0]);
}

#[test]
fn sums_of_values_of_two_types_are_in_f32() {
    for (left, right) in [(true, false), (false, true)] {
        let input = |name, is_f32| {
            let input = Input::random(&[3, 37], name);
            if is_f32 { input.in_f32() } else { input }
        };
        let inputs = [input("left", left), input("right", right)];
        check(&Op::from(&Add), &no_parameters(), &inputs, &|x, _| {
            x[0].iter().zip(&x[1]).map(|(left, right)| left + right).collect()
        });
    }
}

#[test]
fn values_in_the_precision_of_the_tape() {
    for input in [Input::random(&[3, 37], "x"), Input::random(&[3, 37], "x").in_f32()] {
        check(&Op::from(&Convert), &no_parameters(), &[input], &|x, _| x[0].clone());
    }
}

#[test]
fn functions_of_elements() {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    check_elementwise(&Op::from(&Sigmoid), 1, |x| sigmoid(x[0]));
    check_elementwise(&Op::from(&Tanh), 1, |x| x[0].tanh());
    check_elementwise(&Op::from(&Relu), 1, |x| x[0].max(0.0));
    check_elementwise(&Op::from(&Silu), 1, |x| x[0] * sigmoid(x[0]));
}
