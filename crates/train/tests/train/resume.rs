//! A run that is interrupted and resumed has the same bits as a run that is not.

use crate::common::{job, job_of, open, trainer};
use std::path::Path;
use trireme_testkit::{run_ranks, run_ranks_on};
use trireme_train::config::Config;
use trireme_train::metrics::StepRecord;
use trireme_train::{Observer, RunInfo};

/// The results of a step, as bits.
#[derive(Debug, Clone, Copy, PartialEq)]
struct StepBits {
    step: u64,
    loss: u64,
    grad_norm: u64,
    validation: Option<u64>,
    loss_scale: Option<u32>,
    skipped_steps: Option<u64>,
    compression_bytes_saved: Option<u64>,
}

/// An observer that records the results of each step.
#[derive(Default)]
struct StepRecorder(Vec<StepBits>);

impl Observer for StepRecorder {
    fn notice(&mut self, _: &str) {}
    fn begin(&mut self, _: &RunInfo) {}
    fn checkpoint(&mut self, _: u64, _: &Path) {}

    fn step(&mut self, record: &StepRecord) {
        self.0.push(StepBits {
            step: record.step,
            loss: record.loss.to_bits(),
            grad_norm: record.grad_norm.to_bits(),
            validation: record.validation_loss.map(f64::to_bits),
            loss_scale: record.loss_scale,
            skipped_steps: record.skipped_steps,
            compression_bytes_saved: record.compression_bytes_saved,
        });
    }
}

type RunResult = (Vec<StepBits>, Vec<u32>);

/// Trains a run with its ranks on two hosts. Returns the steps and the final parameters of rank 0.
fn train(config: &Config) -> RunResult {
    let hosts: Vec<usize> = (0..config.world_size()).map(|rank| 2 * rank / config.world_size()).collect();
    let ranks = run_ranks_on(&hosts, |group| {
        let mut bits = StepRecorder::default();
        let mut trainer = trainer(config, group, &mut bits);
        trainer.run().unwrap();
        let weights = trainer.gather_parameters().unwrap();
        drop(trainer);
        let flat = |unit| weights.as_ref().map_or_else(Vec::new, |all| all.values(unit).unwrap());
        let num_units = weights.as_ref().map_or(0, |all| all.table().units().len());
        (bits.0, (0..num_units).flat_map(flat).map(f32::to_bits).collect())
    });
    assert!(ranks.iter().all(|rank| rank.0 == ranks[0].0), "ranks agree");
    ranks.into_iter().next().unwrap()
}

/// For each pair of numbers in `workers`, trains 10 steps with the first number of workers and 10 more with the second. Compares the
/// steps and the final weights with a run of 20 uninterrupted steps on the first number of the first pair. Returns the steps.
fn check_interrupted_runs(workers: &[(usize, usize)], keys: &[&str]) -> Vec<StepBits> {
    let folder = tempfile::tempdir().unwrap();
    let whole = train(&job(folder.path(), "whole", workers[0].0, 20, keys));
    assert_eq!(whole.0.len(), 20);
    for (first, second) in workers {
        let name = format!("{first}-then-{second}");
        let mut found = train(&job(folder.path(), &name, *first, 10, keys)).0;
        let rest = train(&job(folder.path(), &name, *second, 20, keys));
        found.extend(&rest.0);
        // The tenth step is validated in both runs: as the last step of the first part, and because of the validation interval.
        assert!(found == whole.0, "{name}, {keys:?}: steps differ: {found:?} {:?}", whole.0);
        assert!(rest.1 == whole.1, "{name}, {keys:?}: weights differ");
    }
    whole.0
}

#[test]
fn an_interrupted_run_has_the_bits_of_an_uninterrupted_one_on_any_number_of_workers() {
    let steps = check_interrupted_runs(&[(1, 1), (1, 2), (4, 1), (2, 4)], &[]);
    assert!(steps[4].validation.is_some() && steps[3].validation.is_none(), "validated every five steps");
    assert!(steps.iter().all(|step| step.loss_scale.is_none()));
}

#[test]
fn an_interrupted_run_has_the_same_bits_in_16_bits() {
    check_interrupted_runs(&[(1, 1), (2, 4)], &["training.dtype=bf16"]);
    let keys =
        ["training.dtype=f16", "training.loss_scale_initial=64", "training.loss_scale_growth_interval=4"];
    // The interruption after step 10 is halfway between two growths of the scale.
    let scales: Vec<_> = check_interrupted_runs(&[(1, 2), (4, 1)], &keys)[..14]
        .iter()
        .map(|step| step.loss_scale.unwrap())
        .collect();
    assert_eq!(scales, [64, 64, 64, 64, 128, 128, 128, 128, 256, 256, 256, 256, 512, 512]);
}

#[test]
fn an_interrupted_run_has_the_same_bits_with_freed_gradients() {
    const BATCH: &str = "training.global_batch_size=4";
    let keys =
        [BATCH, "memory.free_gradients=true", "training.clip_by_previous_norm=true", "training.max_norm=0.5"];
    let clipped = check_interrupted_runs(&[(2, 2)], &keys);
    let unclipped = [BATCH, "training.max_norm=0", "memory.free_gradients=true"];
    assert!(
        check_interrupted_runs(&[(2, 2)], &unclipped) == check_interrupted_runs(&[(2, 1)], &unclipped[..2])
    );
    assert!(clipped != check_interrupted_runs(&[(2, 1)], &[BATCH, "training.max_norm=0.5"]));
}

#[test]
fn an_interrupted_run_has_the_same_bits_with_bf16_parameters() {
    let keys = ["training.dtype=bf16", "memory.bf16_parameters=true"];
    let found = check_interrupted_runs(&[(1, 2), (2, 1)], &keys);
    assert!(found != check_interrupted_runs(&[(1, 2)], &keys[..1]));
}

/// Each seed gives another order of kernels and copies, and another run.
#[test]
fn a_run_that_began_on_the_cpu_ends_on_a_detached_device_and_the_other_way_round() {
    let num_seeds = std::env::var("TRIREME_DETACHED_SEEDS").ok().and_then(|num| num.parse().ok());
    for seed in 0..num_seeds.unwrap_or(4) {
        let folder = tempfile::tempdir().unwrap();
        let seed = format!("training.seed={seed}");
        for (index, layout) in [
            &["parallelism.zero_stage=3", "training.dtype=bf16"][..],
            &["parallelism.zero_stage=1", "offload.optimizer=disk", "offload.activations=host"],
            &["parallelism.pipeline_parallel_degree=2"],
        ]
        .into_iter()
        .enumerate()
        {
            let keys = [&[&*seed][..], layout].concat();
            let detached = [&keys[..], &["training.device=detached"]].concat();
            let whole = train(&job(folder.path(), &format!("{index}-whole"), 2, 6, &keys));
            for (name, first, second) in [("there", &keys, &detached), ("back", &detached, &keys)] {
                let name = format!("{index}-{name}");
                let mut found = train(&job(folder.path(), &name, 2, 3, first)).0;
                let rest = train(&job(folder.path(), &name, 2, 6, second));
                found.extend(&rest.0);
                let losses = |steps: &[StepBits]| -> Vec<[u64; 2]> {
                    steps.iter().map(|step| [step.loss, step.grad_norm]).collect()
                };
                assert!(losses(&found) == losses(&whole.0), "{name}, {keys:?}: steps differ");
                assert!(rest.1 == whole.1, "{name}, {keys:?}: weights differ");
            }
        }
    }
}

/// A number of workers, and the keys of their layout.
type WorkersAndKeys<'a> = (usize, &'a [&'a str]);

/// Trains 5 steps with each layout, and 5 more with the layout after it in `layouts`. Asserts that the weights keep their bits across
/// the change of layout, and that the losses are nearly the same as in 10 steps with the layout `uninterrupted`.
fn check_continuation<'a>(
    layouts: &[WorkersAndKeys<'a>],
    uninterrupted: WorkersAndKeys<'a>,
    run: impl Fn(&str, WorkersAndKeys<'a>, u64) -> RunResult,
    what: &str,
) {
    let expected = run("uninterrupted", uninterrupted, 10);
    for (index, &first) in layouts.iter().enumerate() {
        let (name, second) = (format!("cut-{index}"), layouts[(index + 1) % layouts.len()]);
        let what = format!("{first:?} then {second:?}, {what}");
        let begun = run(&name, first, 5);
        assert!(run(&name, second, 5).1 == begun.1, "{what}: other weights were read than written");
        let rest = run(&name, second, 10);
        for (found, expected) in begun.0.iter().chain(&rest.0).zip(&expected.0) {
            let difference = f64::from_bits(found.loss) / f64::from_bits(expected.loss) - 1.0;
            assert!(difference.abs() < 1e-5, "{what}, step {}: {difference:e}", found.step);
        }
    }
}

/// Ranks of the tensor axis and of the context axis change the order of sums, so losses after a change of layout are only nearly equal.
/// Stored weights have the same bits.
#[test]
fn a_checkpoint_of_any_degree_continues_with_any_other() {
    const TENSOR: &str = "parallelism.tensor_parallel_degree=2";
    const CONTEXT: &str = "parallelism.context_parallel_degree=2";
    let layouts: [WorkersAndKeys<'_>; 8] = [
        (2, &[TENSOR]),
        (1, &[]),
        (4, &[TENSOR, "parallelism.zero_stage=3"]),
        (2, &["parallelism.zero_stage=2"]),
        (4, &[TENSOR, "parallelism.pipeline_parallel_degree=2", "parallelism.sequence_parallel=false"]),
        (4, &["parallelism.tensor_parallel_degree=4"]),
        (2, &[CONTEXT, "parallelism.zero_stage=1"]),
        (4, &[CONTEXT, TENSOR]),
    ];
    for model in [&["model.architecture=gpt2", "model.num_kv_heads=0"][..], &["model.architecture=llama"]] {
        for optimizer in ["adamw", "adafactor"] {
            let folder = tempfile::tempdir().unwrap();
            let optimizer = format!("optimizer.name={optimizer}");
            let keys =
                [model, &[&*optimizer, "model.num_heads=4", "model.tie_word_embeddings=false"]].concat();
            let run = |name: &str, (workers, layout): (usize, &[&str]), steps: u64| {
                train(&job(folder.path(), name, workers, steps, &[layout, &keys].concat()))
            };
            check_continuation(&layouts, layouts[1], run, &format!("{keys:?}"));
        }
    }
}

/// Experts of a checkpoint are loaded on the workers that have them, with their optimizer state.
#[test]
fn experts_continue_on_other_workers() {
    const EXPERTS: &str = "parallelism.expert_parallel_degree=2";
    const FOUR: &str = "parallelism.expert_parallel_degree=4";
    let layouts: [WorkersAndKeys<'_>; 7] = [
        (1, &[]),
        (2, &[EXPERTS]),
        (4, &[FOUR, "parallelism.zero_stage=1"]),
        (4, &[EXPERTS, "parallelism.zero_stage=2", "parallelism.data_parallel_shard_degree=4"]),
        (4, &[FOUR, "parallelism.zero_stage=3", "parallelism.data_parallel_shard_degree=2"]),
        (4, &[EXPERTS, "parallelism.tensor_parallel_degree=2"]),
        (
            4,
            &[
                EXPERTS,
                "parallelism.pipeline_parallel_degree=2",
                "offload.optimizer=disk",
                "parallelism.zero_stage=1",
            ],
        ),
    ];
    let deepseek = r#"{"model_type": "deepseek_v3", "vocab_size": 257, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 32,
        "q_lora_rank": 12, "kv_lora_rank": 12, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8,
        "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1}"#;
    for optimizer in ["adamw", "adafactor", "muon"] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        std::fs::write(&path, deepseek).unwrap();
        let (model, optimizer) = (format!("config = {path:?}"), format!("optimizer.name={optimizer}"));
        let run = |name: &str, (workers, layout): (usize, &[&str]), steps: u64| {
            let keys = [layout, &[&*optimizer]].concat();
            train(&job_of(folder.path(), &model, name, workers, steps, &keys))
        };
        check_continuation(&layouts, layouts[0], run, &optimizer);
    }
}

#[test]
fn a_checkpoint_of_any_sharding_continues_with_any_other() {
    let layouts: [(usize, &[&str]); 12] = [
        (1, &[]),
        (4, &["parallelism.zero_stage=3"]),
        (2, &["parallelism.zero_stage=1", "activation_checkpoint.mode=selective"]),
        (4, &["parallelism.zero_stage=2", "parallelism.data_parallel_shard_degree=2"]),
        (1, &["parallelism.zero_stage=3", "activation_checkpoint.mode=block"]),
        (
            4,
            &[
                "parallelism.zero_stage=3",
                "parallelism.data_parallel_replicate_degree=2",
                "parallelism.zero_prefetch=0",
            ],
        ),
        (1, &["parallelism.zero_stage=1", "offload.optimizer=disk", "offload.activations=host"]),
        (
            2,
            &[
                "parallelism.zero_stage=3",
                "offload.optimizer=disk",
                "offload.parameters=disk",
                "offload.gradients=host",
                "offload.activations=disk",
            ],
        ),
        (4, &["parallelism.zero_stage=2", "offload.optimizer=host", "offload.gradients=host"]),
        (2, &["parallelism.pipeline_parallel_degree=2"]),
        (
            4,
            &[
                "parallelism.pipeline_parallel_degree=2",
                "parallelism.pipeline_parallel_schedule=interleaved-1f1b",
                "parallelism.zero_stage=2",
                "activation_checkpoint.mode=block",
            ],
        ),
        (
            4,
            &[
                "parallelism.pipeline_parallel_degree=4",
                "parallelism.pipeline_parallel_schedule=gpipe",
                "offload.activations=host",
            ],
        ),
    ];
    for dtype in ["f32", "bf16"] {
        let folder = tempfile::tempdir().unwrap();
        let dtype = format!("training.dtype={dtype}");
        let run = |name: &str, (workers, keys): (usize, &[&str]), steps: u64| {
            let untied = "model.tie_word_embeddings=false";
            train(&job(folder.path(), name, workers, steps, &[keys, &[&dtype, untied]].concat()))
        };
        let whole = run("whole", layouts[0], 10);
        for (index, &first) in layouts.iter().enumerate() {
            let (name, second) = (format!("cut-{index}"), layouts[(index + 1) % layouts.len()]);
            let mut found = run(&name, first, 5).0;
            let rest = run(&name, second, 10);
            found.extend(&rest.0);
            assert!(found == whole.0, "{first:?} then {second:?}, {dtype}: steps differ");
            assert!(rest.1 == whole.1, "{first:?} then {second:?}, {dtype}: weights differ");
        }
    }
}

#[test]
fn every_optimizer_has_the_same_bits_over_any_number_of_shards() {
    for optimizer in ["adam", "lion", "adafactor", "lamb", "lars", "muon"] {
        let folder = tempfile::tempdir().unwrap();
        let name = format!("optimizer.name={optimizer}");
        let run = |run: &str, workers: usize, stage: &str, steps: u64| {
            train(&job(folder.path(), run, workers, steps, &[&name, stage]))
        };
        let whole = run("whole", 1, "parallelism.zero_stage=0", 10);
        let mut found = run("cut", 4, "parallelism.zero_stage=3", 5).0;
        let rest = run("cut", 2, "parallelism.zero_stage=1", 10);
        found.extend(&rest.0);
        assert!(found == whole.0, "{optimizer}: steps differ");
        assert!(rest.1 == whole.1, "{optimizer}: weights differ");
    }
}

#[test]
fn an_interrupted_run_has_the_same_bits_in_fp8() {
    for (fp8, amax_history_len) in [("hybrid", 3), ("e4m3", 1)] {
        let (fp8, len) =
            (format!("training.fp8={fp8}"), format!("training.fp8_amax_history_len={amax_history_len}"));
        check_interrupted_runs(&[(1, 1), (1, 2), (4, 1), (2, 4)], &["training.dtype=bf16", &fp8, &len]);
    }
}

/// ZeRO++ has no state of its own: even the copies of parameters are gathered again after an interruption.
#[test]
fn an_interrupted_run_has_the_same_bits_with_zero_plus_plus() {
    let keys = [
        "training.dtype=bf16",
        "parallelism.zero_stage=3",
        "parallelism.zero_quantized_weights=true",
        "parallelism.zero_hpz=true",
        "parallelism.zero_quantized_gradients=int4",
    ];
    check_interrupted_runs(&[(4, 4)], &keys);
    check_interrupted_runs(&[(2, 2)], &keys);
}

#[test]
fn an_interrupted_run_has_the_same_bits_with_compression() {
    let cases: [(usize, &str, &[&str]); 7] = [
        (4, "top_k", &["comm.compression_ratio=0.05"]),
        (4, "powersgd", &["comm.compression_rank=2"]),
        // The interruption is within the warm-up.
        (2, "one_bit", &["comm.compression_warmup_steps=15", "comm.compression_block_len=64"]),
        (2, "random_k", &["comm.compression_ratio=0.1", "comm.compression_warmup_steps=12"]),
        (2, "int8", &[]),
        (4, "one_bit", &["comm.compression_normalize=true", "comm.compression_warmup_steps=3"]),
        (
            2,
            "top_k",
            &[
                "comm.compression_momentum=0.9",
                "optimizer.name=sgd",
                "optimizer.momentum=0",
                "training.dtype=f16",
                "training.loss_scale_initial=64",
                "training.loss_scale_growth_interval=4",
            ],
        ),
    ];
    for (world_size, codec, keys) in cases {
        let codec = format!("comm.compression={codec}");
        let keys = [&[codec.as_str(), "training.determinism=run"], keys].concat();
        let steps = check_interrupted_runs(&[(world_size, world_size)], &keys);
        let saved = steps.iter().map(|step| step.compression_bytes_saved.unwrap());
        assert!(saved.max() > Some(0), "{keys:?}");
    }
}

#[test]
fn an_interrupted_run_has_the_same_bits_with_exchanged_momentum() {
    let f16 =
        ["training.dtype=f16", "training.loss_scale_initial=64", "training.loss_scale_growth_interval=4"];
    let cases: [&[&str]; 4] = [
        // The interruption is within the warm-up, and then after it.
        &["optimizer.name=one_bit_adam", "optimizer.freeze_step=14"],
        &["optimizer.name=one_bit_adam", "optimizer.freeze_step=6"],
        &["optimizer.name=zero_one_adam", "optimizer.var_update_scaler=2", "comm.compression=int4"],
        &[&["optimizer.name=one_bit_adam", "optimizer.freeze_step=6"], &f16[..]].concat(),
    ];
    for keys in cases {
        let keys = [keys, &["training.determinism=run", "training.max_norm=0"]].concat();
        let steps = check_interrupted_runs(&[(2, 2)], &keys);
        let saved: Vec<bool> = steps.iter().map(|step| step.compression_bytes_saved > Some(0)).collect();
        let has_norm = |step: &StepBits| f64::from_bits(step.grad_norm).is_finite();
        assert!(saved[19] && !saved[0], "{keys:?}: {saved:?}");
        assert!(steps.iter().zip(saved).all(|(step, saved)| has_norm(step) != saved), "{keys:?}: {steps:?}");
    }
}

#[test]
fn skipped_steps_are_counted_across_an_interruption() {
    let keys = [
        "training.dtype=f16",
        "training.reduce_dtype=f16",
        "training.loss_scale_initial=131072",
        "training.loss_scale_growth_interval=1",
    ];
    let steps = check_interrupted_runs(&[(2, 2)], &keys);
    let skipped: Vec<u64> = steps.iter().map(|step| step.skipped_steps.unwrap()).collect();
    assert!(skipped[0] == 1 && (2..10).contains(&skipped[9]), "{skipped:?}");
    assert!(skipped[19] > skipped[9], "it grew until gradients overflowed again: {skipped:?}");
    let is_skipped = |step: &StepBits| !f64::from_bits(step.grad_norm).is_finite();
    assert_eq!(steps.iter().filter(|step| is_skipped(step)).count() as u64, skipped[19]);
}

#[test]
fn f16_continues_from_bf16_with_its_own_scale() {
    let folder = tempfile::tempdir().unwrap();
    train(&job(folder.path(), "run", 1, 5, &["training.dtype=bf16"]));
    let rest = train(&job(folder.path(), "run", 1, 10, &["training.dtype=f16"])).0;
    assert_eq!((rest[0].step, rest[0].loss_scale), (6, Some(65_536)));
}

#[test]
fn metrics_hold_every_step_once_after_a_crash_between_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    let whole = train(&job(folder.path(), "whole", 2, 12, &[]));
    let config = job(folder.path(), "crash", 2, 12, &[]);
    // The run ends after eight steps. Its last checkpoint is the one of step 5.
    run_ranks(2, |group| {
        let mut observer = trireme_train::NullObserver;
        let mut short = trainer(&config, group, &mut observer);
        short.run_until(8).unwrap();
    });
    let rest = train(&config);
    assert!(rest.0[..] == whole.0[5..] && rest.1 == whole.1, "the run goes on after step 5");
    let lines = std::fs::read_to_string(config.run_folder().join("metrics.jsonl")).unwrap();
    let steps: Vec<u64> = lines
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["step"].as_u64().unwrap())
        .collect();
    assert_eq!(steps, (1..=12).collect::<Vec<u64>>());
}

#[test]
fn another_order_of_samples_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    train(&job(folder.path(), "run", 1, 5, &[]));
    for (key, what) in
        [("training.seed=3", "seed 0, but this run has 3"), ("training.seq_len=20", "seq_len 24")]
    {
        // The model must not change with seq_len.
        let config = job(folder.path(), "run", 1, 10, &[key, "model.max_position_embeddings=24"]);
        let mut observer = trireme_train::NullObserver;
        let error =
            open(&config, trireme_comm::single(), &mut observer).err().expect("a refusal").to_string();
        assert!(error.contains(what) && error.contains("step-5"), "{error}");
    }
}

#[test]
fn a_new_start_moves_the_earlier_run_aside() {
    let folder = tempfile::tempdir().unwrap();
    let first = train(&job(folder.path(), "run", 1, 5, &[]));
    let config = job(folder.path(), "run", 1, 5, &["checkpoint.resume=never"]);
    assert!(train(&config) == first);
    let run = config.run_folder();
    assert!(run.join("previous-1/checkpoints/step-5").is_dir() && run.join("checkpoints/step-5").is_dir());
    assert!(run.join("previous-1/config.toml").is_file() && run.join("config.toml").is_file());
}

#[test]
fn a_run_keeps_the_corpus_it_began_with() {
    let folder = tempfile::tempdir().unwrap();
    let whole = train(&job(folder.path(), "whole", 1, 10, &[]));
    train(&job(folder.path(), "run", 1, 5, &[]));
    std::fs::write(folder.path().join("text.txt"), "another text ".repeat(3000)).unwrap();
    let rest = train(&job(folder.path(), "run", 2, 10, &[]));
    assert!(rest.0[..] == whole.0[5..], "the inputs have changed, the run has not");
    let restarted = train(&job(folder.path(), "run", 1, 10, &["checkpoint.resume=never"]));
    assert!(restarted.0[9] != whole.0[9], "a run that begins anew takes the new text");
}

#[test]
fn a_fork_within_one_folder_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let config = job(folder.path(), "run", 1, 10, &[]);
    train(&config);
    let older = config.run_folder().join("checkpoints/step-5");
    let resume = format!("checkpoint.resume={older:?}");
    let fork = job(folder.path(), "run", 1, 10, &[&resume]);
    let error = open(&fork, trireme_comm::single(), &mut trireme_train::NullObserver).err().unwrap();
    assert!(error.to_string().contains("cannot resume after step 5"), "{error}");
    // A branch in its own folder is allowed.
    let branch = train(&job(folder.path(), "branch", 1, 10, &[&resume]));
    assert_eq!(branch.0[0].step, 6);
}

/// Optimizer states that begin after ten steps, because the optimizer is another one, or because parameters were frozen until then.
#[test]
fn optimizer_state_that_begins_in_the_middle_of_a_run_counts_its_own_updates() {
    let frozen = "optimizer.groups=[{match = \"*mlp*\", frozen = true}]";
    for (first, second) in [
        ("optimizer.name=adamw", &["optimizer.name=zero_one_adam", "optimizer.var_update_scaler=4"][..]),
        ("optimizer.name=adamw", &["optimizer.name=one_bit_adam", "optimizer.freeze_step=6"]),
        ("optimizer.name=lamb", &["optimizer.name=adam", "optimizer.weight_decay=0"]),
        (frozen, &[]),
    ] {
        let shared = [
            "training.max_norm=0",
            "training.determinism=run",
            "checkpoint.allow_changed=[\"optimizer\"]",
            "optimizer.beta2=0.999",
            "optimizer.lr=1e-3",
        ];
        let folder = tempfile::tempdir().unwrap();
        let run = |name: &str, stops: &[u64]| {
            let first = train(&job(folder.path(), name, 2, 10, &[&shared[..], &[first]].concat()));
            let keys = [&shared[..], second].concat();
            let parts = stops.iter().map(|&stop| train(&job(folder.path(), name, 2, stop, &keys)));
            let parts: Vec<RunResult> = parts.collect();
            let steps: Vec<StepBits> = parts.iter().flat_map(|part| part.0.clone()).collect();
            (first.1, steps, parts.last().unwrap().1.clone())
        };
        let (before, whole, after) = run("whole", &[20]);
        let (_, cut, cut_after) = run("cut", &[15, 20]);
        assert!(whole == cut && after == cut_after, "{second:?}: a second resume changes bits");
        let loss = |step: usize| f64::from_bits(whole[step].loss);
        assert!(loss(9) < loss(0) + 0.02, "{second:?}: {} to {}", loss(0), loss(9));
        let distances = before.iter().zip(&after);
        let distances = distances.map(|(a, b)| (f32::from_bits(*a) - f32::from_bits(*b)).abs());
        let largest = distances.fold(0.0, f32::max);
        // Ten updates of about the learning rate; more if a second moment is frozen and a gradient grows.
        assert!((5e-3..0.5).contains(&largest), "{second:?}: a weight moves by {largest}");
    }
}
