//! Validations of a run that resumes, and its best checkpoint.

use crate::common::recording_observer::RecordingObserver;
use crate::common::{job, open, trainer};
use std::path::Path;
use trireme_train::RunSummary;
use trireme_train::config::Config;

/// Keys with which a run validates after each step, and keeps the last checkpoint and the best one.
const VALIDATED: [&str; 3] =
    ["training.validation_interval=1", "checkpoint.interval=1000", "checkpoint.keep_latest_k=1"];

fn train(folder: &Path, run: &str, steps: u64, keys: &[&str]) -> (Config, RunSummary, Vec<String>) {
    let config = job(folder, run, 1, steps, &[&VALIDATED, keys].concat());
    let mut observed = RecordingObserver::default();
    let summary = trainer(&config, trireme_comm::single(), &mut observed).run().unwrap();
    (config, summary, observed.notices)
}

/// Returns the names in the folder of the run's checkpoints.
fn names(config: &Config) -> Vec<String> {
    let entries = std::fs::read_dir(config.run_folder().join("checkpoints")).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort_unstable();
    names
}

#[test]
fn the_best_loss_resets_with_other_validation_samples() {
    let folder = tempfile::tempdir().unwrap();
    let mut losses = Vec::new();
    for (run, first, second) in [("more", 8, 16), ("fewer", 16, 8)] {
        let samples = |num: u32| format!("training.validation_samples={num}");
        // Weights that do not change have their best loss in the first validation.
        let keys = ["optimizer.lr=0.0", "training.early_stopping_patience=3"];
        let before = train(folder.path(), run, 9, &[&keys[..], &[&samples(first)]].concat()).1;
        assert_eq!((before.step, before.best_validation.map(|(step, _)| step)), (4, Some(1)));
        let (config, after, notices) =
            train(folder.path(), run, 6, &[&keys[..], &[&samples(second)]].concat());
        let (step, loss) = after.best_validation.unwrap();
        assert_eq!((after.step, step), (6, 5), "{run}");
        let line = format!("(validation_samples: {first} -> {second})");
        assert!(notices.iter().any(|notice| notice.contains(&line)), "{notices:?}");
        assert_eq!(names(&config), ["best", "latest", "step-5", "step-6"]);
        let best = config.run_folder().join("checkpoints/best");
        assert_eq!(std::fs::read_to_string(best).unwrap(), "step-5\n");
        losses.push((before.best_validation.unwrap().1, loss));
    }
    assert!(losses.iter().any(|(before, after)| after > before), "{losses:?}");
}

#[test]
fn a_run_that_stopped_early_says_so_when_it_resumes() {
    let folder = tempfile::tempdir().unwrap();
    let keys = ["optimizer.lr=0.0", "training.early_stopping_patience=3"];
    train(folder.path(), "run", 9, &keys);
    let told =
        "early stopping ended this run after step 4: no lower loss in 3 validations; to train further, raise";
    let (_, resumed, notices) = train(folder.path(), "run", 9, &keys);
    assert_eq!((resumed.step, resumed.loss), (4, None));
    assert!(notices.iter().any(|notice| notice.starts_with(told)), "{notices:?}");
    let fork = format!("checkpoint.resume={:?}", folder.path().join("run/checkpoints/step-4"));
    let (_, forked, notices) = train(folder.path(), "fork", 9, &[&keys[..], &[&fork]].concat());
    assert_eq!(forked.step, 4);
    assert!(notices.iter().any(|notice| notice.starts_with(told)), "{notices:?}");
    let (_, patient, notices) =
        train(folder.path(), "run", 9, &["optimizer.lr=0.0", "training.early_stopping_patience=5"]);
    assert_eq!(patient.step, 6);
    assert!(!notices.iter().any(|notice| notice.starts_with(told)), "{notices:?}");
}

#[test]
fn the_previous_best_checkpoint_is_removed() {
    let folder = tempfile::tempdir().unwrap();
    let (config, summary, _) = train(folder.path(), "run", 3, &[]);
    assert_eq!(summary.best_validation.map(|(step, _)| step), Some(3));
    assert_eq!(names(&config), ["best", "latest", "step-3"]);
}

#[test]
fn other_samples_are_read_from_the_first_one() {
    let folder = tempfile::tempdir().unwrap();
    let samples = |run: &str, steps: u64, keys: &[&str]| {
        let (config, _, notices) = train(folder.path(), run, steps, keys);
        let text = std::fs::read_to_string(config.run_folder().join("metrics.jsonl")).unwrap();
        let last: serde_json::Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
        (last["samples"].as_u64().unwrap(), notices)
    };
    let allowed = "checkpoint.allow_changed=[\"data\"]";
    samples("run", 2, &[]);
    // A run whose samples have not changed continues with the next sample.
    assert_eq!(samples("run", 3, &[allowed]).0, 3 * 16);
    let (read, notices) = samples("run", 5, &[allowed, "training.seed=1"]);
    assert_eq!(read, 2 * 16);
    let told = "the samples differ from those of the checkpoint (seed: 0 -> 1), so the run reads them from the first one";
    assert!(notices.iter().any(|notice| notice == told), "{notices:?}");
    assert_eq!(samples("run", 6, &[allowed, "training.seed=1"]).0, 3 * 16);
}

#[test]
fn a_run_without_parameters_to_train_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |pattern: &str| {
        let groups = format!("optimizer.groups=[{{ match = {pattern:?}, frozen = true }}]");
        let config = job(folder.path(), "run", 1, 2, &[&groups]);
        let mut observer = trireme_train::NullObserver;
        let opened = open(&config, trireme_comm::single(), &mut observer);
        opened.err().map(|error| error.to_string())
    };
    assert!(refused("*").unwrap().contains("freeze all"));
    assert_eq!(refused("*norm*"), None);
}

/// The new file has as many samples as the held-out part of the old one.
#[test]
fn the_best_loss_resets_with_another_validation_file() {
    let folder = tempfile::tempdir().unwrap();
    let keys = ["optimizer.lr=0.0", "training.validation_samples=4"];
    let before = train(folder.path(), "run", 2, &keys).1;
    let (text, other) = (folder.path().join("other.txt"), "checkpoint.allow_changed=['data']");
    std::fs::write(&text, "Other words, of which there are enough for four samples. ".repeat(40)).unwrap();
    let inputs = format!("data.validation_inputs=[\"{}\"]", text.display());
    let after = train(folder.path(), "run", 4, &[&keys[..], &[&inputs, other]].concat()).1;
    assert_eq!(before.best_validation.map(|(step, _)| step), Some(1));
    assert_eq!(after.best_validation.map(|(step, _)| step), Some(3));
}
