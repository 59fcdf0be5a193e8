//! Models with tensor and expert parallelism, compared with golden values of Hugging Face transformers; see
//! `crates/model/tests/golden/README.md`.

use crate::common::{DEFAULT, Layout, executor_of_model};
use safetensors::SafeTensors;
use std::path::Path;
use std::sync::Arc;
use trireme_comm::Group;
use trireme_model::{HostBatch, ModelConfig, set_window, token_specs};
use trireme_optim::{OptimizerName, OptimizerOptions, OptimizerSettings};
use trireme_parallel::{Executor, Generation, GradNorm, ParallelError, StepPlan};
use trireme_tensor::{Device, ParameterClass};
use trireme_testkit::run_ranks;

// The same tolerances as for one rank.
const LOGITS_TOLERANCE: f32 = 1e-4;
const LOSS_TOLERANCE: f64 = 1e-5;
const GRAD_TOLERANCE: f64 = 1e-4;
const TRAIN_TOLERANCE: f64 = 1e-4;

struct Golden {
    config: ModelConfig,
    weights: Vec<u8>,
    reference: Vec<u8>,
    train_losses: Vec<f64>,
}

fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

fn floats(file: &[u8], name: &str) -> Vec<f32> {
    f32s(SafeTensors::deserialize(file).unwrap().tensor(name).unwrap().data())
}

impl Golden {
    fn open(name: &str) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/golden").join(name);
        let read = |name: &str| std::fs::read(folder.join(name)).unwrap();
        let mut config = ModelConfig::from_json(&String::from_utf8(read("config.json")).unwrap()).unwrap();
        config.experts.as_mut().unwrap().balance_loss = 0.0;
        let report: serde_json::Value = serde_json::from_slice(&read("reference.json")).unwrap();
        let losses = report["train_losses"].as_array().unwrap();
        Golden {
            config,
            weights: read("model.safetensors"),
            reference: read("reference.safetensors"),
            train_losses: losses.iter().map(|loss| loss.as_f64().unwrap()).collect(),
        }
    }

    /// Returns the windows of a tensor of token ids, concatenated, and the length of each.
    fn windows(&self, name: &str) -> (Vec<u32>, usize) {
        let reference = SafeTensors::deserialize(&self.reference).unwrap();
        let tensor = reference.tensor(name).unwrap();
        let ids = tensor.data().chunks_exact(8);
        let ids = ids.map(|bytes| i64::from_le_bytes(bytes.try_into().unwrap()) as u32).collect();
        (ids, *tensor.shape().last().unwrap())
    }

    /// Creates the executor of one of four ranks: two tensor ranks by two expert ranks. Each expert rank sees one of two windows.
    fn executor(&self, group: Group, optimizer: OptimizerOptions) -> Executor {
        let seq_len = self.windows("input_ids").1 - 1;
        let build = |device: &Device, table| self.config.build_into(table, seq_len, device);
        let layout =
            Layout { tensor: 2, experts: 2, optimizer_options: Some(optimizer), ..Layout::default() };
        let mut executor = executor_of_model(&build, &token_specs(1, seq_len), group, 1, 1, &layout);
        executor
            .load_parameters(|info, held, values| {
                let whole = floats(&self.weights, &info.name);
                for (first, run) in info.runs(held.clone()) {
                    values[run.start - held.start..run.end - held.start]
                        .copy_from_slice(&whole[first..][..run.len()]);
                }
                Ok::<_, ParallelError>(())
            })
            .unwrap();
        executor
    }

    /// Runs a step on two windows, starting at the window `first`. Returns the loss.
    fn step(&self, executor: &mut Executor, name: &str, first: usize, step: u64, lr: f64) -> f64 {
        let (ids, len) = self.windows(name);
        let window = &ids[(first + executor.global_microbatch(0)) * len..][..len];
        let mut samples = HostBatch::new(&token_specs(1, len - 1));
        set_window(&mut samples, 0, window);
        let batch = samples.upload(executor.device()).unwrap();
        let plan = StepPlan { step, lr, grad_norm: GradNorm::Measure, has_loss: true };
        executor.run(plan, &mut std::iter::once(batch)).unwrap().loss
    }
}

fn relative_distance(found: &[f32], expected: &[f32]) -> f64 {
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let difference = square(&mut found.iter().zip(expected).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    difference / square(&mut expected.iter().map(|x| f64::from(*x)))
}

#[test]
fn tensor_and_expert_parallel_models_are_those_of_transformers() {
    for name in ["mixtral", "qwen3_moe", "deepseek_v3"] {
        let golden = &Golden::open(name);
        let optimizer = |(name, settings)| OptimizerOptions {
            settings,
            balance_rate: 0.0,
            ..OptimizerOptions::new(name)
        };
        run_ranks(4, |group| {
            // A plain gradient step, with such a large learning rate that little of the gradient is lost to rounding.
            let plain = OptimizerSettings { momentum: 0.0, ..DEFAULT };
            let mut executor = golden.executor(group, optimizer((OptimizerName::Sgd, plain)));
            let (ids, len) = golden.windows("input_ids");
            let logits = floats(&golden.reference, "logits");
            let mut generation = Generation::new(&mut executor, len);
            for read in [0..20, 20..21, 21..len] {
                let last = read.end - 1;
                let found = generation.append(&ids[read]).unwrap();
                let expected = &logits[last * found.len()..][..found.len()];
                let is_near = |(found, expected): (&f32, &f32)| (found - expected).abs() < LOGITS_TOLERANCE;
                assert!(found.iter().zip(expected).all(is_near), "{name}: logits at {last}");
            }
            let loss = golden.step(&mut executor, "input_ids", 0, 1, 1e3);
            let expected = f64::from(floats(&golden.reference, "loss")[0]);
            assert!((loss - expected).abs() < LOSS_TOLERANCE, "{name}: loss {loss} instead of {expected}");
            let Some(after) = executor.gather_parameters().unwrap() else { return };
            let table = Arc::clone(after.table());
            for info in table.parameters().iter().filter(|info| info.class != ParameterClass::Balance) {
                let before = floats(&golden.weights, &info.name);
                let values = after.values(info.unit).unwrap();
                let grad: Vec<f32> = before
                    .iter()
                    .zip(&values[info.range()])
                    .map(|(before, after)| (before - after) / 1e3)
                    .collect();
                let expected = floats(&golden.reference, &format!("grad.{}", info.name));
                let distance = relative_distance(&grad, &expected);
                assert!(distance < GRAD_TOLERANCE, "{name}: gradient of {} off by {distance}", info.name);
            }
        });
        run_ranks(4, |group| {
            let decays = OptimizerOptions {
                weight_decay: 0.1,
                decay_norms_and_biases: true,
                ..optimizer((OptimizerName::AdamW, DEFAULT))
            };
            let mut executor = golden.executor(group, decays);
            for (index, expected) in golden.train_losses.iter().enumerate() {
                let first = index % 2 * 2;
                let loss = golden.step(&mut executor, "train.batches", first, index as u64 + 1, 1e-3);
                assert!(
                    (loss - expected).abs() < TRAIN_TOLERANCE,
                    "{name}, step {index}: {loss} instead of {expected}"
                );
            }
        });
    }
}
