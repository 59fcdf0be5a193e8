//! Tests of the convolution against f64, and of bit-equal training under every layout.

#[expect(dead_code, reason = "the function that starts the program")]
#[path = "../src/main.rs"]
mod program;

use program::Shapes;
use program::convolution::Convolution;
use program::images::Images;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;
use trireme::model::{Model, ModelError};
use trireme::tensor::{Device, ParameterTable, Precision};
use trireme::train::config::{Config, TaskKind};
use trireme::train::{NullObserver, Samples, TrainError, Trainer, TrainerOptions};
use trireme::{Dataset, Task};
use trireme_testkit::{GradientCheck, Input, run_ranks};

/// Side of an image in the gradient check, in pixels.
const SIZE: usize = 4;

#[test]
fn the_convolution_has_the_gradients_of_its_formula() {
    let (inputs, outputs, batch) = (3, 2, 2);
    let mut table = ParameterTable::default();
    table.begin_unit("unit");
    let convolution = Convolution::new(&mut table, "convolution", SIZE, (inputs, outputs), None);
    let reference = |x: &[Vec<f64>], weight: &[f64]| -> Vec<f64> {
        let pixel = |image: usize, row: usize, col: usize, output: usize| {
            let mut sum = 0.0;
            for (offset, input) in (0..9).flat_map(|offset| (0..inputs).map(move |input| (offset, input))) {
                let (row, col) = (row + offset / 3, col + offset % 3);
                if (1..=SIZE).contains(&row) && (1..=SIZE).contains(&col) {
                    let pixel = (image * SIZE + row - 1) * SIZE + col - 1;
                    sum +=
                        weight[(offset * inputs + input) * outputs + output] * x[0][pixel * inputs + input];
                }
            }
            sum
        };
        let mut y = Vec::new();
        for (image, row) in (0..batch).flat_map(|image| (0..SIZE).map(move |row| (image, row))) {
            for (col, output) in (0..SIZE).flat_map(|col| (0..outputs).map(move |output| (col, output))) {
                y.push(pixel(image, row, col, output));
            }
        }
        y
    };
    for precision in [Precision::F32, Precision::Bf16, Precision::F16] {
        GradientCheck {
            name: format!("the convolution in {precision}"),
            run: &|recorder, inputs| Ok(Some(recorder.apply(&convolution, inputs)?)),
            table: table.clone(),
            precision,
            inputs: vec![Input::random(&[batch, SIZE * SIZE, inputs], "x")],
            reference: &reference,
        }
        .check();
    }
}

/// Trains for a few steps. Returns the bits of the losses, the accuracies and the weights.
fn train(num_workers: usize, layout: &[&str]) -> Vec<u64> {
    let folder = tempfile::tempdir().unwrap();
    let toml = format!(
        "training = {{ local_batch_size = 2, global_batch_size = 16, steps = 4, threads = 1, validation_interval = 2 }}\n\
         checkpoint = {{ enable = false }}\n\
         run = {{ name = \"shapes\", folder = {:?} }}\n\
         launch = {{ workers = {num_workers} }}",
        folder.path()
    );
    let overrides: Vec<String> = layout.iter().map(|&key| key.to_owned()).collect();
    let config =
        Config::parse_for_task(TaskKind::CustomTask, &toml, Path::new("shapes.toml"), &overrides, None)
            .unwrap();
    let ranks = run_ranks(num_workers, |group| {
        let options = TrainerOptions {
            num_threads: 1,
            local_rank: None,
            simd_level_max: None,
            started: Instant::now(),
            plan: None,
            peak_flops: None,
            ends_at: None,
            given_config: None,
        };
        let observer = &mut NullObserver;
        let mut trainer = Trainer::new(&config, Arc::new(Shapes), group, options, observer).unwrap();
        let mut bits = Vec::new();
        for _ in 0..4 {
            let record = trainer.step().unwrap();
            bits.extend([record.loss, record.metrics.get("accuracy").unwrap()].map(f64::to_bits));
        }
        let validated = trainer.validate().unwrap().unwrap();
        bits.extend([validated.loss, validated.metrics.get("accuracy").unwrap()].map(f64::to_bits));
        let weights = trainer.gather_parameters().unwrap()?;
        for unit in 0..trainer.executor().model().num_units() {
            bits.extend(weights.values(unit).unwrap().into_iter().map(|weight| u64::from(weight.to_bits())));
        }
        Some(bits)
    });
    ranks.into_iter().flatten().next().expect("rank 0 has the weights")
}

#[test]
fn every_layout_gives_the_bits_of_one_worker() {
    let pipeline = "parallelism.pipeline_parallel_degree=2";
    for dtype in ["training.dtype=f32", "training.dtype=bf16"] {
        let alone = train(1, &[dtype]);
        for (num_workers, layout) in [
            (2, &[dtype][..]),
            (2, &[dtype, "parallelism.zero_stage=3"]),
            (2, &[dtype, pipeline]),
            (4, &[dtype, pipeline, "parallelism.zero_stage=1"]),
        ] {
            assert!(train(num_workers, layout) == alone, "{num_workers} workers with {layout:?}");
        }
    }
}

/// A task without samples.
struct Empty;

impl Task for Empty {
    fn description(&self) -> String {
        Shapes.description()
    }

    fn build(&self, device: &Device, table: ParameterTable) -> Result<Model, ModelError> {
        Shapes.build(device, table)
    }

    fn train_data(&self, seed: u64) -> Result<Box<dyn Dataset>, TrainError> {
        Ok(Box::new(Images { num_samples: 0, seed, name: "none" }))
    }
}

#[test]
fn a_task_without_samples_is_refused() {
    let config =
        Config::parse_for_task(TaskKind::CustomTask, "", Path::new("shapes.toml"), &[], None).unwrap();
    let error = Samples::open(&Empty, &config).err().unwrap().to_string();
    assert_eq!(
        error,
        "there are no samples for training; check what the task's train_data and validation_data return"
    );
}
