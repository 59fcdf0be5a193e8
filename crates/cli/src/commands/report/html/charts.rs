//! The charts of a page.

use super::super::records::{ProgressUnit, Record, Records};
use super::chart::{Chart, Curve, CurveStyle, HorizontalLine};
use super::downsampling::downsampled;
use super::loaded_run::LoadedRun;
use super::memory::memory_chart;

/// Returns the figures of all runs together. A figure without recorded values is left out.
pub(super) fn charts(runs: &[LoadedRun]) -> String {
    let unit = common_unit(runs);
    let mut html = String::new();
    let mut push = |chart: Chart| html.extend(chart.to_html());
    push(losses(runs));
    push(one_curve_per_run(runs, "Learning rate", "factor of updates", &|record| record.lr));
    push(one_curve_per_run(runs, "Gradient norm", "global norm before clipping", &|record| record.grad_norm));
    let speed = format!("{} a second, all workers", unit.plural());
    push(one_curve_per_run(runs, "Speed", &speed, &|record| record.per_second(unit)));
    push(one_curve_per_run(runs, "MFU", "% of the peak of all workers", &|record| {
        record.mfu.map(|mfu| 100.0 * mfu)
    }));
    push(one_curve_per_run(
        runs,
        "Exposed communication",
        "% of the step in which rank 0 waits",
        &|record| {
            let part = record.comm_seconds_exposed? / record.step_seconds?;
            // A step that took no time would divide by zero.
            part.is_finite().then_some(100.0 * part)
        },
    ));
    html.extend(memory_chart(runs));
    html
}

/// Returns tokens if all runs count them, else samples.
fn common_unit(runs: &[LoadedRun]) -> ProgressUnit {
    let has_tokens = runs.iter().all(|run| run.records.unit() == ProgressUnit::Tokens);
    if has_tokens { ProgressUnit::Tokens } else { ProgressUnit::Samples }
}

/// Returns the last step of the run that has come furthest. Steps are in order, unless the file of a run has been changed.
fn last_step(runs: &[LoadedRun]) -> u64 {
    let steps = runs.iter().flat_map(|run| run.records.iter().map(|record| record.step));
    steps.max().unwrap_or(0)
}

fn losses(runs: &[LoadedRun]) -> Chart {
    let curves = runs.iter().enumerate().flat_map(|(run, LoadedRun { name, records, .. })| {
        loss_curves(run, ["training", "validation"].map(|what| format!("{name}, {what}")), records)
    });
    loss_chart(common_unit(runs), last_step(runs), curves.collect(), baselines(runs))
}

/// Draws the losses of one run as a standalone picture.
pub(in super::super) fn loss_picture(title: &str, records: &Records, baseline: Option<f64>) -> String {
    let curves = loss_curves(0, ["training loss", "validation loss"].map(str::to_owned), records);
    let level = |value| HorizontalLine { name: format!("bigram baseline {value:.4}"), value };
    let levels = baseline.map(level).into_iter().collect();
    loss_chart(records.unit(), records.last().step, curves.into(), levels).to_svg(title)
}

/// Returns the curves of a run's losses in training and in validation, with these names.
fn loss_curves(run: usize, names: [String; 2], records: &Records) -> [Curve; 2] {
    let training: Vec<_> = records.iter().map(|record| (record.step, record.loss)).collect();
    let before = records
        .iter()
        .filter_map(|record| Some((record.step.saturating_sub(1), Some(record.initial_validation_loss?))));
    let measured = records.iter().filter_map(|record| Some((record.step, record.validation_loss?)));
    let validation: Vec<_> = before.chain(measured).collect();
    let [of_training, of_validation] = names;
    [
        Curve { run, name: of_training, style: CurveStyle::Thin, points: downsampled(&training) },
        Curve { run, name: of_validation, style: CurveStyle::Dotted, points: downsampled(&validation) },
    ]
}

fn loss_chart(unit: ProgressUnit, last_step: u64, curves: Vec<Curve>, levels: Vec<HorizontalLine>) -> Chart {
    let unit = match unit {
        ProgressUnit::Tokens => "nats per token",
        ProgressUnit::Samples => "mean over samples",
    };
    Chart {
        title: "Loss",
        unit: unit.to_owned(),
        last_step,
        is_from_zero: false,
        curves,
        horizontal_lines: levels,
    }
}

/// Returns a horizontal line for each distinct baseline. Runs on the same text share a line.
fn baselines(runs: &[LoadedRun]) -> Vec<HorizontalLine> {
    let mut levels: Vec<(f64, Vec<&str>)> = Vec::new();
    for (run, value) in runs.iter().filter_map(|run| Some((run, run.baseline?))) {
        match levels.iter_mut().find(|(known, _)| *known == value) {
            Some((_, names)) => names.push(&run.name),
            None => levels.push((value, vec![&run.name])),
        }
    }
    let is_shared = levels.len() == 1;
    let level = |(value, names): (f64, Vec<&str>)| {
        let of_runs = if is_shared { String::new() } else { format!(", {}", names.join(", ")) };
        HorizontalLine { name: format!("bigram baseline {value:.4}{of_runs}"), value }
    };
    levels.into_iter().map(level).collect()
}

fn one_curve_per_run(
    runs: &[LoadedRun],
    title: &'static str,
    unit: &str,
    value: &dyn Fn(&Record) -> Option<f64>,
) -> Chart {
    let curve = |(run, loaded): (usize, &LoadedRun)| {
        let values: Vec<_> = loaded.records.iter().map(|record| (record.step, value(record))).collect();
        Curve { run, name: loaded.name.clone(), style: CurveStyle::Thin, points: downsampled(&values) }
    };
    let curves = runs.iter().enumerate().map(curve).collect();
    let (unit, last_step) = (unit.to_owned(), last_step(runs));
    Chart { title, unit, last_step, is_from_zero: true, curves, horizontal_lines: Vec::new() }
}
