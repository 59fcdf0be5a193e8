//! Prepares a run: finds or prepares its corpus, computes its number of steps, and checks its data, model and memory plan.

use super::process::ProcessContext;
use crate::commands::prepare::PreparationProgress;
use crate::diagnostics::print_diagnostic;
use crate::launch::error_log;
use crate::planning::{ConfigSource, Plan, PlannedRun, Workers, Workload};
use anyhow::Result;
use trireme_base::Heartbeat;
use trireme_checkpoint::ModelSource;
use trireme_data::Corpus;
use trireme_train::config::Config;
use trireme_train::{
    CorpusState, RunCorpus, RunLock, Samples, SequenceFormat, TrainError, corpus_folder, earlier_run_error,
    ensure_corpus, model_config,
};

/// Locks the run's folder, finds or prepares the corpus, and refuses a corpus, model or plan that does not fit, before a file of the run is
/// written or a worker is started. Returns the version of the corpus, if the run has one.
pub(super) fn prepare_run(
    config: &Config,
    process: ProcessContext<'_>,
    workers: Workers,
    heartbeat: Heartbeat,
) -> Result<Option<u64>> {
    let _lock = RunLock::of_run(config)?;
    if let Some(earlier) = earlier_run_error(config)? {
        return Err(earlier.into());
    }
    let source = process.source;
    if let Some(task) = process.custom_task {
        let sample = Samples::open(&**task, config)?.train.sample();
        check_weights(config)?;
        let workload = Workload::Task { task: &**task, sample: &sample };
        check_plan(PlannedRun { config, source, workload, workers })?;
        return Ok(None);
    }
    let check = |corpus: &Corpus| check(config, corpus, source, workers).map(drop);
    let RunCorpus { version, state } = ensure_corpus(config, &PreparationProgress::new(heartbeat), check)?;
    match state {
        // Trireme's launcher has already reported it.
        _ if error_log().is_some() => {}
        CorpusState::Kept => print_diagnostic(
            "warning: the inputs, or the way in which they are prepared, have changed, but the run resumes with the corpus \
             that it began with; to train on the new one, start again with --resume never",
        ),
        CorpusState::Prepared if version > 1 => {
            let folder = corpus_folder(&config.data().folder, version);
            let folder = folder.display();
            print_diagnostic(&format!(
                "note: the corpus is in {folder}, next to the one that an earlier run used"
            ));
        }
        CorpusState::Prepared | CorpusState::Current => {}
    }
    Ok(Some(version))
}

/// Returns the config with the folder of the corpus, and with the number of steps that its epochs take.
pub(super) fn with_corpus_and_steps(
    config: Config,
    version: Option<u64>,
    process: ProcessContext<'_>,
) -> Result<Config> {
    let folder = version.map(|version| corpus_folder(&config.data().folder, version));
    let config = folder.into_iter().fold(config, Config::with_data_folder);
    if config.training().epochs == 0.0 {
        return Ok(config);
    }
    let num_samples = match process.custom_task {
        Some(task) => Samples::open(&**task, &config)?.train.num_samples(),
        None => {
            let corpus = Corpus::open(&config.data().folder)?;
            let sequences = SequenceFormat::new(&config, corpus.report.has_loss_mask);
            sequences.sampler(&corpus, config.training().seed)?.num_windows()
        }
    };
    let Some(steps) = config.steps_of_epochs(num_samples) else { return Ok(config) };
    let folder = config.data().folder.clone();
    let config = process.source.load(&[format!("training.steps={steps}")])?;
    Ok(config.with_data_folder(folder))
}

/// Checks model, plan and settings against the corpus. Returns the plan; `None` if Trireme's launcher has planned already.
pub(super) fn check(
    config: &Config,
    corpus: &Corpus,
    source: ConfigSource<'_>,
    workers: Workers,
) -> Result<Option<Plan>> {
    let vocabulary_size = corpus.train.tokens.vocabulary_size();
    let (model, _) = model_config(config, vocabulary_size)?;
    let training = config.training();
    let sequences = SequenceFormat::new(config, corpus.report.has_loss_mask);
    let num_split = sequences.sampler(corpus, training.seed)?.num_split_documents();
    let num_documents = corpus.train.tokens.num_documents();
    // A long text among conversations may be cut without harm. Under Trireme's launcher, the launcher has warned already.
    if corpus.report.has_loss_mask && num_split > num_documents / 100 && error_log().is_none() {
        let seq_len = training.seq_len;
        print_diagnostic(&format!(
            "warning: {num_split} of {num_documents} documents are longer than [training] seq_len = {seq_len} and are cut; their later parts \
             are learned without what comes before"
        ));
    }
    if let Some(num_tokens) = corpus.validation.as_ref().map(|validation| validation.tokens.num_tokens())
        && num_tokens < sequences.num_tokens_min()
    {
        return Err(TrainError::ValidationTooShort { num_tokens, seq_len: training.seq_len }.into());
    }
    check_weights(config)?;
    let workload = Workload::Language { model: &model, sequences };
    check_plan(PlannedRun { config, source, workload, workers })
}

/// Refuses a folder without the weights from which the run would start.
pub(super) fn check_weights(config: &Config) -> Result<()> {
    if let Some(folder) = &config.model().init_from {
        ModelSource::open(folder).map_err(TrainError::from)?;
    }
    Ok(())
}

/// Checks the plan against the machine. Returns the plan; `None` if Trireme's launcher has planned already.
pub(super) fn check_plan(job: PlannedRun<'_>) -> Result<Option<Plan>> {
    if error_log().is_some() {
        return Ok(None);
    }
    let plan = Plan::largest(job)?;
    plan.check(job)?;
    Ok(Some(plan))
}
