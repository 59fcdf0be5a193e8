//! Models with experts, from a config.

use crate::common::{Fixture, assert_contains};
use serde_json::Value;

const MIXTRAL: &str = r#"{"model_type": "mixtral", "vocab_size": 257, "hidden_size": 32, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "num_local_experts": 4}"#;

const DEEPSEEK: &str = r#"{"model_type": "deepseek_v3", "vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64, "q_lora_rank": 12, "kv_lora_rank": 12,
    "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}"#;

const DEGREE: &str = "parallelism.expert_parallel_degree";

fn fixture() -> Fixture {
    let fixture = Fixture::with_corpus();
    fixture.write("model.json", MIXTRAL);
    let config = fixture.read("tiny.toml");
    let (_, rest) = config.split_once("[data]").unwrap();
    fixture.write("tiny.toml", format!("[model]\nconfig = \"model.json\"\n[data]{rest}"));
    fixture
}

#[test]
fn settings_of_experts_that_a_run_cannot_use_are_refused() {
    let fixture = fixture();
    fixture.write("many.json", MIXTRAL.replace(r#""num_local_experts": 4"#, r#""num_local_experts": 20000"#));
    let picked = r#""num_local_experts": 4, "num_experts_per_tok": 5"#;
    fixture.write("picked.json", MIXTRAL.replace(r#""num_local_experts": 4"#, picked));
    for (settings, facts) in [
        ("--set experts.bias_update_rate=0.01".to_owned(), ["a mixtral", "remove the key"]),
        ("--set experts.capacity_factor=0".to_owned(), ["capacity_factor", "0"]),
        ("--set experts.num_chunks=0".to_owned(), ["num_chunks", "0"]),
        ("--set experts.num_shadowed=5".to_owned(), ["num_shadowed is 5", "have 4 experts"]),
        (
            "--set model.config=many.json".to_owned(),
            ["'num_local_experts' is 20000", "at most 16384 experts"],
        ),
        ("--set model.config=picked.json".to_owned(), ["'num_experts_per_tok' is 5", "at most 4 experts"]),
        (
            format!("--workers 3 --set training.global_batch_size=12 --set {DEGREE}=3"),
            ["3 ranks cannot have equally many of the 4 experts", "2 or 4"],
        ),
        (format!("--workers 4 --set {DEGREE}=3"), ["3 does not divide the 4 workers", "2 or 4"]),
        (
            format!(
                "--workers 2 --set {DEGREE}=2 --set comm.compression=top_k --set training.determinism=run"
            ),
            ["would round what workers with different experts hold", "expert_parallel_degree = 1"],
        ),
        (
            format!(
                "--workers 2 --set {DEGREE}=2 --set parallelism.zero_stage=3 --set parallelism.zero_quantized_weights=true"
            ),
            ["ZeRO++ gathers units", "expert_parallel_degree = 1"],
        ),
    ] {
        assert_contains(&fixture.refused_without_changes(&format!("train tiny.toml {settings}")), &facts);
    }
    // Counts of loads are reduced next to gradients, and so would be rounded to four bits.
    fixture.write("biased.json", DEEPSEEK);
    let rounded = "plan tiny.toml --workers 4 --set model.config=biased.json --set parallelism.zero_stage=3 \
                   --set parallelism.zero_quantized_gradients=int4";
    assert_contains(
        &fixture.refused_without_changes(rounded),
        &["balances experts by how often each was chosen"],
    );
    let dense = "train tiny.toml --set model.config=dense.json --set experts.balance_loss=0.1";
    fixture.write("dense.json", MIXTRAL.replace("mixtral", "llama"));
    assert_contains(&fixture.refused_without_changes(dense), &["a llama, has none", "remove the section"]);
}

#[test]
fn a_capacity_counts_dropped_tokens_and_makes_memory_predictable() {
    let fixture = fixture();
    let settings = "--workers 2 --set experts.capacity_factor=0.75";
    fixture.run(&format!("train tiny.toml {settings} --set run.name=whole")).succeeded();
    let text = fixture.run(&format!("train tiny.toml {settings} --set {DEGREE}=2 --set run.name=divided"));
    let text = text.succeeded();
    let total = text.lines().find(|line| line.starts_with("total")).unwrap();
    let columns: Vec<&str> = total.split_whitespace().collect();
    assert_eq!(columns[1], columns[3], "{text}");
    for name in ["whole", "divided"] {
        let drops: Vec<f64> = fixture
            .records(name)
            .iter()
            .map(|record| record["metrics"]["expert_drops"].as_f64().unwrap())
            .collect();
        // With even loads, a quarter of the tokens exceeds the capacity.
        assert!(drops.iter().all(|drops| (0.25..0.6).contains(drops)), "{drops:?}");
    }
}

/// A worker that gets more tokens than planned reports it, and the losses equal the losses of a run with enough memory.
#[test]
fn a_run_whose_loads_exceed_its_budget_spills_and_says_so() {
    let fixture = fixture();
    // Each worker has one expert, and one of the experts gets most tokens.
    let settings = format!("--workers 4 --set {DEGREE}=4 --set training.seq_len=64");
    let text = fixture.run(&format!("train tiny.toml {settings} --set run.name=rich")).succeeded();
    assert!(!text.contains("spill"), "{text}");
    let predicted = |record: &Value| record["memory_predicted_bytes"]["total"].as_u64().unwrap();
    let budget = predicted(fixture.records("rich").last().unwrap());
    let settings = format!("{settings} --set memory.device_budget={budget}B");
    let text = fixture.run(&format!("train tiny.toml {settings} --set run.name=poor")).succeeded();
    assert_contains(
        &text,
        &[
            "note: worker ",
            "activations do not fit beside",
            "some spill to runs/poor;",
            "which even loads need at most",
        ],
    );
    assert_eq!(fixture.losses("poor"), fixture.losses("rich"));
    let ended =
        fixture.run(&format!("train tiny.toml {settings} --set experts.spill=false --set run.name=none"));
    assert!(ended.code.is_some_and(|code| code > 0), "{ended:?}");
    assert_contains(&ended.stderr, &["exceeds the device budget"]);
}
