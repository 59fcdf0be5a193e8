//! Metrics, traces and notices of a run.

use super::Trainer;
use crate::error::TrainError;
use crate::metrics::{StepRecord, Written};
use crate::run_folder;
use trireme_base::with_sources;

impl Trainer<'_> {
    /// Writes the record of a step. Reports if the record waits for a full disk, and when no record waits any more.
    pub(super) fn write_metrics(&mut self, record: &StepRecord) -> Result<(), TrainError> {
        let Some(metrics) = &mut self.metrics else { return Ok(()) };
        let written = metrics.write(record)?;
        self.report_written(written, record.step);
        Ok(())
    }

    /// Reports if records wait for a full disk, and when no record waits any more.
    pub(super) fn report_written(&mut self, written: Written, step: u64) {
        match written {
            Written::Now => {}
            Written::Later(errors) => {
                for error in &errors {
                    let error = with_sources(error);
                    self.report_once(format!(
                        "{error}; step records are kept in memory until it can be written"
                    ));
                }
            }
            Written::WithWaiting => {
                self.observer.notice(&format!("metrics are complete again since step {step}"));
            }
        }
    }

    /// Shows a notice, unless the same text was shown before.
    pub(super) fn report_once(&mut self, text: String) {
        if !self.reported.contains(&text) {
            self.observer.notice(&text);
            self.reported.push(text);
        }
    }

    /// Notifies the user once if copies of offloaded state are slow because the host's memory could not be pinned.
    pub(super) fn notice_pinning(&mut self) {
        if self.has_reported_pinning {
            return;
        }
        if let Some(failure) = self.executor.host().pinning_failure() {
            let text = format!(
                "memory of the host could not be pinned ({failure}), so copies of offloaded state are slow; see how much \
                 memory is free, and what the driver reports in `dmesg`"
            );
            self.observer.notice_of_worker(self.executor.group().rank(), &text);
            self.has_reported_pinning = true;
        }
    }

    /// Whether a trace is due after a step.
    pub(super) fn traces(&self, step: u64) -> bool {
        let interval = self.config.metrics().trace_interval;
        interval > 0 && step.is_multiple_of(interval)
    }

    /// Writes the timeline of the last step, if a trace is due. Collective.
    pub(super) fn trace(&mut self) -> Result<(), TrainError> {
        let step = self.state.step;
        if self.traces(step) && !self.executor.timeline().is_empty() {
            self.executor.group().set_program_line(format_args!("step {step}: trace"));
            self.tracer.write(step, &self.executor, &self.utilization, self.program_time)?;
        }
        Ok(())
    }

    /// Writes the algorithms that the group has chosen, if there are new choices.
    pub(super) fn write_algorithm_choices(&mut self) -> Result<(), TrainError> {
        let group = self.executor.group();
        let num_choices = group.num_choices();
        if self.metrics.is_some() && num_choices != self.num_algorithm_choices {
            run_folder::write_algorithm_choices(self.config, group)?;
            self.num_algorithm_choices = num_choices;
        }
        Ok(())
    }
}
