//! Padding changes neither training nor metrics.

use crate::common::{job_of, trainer};
use std::path::Path;
use trireme_testkit::run_ranks;
use trireme_train::metrics::StepRecord;
use trireme_train::{Observer, RunInfo};

/// For each step, the loss, the gradient norm and the metrics, with their names.
#[derive(Default)]
struct Reported(Vec<Vec<(String, f64)>>);

impl Observer for Reported {
    fn notice(&mut self, _: &str) {}
    fn begin(&mut self, _: &RunInfo) {}
    fn checkpoint(&mut self, _: u64, _: &Path) {}

    fn step(&mut self, record: &StepRecord) {
        let own = [("loss", record.loss), ("grad_norm", record.grad_norm)].into_iter();
        let all = own.chain(record.metrics.iter().map(|metric| (metric.0, metric.1)));
        self.0.push(all.map(|(name, value)| (name.to_owned(), value)).collect());
    }
}

#[test]
fn routers_do_not_see_padding() {
    const MIXTRAL: &str = r#"{"model_type": "mixtral", "vocab_size": 257, "hidden_size": 32, "intermediate_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "num_local_experts": 8}"#;
    const DEEPSEEK: &str = r#"{"model_type": "deepseek_v3", "vocab_size": 257, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64,
        "q_lora_rank": 12, "kv_lora_rank": 12, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8,
        "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1}"#;
    let folder = tempfile::tempdir().unwrap();
    // With its end token, each document has 20 tokens, so one document fits into a window.
    let documents = (0..64_u32).map(|index| {
        let letters = (0..19).map(|place| char::from(b'a' + (index * (place + 3) * 7 % 26) as u8));
        format!("{{\"text\": \"{}\"}}\n", letters.collect::<String>())
    });
    let text = folder.path().join("text.jsonl");
    std::fs::write(&text, documents.collect::<String>()).unwrap();
    for (name, json) in [("mixtral", MIXTRAL), ("deepseek_v3", DEEPSEEK)] {
        let config = folder.path().join(format!("{name}.json"));
        std::fs::write(&config, json).unwrap();
        let run = |seq_len: usize, capacity: &str, (workers, layout): (usize, &str)| {
            let inputs = format!("data.inputs=[{text:?}]");
            let keys = [
                &inputs,
                "data.packing=documents",
                "data.validation_fraction=0",
                "training.max_norm=0",
                "experts.z_loss=0.1",
                "experts.balance_loss=0.1",
                layout,
                capacity,
                &format!("training.seq_len={seq_len}"),
                &format!("data.folder={:?}", folder.path().join("documents")),
            ];
            let keys: Vec<&str> = keys.into_iter().filter(|key| !key.is_empty()).collect();
            let run = format!("{name}-{seq_len}-{}-{layout}", capacity.len());
            let model = format!("config = {config:?}");
            let config = job_of(folder.path(), &model, &run, workers, 3, &keys);
            let mut ranks = run_ranks(workers, |group| {
                let mut reported = Reported::default();
                trainer(&config, group, &mut reported).run().unwrap();
                reported.0
            });
            ranks.swap_remove(0)
        };
        for capacity in ["", "experts.capacity_factor=0.75"] {
            let tight = run(20, capacity, (1, ""));
            assert!(tight[0].iter().any(|(name, _)| name == "router_entropy"), "{tight:?}");
            let layouts = [
                (1, ""),
                (2, "parallelism.expert_parallel_degree=2"),
                (2, "parallelism.tensor_parallel_degree=2"),
                (2, "parallelism.context_parallel_degree=2"),
            ];
            // Ranks of the context axis have separate capacities, so this layout is left out if there is a capacity.
            for layout in layouts.into_iter().take(if capacity.is_empty() { 4 } else { 3 }) {
                let padded = run(36, capacity, layout);
                for ((name, tight), (_, padded)) in tight.iter().flatten().zip(padded.iter().flatten()) {
                    let difference = (tight - padded).abs() / tight.abs().max(1.0);
                    assert!(
                        difference < 2e-6,
                        "{capacity} {layout:?}: {name} is {padded} instead of {tight}"
                    );
                }
            }
        }
    }
}
