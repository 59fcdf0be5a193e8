//! An observer for tests.

use std::path::Path;
use trireme_train::metrics::StepRecord;
use trireme_train::{Observer, RunInfo};

/// An observer that records losses, and notices except those about changes of the config.
#[derive(Default)]
pub(crate) struct RecordingObserver {
    pub(crate) notices: Vec<String>,
    pub(crate) losses: Vec<f64>,
}

impl Observer for RecordingObserver {
    fn notice(&mut self, text: &str) {
        if !text.starts_with("the config has changed") {
            self.notices.push(text.to_owned());
        }
    }
    fn begin(&mut self, _: &RunInfo) {}
    fn step(&mut self, record: &StepRecord) {
        self.losses.push(record.loss);
    }
    fn checkpoint(&mut self, _: u64, _: &Path) {}
}
