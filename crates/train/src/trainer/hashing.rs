//! Hashes of the results of steps, for `trireme report diff`.

use super::Trainer;
use crate::error::TrainError;
use crate::metrics::HashRecord;
use std::sync::Arc;

impl Trainer<'_> {
    /// Turns on the hashes that the config asks for, and records the hashes of the parameters that the run begins or resumes with.
    /// Collective.
    pub(super) fn begin_hashes(&mut self) -> Result<(), TrainError> {
        let interval = self.config.metrics().hash_interval;
        if interval == 0 {
            return Ok(());
        }
        self.executor.record_hashes(interval);
        let parameters = self.executor.hash_parameters()?;
        let record = HashRecord::of_start(self.state.step, &parameters, self.executor.model().table());
        self.write_hashes(&record)
    }

    /// Records the hashes of the program's steps for which hashes are due. Collective.
    pub(super) fn finish_hashes(&mut self) -> Result<(), TrainError> {
        let interval = self.config.metrics().hash_interval;
        if interval == 0 {
            return Ok(());
        }
        let found = self.executor.take_hashes()?;
        let table = Arc::clone(self.executor.model().table());
        for index in 0..self.step_plans.len() {
            let (step, loss) = (self.step_plans[index].step, self.outcomes[index].loss);
            if step.is_multiple_of(interval) {
                let hashes = found.iter().find(|hashes| hashes.step == step);
                self.write_hashes(&HashRecord::of_step(step, loss, hashes, &table))?;
            }
        }
        Ok(())
    }

    fn write_hashes(&mut self, record: &HashRecord) -> Result<(), TrainError> {
        let Some(hashes) = &mut self.hashes else { return Ok(()) };
        let written = hashes.write(record)?;
        self.report_written(written, record.step);
        Ok(())
    }
}
