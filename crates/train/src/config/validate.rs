//! Checks the keys against each other, and resolves values that refer to other keys.

use super::checks::{Checks, changed_keys};
use super::choice::{Architecture, Fp8, Tokenizer};
use super::compression::check_compression;
use super::costs::check_costs;
use super::group_origins::GroupOrigins;
use super::memory::{
    check_activation_checkpoint, check_bf16_parameters, check_free_gradients, check_huge_pages,
    check_offload, check_parallelism, degrees, is_on_disk, may_spill,
};
use super::mistake::{KeyPosition, Mistake};
use super::optimizer::check_optimizer;
use super::pipeline::{check_degrees, check_expert_shards, check_positions};
use super::reader::{KeyOrigin, UncheckedConfig};
use super::section::Section;
use super::sections::{Experts, FP8_KEYS, LOSS_SCALE_KEYS, Model, Sections, Training};
use super::{Config, TaskKind};
use std::path::{Component, Path};
use trireme_data::PrepareOptions;
use trireme_optim::{Decay, OptimizerName};
use trireme_parallel::Determinism;
use trireme_schedule::collective::{Algorithm, CollectiveKind, Hosts, fits, is_canonical};
use trireme_tensor::Precision;

/// Maximum number of microbatches per step on one worker: far more than any use needs, and few enough that the step program fits into
/// memory.
const NUM_MICROBATCHES_MAX: usize = 1 << 16;

/// The smallest valid `peak_flops`. Slower devices are not used for training, so a smaller number is in another unit.
const PEAK_FLOPS_MIN: f64 = 1e8;

/// Returns the keys of `[model]` that have an effect only with `architecture`: those listed after it.
pub(super) fn model_shape_keys(model: &Model) -> impl Iterator<Item = &'static str> {
    model.keys().into_iter().map(|key| key.name).skip_while(|name| *name != "architecture").skip(1)
}

/// Returns the checked and resolved config, or all mistakes in the order of the text.
pub(super) fn validate(
    mut unchecked: UncheckedConfig,
    task_kind: TaskKind,
    path: &Path,
    world_size: Option<usize>,
) -> Result<Config, Vec<Mistake>> {
    let device = unchecked.sections.training.device.resolved();
    unchecked.sections.training.device = device;
    if unchecked.sections.launch.workers == 0 {
        unchecked.sections.launch.workers = device.num_devices();
    }
    let world_size = world_size.unwrap_or(unchecked.sections.launch.workers);
    name_run(&mut unchecked.sections, path);
    choose_steps_or_epochs(&mut unchecked);
    let mut checks = Checks { path, unchecked: &unchecked, mistakes: Vec::new() };
    check_run(&mut checks);
    match task_kind {
        TaskKind::LanguageModel => {
            check_model(&mut checks);
            check_experts(&mut checks);
            check_data(&mut checks);
            check_positions(&mut checks);
        }
        TaskKind::CustomTask => refuse_language_keys(&mut checks),
    }
    let data_parallel_degree = check_degrees(&mut checks, world_size);
    check_training(&mut checks, data_parallel_degree, world_size);
    check_parallelism(&mut checks, data_parallel_degree);
    check_expert_shards(&mut checks, data_parallel_degree);
    check_activation_checkpoint(&mut checks);
    check_bf16_parameters(&mut checks);
    check_free_gradients(&mut checks, data_parallel_degree);
    check_huge_pages(&mut checks);
    check_offload(&mut checks, data_parallel_degree);
    check_loss_scale(&mut checks);
    check_fp8(&mut checks);
    check_tls(&mut checks);
    check_peak(&mut checks);
    check_algorithm(&mut checks);
    check_costs(&mut checks);
    check_optimizer(&mut checks);
    check_compression(&mut checks);
    let mut mistakes = checks.mistakes;
    mistakes.append(&mut unchecked.mistakes);
    if !mistakes.is_empty() {
        mistakes.sort_by(|a, b| a.position.cmp(&b.position));
        return Err(mistakes);
    }
    resolve(&mut unchecked.sections, data_parallel_degree);
    if task_kind == TaskKind::CustomTask {
        // Only language models generate a sample at the end.
        unchecked.sections.generate.num_tokens = 0;
    }
    let group_origins = GroupOrigins::of(&unchecked);
    Ok(Config { task_kind, sections: unchecked.sections, world_size, group_origins })
}

fn check_run(checks: &mut Checks<'_>) {
    let name = &checks.unchecked.sections.run.name;
    let is_plain = {
        let mut components = Path::new(name).components();
        matches!(components.next(), Some(Component::Normal(part)) if part == name.as_str())
            && components.next().is_none()
            && !name.chars().any(char::is_control)
    };
    checks
        .require(is_plain, &["run.name"], || format!("expected the name of a single folder, found {name:?}"));
}

fn check_tls(checks: &mut Checks<'_>) {
    let comm = &checks.unchecked.sections.comm;
    let files = [&comm.tls_certificate, &comm.tls_key, &comm.tls_ca];
    let num_set = files.iter().filter(|file| file.is_some()).count();
    checks.require(
        num_set == 0 || num_set == files.len(),
        &["comm.tls_certificate", "comm.tls_key", "comm.tls_ca"],
        || "TLS needs all of `tls_certificate`, `tls_key` and `tls_ca`".to_owned(),
    );
}

fn check_peak(checks: &mut Checks<'_>) {
    let peak = checks.unchecked.sections.metrics.peak_flops;
    checks.require(peak == 0.0 || peak >= PEAK_FLOPS_MIN, &["metrics.peak_flops"], || {
        "expected floating-point operations a second, such as 312e12 for 312 TFLOP/s, or 0".to_owned()
    });
}

/// Checks that a flat algorithm keeps the canonical order of sums if the config requires it. Hierarchical algorithms are not checked,
/// because their order depends on the hosts.
fn check_algorithm(checks: &mut Checks<'_>) {
    let Sections { comm, training, .. } = &checks.unchecked.sections;
    let Some(algorithm @ Algorithm::Flat(_)) = comm.algorithm else { return };
    let (all_reduce, hosts) = (CollectiveKind::AllReduce.with_len(8), Hosts::single(8));
    let keeps_order = !fits(all_reduce, algorithm, &hosts) || is_canonical(all_reduce, algorithm, &hosts);
    checks.require(
        keeps_order || training.determinism == Determinism::Run,
        &["comm.algorithm", "training.determinism"],
        || {
            format!(
                "{algorithm} sums in its own order, so the bits would depend on the layout: set determinism = \
                 \"run\", or use halving_doubling, recursive_doubling, binomial_tree or direct"
            )
        },
    );
}

/// Returns whether a key has an effect only for language models.
pub(super) fn is_language_model_key(section: &str, key: &str) -> bool {
    match section {
        "data" | "generate" => true,
        "model" => !matches!(key, "init_from" | "allow_non_finite"),
        "training" => key == "seq_len",
        "experts" => !matches!(key, "bias_update_rate" | "spill"),
        _ => false,
    }
}

fn refuse_language_keys(checks: &mut Checks<'_>) {
    let unchecked = checks.unchecked;
    for name in unchecked.origins.keys() {
        let is_refused =
            name.split_once('.').is_some_and(|(section, key)| is_language_model_key(section, key));
        checks.require(!is_refused, &[name], || {
            "only applies to language models, but this program has a model and samples of its own; remove this key"
                .to_owned()
        });
    }
}

fn check_model(checks: &mut Checks<'_>) {
    let model = &checks.unchecked.sections.model;
    checks.require(
        model.config.is_some() || model.architecture.is_some() || model.init_from.is_some(),
        &["model.architecture", "model.config", "model.init_from"],
        || {
            "no model; set `config` to a Hugging Face config.json, or `architecture` to \"gpt2\" or \"llama\", or \
             `init_from` to a Hugging Face directory"
                .to_owned()
        },
    );
    checks.require(
        model.config.is_none() || model.architecture.is_none(),
        &["model.architecture", "model.config"],
        || "`config` already describes the model; remove one of the two keys".to_owned(),
    );
    checks.only_applies(
        !model.allow_other_tokenizer || model.init_from.is_some(),
        &["model.allow_other_tokenizer"],
        "`init_from`",
    );
    if model.architecture.is_some() {
        return check_model_shape(checks);
    }
    for key in model_shape_keys(model) {
        let name = format!("model.{key}");
        checks.only_applies(!checks.is_given(&name), &[&name, "model.architecture"], "`architecture`");
    }
}

fn check_experts(checks: &mut Checks<'_>) {
    let Experts { balance_loss, z_loss, capacity_factor, .. } = checks.unchecked.sections.experts;
    let is_capacity = capacity_factor.is_none_or(|factor| factor > 0.0 && factor <= 1024.0);
    checks.require(is_capacity, &["experts.capacity_factor"], || {
        "expected a number above 0, at most 1024; 1 takes as many choices as even loads have".to_owned()
    });
    for (key, weight) in [("experts.balance_loss", balance_loss), ("experts.z_loss", z_loss)] {
        let is_weight =
            weight.is_none_or(|weight| weight == 0.0 || (weight as f32).is_normal() && weight > 0.0);
        checks.require(is_weight, &[key], || "expected a number, 0 or more".to_owned());
    }
}

fn check_model_shape(checks: &mut Checks<'_>) {
    let Sections { model, training, .. } = &checks.unchecked.sections;
    let Model { hidden_size, num_heads, num_kv_heads, max_position_embeddings, .. } = *model;
    let rotary = model.architecture == Some(Architecture::Llama);
    let divides = hidden_size.is_multiple_of(num_heads);
    checks.require(divides, &["model.num_heads", "model.hidden_size"], || {
        format!("num_heads {num_heads} does not divide hidden_size {hidden_size}")
    });
    checks.require(
        !rotary || !divides || (hidden_size / num_heads).is_multiple_of(2),
        &["model.num_heads", "model.hidden_size"],
        || {
            let head = hidden_size / num_heads;
            format!("rotary positions need an even head width; hidden_size / num_heads is {head}")
        },
    );
    checks.require(
        num_kv_heads == 0 || num_heads.is_multiple_of(num_kv_heads),
        &["model.num_kv_heads", "model.num_heads"],
        || format!("num_kv_heads {num_kv_heads} does not divide num_heads {num_heads}"),
    );
    checks.require(
        rotary || num_kv_heads == 0 || num_kv_heads == num_heads,
        &["model.num_kv_heads", "model.num_heads", "model.architecture"],
        || "gpt2 has as many key-value heads as heads; remove num_kv_heads, or use llama".to_owned(),
    );
    checks.require(
        max_position_embeddings == 0 || training.seq_len <= max_position_embeddings,
        &["training.seq_len", "model.max_position_embeddings"],
        || {
            format!(
                "seq_len {} is longer than the model's max_position_embeddings {max_position_embeddings}",
                training.seq_len
            )
        },
    );
}

fn check_data(checks: &mut Checks<'_>) {
    let data = &checks.unchecked.sections.data;
    checks.require(
        !data.inputs.is_empty() || !data.folder.as_os_str().is_empty(),
        &["data.inputs", "data.folder"],
        || "no data; set `inputs` to text files or folders, or `folder` to a prepared folder".to_owned(),
    );
    checks.require(
        data.train_bpe == 0 || data.tokenizer == Tokenizer::Auto,
        &["data.train_bpe", "data.tokenizer"],
        || "`tokenizer` already names one; remove one of the two keys".to_owned(),
    );
    if let Err(mistake) = PrepareOptions::check_weights(&data.weights, &data.inputs) {
        checks.require(false, &["data.weights", "data.inputs"], || mistake);
    }
    for (key, inputs) in [("data.inputs", &data.inputs), ("data.validation_inputs", &data.validation_inputs)]
    {
        checks.require(!inputs.iter().any(|input| input.as_os_str() == "-"), &[key], || {
            "only `trireme prepare` reads the standard input; prepare it, and set `folder`".to_owned()
        });
    }
    checks.require(
        data.validation_inputs.is_empty()
            || data.validation_fraction == 0.0
            || !checks.is_given("data.validation_fraction"),
        &["data.validation_fraction", "data.validation_inputs"],
        || "`validation_inputs` already says what to validate on; remove one of the two keys".to_owned(),
    );
    // A prepared folder has its own tokenizer.
    let is_prepared = data.inputs.is_empty() && !data.folder.as_os_str().is_empty();
    for key in changed_keys(data).filter(|key| {
        matches!(
            *key,
            "tokenizer"
                | "train_bpe"
                | "validation_inputs"
                | "chat_template"
                | "special_tokens_in_messages"
                | "weights"
        )
    }) {
        let name = format!("data.{key}");
        checks.require(!is_prepared, &[&name, "data.inputs"], || {
            "only applies to `inputs`; set those, or remove this key (the tokens in `folder` are used as they are)"
                .to_owned()
        });
    }
    // The 256 bytes are tokens, and training must be able to add at least one merge.
    checks.require(data.train_bpe == 0 || data.train_bpe > 256, &["data.train_bpe"], || {
        "expected 0, or a number above 256 (the bytes)".to_owned()
    });
}

/// Turns `epochs` off if `steps` is set later, on the command line. Otherwise, `epochs` takes precedence over `steps`.
fn choose_steps_or_epochs(unchecked: &mut UncheckedConfig) {
    let place = |key: &str| unchecked.origins.get(key).map(|given| given.position.clone());
    let (Some(steps), Some(_)) = (place("training.steps"), place("training.epochs")) else { return };
    let is_file = |place: &KeyPosition| matches!(place, KeyPosition::File { .. });
    if place("training.epochs").is_some_and(|epochs| steps > epochs && !is_file(&steps)) {
        unchecked.sections.training.epochs = 0.0;
    }
}

fn check_training(checks: &mut Checks<'_>, data_parallel_degree: usize, world_size: usize) {
    let in_file = |key: &str| {
        matches!(
            checks.unchecked.origins.get(key),
            Some(KeyOrigin { position: KeyPosition::File { .. }, .. })
        )
    };
    let has_two_lengths = in_file("training.steps") && in_file("training.epochs");
    checks.require(
        !has_two_lengths || checks.unchecked.sections.training.epochs == 0.0,
        &["training.epochs"],
        || "`steps` already says how long to train; remove one of the two keys".to_owned(),
    );
    let patience = checks.unchecked.sections.training.early_stopping_patience;
    checks.require(
        patience == 0 || checks.unchecked.sections.training.validation_interval > 0,
        &["training.early_stopping_patience", "training.validation_interval"],
        || "needs validations: set validation_interval, or remove this key".to_owned(),
    );
    let training = &checks.unchecked.sections.training;
    let local = training.local_batch_size;
    let samples_per_microbatch = local * data_parallel_degree;
    let workers = if data_parallel_degree == world_size { "workers" } else { "data-parallel workers" };
    checks.require(
        training.global_batch_size.is_multiple_of(samples_per_microbatch),
        &["training.global_batch_size", "training.local_batch_size", "launch.workers"],
        || {
            format!(
                "not a multiple of local_batch_size {local} x {data_parallel_degree} {workers} = {samples_per_microbatch}; the nearest multiples are {} and {}",
                (training.global_batch_size / samples_per_microbatch).max(1) * samples_per_microbatch,
                training.global_batch_size.div_ceil(samples_per_microbatch).max(2) * samples_per_microbatch
            )
        },
    );
    let num_microbatches = training.global_batch_size / samples_per_microbatch;
    checks.require(
        num_microbatches <= NUM_MICROBATCHES_MAX,
        &["training.global_batch_size", "training.local_batch_size", "launch.workers"],
        || {
            format!(
                "global_batch_size {} results in {num_microbatches} microbatches per step on each of \
                 {data_parallel_degree} {workers}, more than {NUM_MICROBATCHES_MAX}; increase local_batch_size",
                training.global_batch_size
            )
        },
    );
    let global = training.global_batch_size.max(samples_per_microbatch) as u64;
    let num_tokens = global.checked_mul(training.seq_len as u64).and_then(|n| n.checked_mul(training.steps));
    checks.require(
        num_tokens.is_some(),
        &["training.steps", "training.global_batch_size", "training.seq_len", "training.local_batch_size"],
        || "steps x global_batch_size x seq_len is too many tokens".to_owned(),
    );
}

fn check_loss_scale(checks: &mut Checks<'_>) {
    let training = &checks.unchecked.sections.training;
    let Training { dtype, reduce_dtype, loss_scale, loss_scale_initial, .. } = *training;
    let is_f16 = dtype == Precision::F16;
    checks.require(
        reduce_dtype != Precision::F16 || is_f16,
        &["training.reduce_dtype", "training.dtype"],
        || {
            "only dtype = \"f16\" scales the loss; without scaling, small gradients would become zero in f16; use \
             \"bf16\""
                .to_owned()
        },
    );
    for key in changed_keys(training).filter(|key| LOSS_SCALE_KEYS.contains(key)) {
        let name = format!("training.{key}");
        checks.only_applies(is_f16, &[&name, "training.dtype"], "dtype = \"f16\"");
        checks.require(
            !is_f16 || loss_scale == 0 || key == "loss_scale",
            &[&name, "training.loss_scale"],
            || {
                format!(
                    "only applies with loss_scale = 0, but it is {loss_scale}; remove one of the two keys"
                )
            },
        );
    }
    for (name, scale) in [("loss_scale", loss_scale), ("loss_scale_initial", loss_scale_initial)] {
        checks.require(scale == 0 || scale.is_power_of_two(), &[&format!("training.{name}")], || {
            let below = 1_u32 << scale.ilog2();
            format!("expected a power of two, such as {below} or {}", 2 * below)
        });
    }
}

fn check_fp8(checks: &mut Checks<'_>) {
    let training = &checks.unchecked.sections.training;
    let is_on = training.fp8 != Fp8::Off;
    checks.require(!is_on || training.dtype == Precision::Bf16, &["training.fp8", "training.dtype"], || {
        "fp8 requires bf16 for everything that is not rounded to fp8; set dtype = \"bf16\", or remove this key"
            .to_owned()
    });
    for key in changed_keys(training).filter(|key| FP8_KEYS.contains(key)) {
        let keys = [&format!("training.{key}"), "training.fp8"];
        checks.only_applies(is_on, &keys, "fp8 = \"e4m3\" or \"hybrid\"");
    }
}

fn name_run(sections: &mut Sections, path: &Path) {
    if sections.run.name.is_empty() {
        let stem = path.file_stem().and_then(|stem| stem.to_str());
        sections.run.name = stem.unwrap_or_default().to_owned();
    }
}

fn resolve(sections: &mut Sections, data_parallel_degree: usize) {
    let Sections {
        run,
        model,
        data,
        training,
        optimizer,
        lr_scheduler,
        parallelism,
        offload,
        experts,
        memory,
        ..
    } = sections;
    let (replicas, shards) = degrees(parallelism, data_parallel_degree);
    parallelism.data_parallel_replicate_degree = replicas as i64;
    parallelism.data_parallel_shard_degree = shards as i64;
    if let Some(architecture) = model.architecture {
        resolve_model(model, architecture, training.seq_len);
    }
    // The folder is resolved only if it is used. Otherwise, it would be a mistake when the written config is read.
    if (is_on_disk(offload) || may_spill(parallelism, experts, memory))
        && offload.folder.as_os_str().is_empty()
    {
        offload.folder = run.folder.join(&run.name);
    }
    if data.folder.as_os_str().is_empty() {
        data.folder = run.folder.join(&run.name).join("data");
    }
    if !data.validation_inputs.is_empty() {
        data.validation_fraction = 0.0;
    }
    for extension in &mut data.extensions {
        *extension = extension.trim_start_matches('.').to_owned();
    }
    if training.global_batch_size == 0 {
        training.global_batch_size = training.local_batch_size * data_parallel_degree;
    }
    if optimizer.name == OptimizerName::OneBitAdam && optimizer.settings.freeze_step == 0 {
        optimizer.settings.freeze_step = (training.steps / 5).max(1);
    }
    if lr_scheduler.decay_steps == 0 {
        let after_warmup = training.steps.saturating_sub(lr_scheduler.warmup_steps);
        lr_scheduler.decay_steps = match lr_scheduler.decay {
            Decay::Cosine | Decay::Linear => after_warmup,
            Decay::WarmupStableDecay => (training.steps / 5).min(after_warmup),
            Decay::Constant => 0,
        };
    }
}

fn resolve_model(model: &mut Model, architecture: Architecture, seq_len: usize) {
    if model.num_kv_heads == 0 {
        model.num_kv_heads = model.num_heads;
    }
    if model.max_position_embeddings == 0 {
        model.max_position_embeddings = seq_len;
    }
    if model.intermediate_size == 0 {
        model.intermediate_size = match architecture {
            Architecture::Gpt2 => 4 * model.hidden_size,
            // Touvron et al., "LLaMA" (2023), section 2.2, in the multiples of its published code.
            Architecture::Llama => (8 * model.hidden_size).div_ceil(3).next_multiple_of(256),
        };
    }
}
