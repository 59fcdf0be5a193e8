//! Trains every layout in worker processes, and compares the losses with the losses of one worker. `cargo xtask ladder` trains every model
//! under every layout and prints the table; the other test trains a part of the table for fewer steps.

use crate::common::{Fixture, Running, assert_contains};
use std::fmt::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use trireme_testkit::or_skip;

/// Relative tolerance of losses in f32 where ranks compute the sums of a layer, or over positions, in another order.
pub(crate) const LOSS_TOLERANCE: f64 = 1e-5;

/// Names and configs of small models.
pub(crate) const MODELS: [(&str, &str); 6] = [
    (
        "gpt2",
        r#"{"model_type": "gpt2", "vocab_size": 257, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}"#,
    ),
    (
        "llama",
        r#"{"model_type": "llama", "vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}"#,
    ),
    (
        "gemma2",
        r#"{"model_type": "gemma2", "vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 16,
            "query_pre_attn_scalar": 8, "sliding_window": 8}"#,
    ),
    (
        "mixtral",
        r#"{"model_type": "mixtral", "vocab_size": 257, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16, "num_local_experts": 8}"#,
    ),
    (
        "qwen3_moe",
        r#"{"model_type": "qwen3_moe", "vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16, "num_experts": 8,
            "num_experts_per_tok": 3, "moe_intermediate_size": 16, "mlp_only_layers": [0], "norm_topk_prob": true}"#,
    ),
    (
        "deepseek_v3",
        r#"{"model_type": "deepseek_v3", "vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 16, "q_lora_rank": 12,
            "kv_lora_rank": 12, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 8,
            "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "first_k_dense_replace": 1}"#,
    ),
];

const WITH_EXPERTS: [&str; 3] = ["mixtral", "qwen3_moe", "deepseek_v3"];

/// The example: a user's own model, operation and samples.
const EXAMPLE: &str = "residual_network";

/// Workers, and the keys of a layout. Keys of `[parallelism]` omit the section.
const LAYOUTS: [(usize, &str); 58] = [
    (2, ""),
    (4, ""),
    (8, ""),
    (2, "zero_stage=1"),
    (2, "zero_stage=2"),
    (2, "zero_stage=3"),
    (4, "zero_stage=3"),
    (8, "zero_stage=3"),
    (4, "zero_stage=2 data_parallel_shard_degree=2"),
    (4, "zero_stage=3 data_parallel_replicate_degree=2"),
    (2, "shard_gradients=true"),
    (1, "activation_checkpoint.mode=selective"),
    (1, "activation_checkpoint.mode=block"),
    (2, "zero_stage=3 activation_checkpoint.mode=block"),
    (1, "zero_stage=1 offload.optimizer=disk"),
    (2, "zero_stage=2 offload.optimizer=host"),
    (1, "offload.activations=host"),
    (2, "zero_stage=3 offload.parameters=disk"),
    (2, "comm.transport=tcp"),
    (2, "pipeline_parallel_degree=2"),
    (2, "pipeline_parallel_degree=2 pipeline_parallel_schedule=gpipe"),
    (2, "pipeline_parallel_degree=2 pipeline_parallel_schedule=zb-h1"),
    (2, "pipeline_parallel_degree=2 pipeline_parallel_schedule=zb-v"),
    (2, "pipeline_parallel_degree=2 pipeline_parallel_schedule=interleaved-1f1b"),
    (4, "pipeline_parallel_degree=4"),
    (4, "pipeline_parallel_degree=2 zero_stage=2"),
    (4, "pipeline_parallel_degree=2 zero_stage=3"),
    (8, "pipeline_parallel_degree=2"),
    (2, "tensor_parallel_degree=2"),
    (2, "tensor_parallel_degree=2 sequence_parallel=false"),
    (2, "tensor_parallel_degree=2 comm.transport=tcp"),
    (4, "tensor_parallel_degree=4"),
    (4, "tensor_parallel_degree=2"),
    (4, "tensor_parallel_degree=2 zero_stage=1"),
    (4, "tensor_parallel_degree=2 zero_stage=2"),
    (4, "tensor_parallel_degree=2 zero_stage=3"),
    (8, "tensor_parallel_degree=4"),
    (8, "tensor_parallel_degree=2 zero_stage=3"),
    (4, "tensor_parallel_degree=2 pipeline_parallel_degree=2"),
    (4, "tensor_parallel_degree=2 pipeline_parallel_degree=2 pipeline_parallel_schedule=zb-h1"),
    (8, "tensor_parallel_degree=2 pipeline_parallel_degree=2 zero_stage=2"),
    (2, "tensor_parallel_degree=2 activation_checkpoint.mode=selective"),
    (2, "tensor_parallel_degree=2 activation_checkpoint.mode=block"),
    (4, "tensor_parallel_degree=2 zero_stage=2 offload.optimizer=disk"),
    (2, "tensor_parallel_degree=2 offload.activations=host"),
    (2, "context_parallel_degree=2 context_parallel_heads_degree=1"),
    (2, "context_parallel_degree=2 context_parallel_heads_degree=2"),
    (2, "context_parallel_degree=2 comm.transport=tcp"),
    (4, "context_parallel_degree=4 context_parallel_heads_degree=1"),
    (4, "context_parallel_degree=4 context_parallel_heads_degree=2"),
    (4, "context_parallel_degree=2 zero_stage=2"),
    (8, "context_parallel_degree=2 zero_stage=3"),
    (4, "context_parallel_degree=2 pipeline_parallel_degree=2"),
    (4, "context_parallel_degree=2 tensor_parallel_degree=2"),
    (8, "context_parallel_degree=2 tensor_parallel_degree=2 zero_stage=2"),
    (8, "context_parallel_degree=2 tensor_parallel_degree=2 pipeline_parallel_degree=2"),
    (2, "context_parallel_degree=2 activation_checkpoint.mode=selective"),
    (2, "context_parallel_degree=2 activation_checkpoint.mode=block zero_stage=2 offload.optimizer=disk"),
];

/// Workers and keys of expert-parallel layouts, and whether all sums are computed in the order of one worker. Sums over microbatches are in
/// that order if each worker has one microbatch, or if gradients are sharded over all workers with different experts.
const EXPERT_LAYOUTS: [(usize, &str, bool); 28] = [
    (2, "expert_parallel_degree=2", false),
    (4, "expert_parallel_degree=2", false),
    (4, "expert_parallel_degree=4", false),
    (8, "expert_parallel_degree=2", true),
    (8, "expert_parallel_degree=4", true),
    (8, "expert_parallel_degree=8", true),
    (2, "expert_parallel_degree=2 zero_stage=1", false),
    (8, "expert_parallel_degree=8 zero_stage=1", true),
    (2, "expert_parallel_degree=2 zero_stage=2", true),
    (2, "expert_parallel_degree=2 zero_stage=3", true),
    (4, "expert_parallel_degree=4 zero_stage=3", true),
    (4, "expert_parallel_degree=4 zero_stage=2 data_parallel_shard_degree=2", false),
    (4, "expert_parallel_degree=2 zero_stage=2 data_parallel_shard_degree=4", true),
    (8, "expert_parallel_degree=4 zero_stage=3 data_parallel_replicate_degree=2", true),
    (2, "expert_parallel_degree=2 shard_gradients=true", true),
    (2, "expert_parallel_degree=2 comm.transport=tcp", false),
    (2, "expert_parallel_degree=2 activation_checkpoint.mode=selective", false),
    (2, "expert_parallel_degree=2 zero_stage=2 activation_checkpoint.mode=block", true),
    (2, "expert_parallel_degree=2 zero_stage=2 offload.optimizer=disk", true),
    (2, "expert_parallel_degree=2 zero_stage=3 offload.parameters=disk", true),
    (2, "expert_parallel_degree=2 zero_stage=2 offload.activations=host", true),
    (4, "expert_parallel_degree=2 pipeline_parallel_degree=2", false),
    (
        4,
        "expert_parallel_degree=2 pipeline_parallel_degree=2 pipeline_parallel_schedule=zb-h1 zero_stage=2",
        true,
    ),
    (4, "expert_parallel_degree=2 tensor_parallel_degree=2", false),
    (8, "expert_parallel_degree=2 tensor_parallel_degree=2 pipeline_parallel_degree=2 zero_stage=1", false),
    (2, "expert_parallel_degree=2 context_parallel_degree=2", false),
    (8, "expert_parallel_degree=4 context_parallel_degree=2 zero_stage=2", false),
    (8, "expert_parallel_degree=2 context_parallel_degree=2 tensor_parallel_degree=2 zero_stage=3", false),
];

/// Returns the arguments that select a layout. Keys without a section are keys of `[parallelism]`.
pub(crate) fn layout_arguments(workers: usize, layout: &str) -> String {
    let keys = layout.split_whitespace().map(|key| {
        let section = if key.split_once('=').unwrap().0.contains('.') { "" } else { "parallelism." };
        format!(" --set {section}{key}")
    });
    format!("--workers {workers}{}", keys.collect::<String>())
}

/// Returns the relative difference of two losses, given as bits.
pub(crate) fn relative_difference(found: u64, expected: u64) -> f64 {
    if found == expected { 0.0 } else { (f64::from_bits(found) / f64::from_bits(expected) - 1.0).abs() }
}

/// Returns the config that trains the model `{name}.json` on the corpus.
pub(crate) fn model_config(name: &str, training: &str) -> String {
    format!(
        "[model]\nconfig = \"{name}.json\"\n[data]\nfolder = \"corpus\"\n{training}[generate]\nnum_tokens = 0\n"
    )
}

/// A program that trains a model with the config `{name}.toml`.
struct TrainingProgram {
    name: &'static str,
    program: PathBuf,
    /// Whether ranks may split the positions of its samples.
    has_positions: bool,
}

impl TrainingProgram {
    fn train(&self, fixture: &Fixture, arguments: &str) -> Running {
        let mut command = Command::new(&self.program);
        let fixed = "--set checkpoint.enable=false --set checkpoint.resume=never";
        let all = format!("train {}.toml {fixed} {arguments}", self.name);
        command.args(all.split_whitespace());
        fixture.isolate(&mut command);
        Running::start(command)
    }

    /// Returns the largest relative difference of the losses from the losses of one worker. Checks the predicted memory.
    fn difference(&self, fixture: &Fixture, workers: usize, layout: &str) -> LayoutOutcome {
        let what = layout_arguments(workers, layout);
        let outcome = self.train(fixture, &format!("--set run.name=rung {what}")).end();
        if layout.contains("expert") && !WITH_EXPERTS.contains(&self.name) {
            assert_contains(&outcome.refused(), &["no experts"]);
            return LayoutOutcome::Refused;
        }
        if layout.contains("context") && !self.has_positions {
            assert_contains(&outcome.refused(), &["no positions", "has_positions"]);
            return LayoutOutcome::Refused;
        }
        let text = outcome.succeeded();
        assert_predicted(&text, layout);
        let (found, expected) = (fixture.losses("rung"), fixture.losses(self.name));
        assert_eq!(found.len(), expected.len(), "{what}");
        let pairs = found.into_iter().zip(expected);
        let differences = pairs.map(|((_, found), (_, expected))| relative_difference(found, expected));
        LayoutOutcome::Difference(differences.fold(0.0, f64::max))
    }
}

/// Asserts that a run with this output took the memory that was predicted. The number of tokens for a worker's experts is not known in
/// advance.
#[track_caller]
pub(crate) fn assert_predicted(output: &str, layout: &str) {
    let total = output.lines().find(|line| line.starts_with("total")).expect("a run prints its memory");
    let columns: Vec<&str> = total.split_whitespace().collect();
    let is_known = !layout.contains("expert");
    assert!(!is_known || Some(&columns[1]) == columns.last(), "memory was predicted otherwise: {output}");
}

/// A cell of the table.
enum LayoutOutcome {
    Difference(f64),
    Refused,
    NotRun,
}

impl fmt::Display for LayoutOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LayoutOutcome::Difference(0.0) => f.pad("equal"),
            LayoutOutcome::Difference(difference) => f.pad(&format!("{difference:.1e}")),
            LayoutOutcome::Refused => f.pad("refused"),
            LayoutOutcome::NotRun => f.pad("-"),
        }
    }
}

/// Returns the models and the example. Cargo builds the example with all tests of the workspace, and `cargo xtask ladder` builds it before
/// this test.
fn training_programs() -> Vec<TrainingProgram> {
    let trireme = Path::new(env!("CARGO_BIN_EXE_trireme"));
    let model = |(name, _)| TrainingProgram { name, program: trireme.to_owned(), has_positions: true };
    let mut subjects: Vec<TrainingProgram> = MODELS.into_iter().map(model).collect();
    let program = trireme.with_file_name(EXAMPLE);
    let found = program.exists().then_some(program).ok_or("cargo build --package residual_network makes it");
    let example = |program| TrainingProgram { name: EXAMPLE, program, has_positions: false };
    subjects.extend(or_skip("program of the example", found).map(example));
    subjects
}

/// Each layout trains one or two of the programs, and each layout of experts one model that has experts. The choice differs from row to
/// row, and in blocks of rows, since similar layouts follow each other.
#[test]
fn every_layout_trains_as_one_worker_does() {
    check_table(8, |layout, row, column| {
        // The models with experts are in adjacent columns, so one of them is chosen.
        let modulus = if layout.contains("expert") { WITH_EXPERTS.len() } else { 4 };
        (row + row / 6 + column) % modulus == 0
    });
}

#[test]
#[ignore = "trains some 500 times; `cargo xtask ladder` runs it"]
fn every_layout_trains_every_model_as_one_worker_does() {
    check_table(20, |_, _, _| true);
}

/// Trains each program for `num_steps` steps under each layout for which `is_chosen(layout, row, column)` holds, and compares the losses
/// with the losses of one worker.
fn check_table(num_steps: usize, is_chosen: impl Fn(&str, usize, usize) -> bool) {
    let fixture = Fixture::with_corpus();
    let training = |keys: &str| {
        // With a peak, no run measures it.
        format!(
            "[training]\nlocal_batch_size = 2\nglobal_batch_size = 16\nsteps = {num_steps}\nthreads = 1\n{keys}\
             [optimizer]\nlr = 1e-3\n[metrics]\npeak_flops = 1e12\n"
        )
    };
    for (name, config) in MODELS {
        fixture.write(&format!("{name}.json"), config);
        fixture.write(&format!("{name}.toml"), model_config(name, &training("seq_len = 16\n")));
    }
    fixture.write(&format!("{EXAMPLE}.toml"), training(""));
    let subjects = training_programs();
    let mut table = format!("{:>7}", "workers");
    for subject in &subjects {
        subject.train(&fixture, &format!("--workers 1 --set run.name={}", subject.name)).end().succeeded();
        write!(table, "  {:>8}", subject.name).unwrap();
    }
    table.push_str("  layout\n");
    let mut missed = 0;
    let of_all = LAYOUTS.into_iter().map(|(workers, layout)| {
        let splits_sums = layout.contains("tensor") || layout.contains("context");
        (workers, layout, !splits_sums)
    });
    for (row, (workers, layout, is_exact)) in of_all.chain(EXPERT_LAYOUTS).enumerate() {
        write!(table, "{workers:>7}").unwrap();
        let tolerance = if is_exact { 0.0 } else { LOSS_TOLERANCE };
        for (column, subject) in subjects.iter().enumerate() {
            let found = if is_chosen(layout, row, column) {
                subject.difference(&fixture, workers, layout)
            } else {
                LayoutOutcome::NotRun
            };
            missed +=
                usize::from(matches!(found, LayoutOutcome::Difference(difference) if difference > tolerance));
            write!(table, "  {found:>width$}", width = subject.name.len().max(8)).unwrap();
        }
        writeln!(table, "  {layout}").unwrap();
    }
    println!(
        "largest relative difference of the losses of {num_steps} steps from those of one worker:\n{table}"
    );
    assert_eq!(
        missed, 0,
        "layouts differ by more than {LOSS_TOLERANCE:e}, or at all without a tensor or context axis:\n{table}"
    );
}
