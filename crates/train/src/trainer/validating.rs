//! Validations between steps, the best checkpoint, and early stopping.

use super::Trainer;
use crate::checkpointing::cleanup_notice;
use crate::error::TrainError;
use crate::validation::ValidationResult;
use std::time::Instant;
use trireme_base::with_sources;
use trireme_checkpoint::{CHECKPOINTS_FOLDER, clean_up, mark_best};

impl Trainer<'_> {
    /// Returns whether early stopping ends the run: the last `early_stopping_patience` validations found no lower loss.
    pub(super) fn is_patience_over(&self) -> bool {
        let patience = self.config.training().early_stopping_patience;
        patience > 0 && self.state.validations.num_since >= patience
    }

    /// Returns the loss before the first step of a new run, if validations follow or the run has no steps. Collective.
    pub(super) fn validate_at_start(&mut self) -> Result<Option<ValidationResult>, TrainError> {
        let training = self.config.training();
        if !self.is_new || training.validation_interval == 0 && training.steps > 0 {
            return Ok(None);
        }
        let validated = self.validate()?;
        if let Some(ValidationResult { loss, .. }) = &validated {
            self.observer.initial_validation(*loss);
        }
        Ok(validated)
    }

    /// Returns the mean loss and metrics on the validation samples, or `None` if there are none, or nothing in them counts in the loss.
    /// Collective.
    ///
    /// # Errors
    /// If samples cannot be read, and errors of [`Executor::evaluate`](trireme_parallel::Executor::evaluate) and of the group of all ranks.
    pub fn validate(&mut self) -> Result<Option<ValidationResult>, TrainError> {
        self.executor.group().set_program_line(format_args!("step {}: validation", self.state.step));
        let Some(validation) = &mut self.validation else { return Ok(None) };
        let began = Instant::now();
        let num_samples = validation.num_samples();
        let validated = validation.run(&mut self.executor)?;
        if validated.is_none() {
            self.report_once(format!(
                "nothing in the {num_samples} validation samples counts in the loss, so there is no validation loss; raise \
                 [training] validation_samples or [data] validation_fraction, or hold out samples with answers"
            ));
        }
        if let Some(limit) = &mut self.time_limit {
            limit.add_validation(began.elapsed());
        }
        Ok(validated)
    }

    /// Reports if early stopping has already ended this run, so that a resumed run makes no further step.
    pub(super) fn notice_stopped_early(&mut self) {
        if self.state.step < self.config.training().steps && self.is_patience_over() {
            self.observer.notice(&format!(
                "early stopping ended this run after step {}: no lower loss in {} validations; to train further, raise [training] \
                 early_stopping_patience, or set it to 0",
                self.state.step, self.state.validations.num_since
            ));
        }
    }

    /// Marks the checkpoint of `step` as the best, and removes the previous best one, unless it is among those to keep.
    pub(super) fn keep_best(&mut self, step: u64) {
        let folder = self.config.run_folder().join(CHECKPOINTS_FOLDER);
        let heartbeat = self.executor.group().heartbeat().clone();
        match mark_best(&folder, step) {
            // The preceding save kept the previous best checkpoint.
            Ok(()) => {
                for error in
                    clean_up(&folder, step, self.config.checkpoint().keep_latest_k, &|| heartbeat.beat())
                {
                    self.report_once(cleanup_notice(&error));
                }
            }
            Err(error) => {
                self.report_once(format!("cannot name the best checkpoint: {}", with_sources(&error)));
            }
        }
    }
}
