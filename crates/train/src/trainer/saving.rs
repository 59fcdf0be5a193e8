//! Saving of checkpoints during a run.

use super::Trainer;
use crate::checkpointing::{cleanup_notice, write_checkpoint};
use crate::config::Interval;
use crate::error::TrainError;
use crate::trainer::RunSummary;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use trireme_base::with_sources;

impl Trainer<'_> {
    /// On rank 0, requests a checkpoint if the checkpoint interval is expected to end during the step that begins now.
    pub(super) fn request_checkpoint(&self, last_step: Duration) {
        let checkpoint = self.config.checkpoint();
        if let Interval::Time(interval) = checkpoint.interval
            && checkpoint.enable
            && self.metrics.is_some()
            && self.saved_at.elapsed() + last_step >= interval
        {
            self.requests.checkpoint();
        }
    }

    /// Saves a checkpoint, if checkpoints are enabled. A full disk ends the run only if the checkpoint is the last one. Collective.
    pub(super) fn save(&mut self, is_last: bool, summary: &mut RunSummary) -> Result<(), TrainError> {
        if self.config.checkpoint().enable {
            self.requests.clear_checkpoint();
            let began = Instant::now();
            let saved = self.save_checkpoint(is_last)?;
            if let Some(limit) = &mut self.time_limit {
                limit.add_save(began.elapsed());
            }
            summary.checkpoint = saved.map(|path| (self.state.step, path)).or(summary.checkpoint.take());
            self.saved_at = Instant::now();
        }
        Ok(())
    }

    /// Saves the last checkpoint of a run, unless the last step already has one. Collective.
    pub(super) fn save_last(&mut self, summary: &mut RunSummary) -> Result<(), TrainError> {
        match &summary.checkpoint {
            Some((step, _)) if *step == self.state.step => Ok(()),
            _ => self.save(true, summary),
        }
    }

    /// Saves a checkpoint. Returns `None` if the disk is full, which is an error if the checkpoint `is_last`. Collective.
    fn save_checkpoint(&mut self, is_last: bool) -> Result<Option<PathBuf>, TrainError> {
        self.executor.group().set_program_line(format_args!("step {}: checkpoint", self.state.step));
        let saved = write_checkpoint(&mut self.executor, &self.state, self.config, &*self.task);
        match saved {
            Ok(saved) => {
                for error in &saved.cleanup_errors {
                    self.report_once(cleanup_notice(error));
                }
                self.observer.checkpoint(self.state.step, &saved.path);
                Ok(Some(saved.path))
            }
            Err(TrainError::Checkpoint(error)) if error.is_out_of_space() && !is_last => {
                let (error, interval) = (with_sources(&error), self.config.checkpoint().interval);
                self.observer.notice(&format!(
                    "{error}; training continues, and the next checkpoint is in {interval}"
                ));
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}
