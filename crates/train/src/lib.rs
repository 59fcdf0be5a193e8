//! The configuration of a run, the trainer and its metrics.
//!
//! [`config::Config`] is read and validated once. [`Trainer`] runs it on one rank of a group, and reports progress to an [`Observer`].

mod agreement;
mod all_gather_json;
mod as_text;
mod balance;
mod changes;
mod checkpointing;
mod choices;
mod compression;
pub mod config;
mod corpus;
mod corpus_samples;
mod dataset;
mod device;
mod error;
mod evaluation;
mod executor;
mod fp8;
mod generation;
mod language;
pub mod metrics;
mod model_config;
mod model_profile;
mod nccl;
mod notices;
mod observer;
mod optimizer;
mod preflight;
mod pretrained;
mod programs;
mod requests;
mod resume;
mod run_folder;
mod run_lock;
mod schedule_file;
mod stages;
mod task;
mod time_limit;
pub mod trace;
mod trainer;
mod utilization;
mod validation;
mod weights;

pub use all_gather_json::all_gather_json;
pub use changes::training_changes;
pub use choices::StepChoices;
pub use corpus::{
    CorpusState, RunCorpus, check_corpus_inputs, corpus_folder, current_corpus, ensure_corpus,
    users_of_corpus,
};
pub use corpus_samples::{CorpusSamples, SampleView};
pub use dataset::{Dataset, Sample};
pub use device::{LocalGpu, device_options, gpu_of_worker, local_gpus, local_threads, share_of_cores};
pub use error::TrainError;
pub use evaluation::{Evaluation, Evaluator};
pub use executor::{executor_options, new_executor};
pub use fp8::FP8_NOTICE;
pub use generation::{FinishReason, GenerationSettings, generate_text};
pub use language::{LanguageTask, SequenceFormat};
pub use model_config::model_config;
pub use model_profile::positions_of_batch;
pub use nccl::{connect_gpus, staging_notice};
pub use observer::{NullObserver, Observer, RunInfo};
pub use optimizer::optimizer_options;
pub use preflight::preflight;
pub use pretrained::{
    TOKENIZER_NOTE, chat_template_for, chat_template_next_to, chat_template_without_files, model_tokenizer,
};
pub use programs::{base_programs, lowered, pipeline_schedule, proven_programs, step_programs};
pub use requests::{Requests, StoppedBy};
pub use resume::{earlier_run_error, resume_point};
pub use run_folder::{CONFIG_TOML, FLIGHT_RECORDER_FOLDER};
pub use run_lock::RunLock;
pub use schedule_file::ScheduleFileError;
pub use stages::{StageChoice, pipeline_costs};
pub use task::{Samples, Task, TaskFile};
pub use trainer::{RunSummary, Trainer, TrainerOptions, WorkerPlan};
pub use validation::{ValidationResult, validation_batches};
pub use weights::{LoadedModel, forward_executor, load_model};
