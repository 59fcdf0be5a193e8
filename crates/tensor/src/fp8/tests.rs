use super::*;
use LinearOperand::{Input, OutputGrad, Weight};

fn recipe(formats: Fp8Formats, amax_history_len: usize, margin: u32) -> Fp8Recipe {
    Fp8Recipe { formats, amax_history_len, margin }
}

#[test]
fn a_scale_is_the_largest_power_of_two_that_leaves_room() {
    let mut amaxes = vec![1.0_f32, 448.0, 57_344.0, 1e-20, 3e20, 1e-3, 0.7];
    amaxes.extend(
        [448.0_f32, 448.0 * 1024.0, 57_344.0 / 4096.0].iter().flat_map(|x| [x.next_down(), x.next_up()]),
    );
    for formats in [Fp8Formats::E4m3, Fp8Formats::Hybrid] {
        for (operand, margin) in [(Input, 0), (Weight, 3), (OutputGrad, 0), (OutputGrad, 1)] {
            let is_wide = formats == Fp8Formats::Hybrid && operand == OutputGrad;
            let max = if is_wide { 57_344.0 } else { 448.0 };
            for &amax in &amaxes {
                let exponent = recipe(formats, 1, margin).scale_exponent(operand, amax);
                let scaled = f64::from(amax) * 2.0_f64.powi(exponent + margin as i32);
                assert!(
                    scaled <= max && 2.0 * scaled > max,
                    "{formats}, {operand:?}, {amax:e}: 2^{exponent}"
                );
            }
        }
    }
}

#[test]
fn scales_have_bounds() {
    let recipe = recipe(Fp8Formats::Hybrid, 1, 16);
    for (amax, exponent) in [(0.0, 100), (1e-45, 100), (1e-37, 100), (1e37, -100), (f32::MAX, -100)] {
        for operand in [Input, Weight, OutputGrad] {
            assert_eq!(recipe.scale_exponent(operand, amax), exponent, "{amax:e}");
        }
    }
    let most = Fp8Recipe { margin: u32::MAX, ..recipe };
    assert_eq!(most.scale_exponent(Input, 1.0), -100);
}

fn history_max(state: &Fp8State) -> Vec<f32> {
    state.scales.history_max.iter().map(|max| f32::from_bits(max.load(Ordering::Relaxed))).collect()
}

fn device() -> Device {
    Device::cpu(crate::DeviceOptions { num_threads: 1, ..Default::default() }).unwrap()
}

fn state(amax_history_len: usize) -> Fp8State {
    let layers = vec![ParameterId(7), ParameterId(3)];
    Fp8State::new(recipe(Fp8Formats::Hybrid, amax_history_len, 0), layers, &device()).unwrap()
}

#[test]
fn histories_hold_the_newest_steps() {
    let mut state = state(2);
    assert_eq!(state.layers(), [ParameterId(3), ParameterId(7)]);
    let mut found = Vec::new();
    for step in [5.0, 4.0, 1.0, 2.0] {
        state.advance(&[step, 10.0 * step, 0.0, 1.0, 1.0, 1.0]);
        found.push(history_max(&state)[..3].to_vec());
    }
    let expected = [[5.0, 50.0, 0.0], [5.0, 50.0, 0.0], [4.0, 40.0, 0.0], [2.0, 20.0, 0.0]];
    assert_eq!(found, expected);
    assert_eq!(state.history(0), (&[2.0, 1.0, 20.0, 10.0, 0.0, 0.0][..], [3, 2]));
}

#[test]
fn a_step_has_the_largest_amax_of_its_passes() {
    let device = device();
    let mut state = state(2);
    for values in [[1.0, -3.0], [2.0, f32::INFINITY], [0.5, f32::NAN]] {
        let layer = state.scales().layer(ParameterId(7), true).unwrap();
        layer.quantize(&device, Weight, View::from_f32s(&values, [2].into())).unwrap();
    }
    let mut amaxes = [1.0; 6];
    state.take_amaxes(&device, &mut amaxes).unwrap();
    assert_eq!(amaxes, [0.0, 0.0, 0.0, 0.0, 3.0, 0.0]);
    state.take_amaxes(&device, &mut amaxes).unwrap();
    assert_eq!(amaxes, [0.0; 6], "they are taken once");
    assert!(state.scales().layer(ParameterId(5), true).is_none());
}

#[test]
fn a_saved_history_is_restored() {
    let kept: Vec<f32> = (1..=9).map(|x| x as f32).collect();
    for (len, expected) in [(2, [2.0, 5.0, 8.0]), (3, [3.0, 6.0, 9.0]), (5, [3.0, 6.0, 9.0])] {
        let mut state = state(len);
        assert!(state.restore(1, &kept, &[3, 3]));
        assert_eq!(history_max(&state), [&[0.0; 3][..], &expected].concat());
        state.advance(&[0.0; 6]);
        let mut resumed = self::state(len);
        let (history, shape) = state.history(1);
        assert!(resumed.restore(1, history, &shape));
        assert_eq!(resumed.history, state.history);
        assert_eq!(history_max(&resumed), history_max(&state));
    }
}

#[test]
fn invalid_histories_are_refused() {
    let mut state = state(3);
    for (kept, shape) in [
        (vec![1.0; 9], vec![9]),
        (vec![1.0; 6], vec![2, 3]),
        (vec![1.0; 8], vec![3, 3]),
        (vec![], vec![3, 0]),
        (vec![-1.0; 9], vec![3, 3]),
        (vec![f32::NAN; 9], vec![3, 3]),
        (vec![f32::INFINITY; 9], vec![3, 3]),
    ] {
        assert!(!state.restore(0, &kept, &shape), "{kept:?} {shape:?}");
        assert_eq!(history_max(&state), [0.0; 6]);
    }
}
