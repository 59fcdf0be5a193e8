//! Operations with random numbers, and embedding bags.

use crate::{PRECISIONS, check, no_parameters, op};
use std::sync::Arc;
use trireme_base::{DType, RandomKey};
use trireme_tensor::tape::{Dropout, EmbeddingBag, Randomness, Recording};
use trireme_tensor::{
    Category, Device, DeviceOptions, Initial, Parameter, ParameterTable, Parameters, PassState, Precision,
    Tape, Tensor, View,
};
use trireme_testkit::Input;

#[test]
fn dropout_masks_follow_the_random_key() {
    for (shape, rate) in [(&[3_usize, 5][..], 0.5), (&[2, 7, 40], 0.1), (&[1], 0.0), (&[300, 9], 0.9)] {
        let reference = |x: &[Vec<f64>], _: &[f64]| -> Vec<f64> {
            let mut words = vec![0; x[0].len()];
            RandomKey::new(0, "layer").derived(0).fill_words_from(0, &mut words);
            let threshold = (f64::from(rate) * 2.0_f64.powi(32)) as u32;
            let scale = |word: &u32| if *word < threshold { 0.0 } else { 1.0 / (1.0 - f64::from(rate)) };
            x[0].iter().zip(&words).map(|(x, word)| x * scale(word)).collect()
        };
        check(&op(Dropout::new("layer", rate)), &no_parameters(), &[Input::random(shape, "x")], &reference);
    }
}

/// Returns the output of dropout applied to ones, with two rows per sample.
fn dropped(num_samples: usize, randomness: Randomness, recording: Recording) -> Vec<f32> {
    let randomness = Randomness { num_samples, ..randomness };
    let device = Device::cpu(DeviceOptions { num_threads: 2, ..DeviceOptions::default() }).unwrap();
    let mut ones = device.empty([2 * num_samples, 37].into(), DType::F32, Category::Activations).unwrap();
    device.upload(&vec![1.0_f32; 2 * num_samples * 37], ones.view_mut());
    let pass = PassState { randomness, ..Precision::F32.into() };
    let mut tape = Tape::new(&device, recording, pass);
    let parameters = Parameters::zeros(&Arc::new(no_parameters()), &device, Category::Parameters).unwrap();
    let x = tape.input(ones);
    let y = tape.recorder(&parameters).apply(&Arc::new(Dropout::new("layer", 0.3)), [x]).unwrap();
    device.read(tape.take_output(&y).unwrap().view()).unwrap()
}

#[test]
fn samples_lose_the_same_elements_in_any_microbatch() {
    let randomness = Randomness { seed: 3, step: 5, first_sample: 8, num_samples: 0 };
    let whole = dropped(6, randomness, Recording::On);
    let second = dropped(2, Randomness { first_sample: 12, ..randomness }, Recording::On);
    assert_eq!(second, whole[8 * 37..]);
    assert_ne!(dropped(6, Randomness { step: 6, ..randomness }, Recording::On), whole);
    assert_ne!(dropped(6, Randomness { seed: 4, ..randomness }, Recording::On), whole);
    let num_dropped = whole.iter().filter(|&&x| x == 0.0).count();
    assert!((90..=180).contains(&num_dropped), "{num_dropped} of {}", whole.len());
    assert_eq!(dropped(6, randomness, Recording::Off), [1.0; 12 * 37]);
}

#[test]
fn bags_of_rows() {
    let (num_rows, cols, bag_len) = (7, 5, 3);
    let mut table = ParameterTable::default();
    table.begin_unit("unit");
    let span = table.add(Parameter::embedding("table", &[num_rows, cols], Initial::ZEROS));
    for (is_mean, lens) in [(false, None), (true, None), (true, Some([2_u32, 0, 3, 1]))] {
        let reference = move |inputs: &[Vec<f64>], table: &[f64]| {
            let mut y = vec![0.0; 4 * cols];
            for (bag, y) in y.chunks_mut(cols).enumerate() {
                let len = inputs.get(1).map_or(bag_len, |lens| lens[bag] as usize);
                for id in &inputs[0][bag * bag_len..][..len] {
                    let row = &table[*id as usize * cols..][..cols];
                    let factor = if is_mean { 1.0 / len as f64 } else { 1.0 };
                    y.iter_mut().zip(row).for_each(|(y, row)| *y += factor * row);
                }
            }
            y
        };
        let mut inputs = vec![Input::ids(&[4, bag_len], &[0, 6, 6, 1, 2, 3, 5, 5, 5, 4, 0, 1])];
        inputs.extend(lens.map(|lens| Input::ids(&[4], &lens)));
        let bag = op(EmbeddingBag { table: span, is_mean, is_padded: lens.is_some() });
        check(&bag, &table, &inputs, &reference);
    }
}

#[test]
fn dropout_gradients_have_the_mask_of_the_output() {
    // With ones as inputs and as output gradients, the input gradient equals the output, because both have the same mask.
    for precision in PRECISIONS {
        let device = Device::cpu(DeviceOptions { num_threads: 1, ..DeviceOptions::default() }).unwrap();
        let parameters =
            Parameters::zeros(&Arc::new(no_parameters()), &device, Category::Parameters).unwrap();
        let ones = || {
            let mut ones = device.empty([4, 33].into(), precision.dtype(), Category::Activations).unwrap();
            device.convert(View::from_f32s(&[1.0; 4 * 33], [4, 33].into()), ones.view_mut());
            ones
        };
        let mut tape = Tape::new(&device, Recording::On, precision);
        let x = tape.input(ones());
        let place = x.id();
        let y = tape.recorder(&parameters).apply(&Arc::new(Dropout::new("layer", 0.4)), [x]).unwrap();
        let made = tape.take_output(&y).unwrap();
        tape.backward(&parameters, [(y.id(), ones())], &mut crate::readers::NoParameters).unwrap();
        let bytes = |x: &Tensor| device.read::<u8>(x.view().as_bytes()).unwrap();
        assert_eq!(bytes(&tape.take_grad(place).unwrap()), bytes(&made), "{precision}");
    }
}
