//! A step as a line of text.

use crate::numbers::{duration, with_thousands_separators};
use console::{Style, colors_enabled};
use std::time::Duration;
use trireme_base::Bytes;
use trireme_train::metrics::StepRecord;

/// A record as a log line: `step: 40  loss: 2.6102  lr: 3.0e-4  grad_norm: 0.91  tps: 10,842  epoch: 0.50  memory: 320.00MiB  left: 1m05s`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LogLine<'a> {
    pub(crate) record: &'a StepRecord,
    /// Tokens or samples per second, averaged over recent steps.
    pub(crate) speed: f64,
    /// Time to the last step.
    pub(crate) left: Option<Duration>,
}

struct Field {
    name: String,
    value: String,
    /// Fields with the highest number are dropped first where there is no room for all. Fields with 0 always stay.
    drop_order: u8,
}

impl LogLine<'_> {
    /// Returns the line with all fields.
    pub(crate) fn plain(&self) -> String {
        let fields: Vec<String> =
            self.fields().iter().map(|Field { name, value, .. }| format!("{name}: {value}")).collect();
        fields.join("  ")
    }

    /// Returns the fields that fit into `columns`, in color if the terminal supports it.
    pub(crate) fn fitted(&self, columns: usize) -> String {
        let mut fields = self.fields();
        let width = |fields: &[Field]| -> usize {
            let each = fields.iter().map(|field| field.name.len() + ": ".len() + field.value.len());
            each.sum::<usize>() + "  ".len() * fields.len().saturating_sub(1)
        };
        while width(&fields) > columns
            && let Some(highest) = fields.iter().map(|field| field.drop_order).max().filter(|rank| *rank > 0)
        {
            let last = fields.iter().rposition(|field| field.drop_order == highest);
            fields.remove(last.expect("a field has the highest rank"));
        }
        let styled = fields.iter().map(|Field { name, value, .. }| {
            let style = match name.as_str() {
                "loss" => Style::new().bold(),
                "validation_loss" => Style::new().bold().green(),
                _ => Style::new(),
            };
            let colors = colors_enabled();
            let name = Style::new().dim().force_styling(colors).apply_to(format!("{name}:"));
            format!("{name} {}", style.force_styling(colors).apply_to(value))
        });
        styled.collect::<Vec<_>>().join("  ")
    }

    fn fields(&self) -> Vec<Field> {
        let record = self.record;
        let mut fields = Vec::new();
        let mut push = |drop_order: u8, name: &str, value: String| {
            fields.push(Field { name: name.to_owned(), value, drop_order });
        };
        push(0, "step", record.step.to_string());
        if !record.loss.is_nan() {
            push(0, "loss", format!("{:.4}", record.loss));
        }
        for (name, value) in record.metrics.iter() {
            push(7, name, format!("{value:.4}"));
        }
        if let Some(loss) = record.validation_loss {
            push(0, "validation_loss", format!("{loss:.4}"));
        }
        for (name, value) in record.validation_metrics.iter() {
            push(6, &format!("validation_{name}"), format!("{value:.4}"));
        }
        push(4, "lr", format!("{:.1e}", record.lr));
        if !record.grad_norm.is_nan() {
            push(5, "grad_norm", format!("{:.2}", record.grad_norm));
        }
        push(1, record.speed().0, with_thousands_separators(self.speed.round() as u64));
        if let (Some(scale), Some(skipped)) = (record.loss_scale, record.skipped_steps) {
            push(7, "loss_scale", scale.to_string());
            push(7, "skipped", skipped.to_string());
        }
        if let Some(mfu) = record.mfu {
            // Averaged over the same steps as the speed.
            let mfu = mfu * self.speed / record.speed().1;
            push(3, "mfu", format!("{:.1}%", 100.0 * mfu));
        }
        push(3, "epoch", format!("{:.2}", record.epoch));
        push(3, "memory", Bytes(record.memory_peak_bytes.total as u64).to_string());
        if let Some(left) = self.left {
            push(2, "left", duration(left));
        }
        fields
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trireme_train::metrics::MemoryPeakBytes;

    fn record() -> StepRecord {
        StepRecord {
            step: 40,
            loss: 2.610_24,
            grad_norm: 0.912,
            lr: 3e-4,
            epoch: 0.5,
            tokens_per_second: Some(1.0),
            memory_peak_bytes: MemoryPeakBytes { total: (1 << 28) + (1 << 26), ..Default::default() },
            ..StepRecord::default()
        }
    }

    fn plain(record: &StepRecord) -> String {
        LogLine { record, speed: 10_841.7, left: Some(Duration::from_secs(65)) }.plain()
    }

    #[test]
    fn a_log_line_has_all_known_fields() {
        let mut record = record();
        assert_eq!(
            plain(&record),
            "step: 40  loss: 2.6102  lr: 3.0e-4  grad_norm: 0.91  tps: 10,842  epoch: 0.50  memory: 320.00MiB  left: 1m05s"
        );
        // This step was twice as fast as the last ones.
        (record.mfu, record.tokens_per_second) = (Some(0.6238), Some(2.0 * 10_841.7));
        record.validation_loss = Some(f64::NAN);
        record.grad_norm = f64::NAN;
        record.metrics.push(("accuracy", 0.5));
        record.validation_metrics.push(("accuracy", 0.25));
        record.memory_peak_bytes.total = 3 << 29;
        (record.loss_scale, record.skipped_steps) = (Some(32_768), Some(2));
        assert_eq!(
            plain(&record),
            "step: 40  loss: 2.6102  accuracy: 0.5000  validation_loss: NaN  validation_accuracy: 0.2500  lr: 3.0e-4  tps: 10,842  \
             loss_scale: 32768  skipped: 2  mfu: 31.2%  epoch: 0.50  memory: 1.50GiB  left: 1m05s"
        );
    }

    #[test]
    fn a_narrow_terminal_shows_what_matters_most() {
        let record = record();
        let line = LogLine { record: &record, speed: 10_841.7, left: Some(Duration::from_secs(65)) };
        let fitted = |columns| console::strip_ansi_codes(&line.fitted(columns)).into_owned();
        assert_eq!(fitted(200), line.plain());
        assert_eq!(fitted(60), "step: 40  loss: 2.6102  tps: 10,842  left: 1m05s");
        assert_eq!(fitted(30), "step: 40  loss: 2.6102");
        assert_eq!(fitted(5), "step: 40  loss: 2.6102");
        for columns in 30..130 {
            assert!(fitted(columns).len() <= columns, "{columns}");
        }
    }
}
