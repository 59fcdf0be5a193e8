//! Names that other systems use for the keys of the config.

/// A name in another system, in lower case with underscores; the key that does the same, or most of it; and the difference between them.
const ALIASES: &[(&str, &str, &str)] = &[
    ("adam_beta1", "optimizer.beta1", ""),
    ("adam_beta2", "optimizer.beta2", ""),
    ("adam_epsilon", "optimizer.eps", ""),
    ("attention_dropout", "model.dropout", "drops outputs of attention, not its probabilities"),
    ("batch_size", "training.local_batch_size", "of one worker; `global_batch_size` is that of all"),
    ("betas", "optimizer.beta1", "with `beta2` for the second"),
    ("bf16", "training.dtype", "dtype = \"bf16\""),
    ("block_size", "training.seq_len", ""),
    ("chat_template_path", "data.chat_template", ""),
    ("clip_grad", "training.max_norm", ""),
    ("context_length", "training.seq_len", ""),
    ("context_parallel_size", "parallelism.context_parallel_degree", ""),
    ("cpu_offload", "offload.optimizer", ""),
    ("cuda", "training.device", "device = \"cuda\""),
    ("dataset", "data.inputs", ""),
    ("dataset_text_field", "data.field", ""),
    ("ddp", "parallelism.zero_stage", "zero_stage = 0, the default"),
    ("ddp_timeout", "comm.timeout_seconds", ""),
    ("deepspeed", "parallelism.zero_stage", "and [offload]"),
    ("distributed_backend", "comm.transport", ""),
    ("early_stopping", "training.early_stopping_patience", ""),
    ("epoch", "training.epochs", ""),
    ("eval_file", "data.validation_inputs", ""),
    ("eval_interval", "training.validation_interval", ""),
    ("eval_iters", "training.validation_samples", ""),
    ("eval_steps", "training.validation_interval", ""),
    ("expert_model_parallel_size", "parallelism.expert_parallel_degree", ""),
    ("fp16", "training.dtype", "dtype = \"f16\""),
    ("freeze", "optimizer.groups", "a group with frozen = true"),
    ("fsdp", "parallelism.zero_stage", "zero_stage = 3"),
    ("full_shard", "parallelism.zero_stage", "zero_stage = 3"),
    ("global_train_batch_size", "training.global_batch_size", ""),
    ("gpu", "training.device", "device = \"cuda\""),
    ("gradient_accumulation", "training.global_batch_size", "local_batch_size x workers x accumulation"),
    (
        "gradient_accumulation_steps",
        "training.global_batch_size",
        "local_batch_size x workers x accumulation",
    ),
    ("gradient_checkpointing", "activation_checkpoint.mode", "mode = \"block\""),
    ("gradient_clip_val", "training.max_norm", ""),
    ("init_method_std", "model.initializer_range", ""),
    ("learning_rate", "optimizer.lr", ""),
    ("load_best_model_at_end", "checkpoint.keep_best", ""),
    ("logging_steps", "metrics.log_interval", ""),
    ("lr_decay_style", "lr_scheduler.decay", ""),
    ("lr_scheduler_type", "lr_scheduler.decay", ""),
    ("max_grad_norm", "training.max_norm", ""),
    ("max_length", "training.seq_len", ""),
    ("max_seq_length", "training.seq_len", ""),
    ("max_steps", "training.steps", ""),
    ("micro_batch_size", "training.local_batch_size", ""),
    ("mixed_precision", "training.dtype", ""),
    ("model_name_or_path", "model.init_from", ""),
    ("n_embd", "model.hidden_size", ""),
    ("n_head", "model.num_heads", ""),
    ("n_layer", "model.num_layers", ""),
    ("nproc", "launch.workers", ""),
    ("nproc_per_node", "launch.workers", ""),
    ("num_processes", "launch.workers", ""),
    ("num_train_epochs", "training.epochs", ""),
    ("offload_param", "offload.parameters", ""),
    ("output_dir", "run.folder", "with [run] name"),
    ("packing_strategy", "data.packing", ""),
    ("per_device_train_batch_size", "training.local_batch_size", ""),
    ("pipeline_model_parallel_size", "parallelism.pipeline_parallel_degree", ""),
    ("precision", "training.dtype", ""),
    ("recompute_granularity", "activation_checkpoint.mode", ""),
    ("report_to", "metrics.tensorboard", ""),
    ("resume_from_checkpoint", "checkpoint.resume", ""),
    ("save_interval", "checkpoint.interval", ""),
    ("save_steps", "checkpoint.interval", ""),
    ("save_total_limit", "checkpoint.keep_latest_k", ""),
    ("seq_length", "training.seq_len", ""),
    ("sequence_length", "training.seq_len", ""),
    ("tensor_model_parallel_size", "parallelism.tensor_parallel_degree", ""),
    ("tokenizer_name", "data.tokenizer", ""),
    ("train_batch_size", "training.global_batch_size", ""),
    ("train_file", "data.inputs", ""),
    ("train_files", "data.inputs", ""),
    ("train_iters", "training.steps", ""),
    (
        "train_on_completions",
        "data.inputs",
        "for `messages` and completions, only the answers contribute to the loss",
    ),
    ("use_cpu", "training.device", ""),
    ("validation_file", "data.validation_inputs", ""),
    ("vocab_file", "data.tokenizer", ""),
    ("warmup", "lr_scheduler.warmup_steps", ""),
    ("warmup_ratio", "lr_scheduler.warmup_steps", "a number of steps, not a fraction"),
    ("world_size", "launch.workers", ""),
    ("zero", "parallelism.zero_stage", ""),
    ("zero_optimization", "parallelism.zero_stage", ""),
];

/// If `word` is a name in another system, returns the name, its key and the difference. Otherwise, returns these for every name that
/// contains `word`, provided `word` has at least three characters.
pub(super) fn search_aliases(word: &str) -> impl Iterator<Item = (&'static str, &'static str, &'static str)> {
    let word = normalize(word);
    let is_whole = ALIASES.iter().any(|(foreign, ..)| *foreign == word);
    let fits = move |foreign: &str| {
        if is_whole { foreign == word } else { word.len() >= 3 && foreign.contains(&word) }
    };
    ALIASES.iter().filter(move |(foreign, ..)| fits(foreign)).copied()
}

/// Returns the key with the given name in another system, and the difference.
pub(super) fn key_for_alias(word: &str) -> Option<(&'static str, &'static str)> {
    let word = normalize(word);
    ALIASES.iter().find(|(foreign, ..)| *foreign == word).map(|(_, key, difference)| (*key, *difference))
}

/// Converts names such as `--per-device-train-batch-size` to lower case with underscores.
fn normalize(word: &str) -> String {
    word.trim_start_matches('-').replace(['-', '.', ' '], "_").to_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::sections::Sections;
    use std::collections::BTreeSet;

    #[test]
    fn aliases_refer_to_existing_keys() {
        let sections = Sections::default();
        let keys: BTreeSet<String> = sections
            .all()
            .flat_map(|(name, section)| {
                let lists = section.lists().into_iter().map(|(list, _)| list);
                section
                    .keys()
                    .into_iter()
                    .map(|key| key.name)
                    .chain(lists)
                    .map(move |key| format!("{name}.{key}"))
            })
            .collect();
        for (word, key, _) in ALIASES {
            assert!(keys.contains(*key), "{word}: {key}");
            assert!(!keys.iter().any(|own| own.ends_with(&format!(".{word}"))), "{word} is a key itself");
        }
        assert!(ALIASES.is_sorted());
        assert_eq!(key_for_alias("--nproc-per-node"), Some(("launch.workers", "")));
        assert_eq!(search_aliases("gradient").count(), 4);
    }
}
