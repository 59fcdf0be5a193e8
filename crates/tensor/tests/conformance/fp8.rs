//! Matmuls with operands rounded to fp8.

use super::{on_all, random, rounded, wide};
use std::sync::Arc;
use trireme_base::DType;
use trireme_tensor::tape::{InputActivation, Linear, Recording};
use trireme_tensor::{
    Category, Fp8Formats, Fp8Recipe, Fp8State, Initial, ParameterTable, Parameters, PassState, Precision,
    Tape,
};

/// A layer with a single weight of 1, so that its outputs are its rounded inputs.
#[test]
fn inputs_are_rounded_to_fp8_and_amaxes_are_recorded() {
    let values = random(500, "x");
    let largest = values.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
    let (found, amaxes) = on_all(|device| {
        let mut table = ParameterTable::default();
        table.begin_unit("layer");
        let layer = Linear::new(&mut table, "layer", [1, 1], Initial::ZEROS, InputActivation::Identity);
        let state = Fp8State::of_matrices(Fp8Recipe::new(Fp8Formats::Hybrid), &table, device);
        let mut state = state.unwrap();
        let mut parameters = Parameters::zeros(&Arc::new(table), device, Category::Parameters).unwrap();
        parameters.set(0, &[1.0, 0.0]);
        let scales = Some(Arc::clone(state.scales()));
        let pass = PassState { fp8: scales, ..Precision::Bf16.into() };
        let mut tape = Tape::new(device, Recording::On, pass);
        let x = tape.input(rounded(device, &values, DType::Bf16).reshaped([500, 1].into()));
        let y = tape.recorder(&parameters).apply(&Arc::new(layer), [x]).unwrap();
        let y = wide(device, &tape.take_output(&y).unwrap());
        let mut amaxes = [0.0; 3];
        state.take_amaxes(device, &mut amaxes).unwrap();
        (y, amaxes)
    });
    // Three fraction bits. Far below the largest value, the rounding step is constant.
    for (&found, &x) in found.iter().zip(&values) {
        let bound = (f64::from(x).abs() / 16.0).max(f64::from(largest) * 2.0_f64.powi(-17)) * 1.1;
        assert!((f64::from(found) - f64::from(x)).abs() <= bound, "{found} instead of {x}");
    }
    assert!((amaxes[0] - largest).abs() <= largest / 256.0 && amaxes[1] == 1.0 && amaxes[2] == 0.0);
}
