use serde::{Deserialize, Serialize, Serializer};
use std::fmt;

/// Metrics that units report, by name. The value of a step is the mean over its rows.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct MetricValues(Vec<(&'static str, f64)>);

impl MetricValues {
    /// Adds a metric.
    pub fn push(&mut self, metric: (&'static str, f64)) {
        self.0.push(metric);
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Forgets all, but keeps the memory.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// Names and values.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, f64)> + '_ {
        self.0.iter().copied()
    }

    /// The value of a name.
    pub fn get(&self, name: &str) -> Option<f64> {
        self.iter().find(|(own, _)| *own == name).map(|(_, value)| value)
    }
}

impl Serialize for MetricValues {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.iter())
    }
}

/// What is recorded of one step. Numbers that are not finite are written as `null` in JSON: of a skipped step, the norm of the
/// gradients or the loss.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct StepRecord {
    /// The step, counted from 1.
    pub step: u64,
    /// Mean loss of the step: of a language model the cross-entropy over its tokens, in nats.
    pub loss: f64,
    /// What units report beside the loss.
    #[serde(skip_serializing_if = "MetricValues::is_empty")]
    pub metrics: MetricValues,
    /// Global norm of the gradients before clipping; NaN where momentum was exchanged in their place.
    pub grad_norm: f64,
    /// Learning rate of the step.
    pub lr: f64,
    /// Samples trained on since the beginning of the run.
    pub samples: u64,
    /// Passes over the samples since the beginning of the run.
    pub epoch: f64,
    /// When the step ended, in seconds since 1970.
    pub unix_seconds: f64,
    /// Samples a second of all workers together.
    pub samples_per_second: f64,
    /// Tokens trained on since the beginning of the run, where samples are of tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<u64>,
    /// Tokens a second of all workers together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_per_second: Option<f64>,
    /// Wall time of the step.
    pub step_seconds: f64,
    /// Part of the step in which this worker computed nothing because it waited for others.
    pub comm_seconds_exposed: f64,
    /// Bytes that this worker sent.
    pub comm_bytes: u64,
    /// Most memory held by this worker so far; where units of a pipeline have moved, since then.
    pub memory_peak_bytes: MemoryPeakBytes,
    /// What that was predicted to be, where it was, and no units have moved.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_predicted_bytes: Option<MemoryPeakBytes>,
    /// Most bytes of activations that lay in files, because this worker's experts had more tokens than were planned for, if any did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_spilled_bytes: Option<u64>,
    /// How long a step was predicted to take, if that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step_seconds_predicted: Option<f64>,
    /// Bytes that this worker would have sent in addition without compression, by the formulas of
    /// docs/compression.md, in runs with compression.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compression_bytes_saved: Option<u64>,
    /// Norm of what this worker's mean gradient, with what earlier steps have kept of it, lacks in its messages, in the
    /// units of `grad_norm`, in runs with compression; where momentum was exchanged, what that lacks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compression_error_norm: Option<f64>,
    /// Factor of the loss in this step's backward, in runs with `dtype = "f16"`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<u32>,
    /// Steps skipped since the beginning of the run because gradients overflowed, in runs with `dtype = "f16"`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skipped_steps: Option<u64>,
    /// Model FLOP/s as a part of the hardware's peak, where the peak is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mfu: Option<f64>,
    /// Mean loss of the validation samples, where this step measured it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_loss: Option<f64>,
    /// That loss before the first step, in the record of that step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub initial_validation_loss: Option<f64>,
    /// What units report of the validation samples beside the loss.
    #[serde(skip_serializing_if = "MetricValues::is_empty")]
    pub validation_metrics: MetricValues,
    /// Time from the start of the command to the end of its first step, in the record of that step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds_to_first_step: Option<f64>,
}

/// Most memory held so far, by what it is for. What a record lacks is 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct MemoryPeakBytes {
    /// Weights.
    pub parameters: u64,
    /// Gradients, with the partial sums of accumulation.
    pub gradients: u64,
    /// State of the optimizer.
    pub optimizer: u64,
    /// Activations, with the scratch space of kernels.
    pub activations: u64,
    /// Buffers of messages, and whole units on their way.
    pub communication: u64,
    /// All categories together: less than their sum where they peak at different times.
    pub total: u64,
}

impl MemoryPeakBytes {
    /// The categories and all of them together, with their names.
    pub fn named(&self) -> [(&'static str, u64); 6] {
        [
            ("parameters", self.parameters),
            ("gradients", self.gradients),
            ("optimizer", self.optimizer),
            ("activations", self.activations),
            ("communication", self.communication),
            ("total", self.total),
        ]
    }
}

impl StepRecord {
    /// The speed, and its short name: tokens a second (`tps`), or samples a second (`sps`) where there are no tokens.
    pub fn speed(&self) -> (&'static str, f64) {
        self.tokens_per_second.map_or(("sps", self.samples_per_second), |speed| ("tps", speed))
    }
}

/// A record as a log line: `step: 40  loss: 2.6102  grad_norm: 0.91  tps: 10,842  memory: 0.31GiB`.
#[derive(Debug, Clone, Copy)]
pub struct LogLine<'a>(pub &'a StepRecord);

impl fmt::Display for LogLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let record = self.0;
        write!(f, "step: {}  loss: {:.4}", record.step, record.loss)?;
        for (name, value) in record.metrics.iter() {
            write!(f, "  {name}: {value:.4}")?;
        }
        if let Some(loss) = record.validation_loss {
            write!(f, "  validation_loss: {loss:.4}")?;
        }
        for (name, value) in record.validation_metrics.iter() {
            write!(f, "  validation_{name}: {value:.4}")?;
        }
        if !record.grad_norm.is_nan() {
            write!(f, "  grad_norm: {:.2}", record.grad_norm)?;
        }
        let (name, speed) = record.speed();
        write!(f, "  {name}: ")?;
        write_grouped(f, speed.round() as u64)?;
        if let (Some(scale), Some(skipped)) = (record.loss_scale, record.skipped_steps) {
            write!(f, "  loss_scale: {scale}  skipped: {skipped}")?;
        }
        if let Some(mfu) = record.mfu {
            write!(f, "  mfu: {:.1}%", 100.0 * mfu)?;
        }
        // Always GiB: a unit that changed between lines would make them hard to compare.
        write!(f, "  memory: {:.2}GiB", record.memory_peak_bytes.total as f64 / (1_u64 << 30) as f64)
    }
}

/// Writes `number` with a comma between groups of three digits.
fn write_grouped(f: &mut fmt::Formatter<'_>, number: u64) -> fmt::Result {
    if number < 1000 {
        return write!(f, "{number}");
    }
    write_grouped(f, number / 1000)?;
    write!(f, ",{:03}", number % 1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_line_tells_what_is_known() {
        let mut record = StepRecord {
            step: 40,
            loss: 2.610_24,
            grad_norm: 0.912,
            tokens_per_second: Some(10_841.7),
            memory_peak_bytes: MemoryPeakBytes { total: (1 << 28) + (1 << 26), ..Default::default() },
            ..StepRecord::default()
        };
        assert_eq!(
            LogLine(&record).to_string(),
            "step: 40  loss: 2.6102  grad_norm: 0.91  tps: 10,842  memory: 0.31GiB"
        );
        record.mfu = Some(0.3119);
        record.validation_loss = Some(f64::NAN);
        record.tokens_per_second = Some(1_002_003.0);
        assert_eq!(
            LogLine(&record).to_string(),
            "step: 40  loss: 2.6102  validation_loss: NaN  grad_norm: 0.91  tps: 1,002,003  mfu: 31.2%  \
             memory: 0.31GiB"
        );
        record.metrics.push(("accuracy", 0.5));
        record.validation_metrics.push(("accuracy", 0.25));
        let line = LogLine(&record).to_string();
        assert!(line.starts_with(
            "step: 40  loss: 2.6102  accuracy: 0.5000  validation_loss: NaN  validation_accuracy: 0.2500  grad"
        ));
        record.validation_metrics.clear();
        record.grad_norm = f64::NAN;
        assert!(LogLine(&record).to_string().contains("validation_loss: NaN  tps: 1,002,003"));
        let scaled = StepRecord { loss_scale: Some(32_768), skipped_steps: Some(2), ..StepRecord::default() };
        assert_eq!(
            LogLine(&scaled).to_string(),
            "step: 0  loss: 0.0000  grad_norm: 0.00  sps: 0  loss_scale: 32768  skipped: 2  memory: 0.00GiB"
        );
    }
}
