//! Losses.

use crate::{PRECISIONS, check, no_parameters, op};
use std::sync::Arc;
use trireme_base::DType;
use trireme_tensor::tape::{
    Accuracy, BinaryCrossEntropyWithLogits, CrossEntropy, MeanLoss, NewDim, Op, Recording, Reshape, RowMean,
    SquaredError,
};
use trireme_tensor::{
    BackendKind, Category, DetachedOptions, Device, DeviceOptions, Parameters, Precision, Tape, Tensor,
};
use trireme_testkit::{GradientCheck, Input, TracedDevice, test_gpu};

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
fn loss_terms_are_weighted_means_over_their_own_rows() {
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

#[test]
fn a_metric_is_reported_and_changes_no_gradient() {
    let scores =
        [[1.0, 3.0, 2.0], [2.0, 2.0, 1.0], [2.0, 2.0, 1.0], [f32::NAN, 1.0, 0.0], [0.0, 1.0, f32::NAN]];
    let classes = [1, 0, 1, 0, 1_u32];
    for backend in
        [BackendKind::Cpu, BackendKind::Detached(DetachedOptions::default())].into_iter().chain(test_gpu())
    {
        let device =
            TracedDevice::open(DeviceOptions { num_threads: 2, backend, ..DeviceOptions::default() })
                .unwrap();
        let mut x = device.zeros([5, 3].into(), DType::F32, Category::Activations).unwrap();
        device.upload(scores.as_flattened(), x.view_mut());
        let mut labels = device.zeros([5].into(), DType::U32, Category::Activations).unwrap();
        device.upload(&classes, labels.view_mut());
        for recording in [Recording::On, Recording::Off] {
            let mut tape = Tape::new(&device, recording, Precision::F32);
            let parameters =
                Parameters::zeros(&no_parameters().into(), &device, Category::Parameters).unwrap();
            let (x, labels) = (tape.input(copy(&device, &x)), tape.constant(copy(&device, &labels)));
            let in_use = device.memory().usage(Category::Activations).current;
            let mut recorder = tape.recorder(&parameters);
            recorder.apply_metric("accuracy", &Accuracy, (&x, &labels)).unwrap();
            recorder.apply_metric("entropy", &CrossEntropy, (&x, &labels)).unwrap();
            recorder.apply_metric("accuracy", &Accuracy, (&x, &labels)).unwrap();
            assert!(tape.loss().is_none());
            let [accuracy, entropy] = tape.metrics() else { panic!("{:?}", tape.metrics()) };
            // Rows: one maximum, the first of two equal maxima, the second of two, and NaN before and after the maximum.
            let found = accuracy.mean.read(&device).unwrap();
            assert_eq!((accuracy.name, found), ("accuracy", RowMean { sum: 4.0, num_rows: 10 }));
            assert_eq!((entropy.name, entropy.mean.num_rows), ("entropy", 5));
            assert!(entropy.mean.read(&device).unwrap().sum.is_nan());
            let num_sums = 2 * Device::ALIGNMENT;
            let found = device.memory().usage(Category::Activations).current;
            assert_eq!(found, in_use + num_sums, "two sums are kept, and nothing else");
            tape.clear();
            assert!(tape.metrics().is_empty());
        }
    }
}

fn copy(device: &Device, tensor: &Tensor) -> Tensor {
    let mut copy = device.empty(tensor.shape(), tensor.dtype(), Category::Activations).unwrap();
    device.copy(tensor.view(), copy.view_mut());
    copy
}
