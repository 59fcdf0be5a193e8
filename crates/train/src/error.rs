use crate::config::ConfigError;
use crate::metrics::MetricsError;
use crate::schedule_file::ScheduleFileError;
use std::io;
use std::path::PathBuf;
use trireme_base::{Bytes, quoted};
use trireme_checkpoint::CheckpointError;
use trireme_codec::CompressionError;
use trireme_comm::CommError;
use trireme_data::DataError;
use trireme_model::ModelError;
use trireme_parallel::ParallelError;
use trireme_schedule::pipeline::{GenerateError, Kind};
use trireme_tensor::{DeviceError, OverBudget};

/// A run could not start, continue or end.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages explain the fields")]
pub enum TrainError {
    /// The config does not fit the model.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The system keeps huge pages on for this process.
    #[error("cannot turn huge pages off for this process; set [memory] huge_pages = \"transparent\"")]
    HugePages(#[source] io::Error),
    /// The model's description cannot be read.
    #[error("cannot read the model config {}", path.display())]
    ReadModelConfig {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The model's description is refused.
    #[error("{}: {source}", path.display())]
    ModelConfig {
        path: PathBuf,
        #[source]
        source: ModelError,
    },
    /// Weights that hold NaN or infinity.
    #[error(
        "{count} of {num_elements} weights of '{name}' in {} are not finite (the first is {value}, element {first}): the run that wrote \
         them diverged, or they were damaged before they were written. Use an earlier checkpoint, or load them as they are with \
         [model] allow_non_finite = true (train) or --allow-non-finite (generate)",
        path.display()
    )]
    NonFiniteWeights {
        path: PathBuf,
        name: String,
        /// How many are not finite, of those that this rank reads.
        count: usize,
        num_elements: usize,
        first: usize,
        value: f32,
    },
    /// Weights without a description of their model.
    #[error("{} has no config.json, so the model of its weights is unknown", path.display())]
    NoModelConfig { path: PathBuf },
    /// The corpus has tokens that the model does not know.
    #[error(
        "the tokenizer of {} has {tokenizer} tokens, but the model's vocab_size is {model}; set [model] vocab_size = \
         0 to use the tokenizer's, or prepare the text with the model's own tokenizer",
        folder.display()
    )]
    VocabularyTooSmall { folder: PathBuf, tokenizer: usize, model: usize },
    /// A corpus whose ids mean other texts than those that the weights have learned.
    #[error(
        "{} does not have the tokenizer of the model in {}, so its tokens mean nothing to the weights. Leave out [data] tokenizer and \
         train_bpe to use the model's; or prepare the text again with `trireme prepare INPUT… --tokenizer {} --out DIR`. To let the model \
         learn other tokens, set [model] allow_other_tokenizer = true",
        corpus.display(),
        model.display(),
        quoted(&model.to_string_lossy())
    )]
    OtherTokenizer { corpus: PathBuf, model: PathBuf },
    /// A model whose tokenizer the text needs.
    #[error(
        "the model in {} has no tokenizer.json, so its text cannot be prepared; set [data] tokenizer, or make the file (in Python: \
         AutoTokenizer.from_pretrained(folder).save_pretrained(folder))",
        path.display()
    )]
    NoModelTokenizer { path: PathBuf },
    /// Somebody has put another tokenizer beside the weights.
    #[error(
        "the tokenizer in {} is not the one that the model was trained with; export the model again, or, if it is meant to be another \
         one, name it: [data] tokenizer with [model] allow_other_tokenizer = true (train), or --tokenizer (generate)",
        path.display()
    )]
    TokenizerReplaced { path: PathBuf },
    /// An earlier run in the folder that this run would not continue.
    #[error(
        "{} contains an earlier run, which this one would not continue; pass --resume never (or set [checkpoint] resume = \"never\") to move it \
         aside and start again, or choose another [run] name",
        folder.display()
    )]
    EarlierRun { folder: PathBuf },
    /// A checkpoint of another optimizer.
    #[error(
        "{} was written by a run with [optimizer] name = {found}, but this run has {expected}; set it back, or set [checkpoint] allow_changed = \
         [\"optimizer\"] to resume with a fresh optimizer state",
        path.display()
    )]
    ResumedOptimizerDiffers { path: PathBuf, found: String, expected: String },
    /// Settings of experts, of which the model has none.
    #[error("[experts] is for models with experts, but this model, a {family}, has none; remove the section")]
    NoExperts { family: &'static str },
    /// A rate of biases, of which the model's experts have none.
    #[error(
        "[experts] bias_update_rate is for biases that balance experts, but those of this model, a {family}, have none; remove the key"
    )]
    NoExpertBias { family: &'static str },
    /// More shadowed experts than a layer has.
    #[error(
        "[experts] num_shadowed is {num_shadowed}, but layers of the model have {num_experts} experts; lower it"
    )]
    TooManyShadowed { num_shadowed: usize, num_experts: usize },
    /// Sequences longer than the model can take.
    #[error(
        "[training] seq_len is {seq_len}, but the model supports at most {max_position_embeddings} positions"
    )]
    SequenceTooLong { seq_len: usize, max_position_embeddings: usize },
    /// A folder or file of the run cannot be made.
    #[error("cannot write {}", path.display())]
    RunFolder {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// There is no trace.
    #[error(
        "{} has no trace.json; set [metrics] trace_interval, such as to 10, and train: every 10th step is then traced",
        folder.display()
    )]
    NoTrace { folder: PathBuf },
    /// The trace cannot be read.
    #[error("cannot read {}", path.display())]
    ReadTrace {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// A file is not a valid trace.
    #[error("{} is not a valid trace: {what}; remove it, and train with [metrics] trace_interval", path.display())]
    DamagedTrace { path: PathBuf, what: String },
    /// Another process trains into the same folder.
    #[error("another process is using the run {}; wait for it, or set another [run] name", path.display())]
    RunInUse { path: PathBuf },
    /// The ranks were given different runs.
    #[error(
        "the ranks disagree about the run; give all of them the same program, config, model, samples and run folder:{}",
        differences.iter().map(|line| format!("\n  {line}")).collect::<String>()
    )]
    RanksDisagree {
        /// Each key that differs, with its values and their ranks.
        differences: Vec<String>,
    },
    /// The first checkpoints would fill the disk.
    #[error(
        "there is no room for two checkpoints in {}: they need {} more, and {} are free; free some, or choose another [run] folder",
        folder.display(), Bytes(*needed), Bytes(*available)
    )]
    NoRoom { folder: PathBuf, needed: u64, available: u64 },
    /// A checkpoint is of another kind of run.
    #[error(
        "{} was written with {what} {found}, but this run has {expected}, so it would not read the same \
         samples. Restore the old value, start again with --resume never, train further from these weights with [model] init_from and \
         another [run] name, or set [checkpoint] allow_changed = [\"data\"]",
        path.display()
    )]
    ResumeDiffers { path: PathBuf, what: String, found: String, expected: String },
    /// A checkpoint is of another model.
    #[error(
        "{} contains another model: {}. Restore the old values, start again with --resume never or another [run] name, or set [checkpoint] \
         allow_changed = [\"model\"]",
        path.display(), differences.join(", ")
    )]
    ResumedModelDiffers { path: PathBuf, differences: Vec<String> },
    /// Resuming from a checkpoint would fork the run within one folder.
    #[error(
        "cannot resume after step {step}: {} contains checkpoints up to step {newest}; set another [run] name to \
         branch off, or move them away",
        folder.display()
    )]
    NewerCheckpoints { step: u64, newest: u64, folder: PathBuf },
    /// A run has checkpoints, and none is whole.
    #[error(
        "none of the checkpoints in {} can be resumed; to start again, set [checkpoint] resume = \"never\", which \
         moves the earlier run aside:{}",
        folder.display(),
        reasons.iter().map(|reason| format!("\n  {reason}")).collect::<String>()
    )]
    AllCheckpointsDamaged { folder: PathBuf, reasons: Vec<String> },
    /// Rank 0 failed to find the checkpoint to resume from, and tells why itself.
    #[error("rank 0 could not choose a checkpoint to resume from; see its own error")]
    NoCheckpointChosen,
    /// No parameter is left to train.
    #[error(
        "[[optimizer.groups]] freeze all {num_parameters} parameters, so training would change nothing; remove `frozen = true` from a group, \
         or narrow its patterns"
    )]
    AllFrozen { num_parameters: usize },
    /// Too little text was held out.
    #[error(
        "only {num_tokens} tokens are held out for validation, fewer than one sequence of seq_len {seq_len} needs; \
         raise [data] validation_fraction, set it to 0 to skip validation, or lower [training] seq_len"
    )]
    ValidationTooShort { num_tokens: u64, seq_len: usize },
    /// The state in a checkpoint makes no sense.
    #[error("cannot read the training state in {}", path.display())]
    ResumeState {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    /// A history of fp8 makes no sense.
    #[error(
        "{name} of shape {shape:?} in {} is not a valid fp8 history ([3, steps] finite numbers, none negative); \
         resume from another checkpoint, or without [training] fp8",
        path.display()
    )]
    Fp8History { path: PathBuf, name: String, shape: Vec<usize> },
    /// What compressors have kept makes no sense.
    #[error(
        "the state of the compressor of {unit} in {} is invalid; resume from another checkpoint, or with another \
         [comm] compression, which starts without it",
        path.display()
    )]
    CompressionState {
        path: PathBuf,
        unit: String,
        #[source]
        source: CompressionError,
    },
    /// A prompt longer than the model can take.
    #[error(
        "the prompt has {num_tokens} tokens, but the model supports at most {max_position_embeddings} positions"
    )]
    PromptTooLong { num_tokens: usize, max_position_embeddings: usize },
    /// A prompt of which nothing reaches the model.
    #[error(
        "the tokenizer has no token for any character of the prompt {prompt:?}; use the tokenizer that the model was trained with (--tokenizer)"
    )]
    PromptWithoutTokens { prompt: String },
    /// A corpus without validation tokens.
    #[error(
        "{} holds out nothing for validation; prepare it with a validation fraction or with texts to validate on",
        folder.display()
    )]
    NoValidation { folder: PathBuf },
    /// A corpus in which no token is predicted.
    #[error(
        "no token counts in the loss; the text needs two tokens, or answers that fit into sequences of {seq_len}"
    )]
    NothingToEvaluate { seq_len: usize },
    /// An id that the model does not know.
    #[error(
        "the tokenizer produced token {token}, but the model's vocab_size is {vocab_size}; the tokenizer belongs to \
         another model"
    )]
    ForeignToken { token: u32, vocab_size: usize },
    /// The text.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A dataset of the program's own cannot be opened or read.
    #[error("cannot read the samples")]
    Samples(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// Samples that workers cannot have parts of.
    #[error(
        "samples of this task have no positions that {degree} workers could divide; set [parallelism] context_parallel_degree = 1 (or let \
         the task's has_positions say that they have)"
    )]
    NoPositions { degree: usize },
    /// Samples with a number of positions that workers cannot have equal parts of.
    #[error(
        "{degree} workers have two equal parts each of the positions, but {tensor} has {len}, which is not a multiple of {}; use samples of \
         such a length, or another [parallelism] context_parallel_degree", 2 * degree
    )]
    UnequalPositions { tensor: String, len: usize, degree: usize },
    /// A dataset is empty.
    #[error(
        "there are no samples for {purpose}; check what the task's train_data and validation_data return"
    )]
    NoSamples { purpose: &'static str },
    /// More stages than units.
    #[error(
        "a pipeline of {num_stages} stages needs at least as many units, but the model has {num_units}; lower \
         [parallelism] pipeline_parallel_degree or pipeline_parallel_stages_per_rank, or the stages of pipeline_parallel_schedule_file"
    )]
    TooManyStages { num_stages: usize, num_units: usize },
    /// A stage that begins where there is no unit.
    #[error(
        "[parallelism] pipeline_parallel_split_points starts a stage at unit {split_point}, but the model has \
         {num_units} units (counted from 0); lower it, or remove the key to divide the \
         stages evenly"
    )]
    SplitPointBeyondUnits { split_point: usize, num_units: usize },
    /// Not as many stages are cut as the schedule has.
    #[error(
        "the schedule's {num_stages} stages need {} split points, but [parallelism] pipeline_parallel_split_points has {found}; give the first \
         unit of each stage after the first, or remove the key to divide the stages evenly",
        num_stages - 1
    )]
    SplitPoints { num_stages: usize, found: usize },
    /// Rank 0 has cut stages that this rank cannot read.
    #[error(
        "rank 0 sent pipeline stages in an unknown format; run the same version of trireme on all workers"
    )]
    ForeignStages,
    /// Another rank of the pipeline tells of compressors what this rank cannot read.
    #[error(
        "another worker of the pipeline sent the states of its compressors in an unknown format; run the same version of trireme on all workers"
    )]
    ForeignCompressors,
    /// A schedule of the user's own.
    #[error("cannot run the pipeline schedule {}", path.display())]
    ScheduleFile {
        path: PathBuf,
        #[source]
        source: ScheduleFileError,
    },
    /// A stage that keeps more activations than a schedule counts.
    #[error(
        "stage {stage} of the pipeline keeps {kept} of activations for each microbatch, more than the {kept_max} that can be \
         scheduled; lower [training] local_batch_size, or seq_len of a language model, or use more stages"
    )]
    StageTooLarge { stage: usize, kept: Bytes, kept_max: Bytes },
    /// A schedule that holds more activations than it may.
    #[error(
        "schedule '{kind}' holds {needed} of activations on worker {rank} of the pipeline, but [parallelism] \
         pipeline_parallel_in_flight_max allows {bound}; {remedy}"
    )]
    InFlight { kind: Kind, rank: usize, needed: Bytes, bound: Bytes, remedy: &'static str },
    /// A checkpoint at a step at which the pipeline would not be empty.
    #[error(
        "the run resumes at step {step}, which is not a multiple of the {num_steps} steps between drains of the \
         pipeline; set [parallelism] pipeline_parallel_drain_interval to a divisor of {step}, or [checkpoint] resume \
         = \"never\""
    )]
    ResumedWithinProgram { step: u64, num_steps: u64 },
    /// A pipeline that does not drain, and two units that share a weight.
    #[error(
        "two units share a weight (of a language model, the embedding and the head), but in a pipeline that does not \
         drain between steps they would read different versions of it; set another pipeline_parallel_schedule, or do not \
         share the weight ([model] tie_word_embeddings = false)"
    )]
    TiedVersions,
    /// The pipeline's schedule.
    #[error(transparent)]
    Pipeline(#[from] GenerateError),
    /// The model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The device.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The other ranks.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// A step.
    #[error(transparent)]
    Parallel(#[from] ParallelError),
    /// A checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The record of the run.
    #[error(transparent)]
    Metrics(#[from] MetricsError),
}

impl TrainError {
    /// The failure of communication behind this error, if that is what it was.
    pub fn comm(&self) -> Option<&CommError> {
        match self {
            TrainError::Comm(error) | TrainError::Parallel(ParallelError::Comm(error)) => Some(error),
            TrainError::Checkpoint(CheckpointError::Exchange { source, .. }) => Some(source),
            _ => None,
        }
    }

    /// Memory that would have passed the budget, if that is what this error is about.
    pub fn over_budget(&self) -> Option<&OverBudget> {
        match self {
            TrainError::Parallel(ParallelError::OverBudget { source, .. })
            | TrainError::Parallel(ParallelError::Device(DeviceError::OverBudget(source)))
            | TrainError::Device(DeviceError::OverBudget(source))
            | TrainError::Model(ModelError::Device(DeviceError::OverBudget(source))) => Some(source),
            _ => None,
        }
    }
}
