//! Losses.

use crate::{PRECISIONS, check, no_parameters, op};
use std::sync::Arc;
use trireme_tensor::tape::{
    BinaryCrossEntropyWithLogits, CrossEntropy, MeanLoss, NewDim, Op, Reshape, SquaredError,
};
use trireme_testkit::{GradientCheck, Input};

#[test]
fn losses_of_classes() {
    for (rows, classes) in [(3, 5), (1, 1), (4, 33)] {
        let targets: Vec<u32> = (0..rows as u32).map(|row| row * 7 % classes as u32).collect();
        let reference = |x: &[Vec<f64>], _: &[f64]| -> Vec<f64> {
            let loss = |(row, &class): (&[f64], &f64)| {
                row.iter().map(|x| x.exp()).sum::<f64>().ln() - row[class as usize]
            };
            vec![x[0].chunks(classes).zip(&x[1]).map(loss).sum::<f64>() / rows as f64]
        };
        let inputs = [Input::random(&[rows, classes], "x"), Input::ids(&[rows], &targets)];
        check(&Op::from(&CrossEntropy), &no_parameters(), &inputs, &reference);
    }
}

#[test]
fn losses_of_elements() {
    for shape in [&[3_usize, 5][..], &[1], &[2, 2, 37]] {
        let targets = Input::random(shape, "targets").constant();
        let inputs = [Input::random(shape, "x"), targets];
        let mean = |x: &[Vec<f64>], loss: &dyn Fn(f64, f64) -> f64| -> Vec<f64> {
            vec![x[0].iter().zip(&x[1]).map(|(&x, &target)| loss(x, target)).sum::<f64>() / x[0].len() as f64]
        };
        let squared = |x: &[Vec<f64>], _: &[f64]| mean(x, &|x, target| (x - target).powi(2));
        check(&op(MeanLoss(SquaredError)), &no_parameters(), &inputs, &squared);
        let entropy = |x: &[Vec<f64>], _: &[f64]| mean(x, &|x, target| x.exp().ln_1p() - x * target);
        check(&op(MeanLoss(BinaryCrossEntropyWithLogits)), &no_parameters(), &inputs, &entropy);
    }
}

#[test]
fn several_terms_of_a_loss_have_their_weights_and_rows() {
    let (rows, classes) = (6, 4);
    let reference = |x: &[Vec<f64>], _: &[f64]| -> Vec<f64> {
        let entropy = |(row, &class): (&[f64], &f64)| {
            row.iter().map(|x| x.exp()).sum::<f64>().ln() - row[class as usize]
        };
        let entropy = x[0].chunks(classes).zip(&x[1]).map(entropy).sum::<f64>() / rows as f64;
        let square = x[0].iter().zip(&x[2]).map(|(x, target)| (x - target).powi(2)).sum::<f64>();
        vec![entropy + 0.25 * square / (rows * classes) as f64]
    };
    let reshape = Arc::new(Reshape(vec![NewDim::Size(2), NewDim::Rest]));
    let square = Arc::new(MeanLoss(SquaredError));
    for precision in PRECISIONS {
        GradientCheck {
            name: format!("two terms in {precision}"),
            run: &|recorder, inputs| {
                let [x, targets, values] = inputs.try_into().unwrap();
                recorder.apply_loss(&CrossEntropy, (&x, targets), 1.0)?;
                let (x, values) = (recorder.apply(&reshape, [x])?, recorder.apply(&reshape, [values])?);
                recorder.apply_loss(&square, (x, values), 0.25)?;
                Ok(None)
            },
            table: no_parameters(),
            precision,
            inputs: vec![
                Input::random(&[rows, classes], "x"),
                Input::ids(&[rows], &[0, 3, 1, 2, 0, 1]),
                Input::random(&[rows, classes], "values").constant(),
            ],
            reference: &reference,
        }
        .check();
    }
}
