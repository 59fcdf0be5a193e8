use crate::metrics::StepRecord;
use std::path::Path;
use trireme_base::Rank;

/// The properties of a run at its first step.
#[derive(Debug, Clone, PartialEq)]
pub struct RunInfo {
    /// The task's description of the model.
    pub model: String,
    /// Number of parameters.
    pub num_parameters: usize,
    /// Number of workers.
    pub world_size: usize,
    /// Number of threads of this worker.
    pub num_threads: usize,
    /// Description of the transport that carries messages between workers.
    pub transport: String,
    /// Number of samples in one pass over the data.
    pub num_samples: u64,
    /// Number of samples per step of all workers.
    pub samples_per_step: u64,
    /// Number of tokens per sample, if samples have tokens.
    pub tokens_per_sample: Option<u64>,
    /// The step after which the run resumes; 0 for a new run.
    pub resumed_step: u64,
    /// The last step.
    pub steps: u64,
}

/// A receiver of the events of a run. Calls come from the trainer's thread and should return quickly.
pub trait Observer {
    /// Called with information for the user that is not an error.
    fn notice(&mut self, text: &str);

    /// Called with information that concerns only this worker, whose rank is `rank`.
    fn notice_of_worker(&mut self, rank: Rank, text: &str) {
        self.notice(&format!("worker {rank}: {text}"));
    }

    /// Called before the first step.
    fn begin(&mut self, info: &RunInfo);

    /// Called with the loss of a validation before the first step.
    fn initial_validation(&mut self, loss: f64) {
        let _ = loss;
    }

    /// Called after each step.
    fn step(&mut self, record: &StepRecord);

    /// Called after a checkpoint was written.
    fn checkpoint(&mut self, step: u64, path: &Path);
}

/// An observer that ignores all events.
#[derive(Debug, Clone, Copy, Default)]
pub struct NullObserver;

impl Observer for NullObserver {
    fn notice(&mut self, _: &str) {}
    fn begin(&mut self, _: &RunInfo) {}
    fn step(&mut self, _: &StepRecord) {}
    fn checkpoint(&mut self, _: u64, _: &Path) {}
}
