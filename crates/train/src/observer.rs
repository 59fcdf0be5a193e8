use crate::metrics::StepRecord;
use std::path::Path;
use trireme_base::Rank;

/// What is known of a run when its first step is about to begin.
#[derive(Debug, Clone, PartialEq)]
pub struct RunFacts {
    /// The task's description of it.
    pub model: String,
    /// Number of parameters.
    pub num_parameters: usize,
    /// Number of workers.
    pub world_size: usize,
    /// Threads of this worker.
    pub num_threads: usize,
    /// What carries messages between workers.
    pub transport: String,
    /// Samples of one pass over the data.
    pub num_samples: u64,
    /// Samples in a step of all workers.
    pub samples_per_step: u64,
    /// Tokens of a sample, where it has such.
    pub tokens_per_sample: Option<u64>,
    /// The step after which the run resumes: 0 for a new run.
    pub resumed_step: u64,
    /// The last step.
    pub steps: u64,
}

/// Hears what happens during a run. Calls come from the trainer's thread and should be short.
pub trait Observer {
    /// Something a user should know and that is no error.
    fn notice(&mut self, text: &str);

    /// Something of the kind that concerns this worker alone, whose rank it is.
    fn notice_of_worker(&mut self, rank: Rank, text: &str) {
        self.notice(&format!("worker {rank}: {text}"));
    }

    /// The first step is about to begin.
    fn begin(&mut self, facts: &RunFacts);

    /// The loss of a validation before the first step.
    fn initial_validation(&mut self, loss: f64) {
        let _ = loss;
    }

    /// A step has ended.
    fn step(&mut self, record: &StepRecord);

    /// A checkpoint was written.
    fn checkpoint(&mut self, step: u64, path: &Path);
}

/// Tells nobody.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Observer for Silent {
    fn notice(&mut self, _: &str) {}
    fn begin(&mut self, _: &RunFacts) {}
    fn step(&mut self, _: &StepRecord) {}
    fn checkpoint(&mut self, _: u64, _: &Path) {}
}
