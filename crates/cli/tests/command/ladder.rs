//! The ladder: every layout against one worker, as processes. `cargo xtask ladder` prints its table.

use crate::common::Scene;
use std::fmt::Write;

/// Relative difference of losses in f32 where ranks take the sums of a layer, or over positions, in another order.
const LOSS_TOLERANCE: f64 = 1e-5;

const MODELS: [(&str, &str); 3] = [
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
];

/// Workers, and the keys of a layout; those of `[parallelism]` without the section.
const LAYOUTS: [(usize, &str); 57] = [
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

/// The largest relative difference of a run's losses from those of one worker; checks the memory that was predicted.
fn difference(scene: &Scene, model: &str, workers: usize, layout: &str) -> f64 {
    let keys = layout.split_whitespace().map(|key| {
        let section = if key.split_once('=').unwrap().0.contains('.') { "" } else { "parallelism." };
        format!(" --set {section}{key}")
    });
    let keys: String = keys.collect();
    let fixed = "--set run.name=rung --set checkpoint.resume=never --set checkpoint.enable=false --set generate.num_tokens=0";
    let command = format!("train {model}.toml --workers {workers} {fixed}{keys}");
    let text = scene.run(&command).succeeded();
    let total = text.lines().find(|line| line.starts_with("total")).unwrap();
    let columns: Vec<&str> = total.split_whitespace().collect();
    assert_eq!(Some(&columns[1]), columns.last(), "{command}: memory was predicted otherwise: {text}");
    let (found, expected) = (scene.losses("rung"), scene.losses(model));
    assert_eq!(found.len(), expected.len(), "{command}");
    let pairs = found.into_iter().zip(expected);
    let differences = pairs.map(|((_, found), (_, expected))| match found == expected {
        true => 0.0,
        false => (f64::from_bits(found) / f64::from_bits(expected) - 1.0).abs(),
    });
    differences.fold(0.0, f64::max)
}

#[test]
fn every_layout_trains_as_one_worker_does() {
    let scene = Scene::with_corpus();
    for (name, config) in MODELS {
        scene.write(&format!("{name}.json"), config);
        scene.write(
            &format!("{name}.toml"),
            format!(
                "[model]\nconfig = \"{name}.json\"\n[data]\nfolder = \"corpus\"\n[training]\nlocal_batch_size = 2\n\
                 global_batch_size = 16\nseq_len = 16\nsteps = 20\nthreads = 1\n[optimizer]\nlr = 1e-3\n"
            ),
        );
        let alone = "--workers 1 --set checkpoint.enable=false --set generate.num_tokens=0";
        scene.run(&format!("train {name}.toml {alone} --set run.name={name}")).succeeded();
    }
    let mut table = format!("{:>7}  {:>8}  {:>8}  {:>8}  layout\n", "workers", "gpt2", "llama", "gemma2");
    let mut missed = 0;
    for (workers, layout) in LAYOUTS {
        write!(table, "{workers:>7}").unwrap();
        let splits_sums = layout.contains("tensor") || layout.contains("context");
        let tolerance = if splits_sums { LOSS_TOLERANCE } else { 0.0 };
        for (model, _) in MODELS {
            let difference = difference(&scene, model, workers, layout);
            missed += usize::from(difference > tolerance);
            let cell = if difference == 0.0 { "equal".to_owned() } else { format!("{difference:.1e}") };
            write!(table, "  {cell:>8}").unwrap();
        }
        writeln!(table, "  {layout}").unwrap();
    }
    println!("largest relative difference of the losses of 20 steps from those of one worker:\n{table}");
    assert_eq!(
        missed, 0,
        "layouts differ by more than {LOSS_TOLERANCE:e}, or at all without a tensor or context axis:\n{table}"
    );
}
