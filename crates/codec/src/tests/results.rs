//! Results of steps: sums, error feedback, random numbers, values that are not finite, and state.

use super::*;

/// The decoded sums and the residuals add up to the gradients.
#[test]
fn nothing_is_lost_with_error_feedback() {
    for codec in lossy() {
        let compression = compression_with(codec, |options| options.error_feedback = Some(true));
        for world_size in 1..=5 {
            for len in [0, 1, 2, 63, 65, 130, 777] {
                let mut world = World::new(&compression, &Bucket::flat(len), world_size);
                let (mut given, mut received) = (vec![0.0; len], vec![0.0; len]);
                for step in 0..4 {
                    let gradients = gradients(len, world_size, step);
                    given.iter_mut().zip(sum(&gradients)).for_each(|(all, sum)| *all += sum);
                    let result = world.step(&gradients);
                    received.iter_mut().zip(result).for_each(|(all, sum)| *all += f64::from(sum));
                }
                for rank in 0..world_size {
                    let residual = world.residual(rank).unwrap_or(&[]);
                    received.iter_mut().zip(residual).for_each(|(all, x)| *all += f64::from(*x));
                }
                // Sums in f16 and bf16 are rounded at each addition.
                let tolerance = match codec {
                    CodecName::F16 => 1e-2,
                    CodecName::Bf16 => 6e-2,
                    _ => 1e-4,
                };
                for (index, (given, received)) in given.iter().zip(&received).enumerate() {
                    let error = (given - received).abs();
                    assert!(error < tolerance, "{codec}, {world_size} ranks, {index} of {len}: {error}");
                }
            }
        }
    }
}

/// Sums of small integers are exact in f32, so gradients, results and residuals add up without any error.
#[test]
fn sparse_messages_and_residuals_add_up_exactly() {
    for codec in [CodecName::TopK, CodecName::RandomK] {
        let mut world = World::new(&compression(codec), &Bucket::flat(333), 3);
        let (mut given, mut received) = (vec![0.0; 333], vec![0.0; 333]);
        for step in 0..20 {
            let mut gradients = gradients(333, 3, step);
            gradients.iter_mut().flatten().for_each(|x| *x = (*x * 20.0).round());
            given.iter_mut().zip(sum(&gradients)).for_each(|(all, sum)| *all += sum);
            let result = world.step(&gradients);
            received.iter_mut().zip(result).for_each(|(all, sum)| *all += f64::from(sum));
            let kept = [0, 1, 2].map(|rank| world.residual(rank).unwrap().to_vec());
            assert!((0..333).all(|index| given[index] == received[index] + sum(&kept)[index]), "{codec}");
        }
    }
}

#[test]
fn one_step_is_close_to_the_sum() {
    let (len, world_size) = (1000, 4);
    let gradients = gradients(len, world_size, 0);
    let exact = sum(&gradients);
    for (codec, error_max) in [
        (CodecName::None, 1e-6),
        (CodecName::F16, 3e-3),
        (CodecName::Bf16, 3e-2),
        // Half a unit in the last place of values below 2, on each rank.
        (CodecName::Fp8E4m3, 4.0 / 16.0),
        (CodecName::Fp8E5m2, 4.0 / 8.0),
        // One quantization step of a block whose largest magnitude is 2, on each rank.
        (CodecName::Int8, 4.0 * 2.0 / 127.0),
        (CodecName::Int4, 4.0 * 2.0 / 7.0),
    ] {
        let result = World::new(&compression(codec), &Bucket::flat(len), world_size).step(&gradients);
        let errors = result.iter().zip(&exact).map(|(&x, exact)| (f64::from(x) - exact).abs());
        let largest = errors.fold(0.0, f64::max);
        assert!(largest < error_max, "{codec}: {largest}");
        assert!(codec == CodecName::None || largest > error_max / 100.0, "{codec}: {largest}");
    }
}

#[test]
fn a_sign_stands_for_the_mean_of_its_block() {
    let mut gradient = vec![1.0; 128];
    gradient[..64].iter_mut().step_by(4).for_each(|x| *x = -3.0);
    gradient[1] = 2.0;
    let other = vec![0.0; 128];
    let mut world = World::new(&compression(CodecName::OneBit), &Bucket::flat(128), 2);
    let result = world.step(&[gradient.clone(), other]);
    let means: Vec<f32> = bytemuck::pod_collect_to_vec(&world.messages[0][0][..16]);
    assert_eq!(means, [49.0 / 48.0, -3.0, 1.0, 0.0]);
    for (index, (x, result)) in gradient.iter().zip(&result).enumerate() {
        let expected = match index {
            64.. => 1.0,
            _ if *x < 0.0 => -3.0,
            _ => 49.0 / 48.0,
        };
        assert_eq!(*result, expected, "element {index}");
    }
}

/// A matrix whose rank is at most that of the factors is reproduced exactly, and no residual remains.
#[test]
fn low_rank_is_exact_where_the_rank_is_low() {
    let (rows, cols) = (24, 40);
    let element = |index: usize| {
        let (row, col) = ((index / cols) as f32, (index % cols) as f32);
        (row + 1.0) * (0.3 * col).sin() + (0.7 * row).cos() * (col - 7.0)
    };
    let bucket = Bucket::with_matrices(5 + rows * cols + 2, vec![Matrix { offset: 5, rows, cols }]).unwrap();
    let mut gradient = vec![0.5; bucket.len()];
    gradient[5..5 + rows * cols].iter_mut().enumerate().for_each(|(index, x)| *x = element(index));
    for factor in [1.0, 1e-25, 1e25] {
        let gradients = [1.0, -0.25].map(|part| gradient.iter().map(|x| x * part * factor).collect());
        let mut world = World::new(&compression(CodecName::PowerSgd), &bucket, 2);
        for _ in 0..3 {
            let result = world.step(&gradients);
            for (x, result) in gradient.iter().zip(&result) {
                assert!((result / factor - 0.75 * x).abs() < 1e-3, "{factor:e}: {result} for {x}");
            }
        }
    }
}

/// Finite values whose factors overflow f32 give NaN; they must not vanish.
#[test]
fn overflowing_factors_give_nan() {
    let mut world = World::new(&compression(CodecName::PowerSgd), &Bucket::flat(400), 2);
    let result = world.step(&[vec![3e38; 400], vec![0.0; 400]]);
    assert!(result.iter().all(|x| x.is_nan()), "{result:?}");
}

#[test]
fn zeros_give_zeros() {
    for codec in CodecName::ALL {
        let mut world = World::new(&compression(codec), &Bucket::flat(400), 2);
        for _ in 0..2 {
            assert!(world.step(&[vec![0.0; 400], vec![0.0; 400]]).iter().all(|&x| x == 0.0), "{codec}");
            // The scale of fp8 and the indices of top-k are not 0 even for zeros.
            if !matches!(codec, CodecName::Fp8E4m3 | CodecName::Fp8E5m2 | CodecName::TopK) {
                assert!(world.messages.iter().flatten().flatten().all(|&byte| byte == 0), "{codec}");
            }
        }
        // Factors of a zero matrix are replaced by random ones, so that later gradients are not lost.
        let result = world.step(&gradients(400, 2, 0));
        assert!(result.iter().any(|&x| x != 0.0), "{codec}");
    }
}

#[test]
fn unbiased_codecs_are_right_on_average() {
    const SEEDS: u64 = 3000;
    let gradients = gradients(150, 2, 0);
    let exact = sum(&gradients);
    for codec in [CodecName::Int8, CodecName::Int4, CodecName::RandomK] {
        let compression = compression_with(codec, |options| options.error_feedback = Some(false));
        let mut means = vec![0.0; 150];
        let mut squares = vec![0.0; 150];
        for seed in 0..SEEDS {
            let result = World::seeded(&compression, &Bucket::flat(150), 2, seed).step(&gradients);
            for (index, x) in result.into_iter().enumerate() {
                means[index] += f64::from(x) / SEEDS as f64;
                squares[index] += (f64::from(x) - exact[index]).powi(2) / SEEDS as f64;
            }
        }
        for index in 0..150 {
            let deviation = (squares[index] / SEEDS as f64).sqrt();
            let error = (means[index] - exact[index]).abs();
            assert!(error < 4.5 * deviation + 1e-6, "{codec}: {error} where {deviation} is usual");
        }
    }
}

/// Stochastic rounding depends on the step, the rank and the seed, and is the same in a repeated run.
#[test]
fn random_numbers_depend_on_seed_step_and_rank() {
    let gradients = vec![gradients(500, 1, 0).remove(0); 2];
    for codec in [CodecName::Int8, CodecName::Int4] {
        let run = |seed| {
            let mut world = World::seeded(&compression(codec), &Bucket::flat(500), 2, seed);
            [0, 1].map(|_| {
                world.step(&gradients);
                world.messages[0].clone()
            })
        };
        let (first, again, other) = (run(1), run(1), run(2));
        assert_eq!(first, again);
        assert_ne!(first[0], first[1], "of another step");
        assert_ne!(first[0][0], first[0][1], "of another rank");
        assert_ne!(first[0], other[0], "of another seed");
    }
}

/// Tests values that are not finite among ordinary ones, at positions that a sparse codec may not select.
#[test]
fn non_finite_values_reach_every_rank_and_do_not_persist() {
    let len = 400;
    for codec in CodecName::ALL {
        for (error_feedback, normalize) in [(false, None), (true, None), (true, Some(0.9))] {
            let compression = compression_with(codec, |options| {
                options.error_feedback = (codec != CodecName::None).then_some(error_feedback);
                options.normalize = normalize.filter(|_| codec != CodecName::None);
            });
            for broken in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                for index in [0, 201, len - 1] {
                    let mut world = World::new(&compression, &Bucket::flat(len), 3);
                    let mut gradients = gradients(len, 3, 0);
                    gradients[1][index] = broken;
                    let result = world.step(&gradients);
                    assert!(result.iter().any(|x| !x.is_finite()), "{codec}: {broken} at {index} vanished");
                    if !matches!(codec, CodecName::RandomK) {
                        assert!(!result[index].is_finite(), "{codec}: {broken} at {index} moved");
                    }
                    assert!(world.compressors[1].statistics().error_norm.is_finite());
                    gradients[1][index] = 0.0;
                    for _ in 0..2 {
                        let result = world.step(&gradients);
                        assert!(
                            result.iter().all(|x| x.is_finite()),
                            "{codec}: {broken} at {index} came back"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn more_non_finite_values_than_top_k_sends_do_not_persist() {
    let compression = compression_with(CodecName::TopK, |options| options.momentum = Some(0.9));
    let mut world = World::new(&compression, &Bucket::flat(100), 2);
    let result = world.step(&[vec![f32::NAN; 100], vec![1.0; 100]]);
    assert_eq!(result.iter().filter(|x| x.is_nan()).count(), 10);
    assert!(world.step(&gradients(100, 2, 0)).iter().all(|x| x.is_finite()));
}

#[test]
fn momentum_works_where_nothing_is_compressed() {
    let compression = compression_with(CodecName::TopK, |options| options.momentum = Some(0.5));
    let mut world = World::new(&compression, &Bucket::flat(10), 1);
    let results = [1.0, 0.0, 1.0].map(|x| world.step(&[vec![x; 10]])[3]);
    assert_eq!(results, [1.0, 0.5, 1.25]);
}

/// Elements have different magnitudes on each rank. After normalization only their signs and their ratios to earlier
/// steps count.
#[test]
fn every_rank_normalizes_by_its_own_second_moment() {
    let gradients = [vec![1e-6, -1e-3, 5.0, 0.0], vec![2e3, 1e-3, 7e-9, 0.0]];
    let second = [vec![1e-6, 1e-3, -5.0, 0.0], vec![4e3, 1e-3, 7e-9, 1.0]];
    // One case sends more bytes than uncompressed, and one is in its warm-up. Gradients are normalized in both.
    let many = compression_with(CodecName::TopK, |options| {
        (options.normalize, options.ratio) = (Some(0.5), Some(1.0));
    });
    let warm_up = compression_with(CodecName::Bf16, |options| {
        (options.normalize, options.warmup_steps) = (Some(0.5), Some(2));
    });
    for compression in [many, warm_up] {
        let mut world = World::new(&compression, &Bucket::flat(4), 2);
        assert!(world.compressors[0].uncompressed_reason().is_some());
        let close = |found: Vec<f32>, expected: [f32; 4]| {
            assert!(found.iter().zip(expected).all(|(x, y)| (x - y).abs() < 1e-5), "{found:?}, {expected:?}");
        };
        close(world.step(&gradients), [2.0, 0.0, 2.0, 0.0]);
        // Second moments after bias correction: (0.25 + 0.5) / 0.75 for gradients of 1 and then 1, 0.5 / 0.75 for 0 and then 1, and
        // (1 + 8) / 0.75 for 2 and then 4. Their unit cancels.
        close(world.step(&second), [1.0 + 4.0 / 12_f32.sqrt(), 2.0, 0.0, 1.5_f32.sqrt()]);
    }
}

/// Ten steps give the same bits as five steps, a state that is saved and loaded, and five more, within a warm-up and
/// after it.
#[test]
fn a_loaded_state_continues_with_the_same_bits() {
    for codec in CodecName::ALL {
        for warmup_steps in [0, 3, 7] {
            let compression = compression_with(codec, |options| {
                options.warmup_steps = (codec != CodecName::None).then_some(warmup_steps);
                options.error_feedback = (codec != CodecName::None).then_some(true);
                options.momentum = (codec == CodecName::TopK).then_some(0.9);
            });
            check_resume(&compression);
        }
        if codec != CodecName::None {
            check_resume(&compression_with(codec, |options| options.normalize = Some(0.9)));
        }
        if codec.options().contains(&"warmup_codec") {
            for (warmup_steps, warmup_codec) in [(3, CodecName::Int8), (7, CodecName::Bf16)] {
                check_resume(&compression_with(codec, |options| {
                    options.warmup_steps = Some(warmup_steps);
                    options.warmup_codec = Some(warmup_codec);
                    options.error_feedback = Some(true);
                }));
            }
        }
    }
}

fn check_resume(compression: &Compression) {
    let (len, world_size) = (500, 3);
    let world = || World::new(compression, &Bucket::flat(len), world_size);
    let (mut whole, mut first, mut second) = (world(), world(), world());
    for step in 0..5 {
        let gradients = gradients(len, world_size, step);
        assert_eq!(whole.step(&gradients), first.step(&gradients));
    }
    for (old, new) in first.compressors.iter().zip(&mut second.compressors) {
        let mut state: Vec<_> = old.state().collect();
        state.reverse();
        new.load_state(&state).unwrap();
        assert_eq!(new.step(), 5);
    }
    for step in 5..10 {
        let gradients = gradients(len, world_size, step);
        assert_eq!(whole.step(&gradients), second.step(&gradients), "{compression}, step {step}");
        assert_eq!(whole.messages, second.messages, "{compression}, step {step}");
    }
}

#[test]
fn a_state_that_does_not_fit_is_refused_and_changes_nothing() {
    let mut world = World::new(&compression(CodecName::PowerSgd), &Bucket::flat(100), 2);
    world.step(&gradients(100, 2, 0));
    let compressor = &mut world.compressors[0];
    let (residual, q) = (vec![1.0; 100], vec![1.0; 20]);
    let broken = [vec![1.0; 19], vec![f32::NAN]].concat();
    let step = StateValues::U64(&[7]);
    let (residual, q, broken) =
        (StateValues::F32(&residual), StateValues::F32(&q), StateValues::F32(&broken));
    for (tensors, expected) in [
        (vec![("step", step), ("residual", residual)], "'q' is missing"),
        (vec![("step", step), ("residual", residual), ("q", residual)], "'q' has 100 elements instead of 20"),
        (vec![("step", step), ("residual", residual), ("q", broken)], "'q' has NaN as element 19"),
        (vec![("step", residual), ("residual", residual), ("q", q)], "'step' has another dtype"),
        (vec![("step", step), ("step", step), ("residual", residual), ("q", q)], "'step' occurs twice"),
        (vec![("step", step), ("velocity", residual), ("q", q)], "'velocity' is not one of its tensors"),
        (vec![("step", StateValues::U64(&[])), ("residual", residual), ("q", q)], "'step' has 0 elements"),
    ] {
        let refusal = compressor.load_state(&tensors).unwrap_err().to_string();
        assert!(refusal.contains(expected) && refusal.contains("powersgd"), "{refusal}");
        assert_eq!(compressor.step(), 1);
        assert!(compressor.state.residual.as_ref().unwrap().iter().any(|&x| x != 1.0));
    }
    assert_eq!(compressor.load_state(&[("q", q), ("step", step), ("residual", residual)]), Ok(()));
    assert_eq!((compressor.step(), compressor.num_bytes()), (7, 4 * 120));
}

#[test]
fn another_loss_scale_changes_the_exponent_only() {
    for codec in lossy() {
        let compression = compression_with(codec, |options| {
            options.error_feedback = Some(true);
            options.momentum = (codec == CodecName::TopK).then_some(0.9);
        });
        let normalized = compression_with(codec, |options| options.normalize = Some(0.9));
        check_normalized_scale(&normalized);
        let mut worlds = [0, 1].map(|_| World::new(&compression, &Bucket::flat(300), 2));
        for step in 0..4 {
            let gradients = gradients(300, 2, step);
            let plain = worlds[0].step(&gradients);
            let factor = if step < 2 { 1.0 } else { 1024.0 };
            if step == 2 {
                worlds[1].compressors.iter_mut().for_each(|compressor| compressor.rescale(1024.0));
            }
            let scaled: Vec<Vec<f32>> =
                gradients.iter().map(|gradient| gradient.iter().map(|x| x * factor).collect()).collect();
            let result = worlds[1].step(&scaled);
            for (plain, result) in plain.iter().zip(&result) {
                // In f16, values below 2^-14 have fewer significant bits.
                let tolerance = if codec == CodecName::F16 { 1e-6 } else { 0.0 };
                assert!(
                    (result / factor - plain).abs() <= tolerance,
                    "{codec}, step {step}: {plain}, {result}"
                );
            }
        }
    }
}

/// Sums of normalized gradients do not depend on the loss scale.
fn check_normalized_scale(compression: &Compression) {
    let mut worlds = [0, 1].map(|_| World::new(compression, &Bucket::flat(300), 2));
    for step in 0..4 {
        let gradients = gradients(300, 2, step);
        let factor = if step < 2 { 1.0 } else { 1024.0 };
        if step == 2 {
            worlds[1].compressors.iter_mut().for_each(|compressor| compressor.rescale(1024.0));
        }
        let scaled: Vec<Vec<f32>> =
            gradients.iter().map(|gradient| gradient.iter().map(|x| x * factor).collect()).collect();
        assert_eq!(worlds[0].step(&gradients), worlds[1].step(&scaled), "{compression}, step {step}");
    }
}
