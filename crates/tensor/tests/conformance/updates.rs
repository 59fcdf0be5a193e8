//! Optimizer updates.

use super::{assert_near, empty, on_all, on_all_near, random, shaped, tensor};
use std::sync::Arc;
use trireme_base::DType;
use trireme_tensor::updates::{
    AdafactorVectorStep, AdamWStep, LarsStep, LionStep, MomentumStep, MuonStep, Update,
};
use trireme_tensor::{
    Device, FactoredMatrix, FactoredMoments, FactoredStep, Initial, LeafRun, OptimizerState, Parameter,
    ParameterTable, Piece, Pieces, Precision, StateDType, StepScale, UpdatePass,
};

const LEN: usize = 3000;

const ADAMW: AdamWStep = AdamWStep {
    lr: 1e-2,
    beta2: 0.95,
    weight_decay: 0.1,
    grad_scale: 0.5,
    step: 2,
    num_second_updates: 2,
    ..AdamWStep::DEFAULT
};

/// Computes one AdamW update (Loshchilov, Hutter 2019) from zero moments: the parameter and both moments.
fn adamw(parameter: f64, gradient: f64) -> [f64; 3] {
    let wide = |x: f32| f64::from(x);
    let g = gradient * wide(ADAMW.grad_scale);
    let (first, second) = ((1.0 - wide(ADAMW.beta1)) * g, (1.0 - wide(ADAMW.beta2)) * g * g);
    let correction = |beta: f32| 1.0 - wide(beta).powi(ADAMW.step as i32);
    let (mean, square) = (first / correction(ADAMW.beta1), second / correction(ADAMW.beta2));
    let kept = parameter * (1.0 - wide(ADAMW.lr) * wide(ADAMW.weight_decay));
    [kept - wide(ADAMW.lr) * mean / (square.sqrt() + wide(ADAMW.epsilon)), first, second]
}

#[test]
fn adamw_updates_parameters_and_states_and_norms_are_summed() {
    for dtype in [StateDType::F32, StateDType::Bf16, StateDType::Int8] {
        let (parameters, gradients) = (random(LEN, "parameters"), random(LEN, "gradients"));
        let [found, first, second] = on_all(|device| {
            let pieces = Arc::new(Pieces::whole(LEN));
            let (mut p, g) = (tensor(device, &parameters), tensor(device, &gradients));
            let state = |is_square| OptimizerState::zeros(&pieces, dtype, is_square, device).unwrap();
            let mut states = [state(false), state(true)];
            let updates = Arc::new(vec![Update::AdamW(ADAMW)]);
            let pass =
                UpdatePass { pieces: &pieces, updates: &updates, scales: None, rounding_seed: 3, sums: None };
            device.update(pass, p.view_mut(), g.view(), &mut states);
            let all = 0..pieces.as_slice().len();
            let read = |state: &OptimizerState| {
                let mut values = vec![0.0; LEN];
                state.read(&pieces, all.clone(), device, &mut values).unwrap();
                values
            };
            let [first, second] = states.each_ref().map(read);
            // Writing back values that were read does not change the state.
            states[0].write(&pieces, all.clone(), device, &first);
            assert_eq!(read(&states[0]), first);
            [device.read(p.view()).unwrap(), first, second]
        });
        let [sums] = on_all_near(1e-6, |device| {
            let pieces = Arc::new(Pieces::whole(LEN));
            let (mut p, g) = (tensor(device, &found), tensor(device, &gradients));
            let mut sums = empty(device, [pieces.as_slice().len(), 2], DType::F64);
            let norms = Arc::new(vec![Update::Norms { grad_scale: 0.5 }]);
            let (updates, taken) = (&norms, Some(sums.view_mut()));
            let pass = UpdatePass { pieces: &pieces, updates, scales: None, rounding_seed: 3, sums: taken };
            device.update(pass, p.view_mut(), g.view(), &mut []);
            let sums: Vec<f64> = device.read(sums.view()).unwrap();
            [sums.iter().map(|&sum| sum as f32).collect()]
        });
        let pairs = parameters.iter().zip(&gradients);
        let expected: Vec<[f64; 3]> = pairs.map(|(&p, &g)| adamw(f64::from(p), f64::from(g))).collect();
        assert_near(&found, expected.iter().map(|found| found[0]), 1e-6, "parameter");
        let (narrow, narrow_square) = match dtype {
            StateDType::F32 => (1e-6, 1e-6),
            StateDType::Bf16 => (4e-3, 4e-3),
            StateDType::Int8 => (2e-3, 2e-2),
        };
        assert_near(&first, expected.iter().map(|found| found[1]), narrow, "first moment");
        assert_near(&second, expected.iter().map(|found| found[2]), narrow_square, "second moment");
        let squares = |values: &[f32], scale: f64| -> f64 {
            values.iter().map(|&x| (scale * f64::from(x)).powi(2)).sum()
        };
        let [of_parameters, of_gradients] =
            [0, 1].map(|which| sums.iter().skip(which).step_by(2).map(|&sum| f64::from(sum)).sum::<f64>());
        assert!((of_parameters / squares(&found, 1.0) - 1.0).abs() < 1e-5);
        assert!((of_gradients / squares(&gradients, 0.5) - 1.0).abs() < 1e-5);
    }
}

/// Returns every update with a learning rate, and the number of its states.
fn updates(lr: f32) -> [(Update, usize); 18] {
    let adam = AdamWStep { lr, ..ADAMW };
    let quasi = AdamWStep { nu: 0.75, ..adam };
    let rms = AdafactorVectorStep { lr, mixing: 0.1, parameter_factor: 0.99, grad_scale: 0.5 };
    let sgd = MomentumStep { lr, momentum: 0.9, nesterov: true, weight_decay: 0.1, grad_scale: 0.5, step: 2 };
    [
        (Update::AdamW(adam), 2),
        (Update::AdamW(quasi), 2),
        (Update::Adam(adam), 2),
        (Update::FrozenAdam(adam), 2),
        (Update::FrozenAdamFromMomentum(adam), 2),
        (Update::FrozenAdamMomentum(adam), 1),
        (Update::Momentum(sgd), 1),
        (Update::Momentum(MomentumStep { nesterov: false, step: 1, ..sgd }), 1),
        (Update::Lion(LionStep { lr, beta1: 0.9, beta2: 0.95, weight_decay: 0.1, grad_scale: 0.5 }), 1),
        (Update::Lars(LarsStep { lr, momentum: 0.9, weight_decay: 0.1, grad_scale: 0.5 }), 1),
        (Update::LambMoments(adam), 2),
        (Update::Lamb(adam), 2),
        (Update::AdafactorVectorMoment(rms), 1),
        (Update::AdafactorVector(rms), 1),
        (Update::MuonMomentum(MuonStep { momentum: 0.95, nesterov: true, grad_scale: 0.5 }), 1),
        (Update::MuonMomentum(MuonStep { momentum: 0.95, nesterov: false, grad_scale: 0.5 }), 1),
        (Update::Descend { lr, parameter_factor: 0.9 }, 0),
        (Update::Sign { lr }, 0),
    ]
}

/// Returns contiguous pieces of uneven lengths, with one of `num_rules` rules each.
fn uneven_pieces(num_rules: usize) -> Pieces {
    let mut pieces = Vec::new();
    let mut start = 0;
    while start < LEN {
        let index = pieces.len();
        let len = (1 + 37 * index % 113 + if index == 3 { 700 } else { 0 }).min(LEN - start);
        let update = 7 * index % num_rules;
        pieces.push(Piece { position: (1 << 33) + start, start, state: start, len, update });
        start += len;
    }
    Pieces::new(pieces)
}

#[test]
fn every_update_has_the_same_bits_on_every_device() {
    const NUM_RATES: usize = 11;
    let pieces = Arc::new(uneven_pieces(NUM_RATES));
    let all = 0..pieces.as_slice().len();
    let [parameters, gradients, first, second] =
        ["parameters", "gradients", "first", "second"].map(|name| random(LEN, name));
    let positive = |values: &[f32]| -> Vec<f32> { values.iter().map(|x| x.abs()).collect() };
    for rule in 0..updates(0.0).len() {
        let at_rate = |rate: usize| updates(0.01 * (rate + 1) as f32)[rule];
        let (update, num_states) = at_rate(0);
        // These change moments only, and sum squares.
        let is_moment = matches!(update, Update::LambMoments(_) | Update::AdafactorVectorMoment(_));
        let rules = Arc::new((0..NUM_RATES).map(|rate| at_rate(rate).0).collect::<Vec<_>>());
        for dtype in [StateDType::F32, StateDType::Bf16, StateDType::Int8] {
            let run = |device: &Device| {
                let (mut p, g) = (tensor(device, &parameters), tensor(device, &gradients));
                // Adafactor's second moment is its first state.
                let is_adafactor =
                    matches!(update, Update::AdafactorVector(_) | Update::AdafactorVectorMoment(_));
                let mut states: Vec<OptimizerState> = (0..num_states)
                    .map(|index| {
                        let is_square = index == 1 || is_adafactor;
                        let mut state = OptimizerState::zeros(&pieces, dtype, is_square, device).unwrap();
                        let values = [&first, &second][index];
                        let values = if is_square { positive(values) } else { values.clone() };
                        state.write(&pieces, all.clone(), device, &values);
                        state
                    })
                    .collect();
                let mut sums = empty(device, [all.len(), 2], DType::F64);
                let pass = UpdatePass {
                    pieces: &pieces,
                    updates: &rules,
                    scales: None,
                    rounding_seed: 3,
                    sums: is_moment.then(|| sums.view_mut()),
                };
                device.update(pass, p.view_mut(), g.view(), &mut states);
                let read = |index: usize| {
                    let mut values = vec![0.0; LEN];
                    if let Some(state) = states.get(index) {
                        state.read(&pieces, all.clone(), device, &mut values).unwrap();
                    }
                    values
                };
                let sums: Vec<f64> = if is_moment { device.read(sums.view()).unwrap() } else { Vec::new() };
                let sums: Vec<f32> = sums.iter().map(|&sum| sum as f32).collect();
                ([device.read::<f32>(p.view()).unwrap(), read(0), read(1)], [sums])
            };
            let [found, _, _] = on_all(|device| run(device).0);
            assert_eq!(found == parameters, is_moment, "{update:?} changes parameters");
            on_all_near(1e-6, |device| run(device).1);
        }
    }
}

#[test]
fn learning_rates_are_scaled_by_sums_over_whole_parameters() {
    let (parameters, gradients) = (random(LEN, "parameters"), random(LEN, "gradients"));
    let rms = AdafactorVectorStep { lr: 0.1, mixing: 0.5, parameter_factor: 0.9, grad_scale: 2.0 };
    let [found, sums, moments] = on_all_near(1e-6, |device| {
        let pieces = Arc::new(Pieces::whole(LEN));
        let (mut p, g) = (tensor(device, &parameters), tensor(device, &gradients));
        let num_pieces = pieces.as_slice().len();
        let mut of_pieces = empty(device, [num_pieces, 2], DType::F64);
        let updates = Arc::new(vec![Update::Norms { grad_scale: 2.0 }]);
        let taken = Some(of_pieces.view_mut());
        let pass =
            UpdatePass { pieces: &pieces, updates: &updates, scales: None, rounding_seed: 0, sums: taken };
        device.update(pass, p.view_mut(), g.view(), &mut []);
        // The second parameter is counted by another rank.
        let runs =
            [LeafRun { pieces: 0..num_pieces, first_leaf: 3 }, LeafRun { pieces: 0..0, first_leaf: 0 }];
        let mut sums = empty(device, [4], DType::F64);
        device.leaf_sums(of_pieces.view(), Arc::new(runs.to_vec()), sums.view_mut());
        let of = |start: usize| sums.view().part(start, [2].into());
        let num_elements = LEN;
        let adafactor =
            StepScale::Adafactor { lr: 0.5, is_relative: true, clip_threshold: 1.0, num_elements };
        let rules = Arc::new(vec![adafactor, StepScale::TrustRatio { weight_decay: 0.5 }]);
        let mut scales = empty(device, [2], DType::F32);
        device.step_scales(Arc::clone(&rules), [of(0), of(2)], scales.view_mut());
        let mut states = [OptimizerState::zeros(&pieces, StateDType::F32, true, device).unwrap()];
        states[0].write(&pieces, 0..num_pieces, device, &vec![4.0; LEN]);
        let updates = Arc::new(vec![Update::AdafactorVector(rms), Update::AdafactorVector(rms)]);
        let scales = Some(scales.view());
        let pass = UpdatePass { pieces: &pieces, updates: &updates, scales, rounding_seed: 0, sums: None };
        device.update(pass, p.view_mut(), g.view(), &mut states);
        let mut moments = tensor(device, &[1.0, 2.0]);
        device.factored_moments(of(0), 10, 0.25, moments.view_mut());
        let narrow = |sums: Vec<f64>| sums.iter().map(|&sum| sum as f32).collect();
        [
            device.read(p.view()).unwrap(),
            narrow(device.read(sums.view()).unwrap()),
            device.read(moments.view()).unwrap(),
        ]
    });
    let squares =
        |values: &[f32], scale: f64| -> f64 { values.iter().map(|&x| (scale * f64::from(x)).powi(2)).sum() };
    let (of_parameter, of_update) = (squares(&parameters, 1.0), squares(&gradients, 2.0));
    assert_near(&sums, [of_parameter, 0.0, of_update, 0.0], 1e-5, "sum");
    let excess = (of_update / LEN as f64).sqrt().max(1.0);
    let scale = (of_parameter / LEN as f64).sqrt() * 0.5 / excess;
    let updated = parameters
        .iter()
        .zip(&gradients)
        .map(|(&p, &g)| 0.9 * f64::from(p) - 0.1 * scale * 2.0 * f64::from(g) / 2.0);
    assert_near(&found, updated, 1e-5, "parameter");
    assert_near(&moments, [0.75 + 0.25 * of_parameter / 10.0, 1.5], 1e-5, "moment");
}

#[test]
fn a_factored_moment_is_the_product_of_its_row_and_its_column() {
    let (rows, cols, len) = (6, 10, 60);
    let mut table = ParameterTable::default();
    table.begin_unit("matrix");
    table.add(Parameter::matrix("weight", &[rows, cols], Initial::ZEROS));
    let matrix = FactoredMatrix::new(&table.parameters()[0], &table.units()[0], 0..len);
    let (parameters, gradients) = (random(len, "parameters"), random(len, "gradients"));
    let (row_moments, col_moments) = ([0.5_f32, 1.0, 2.0, 0.25, 3.0, 1.5], [1.0_f32; 10]);
    let step = FactoredStep { offset: 0, parameter_factor: 0.9, grad_scale: 2.0 };
    let [sums, squares, found] = on_all_near(1e-6, |device| {
        let (mut p, g) = (tensor(device, &parameters), tensor(device, &gradients));
        let mut sums = empty(device, [rows + cols], DType::F64);
        device.factored_sums(matrix.clone(), g.view(), 2.0, sums.view_mut());
        let pieces = Arc::new(Pieces::whole(len));
        let moments = [tensor(device, &row_moments), tensor(device, &col_moments)];
        let [rows, cols] = moments.each_ref().map(|moments| moments.view());
        let mut row_mean = empty(device, [1], DType::F64);
        device.sum_elements(rows, 6.0, row_mean.view_mut());
        let (moments, lr) =
            (FactoredMoments { rows, cols, row_mean: row_mean.view() }, tensor(device, &[0.1]));
        let mut squares = empty(device, [1, 2], DType::F64);
        device.factored_squares(Arc::clone(&pieces), step, moments, g.view(), squares.view_mut());
        device.factored_update(Arc::clone(&pieces), step, lr.view(), moments, p.view_mut(), g.view());
        let narrow = |sums: Vec<f64>| sums.iter().map(|&sum| sum as f32).collect();
        [
            narrow(device.read(sums.view()).unwrap()),
            narrow(device.read(squares.view()).unwrap()),
            device.read(p.view()).unwrap(),
        ]
    });
    let g = |row: usize, col: usize| 2.0 * f64::from(gradients[row * cols + col]);
    let row_sums = (0..rows).map(|row| (0..cols).map(|col| g(row, col).powi(2)).sum());
    let col_sums = (0..cols).map(|col| (0..rows).map(|row| g(row, col).powi(2)).sum());
    assert_near(&sums, row_sums.chain(col_sums), 1e-5, "sum");
    let update = |index: usize| {
        let (row, col) = (index / cols, index % cols);
        let moment = f64::from(row_moments[row]) / 1.375 * f64::from(col_moments[col]);
        g(row, col) / moment.sqrt()
    };
    assert_near(&squares[..1], [(0..len).map(|index| update(index).powi(2)).sum()], 1e-5, "sum of squares");
    let updated = (0..len).map(|index| 0.9 * f64::from(parameters[index]) - 0.1 * update(index));
    assert_near(&found, updated, 1e-5, "parameter");
}

#[test]
fn matrices_are_made_nearly_orthogonal() {
    for [rows, cols] in [[5, 40], [40, 5]] {
        let values = random(rows * cols, "matrix");
        let [found] = on_all_near(1e-5, |device| {
            let mut matrix = shaped(device, &values, [rows, cols]);
            device.orthogonalize(matrix.view_mut(), 5, Precision::F32).unwrap();
            [device.read::<f32>(matrix.view()).unwrap()]
        });
        // Returns one of the five vectors of length 40.
        let vector = |index: usize| -> Vec<f64> {
            let of = |place: usize| if rows < cols { index * cols + place } else { place * cols + index };
            (0..40).map(|place| f64::from(found[of(place)])).collect()
        };
        for left in 0..5 {
            for right in 0..=left {
                let product: f64 = vector(left).iter().zip(vector(right)).map(|(x, y)| x * y).sum();
                let is_near = if left == right { (0.4..1.5).contains(&product) } else { product.abs() < 0.4 };
                assert!(is_near, "{rows} x {cols}: {left} times {right} is {product}");
            }
        }
    }
}
