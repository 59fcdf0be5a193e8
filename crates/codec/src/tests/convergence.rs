//! Training on four ranks: linear regression with several outputs. The parameters are one matrix and one bias vector.

use super::*;

const INPUTS: usize = 24;
const OUTPUTS: usize = 20;
const LEN: usize = OUTPUTS * INPUTS + OUTPUTS;
const SAMPLES: usize = 16;
const RANKS: usize = 4;
const STEPS: u64 = 1500;
/// A low learning rate, because gradients that were held back for many steps are applied at once.
const RATE: f32 = 0.03;

/// The samples of one rank: inputs, and outputs of a hidden linear model with noise.
struct Samples {
    inputs: Vec<f32>,
    outputs: Vec<f32>,
}

impl Samples {
    fn of(rank: usize, model: &[f32]) -> Self {
        let normal = |len, purpose: &str, deviation| {
            let mut values = vec![0.0; len];
            RandomKey::new(rank as u64, purpose).fill_normal(&mut values, deviation);
            values
        };
        let inputs = normal(SAMPLES * INPUTS, "inputs", 1.0);
        let mut outputs = normal(SAMPLES * OUTPUTS, "noise", 0.3);
        for (x, y) in inputs.chunks_exact(INPUTS).zip(outputs.chunks_exact_mut(OUTPUTS)) {
            predict(model, x).zip(y).for_each(|(predicted, y)| *y += predicted);
        }
        Samples { inputs, outputs }
    }

    /// Computes this rank's share of the mean loss over the samples of all ranks, and its gradient. The sum over the
    /// ranks is the mean.
    fn loss_and_gradient(&self, parameters: &[f32], gradient: &mut [f32]) -> f64 {
        gradient.fill(0.0);
        let (mut loss, weight) = (0.0, 1.0 / (RANKS * SAMPLES) as f32);
        for (x, y) in self.inputs.chunks_exact(INPUTS).zip(self.outputs.chunks_exact(OUTPUTS)) {
            for (output, (predicted, y)) in predict(parameters, x).zip(y).enumerate() {
                let error = predicted - y;
                loss += f64::from(error * error * weight) / 2.0;
                let row = &mut gradient[output * INPUTS..][..INPUTS];
                row.iter_mut().zip(x).for_each(|(gradient, x)| *gradient += error * x * weight);
                gradient[OUTPUTS * INPUTS + output] += error * weight;
            }
        }
        loss
    }
}

/// Returns the outputs of the model for one input. `parameters` are the matrix and then the bias.
fn predict(parameters: &[f32], x: &[f32]) -> impl Iterator<Item = f32> {
    let (matrix, vector) = parameters.split_at(OUTPUTS * INPUTS);
    matrix
        .chunks_exact(INPUTS)
        .zip(vector)
        .map(move |(row, bias)| row.iter().zip(x).map(|(weight, x)| weight * x).sum::<f32>() + bias)
}

/// Trains by gradient descent with momentum `momentum` in the optimizer. Returns the loss before the first step and
/// after the last one.
fn train(compression: &Compression, momentum: f32) -> [f64; 2] {
    let mut model = vec![0.0; LEN];
    RandomKey::new(9, "model").fill_normal(&mut model, 1.0);
    let samples: Vec<Samples> = (0..RANKS).map(|rank| Samples::of(rank, &model)).collect();
    let bucket = Bucket::with_matrices(LEN, vec![Matrix { offset: 0, rows: OUTPUTS, cols: INPUTS }]).unwrap();
    let mut world = World::new(compression, &bucket, RANKS);
    let (mut parameters, mut velocity) = (vec![0.0; LEN], vec![0.0; LEN]);
    let mut gradients = vec![vec![0.0; LEN]; RANKS];
    let mut losses = Vec::new();
    for _ in 0..=STEPS {
        let ranks = samples.iter().zip(&mut gradients);
        losses.push(ranks.map(|(samples, gradient)| samples.loss_and_gradient(&parameters, gradient)).sum());
        let sum = world.step(&gradients);
        for ((parameter, velocity), sum) in parameters.iter_mut().zip(&mut velocity).zip(sum) {
            *velocity = momentum * *velocity + sum;
            *parameter -= RATE * *velocity;
        }
    }
    [losses[0], losses[STEPS as usize]]
}

#[test]
fn every_codec_trains_as_well_as_none() {
    let [before, uncompressed] = train(&Compression::none(), 0.0);
    assert!(uncompressed < before / 10.0, "{before}, {uncompressed}");
    for codec in lossy() {
        let [_, loss] = train(&compression(codec), 0.0);
        assert!((loss / uncompressed - 1.0).abs() < 0.02, "{codec}: {loss} instead of {uncompressed}");
    }
}

#[test]
fn momentum_is_corrected_and_warmed_up() {
    let [_, uncompressed] = train(&Compression::none(), 0.5);
    let compression = compression_with(CodecName::TopK, |options| {
        options.momentum = Some(0.5);
        options.warmup_steps = Some(50);
    });
    let [_, loss] = train(&compression, 0.0);
    assert!((loss / uncompressed - 1.0).abs() < 0.02, "{loss} instead of {uncompressed}");
}

/// Without error feedback, biased codecs end at a higher loss than training without compression.
#[test]
fn biased_codecs_need_error_feedback() {
    let [_, uncompressed] = train(&Compression::none(), 0.0);
    for codec in [CodecName::OneBit, CodecName::TopK, CodecName::PowerSgd] {
        let compression = compression_with(codec, |options| options.error_feedback = Some(false));
        let [_, loss] = train(&compression, 0.0);
        assert!(loss > 1.02 * uncompressed, "{codec}: {loss} instead of {uncompressed}");
    }
}
