//! A small job in a temporary folder.

pub(crate) mod recording_observer;

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;
use trireme_comm::Group;
use trireme_train::config::Config;
use trireme_train::{
    LanguageTask, Observer, TrainError, Trainer, TrainerOptions, corpus_folder, ensure_corpus,
};

/// Returns the config of a job of `steps` steps with eight microbatches each. `more` is added to its keys.
///
/// The corpus is prepared on first use.
pub(crate) fn job(folder: &Path, run: &str, world_size: usize, steps: u64, more: &[&str]) -> Config {
    let model =
        r#"architecture = "llama", hidden_size = 32, num_layers = 2, num_heads = 4, num_kv_heads = 2"#;
    job_of(folder, model, run, world_size, steps, more)
}

/// Like [`job`], for a model that the keys `model` describe.
pub(crate) fn job_of(
    folder: &Path,
    model: &str,
    run: &str,
    world_size: usize,
    steps: u64,
    more: &[&str],
) -> Config {
    let text = folder.join("text.txt");
    if !text.exists() {
        let words: Vec<String> =
            (0..4000_u32).map(|i| format!("word{} ", i.wrapping_mul(2_654_435_761) >> 27)).collect();
        std::fs::write(&text, words.concat()).unwrap();
    }
    let toml = format!(
        r#"
        run = {{ name = "{run}", folder = {folder:?} }}
        model = {{ {model} }}
        data = {{ inputs = [{text:?}], folder = {corpus:?} }}
        training = {{ local_batch_size = 2, global_batch_size = 16, seq_len = 24, steps = {steps}, threads = 1, validation_interval = 5 }}
        optimizer = {{ lr = 1e-2 }}
        lr_scheduler = {{ warmup_steps = 3, decay = "constant" }}
        checkpoint = {{ interval = 5 }}
        launch = {{ workers = {world_size} }}
        "#,
        corpus = folder.join("corpus"),
    );
    let overrides: Vec<String> = more.iter().map(|&key| key.to_owned()).collect();
    let config = Config::parse(&toml, Path::new("job.toml"), &overrides, None).unwrap();
    let corpus = ensure_corpus(&config, &trireme_data::NoProgress, |_| Ok::<_, TrainError>(())).unwrap();
    let folder = corpus_folder(&config.data().folder, corpus.version);
    config.with_data_folder(folder)
}

/// Returns the trainer of one rank.
pub(crate) fn trainer<'a>(config: &'a Config, group: Group, observer: &'a mut dyn Observer) -> Trainer<'a> {
    open(config, group, observer).unwrap()
}

/// Like [`trainer`], but returns errors.
pub(crate) fn open<'a>(
    config: &'a Config,
    group: Group,
    observer: &'a mut dyn Observer,
) -> Result<Trainer<'a>, TrainError> {
    Trainer::new(config, Arc::new(LanguageTask::open(config)?), group, options(config), observer)
}

pub(crate) fn options(config: &Config) -> TrainerOptions {
    TrainerOptions {
        num_threads: config.training().threads,
        local_rank: None,
        started: Instant::now(),
        plan: None,
        peak_flops: None,
        simd_level_max: None,
        ends_at: None,
        given_config: None,
    }
}
