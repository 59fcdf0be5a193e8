//! What a user sees of steps that are skipped because gradients overflow.

mod common;

use common::{job, trainer};
use serde_json::Value;
use std::path::Path;
use trireme_testkit::run_ranks;
use trireme_train::metrics::StepRecord;
use trireme_train::{Observer, RunFacts};

/// Keeps the notices.
#[derive(Default)]
struct Notices(Vec<String>);

impl Observer for Notices {
    fn notice(&mut self, text: &str) {
        self.0.push(text.to_owned());
    }
    fn begin(&mut self, _: &RunFacts) {}
    fn step(&mut self, _: &StepRecord) {}
    fn checkpoint(&mut self, _: u64, _: &Path) {}
}

#[test]
fn a_skipped_step_is_told_and_recorded() {
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
    let text = std::fs::read_to_string(config.run_folder().join("metrics.jsonl")).unwrap();
    let records: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((&records[1]["loss_scale"], &records[1]["skipped_steps"]), (&8_388_608.into(), &2.into()));
    assert!(records[1]["grad_norm"].is_null() && records[1]["loss"].is_f64());
    assert_eq!(records[1]["tokens"], 2 * 16 * 24, "its data is used up");
    assert_eq!(records[0]["validation_loss"], Value::Null);
    assert!(records[1]["validation_loss"].is_f64());
}
