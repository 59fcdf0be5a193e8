//! A corpus on which a run was trained survives refused launches, and runs that begin with another text.

use crate::common::{Fixture, assert_contains};
use std::fs::File;

/// Creates a fixture with a run that has prepared its own corpus, and whose text has changed since.
fn trained_then_changed() -> Fixture {
    let fixture = Fixture::new();
    fixture.run("train tiny.toml").succeeded();
    fixture.write("text.txt", "something else altogether\n".repeat(900));
    fixture
}

fn assert_resumes(fixture: &Fixture) {
    let resumed = fixture.run("train tiny.toml --set training.steps=6");
    assert_eq!(resumed.code, Some(0), "{resumed:?}");
    assert_contains(&resumed.stdout, &["resuming after step 4 of 6"]);
    assert_contains(&resumed.stderr, &["the run resumes with the corpus that it began with"]);
}

#[test]
fn a_launch_that_is_refused_changes_nothing() {
    let fixture = trained_then_changed();
    for reason in [
        "--set memory.device_budget=100KiB",
        "--set training.seq_len=100000",
        "--set model.vocab_size=8",
        "--set model.init_from=nowhere",
    ] {
        let command = format!("train tiny.toml --set checkpoint.resume=never {reason}");
        for workers in [1, 2] {
            fixture.refused_without_changes(&format!("{command} --workers {workers}"));
        }
    }
    assert_resumes(&fixture);
}

#[test]
fn a_launch_into_a_run_in_use_changes_nothing() {
    let fixture = trained_then_changed();
    let lock = File::open(fixture.path("runs/tiny/.lock")).unwrap();
    lock.lock().unwrap();
    let error = fixture.refused_without_changes("train tiny.toml --set checkpoint.resume=never");
    assert_contains(&error, &["another process is using the run runs/tiny"]);
    drop(lock);
    assert_resumes(&fixture);
}

#[test]
fn a_first_launch_that_is_refused_leaves_nothing() {
    let fixture = Fixture::new();
    for workers in [1, 2] {
        let command = format!("train tiny.toml --workers {workers} --set memory.device_budget=100KiB");
        fixture.refused_without_changes(&command);
    }
}

#[test]
fn another_corpus_is_made_next_to_one_that_checkpoints_refer_to() {
    let fixture = trained_then_changed();
    let old = fixture.losses("tiny");
    let restarted = fixture.run("train tiny.toml --set checkpoint.resume=never");
    assert_eq!(restarted.code, Some(0), "{restarted:?}");
    assert_contains(
        &restarted.stderr,
        &["the corpus is in runs/tiny/data-2, next to the one that an earlier run used"],
    );
    assert_ne!(fixture.losses("tiny"), old);
    assert_contains(&fixture.read("runs/tiny/config.toml"), &["folder = \"runs/tiny/data-2\""]);
    // The new run resumes with its corpus.
    assert_contains(
        &fixture.run("train tiny.toml --set training.steps=6").succeeded(),
        &["resuming after step 4 of 6"],
    );
    // The earlier run resumes with its corpus, too.
    let resume = "--set checkpoint.resume=runs/tiny/previous-1/checkpoints/step-2";
    let branch = format!("train tiny.toml {resume} --set run.name=branch --set data.folder=runs/tiny/data");
    let branch = fixture.run(&branch);
    assert_eq!(branch.code, Some(0), "{branch:?}");
    assert_eq!(fixture.losses("branch"), old[2..]);
    // If `checkpoint.resume` is the folder of a run, the newest checkpoint is used.
    let resume = "--set checkpoint.resume=runs/tiny/previous-1 --set training.steps=5";
    let longer = format!("train tiny.toml {resume} --set run.name=longer --set data.folder=runs/tiny/data");
    assert_contains(&fixture.run(&longer).stdout, &["resuming after step 4 of 5", "checkpoint of step 5"]);
    // Without a checkpoint, no corpus needs to be kept.
    fixture.write("text.txt", "one more text\n".repeat(900));
    fixture.run("train tiny.toml --set run.name=fresh --set checkpoint.enable=false").succeeded();
    fixture.write("text.txt", "and one more\n".repeat(900));
    fixture
        .run("train tiny.toml --set run.name=fresh --set checkpoint.enable=false --resume never")
        .succeeded();
    assert!(!fixture.path("runs/fresh/data-2").exists());
}

#[test]
fn a_corpus_whose_report_is_damaged_is_not_replaced() {
    let fixture = trained_then_changed();
    fixture.cut("runs/tiny/data/prepare.json", 20);
    let tokens = std::fs::read(fixture.path("runs/tiny/data/train.tokens")).unwrap();
    let restarted = fixture.run("train tiny.toml --set checkpoint.resume=never");
    assert_eq!(restarted.code, Some(0), "{restarted:?}");
    assert_eq!(std::fs::read(fixture.path("runs/tiny/data/train.tokens")).unwrap(), tokens);
    assert!(fixture.path("runs/tiny/data-2/train.tokens").exists());
}

#[test]
fn another_corpus_is_made_next_to_a_folder_with_a_trailing_slash() {
    let fixture = Fixture::new();
    let train = "train tiny.toml --set data.folder=shared/ --set run.name";
    fixture.run(&format!("{train}=first")).succeeded();
    fixture.write("text.txt", "something else altogether\n".repeat(900));
    assert_eq!(fixture.run(&format!("{train}=second")).code, Some(0));
    assert!(fixture.path("shared-2/train.tokens").exists());
}

#[test]
fn a_corpus_without_its_report_is_refused_where_it_would_be_replaced() {
    let fixture = Fixture::new();
    fixture.run("train tiny.toml --set checkpoint.enable=false").succeeded();
    std::fs::remove_file(fixture.path("runs/tiny/data/prepare.json")).unwrap();
    let refused = fixture.run("train tiny.toml --set checkpoint.enable=false --resume never").refused();
    assert_contains(&refused, &["runs/tiny/data/train.tokens exists", "move it away"]);
}

#[test]
fn a_run_finds_its_corpus_after_another_one_was_removed() {
    let fixture = trained_then_changed();
    assert_eq!(fixture.run("train tiny.toml --set checkpoint.resume=never").code, Some(0));
    std::fs::remove_dir_all(fixture.path("runs/tiny/data")).unwrap();
    // This folder is not a corpus. The run must not try all numbers up to the number in its name.
    std::fs::create_dir(fixture.path("runs/tiny/data-18446744073709551615")).unwrap();
    fixture.write("text.txt", "yet another text\n".repeat(900));
    let resumed = fixture.run("train tiny.toml --set training.steps=6");
    assert_eq!(resumed.code, Some(0), "{resumed:?}");
    assert_contains(&resumed.stdout, &["resuming after step 4 of 6"]);
    assert!(!fixture.path("runs/tiny/data").exists());
}
