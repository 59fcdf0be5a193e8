use crate::config::ConfigError;
use crate::metrics::MetricsError;
use crate::schedule_file::ScheduleFileError;
use std::io;
use std::path::PathBuf;
use trireme_base::{Bytes, Rank, quoted};
use trireme_checkpoint::CheckpointError;
use trireme_codec::CompressionError;
use trireme_comm::CommError;
use trireme_data::DataError;
use trireme_model::ModelError;
use trireme_parallel::ParallelError;
use trireme_schedule::pipeline::{GenerateError, ScheduleKind};
use trireme_tensor::{DeviceError, GpuMemory, OverBudget};

/// A failure to start, continue or end a run.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages explain the fields")]
pub enum TrainError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("cannot turn huge pages off for this process; set [memory] huge_pages = \"transparent\"")]
    HugePages(#[source] io::Error),
    #[error("cannot read the model config {}", path.display())]
    ReadModelConfig { path: PathBuf, source: io::Error },
    #[error("{}: {source}", path.display())]
    ModelConfig { path: PathBuf, source: ModelError },
    #[error(
        "{count} of {num_elements} weights of '{name}' in {} are not finite (the first is {value}, element {first}): the run that wrote \
         them diverged, or they were damaged before they were written. Use an earlier checkpoint, or load them as they are with \
         [model] allow_non_finite = true (train) or --allow-non-finite (generate)",
        path.display()
    )]
    NonFiniteWeights {
        path: PathBuf,
        name: String,
        /// Number of non-finite values among those that this rank reads.
        count: usize,
        num_elements: usize,
        first: usize,
        value: f32,
    },
    #[error("{} has no config.json, so the model of its weights is unknown", path.display())]
    NoModelConfig { path: PathBuf },
    #[error(
        "the tokenizer of {} has {tokenizer} tokens, but the model's vocab_size is {model}; set [model] vocab_size = \
         0 to use the tokenizer's, or prepare the text with the model's own tokenizer",
        folder.display()
    )]
    VocabularyTooSmall { folder: PathBuf, tokenizer: usize, model: usize },
    #[error(
        "{} does not have the tokenizer of the model in {}, so its tokens mean nothing to the weights. Leave out [data] tokenizer and \
         train_bpe to use the model's; or prepare the text again with `trireme prepare INPUT… --tokenizer {} --out DIR`. To let the model \
         learn other tokens, set [model] allow_other_tokenizer = true",
        corpus.display(),
        model.display(),
        quoted(&model.to_string_lossy())
    )]
    OtherTokenizer { corpus: PathBuf, model: PathBuf },
    #[error(
        "the model in {} has no tokenizer.json, so its text cannot be prepared; set [data] tokenizer, or make the file (in Python: \
         AutoTokenizer.from_pretrained(folder).save_pretrained(folder))",
        path.display()
    )]
    NoModelTokenizer { path: PathBuf },
    #[error(
        "the tokenizer in {} is not the one that the model was trained with; export the model again, or, if it is meant to be another \
         one, name it: [data] tokenizer with [model] allow_other_tokenizer = true (train), or --tokenizer (generate)",
        path.display()
    )]
    TokenizerReplaced { path: PathBuf },
    #[error(
        "{} contains an earlier run, which this one would not continue; pass --resume never (or set [checkpoint] resume = \"never\") to move it \
         aside and start again, or choose another [run] name",
        folder.display()
    )]
    EarlierRun { folder: PathBuf },
    #[error(
        "{} was written by a run with [optimizer] name = {found}, but this run has {expected}; set it back, or set [checkpoint] allow_changed = \
         [\"optimizer\"] to resume with a fresh optimizer state",
        path.display()
    )]
    ResumedOptimizerDiffers { path: PathBuf, found: String, expected: String },
    #[error("[experts] is for models with experts, but this model, a {family}, has none; remove the section")]
    NoExperts { family: &'static str },
    #[error(
        "[experts] bias_update_rate is for models whose experts are balanced by biases, but this model, a {family}, has no such biases; \
         remove the key"
    )]
    NoExpertBias { family: &'static str },
    #[error(
        "[experts] num_shadowed is {num_shadowed}, but layers of the model have {num_experts} experts; lower it"
    )]
    TooManyShadowed { num_shadowed: usize, num_experts: usize },
    #[error(
        "[training] seq_len is {seq_len}, but the model supports at most {max_position_embeddings} positions"
    )]
    SequenceTooLong { seq_len: usize, max_position_embeddings: usize },
    #[error("cannot write {}", path.display())]
    RunFolder { path: PathBuf, source: io::Error },
    #[error(
        "{} has no trace.json; set [metrics] trace_interval, such as to 10, and train: every 10th step is then traced",
        folder.display()
    )]
    NoTrace { folder: PathBuf },
    #[error("cannot read {}", path.display())]
    ReadTrace { path: PathBuf, source: io::Error },
    #[error("{} is not a valid trace: {what}; remove it, and train with [metrics] trace_interval", path.display())]
    DamagedTrace { path: PathBuf, what: String },
    #[error("another process is using the run {}; wait for it, or set another [run] name", path.display())]
    RunInUse { path: PathBuf },
    #[error(
        "the ranks disagree about the run; give all of them the same program, config, model, samples and run folder:{}",
        differences.iter().map(|line| format!("\n  {line}")).collect::<String>()
    )]
    RanksDisagree {
        /// Each fact that differs, with its values and their ranks.
        differences: Vec<String>,
    },
    #[error(
        "[comm] nccl is \"always\", but GPUs cannot exchange data by NCCL: {reason}; fix that, or set nccl = \"auto\" to exchange data through host memory"
    )]
    NoNccl { reason: String },
    /// A step needs more memory of a GPU than CUDA, NCCL and other programs leave.
    #[error(
        "a step needs {} of a GPU's memory, but {} of its {} are left: CUDA, NCCL and other programs use {}; use a smaller batch or \
         shorter sequences, shard state over more GPUs, or end other programs on the GPU",
        Bytes(*needed as u64), Bytes(memory.available() as u64), Bytes(memory.total as u64), Bytes(memory.others() as u64)
    )]
    GpuMemory { needed: usize, memory: GpuMemory },
    /// The first checkpoints would fill the disk.
    #[error(
        "there is no room for two checkpoints in {}: they need {} more, and {} are free; free some, or choose another [run] folder",
        folder.display(), Bytes(*needed), Bytes(*available)
    )]
    NoRoom { folder: PathBuf, needed: u64, available: u64 },
    #[error(
        "{} was written with {what} {found}, but this run has {expected}, so it would not read the same \
         samples. Restore the old value, start again with --resume never, train further from these weights with [model] init_from and \
         another [run] name, or set [checkpoint] allow_changed = [\"data\"]",
        path.display()
    )]
    ResumeDiffers { path: PathBuf, what: String, found: String, expected: String },
    #[error(
        "{} contains another model: {}. Restore the old values, start again with --resume never or another [run] name, or set [checkpoint] \
         allow_changed = [\"model\"]",
        path.display(), differences.join(", ")
    )]
    ResumedModelDiffers { path: PathBuf, differences: Vec<String> },
    #[error(
        "cannot resume after step {step}: {} contains checkpoints up to step {newest}; set another [run] name to \
         branch off, or move them away",
        folder.display()
    )]
    NewerCheckpoints { step: u64, newest: u64, folder: PathBuf },
    #[error(
        "none of the checkpoints in {} can be resumed; to start again, set [checkpoint] resume = \"never\", which \
         moves the earlier run aside:{}",
        folder.display(),
        reasons.iter().map(|reason| format!("\n  {reason}")).collect::<String>()
    )]
    AllCheckpointsDamaged { folder: PathBuf, reasons: Vec<String> },
    /// Rank 0 failed to choose the checkpoint to resume from, and reports the reason itself.
    #[error("rank 0 could not choose a checkpoint to resume from; see its own error")]
    NoCheckpointChosen,
    #[error(
        "[[optimizer.groups]] freeze all {num_parameters} parameters, so training would change nothing; remove `frozen = true` from a group, \
         or narrow its patterns"
    )]
    AllFrozen { num_parameters: usize },
    #[error(
        "only {num_tokens} tokens are held out for validation, fewer than one sequence of seq_len {seq_len} needs; \
         raise [data] validation_fraction, set it to 0 to skip validation, or lower [training] seq_len"
    )]
    ValidationTooShort { num_tokens: u64, seq_len: usize },
    #[error("cannot read the training state in {}", path.display())]
    ResumeState { path: PathBuf, source: serde_json::Error },
    #[error(
        "{name} of shape {shape:?} in {} is not a valid fp8 history ([3, steps] finite numbers, none negative); \
         resume from another checkpoint, or without [training] fp8",
        path.display()
    )]
    Fp8History { path: PathBuf, name: String, shape: Vec<usize> },
    #[error(
        "the state of the compressor of {unit} in {} is invalid; resume from another checkpoint, or with another \
         [comm] compression, which starts without it",
        path.display()
    )]
    CompressionState { path: PathBuf, unit: String, source: CompressionError },
    #[error(
        "the prompt has {num_tokens} tokens, but the model supports at most {max_position_embeddings} positions"
    )]
    PromptTooLong { num_tokens: usize, max_position_embeddings: usize },
    #[error(
        "the tokenizer has no token for any character of the prompt {prompt:?}; use the tokenizer that the model was trained with (--tokenizer)"
    )]
    PromptWithoutTokens { prompt: String },
    #[error(
        "{} holds out nothing for validation; prepare it with a validation fraction or with texts to validate on",
        folder.display()
    )]
    NoValidation { folder: PathBuf },
    #[error(
        "no token counts in the loss; the text needs two tokens, or answers that fit into sequences of {seq_len}"
    )]
    NothingToEvaluate { seq_len: usize },
    #[error(
        "the tokenizer produced token {token}, but the model's vocab_size is {vocab_size}; the tokenizer belongs to \
         another model"
    )]
    TokenOutsideVocabulary { token: u32, vocab_size: usize },
    #[error(transparent)]
    Data(#[from] DataError),
    /// A dataset that the program defines itself cannot be opened or read.
    #[error("cannot read the samples")]
    Samples(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error(
        "samples of this task have no positions that {degree} workers could divide; set [parallelism] context_parallel_degree = 1 (or let \
         the task's has_positions say that they have)"
    )]
    NoPositions { degree: usize },
    #[error(
        "{degree} workers have two equal parts each of the positions, but {tensor} has {len}, which is not a multiple of {}; use samples of \
         such a length, or another [parallelism] context_parallel_degree", 2 * degree
    )]
    UnequalPositions { tensor: String, len: usize, degree: usize },
    #[error(
        "there are no samples for {purpose}; check what the task's train_data and validation_data return"
    )]
    NoSamples { purpose: &'static str },
    #[error(
        "a pipeline of {num_stages} stages needs at least as many units, but the model has {num_units}; lower \
         [parallelism] pipeline_parallel_degree or pipeline_parallel_stages_per_rank, or the stages of pipeline_parallel_schedule_file"
    )]
    TooManyStages { num_stages: usize, num_units: usize },
    #[error(
        "[parallelism] pipeline_parallel_split_points starts a stage at unit {split_point}, but the model has \
         {num_units} units (counted from 0); lower it, or remove the key to divide the \
         stages evenly"
    )]
    SplitPointBeyondUnits { split_point: usize, num_units: usize },
    #[error(
        "the schedule's {num_stages} stages need {} split points, but [parallelism] pipeline_parallel_split_points has {found}; give the first \
         unit of each stage after the first, or remove the key to divide the stages evenly",
        num_stages - 1
    )]
    SplitPoints { num_stages: usize, found: usize },
    #[error(
        "rank 0 sent pipeline stages in an unknown format; run the same version of trireme on all workers"
    )]
    UnreadableStages,
    #[error(
        "another worker of the pipeline sent the states of its compressors in an unknown format; run the same version of trireme on all workers"
    )]
    UnreadableCompressors,
    #[error("rank {rank} sent a message that this program cannot read; run the same version everywhere")]
    UnreadableMessage { rank: Rank, source: serde_json::Error },
    #[error("cannot run the pipeline schedule {}", path.display())]
    ScheduleFile { path: PathBuf, source: ScheduleFileError },
    #[error(
        "stage {stage} of the pipeline keeps {kept} of activations for each microbatch, more than the {kept_max} that can be \
         scheduled; lower [training] local_batch_size, or seq_len of a language model, or use more stages"
    )]
    StageTooLarge { stage: usize, kept: Bytes, kept_max: Bytes },
    #[error(
        "schedule '{kind}' holds {needed} of activations on worker {rank} of the pipeline, but [parallelism] \
         pipeline_parallel_in_flight_max allows {bound}; {remedy}"
    )]
    InFlight { kind: ScheduleKind, rank: usize, needed: Bytes, bound: Bytes, remedy: &'static str },
    #[error(
        "the run resumes at step {step}, which is not a multiple of the {num_steps} steps between drains of the \
         pipeline; set [parallelism] pipeline_parallel_drain_interval to a divisor of {step}, or [checkpoint] resume \
         = \"never\""
    )]
    ResumedWithinProgram { step: u64, num_steps: u64 },
    #[error(
        "two units share a weight (of a language model, the embedding and the head), but in a pipeline that does not \
         drain between steps they would read different versions of it; set another pipeline_parallel_schedule, or do not \
         share the weight ([model] tie_word_embeddings = false)"
    )]
    TiedVersions,
    #[error(transparent)]
    Pipeline(#[from] GenerateError),
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Comm(#[from] CommError),
    #[error(transparent)]
    Parallel(#[from] ParallelError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Metrics(#[from] MetricsError),
}

impl TrainError {
    /// Returns the communication failure that caused this error, if there is one.
    pub fn comm(&self) -> Option<&CommError> {
        match self {
            TrainError::Comm(error) | TrainError::Parallel(ParallelError::Comm(error)) => Some(error),
            TrainError::Checkpoint(CheckpointError::Exchange { source, .. }) => Some(source),
            _ => None,
        }
    }

    /// Returns the allocation that would have exceeded the memory budget, if that caused this error.
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
