use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeMap;
use trireme_base::{Category, CategoryBytes};
use trireme_tensor::Device;

/// Metrics that units report, by name. The value of a metric is its mean over the rows of the step.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct MetricValues(Vec<(&'static str, f64)>);

impl MetricValues {
    /// Adds a metric.
    pub fn push(&mut self, metric: (&'static str, f64)) {
        self.0.push(metric);
    }

    /// Returns whether there are no metrics.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Removes all metrics, but keeps the memory.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// Returns names and values.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, f64)> + '_ {
        self.0.iter().copied()
    }

    /// Returns the value of the metric `name`, if there is one.
    pub fn get(&self, name: &str) -> Option<f64> {
        self.iter().find(|(own, _)| *own == name).map(|(_, value)| value)
    }
}

impl Serialize for MetricValues {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.iter())
    }
}

/// The record of one step. JSON has `null` for numbers that are not finite, such as the gradient norm or the loss of a skipped step.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct StepRecord {
    /// The step, counted from 1.
    pub step: u64,
    /// Mean loss of the step; for a language model, the cross-entropy over its tokens in nats. NaN if nothing in the step counts in the
    /// loss.
    pub loss: f64,
    /// Metrics that units report in addition to the loss.
    #[serde(skip_serializing_if = "MetricValues::is_empty")]
    pub metrics: MetricValues,
    /// Global norm of the gradients before clipping. NaN if workers exchanged momentum instead.
    pub grad_norm: f64,
    /// Learning rate of the step.
    pub lr: f64,
    /// Samples trained on since the beginning of the run, or since it resumed with other samples.
    pub samples: u64,
    /// Number of passes over these samples.
    pub epoch: f64,
    /// The time at which the step ended, in seconds since 1970.
    pub unix_seconds: f64,
    /// Samples per second of all workers together.
    pub samples_per_second: f64,
    /// Tokens trained on since the beginning of the run, if samples have tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<u64>,
    /// Tokens per second of all workers together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_per_second: Option<f64>,
    /// Wall time of the step in seconds.
    pub step_seconds: f64,
    /// Seconds of the step in which this worker computed nothing because it waited for others.
    pub comm_seconds_exposed: f64,
    /// Bytes that this worker sent in the step.
    pub comm_bytes: u64,
    /// Peak memory of this worker so far, or since units of a pipeline last moved.
    pub memory_peak_bytes: MemoryPeakBytes,
    /// The predicted peak memory, if there is a prediction and no units have moved.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_predicted_bytes: Option<MemoryPeakBytes>,
    /// Peak of the activation bytes spilled to files because this worker's experts had more tokens than planned, if any were spilled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_spilled_bytes: Option<u64>,
    /// The predicted time of a step in seconds, if a prediction was requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step_seconds_predicted: Option<f64>,
    /// Bytes that this worker would have sent in addition without compression, by the formulas of docs/compression.md. Only in runs with
    /// compression.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compression_bytes_saved: Option<u64>,
    /// Norm of the compression error of this worker: the difference between its mean gradient plus residuals of earlier steps, and the
    /// messages that it sent, in the units of `grad_norm`. If workers exchanged momentum, the error of the momentum. Only in runs with
    /// compression.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compression_error_norm: Option<f64>,
    /// The loss scale of this step's backward. Only in runs with `dtype = "f16"`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<u32>,
    /// Steps skipped since the beginning of the run, because gradients overflowed or nothing counted in the loss. Only in runs with
    /// `dtype = "f16"`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skipped_steps: Option<u64>,
    /// Model FLOPs utilization: the operations that the model needs for the step, relative to the peak of all workers, if the peak is
    /// known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mfu: Option<f64>,
    /// Mean loss of the validation samples, if a validation followed this step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_loss: Option<f64>,
    /// The validation loss before the first step, in the record of that step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub initial_validation_loss: Option<f64>,
    /// Metrics that units report on the validation samples in addition to the loss.
    #[serde(skip_serializing_if = "MetricValues::is_empty")]
    pub validation_metrics: MetricValues,
    /// Seconds from the start of the command to the end of its first step, in the record of that step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds_to_first_step: Option<f64>,
}

impl StepRecord {
    /// Calls `put(group, name, value)` for every number that is plotted over the steps. Numbers that become one Prometheus metric follow
    /// each other, as its text format requires.
    pub(super) fn scalars(&self, mut put: impl FnMut(&'static str, &str, f64)) {
        put("train", "loss", self.loss);
        self.metrics.iter().for_each(|(name, value)| put("metrics", name, value));
        self.validation_metrics.iter().for_each(|(name, value)| put("validation_metrics", name, value));
        put("train", "grad_norm", self.grad_norm);
        put("train", "lr", self.lr);
        put("train", "samples", self.samples as f64);
        put("train", "epoch", self.epoch);
        put("performance", "samples_per_second", self.samples_per_second);
        if let (Some(tokens), Some(speed)) = (self.tokens, self.tokens_per_second) {
            put("train", "tokens", tokens as f64);
            put("performance", "tokens_per_second", speed);
        }
        put("performance", "step_seconds", self.step_seconds);
        put("performance", "comm_seconds_exposed", self.comm_seconds_exposed);
        put("performance", "comm_bytes", self.comm_bytes as f64);
        for (category, bytes) in self.memory_peak_bytes.named() {
            put("memory_peak_bytes", category, bytes as f64);
        }
        let not_in_every_record = [
            ("memory_peak_bytes", "spilled", self.memory_spilled_bytes.map(|bytes| bytes as f64)),
            ("train", "compression_error_norm", self.compression_error_norm),
            (
                "performance",
                "compression_bytes_saved",
                self.compression_bytes_saved.map(|bytes| bytes as f64),
            ),
            ("train", "loss_scale", self.loss_scale.map(f64::from)),
            ("train", "skipped_steps", self.skipped_steps.map(|steps| steps as f64)),
            ("performance", "mfu", self.mfu),
            ("validation", "loss", self.validation_loss),
            ("validation", "initial_loss", self.initial_validation_loss),
            ("performance", "seconds_to_first_step", self.seconds_to_first_step),
        ];
        for (group, name, value) in not_in_every_record {
            if let Some(value) = value {
                put(group, name, value);
            }
        }
    }
}

/// Peak memory so far by category, in bytes. In JSON, one number per category name and one for `total`. A missing number is read as 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryPeakBytes {
    /// The peak of each category.
    pub categories: CategoryBytes,
    /// The peak of the sum of all categories. It is less than the sum of their peaks if they peak at different times.
    pub total: usize,
}

impl MemoryPeakBytes {
    /// Returns the peaks of a device so far.
    pub fn measured(device: &Device) -> Self {
        let memory = device.memory();
        let categories = Category::ALL.map(|category| memory.usage(category).peak);
        MemoryPeakBytes { categories: CategoryBytes(categories), total: memory.total().peak }
    }

    /// Returns the higher peak of each category and of the total.
    pub fn max(self, other: Self) -> Self {
        let higher = |index: usize| self.categories.0[index].max(other.categories.0[index]);
        MemoryPeakBytes {
            categories: CategoryBytes(std::array::from_fn(higher)),
            total: self.total.max(other.total),
        }
    }

    /// Returns the peaks of the categories and of the total, with their names.
    pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
        let MemoryPeakBytes { categories, total } = *self;
        let categories = Category::ALL.map(|category| (category.name(), categories.get(category) as u64));
        categories.into_iter().chain([("total", total as u64)])
    }
}

impl Serialize for MemoryPeakBytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.named())
    }
}

impl<'de> Deserialize<'de> for MemoryPeakBytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let found = BTreeMap::<String, usize>::deserialize(deserializer)?;
        let bytes = |name: &str| found.get(name).copied().unwrap_or(0);
        let categories = CategoryBytes(Category::ALL.map(|category| bytes(category.name())));
        Ok(MemoryPeakBytes { categories, total: bytes("total") })
    }
}

impl StepRecord {
    /// Returns the speed and the name of its unit: tokens per second (`tps`), or samples per second (`sps`) if there are no tokens.
    pub fn speed(&self) -> (&'static str, f64) {
        self.tokens_per_second.map_or(("sps", self.samples_per_second), |speed| ("tps", speed))
    }
}
