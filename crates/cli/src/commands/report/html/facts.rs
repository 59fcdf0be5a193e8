//! A table of facts about runs: model, workers, progress and results.

use super::super::records::Record;
use super::hues::run_color_attributes;
use super::loaded_run::LoadedRun;
use crate::clock::date_and_time;
use crate::numbers::{duration, with_thousands_separators};
use std::time::Duration;
use trireme_base::{Bytes, escape_markup};

type Fact = (&'static str, fn(&LoadedRun) -> Option<String>);

const FACTS: [Fact; 16] = [
    ("folder", |run| Some(run.folder.display().to_string())),
    ("model", model),
    ("parameters", |run| run.num_parameters.map(|number| with_thousands_separators(number.round() as u64))),
    ("workers", workers),
    ("steps done", steps),
    ("trained on", |run| {
        let unit = run.records.unit();
        Some(format!("{} {}", with_thousands_separators(run.records.last().amount(unit)?), unit.plural()))
    }),
    ("last loss", |run| Some(run.records.last().loss.map_or_else(|| "not finite".to_owned(), loss))),
    ("last validation loss", |run| run.records.validations().next_back().map(loss_at)),
    ("best validation loss", |run| run.records.best_validation().map(loss_at)),
    ("bigram baseline", |run| run.baseline.map(loss)),
    ("median speed", |run| {
        let unit = run.records.unit().plural();
        Some(format!(
            "{} {unit} a second",
            with_thousands_separators(run.records.median_speed()?.round() as u64)
        ))
    }),
    ("median MFU", |run| run.records.median_mfu().map(|mfu| format!("{:.1} %", 100.0 * mfu))),
    ("peak memory of rank 0", |run| {
        let total = run.records.last().memory_peak_bytes.total as u64;
        (total > 0).then(|| Bytes(total).to_string())
    }),
    ("time in steps", |run| {
        let seconds = |record: &Record| record.step_seconds;
        Duration::try_from_secs_f64(run.records.iter().filter_map(seconds).sum()).ok().map(duration)
    }),
    ("began", |run| run.began.and_then(date_and_time)),
    ("last record written", |run| run.ended.and_then(date_and_time)),
];

/// Returns a table with a column for each run and a row for each fact that is known of at least one run.
pub(super) fn facts_table(runs: &[LoadedRun]) -> String {
    let mut html = "<div class=\"wide\"><table>\n<thead><tr><th></th>".to_owned();
    for (index, run) in runs.iter().enumerate() {
        let color = run_color_attributes(index);
        html += &format!("<th {color}><span class=\"swatch\"></span>{}</th>", escape_markup(&run.name));
    }
    html += "</tr></thead>\n<tbody>\n";
    for (name, fact) in FACTS {
        let values: Vec<Option<String>> = runs.iter().map(fact).collect();
        if values.iter().all(Option::is_none) {
            continue;
        }
        let cell = |value: Option<String>| {
            format!("<td>{}</td>", value.map_or_else(|| "–".to_owned(), |value| escape_markup(&value)))
        };
        let cells: String = values.into_iter().map(cell).collect();
        html += &format!("<tr><th>{name}</th>{cells}</tr>\n");
    }
    html + "</tbody></table></div>\n"
}

fn model(run: &LoadedRun) -> Option<String> {
    let text = |key: &str| run.keys.get(key).map(|value| value.trim_matches('"').to_owned());
    let Some(architecture) = text("model.architecture") else {
        return text("model.config").or_else(|| text("model.init_from"));
    };
    match (text("model.num_layers"), text("model.hidden_size")) {
        (Some(layers), Some(width)) => Some(format!("{architecture}, {layers} layers of width {width}")),
        _ => Some(architecture),
    }
}

/// Returns the number of workers: the product of the degrees that divide them.
fn workers(run: &LoadedRun) -> Option<String> {
    let degree = |name: &str| run.keys.get(&format!("parallelism.{name}"))?.parse::<u64>().ok();
    let degrees = [
        "data_parallel_replicate_degree",
        "data_parallel_shard_degree",
        "context_parallel_degree",
        "tensor_parallel_degree",
        "pipeline_parallel_degree",
    ];
    let product = degrees.iter().try_fold(1_u64, |product, name| product.checked_mul(degree(name)?))?;
    Some(product.to_string())
}

fn steps(run: &LoadedRun) -> Option<String> {
    let done = with_thousands_separators(run.records.last().step);
    match run.keys.get("training.steps").and_then(|steps| steps.parse::<u64>().ok()) {
        Some(planned) => Some(format!("{done} of {}", with_thousands_separators(planned))),
        None => Some(done),
    }
}

fn loss(value: f64) -> String {
    format!("{value:.4}")
}

fn loss_at((step, value): (u64, f64)) -> String {
    format!("{value:.4} at step {}", with_thousands_separators(step))
}
