//! Notices and records of skipped steps.

use crate::common::{job, trainer};
use serde_json::Value;
use std::path::Path;
use trireme_testkit::run_ranks;
use trireme_train::config::Config;
use trireme_train::metrics::StepRecord;
use trireme_train::{Observer, RunInfo};

/// An observer that records notices.
#[derive(Default)]
struct Notices(Vec<String>);

impl Observer for Notices {
    fn notice(&mut self, text: &str) {
        self.0.push(text.to_owned());
    }
    fn begin(&mut self, _: &RunInfo) {}
    fn step(&mut self, _: &StepRecord) {}
    fn checkpoint(&mut self, _: u64, _: &Path) {}
}

/// Returns the records of a run's steps.
fn records(config: &Config) -> Vec<Value> {
    let text = std::fs::read_to_string(config.run_folder().join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Writes inputs with prompts of `num_windows` sequences each, of which only the last one has an answer. Returns the value of
/// `data.inputs`.
fn prompts(path: &Path, num_records: usize, num_windows: usize) -> String {
    let prompt = "word ".repeat(5 * num_windows - 2);
    std::fs::write(
        path,
        format!("{{\"prompt\": \"{prompt}\", \"completion\": \"yes\"}}\n").repeat(num_records),
    )
    .unwrap();
    format!("[{path:?}]")
}

#[test]
fn a_step_without_a_token_that_counts_is_skipped_on_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let inputs = prompts(&folder.path().join("prompts.jsonl"), 40, 16);
    let mut found = Vec::new();
    for (name, world_size, key) in [
        ("one", 1, "parallelism.zero_stage=0"),
        ("data", 2, "parallelism.zero_stage=0"),
        ("sharded", 2, "parallelism.zero_stage=3"),
        ("pipeline", 2, "parallelism.pipeline_parallel_degree=2"),
        ("context", 2, "parallelism.context_parallel_degree=2"),
        ("tensor", 2, "parallelism.tensor_parallel_degree=2"),
    ] {
        let keys = [&format!("data.inputs={inputs}"), key, "data.validation_fraction=0.2"];
        let config = job(folder.path(), name, world_size, 6, &keys);
        let notices = run_ranks(world_size, |group| {
            let mut notices = Notices::default();
            let summary = trainer(&config, group, &mut notices).run().unwrap();
            assert!(summary.loss.unwrap() > 0.0);
            notices.0
        });
        let records = records(&config);
        let skipped: Vec<u64> = records
            .iter()
            .filter(|record| record["loss"].is_null())
            .map(|record| record["step"].as_u64().unwrap())
            .collect();
        assert!(records.iter().all(|record| record["loss"].as_f64().is_none_or(|loss| loss > 0.0)), "{name}");
        for step in &skipped {
            let line = format!("step {step}: nothing in its 16 samples counts in the loss; step skipped");
            assert!(notices.iter().all(|notices| notices.contains(&line)), "{name}: {notices:?}");
        }
        found.push(skipped);
    }
    assert!((1..6).contains(&found[0].len()), "{found:?}");
    assert!(found.iter().all(|skipped| *skipped == found[0]), "{found:?}");
}

#[test]
fn a_validation_without_a_token_that_counts_is_none() {
    let folder = tempfile::tempdir().unwrap();
    let validation = prompts(&folder.path().join("validation.jsonl"), 1, 16);
    let inputs = prompts(&folder.path().join("prompts.jsonl"), 40, 2);
    let keys = [
        &format!("data.inputs={inputs}"),
        &format!("data.validation_inputs={validation}"),
        "data.validation_fraction=0",
        "training.validation_interval=1",
        "training.validation_samples=8",
        "training.early_stopping_patience=1",
    ];
    let config = job(folder.path(), "run", 2, 4, &keys);
    let summaries = run_ranks(2, |group| {
        let mut notices = Notices::default();
        let summary = trainer(&config, group, &mut notices).run().unwrap();
        let told = notices
            .0
            .iter()
            .filter(|line| line.contains("nothing in the 8 validation samples counts in the loss"));
        assert_eq!(told.count(), 1, "{:?}", notices.0);
        summary
    });
    for summary in summaries {
        assert_eq!((summary.step, summary.validation_loss, summary.best_validation), (4, None, None));
    }
    for record in records(&config) {
        assert!(record.get("validation_loss").is_none() && record.get("initial_validation_loss").is_none());
    }
}

#[test]
fn a_skipped_step_is_reported_and_recorded() {
    let folder = tempfile::tempdir().unwrap();
    let keys = ["training.dtype=f16", "training.reduce_dtype=f16", "training.loss_scale_initial=16777216"];
    let config = job(folder.path(), "run", 2, 2, &keys);
    let notices = run_ranks(2, |group| {
        let mut notices = Notices::default();
        trainer(&config, group, &mut notices).run().unwrap();
        notices.0
    });
    for notices in notices {
        assert!(
            notices[0].starts_with("gradients are rounded to f16 and summed over 2 workers"),
            "{notices:?}"
        );
        assert_eq!(
            notices[1..],
            [
                "step 1: gradients overflowed in f16; step skipped, loss scale 16777216 → 8388608",
                "step 2: gradients overflowed in f16; step skipped, loss scale 8388608 → 4194304",
            ]
        );
    }
    let records = records(&config);
    assert_eq!((&records[1]["loss_scale"], &records[1]["skipped_steps"]), (&8_388_608.into(), &2.into()));
    assert!(records[1]["grad_norm"].is_null() && records[1]["loss"].is_f64());
    assert_eq!(records[1]["tokens"], 2 * 16 * 24, "its data is used up");
    assert_eq!(records[0]["validation_loss"], Value::Null);
    assert!(records[1]["validation_loss"].is_f64());
}
