//! The first step, unit and tensor at which two runs differ.

use crate::common::{Fixture, Outcome, assert_contains};

const TRAIN: &str = "train tiny.toml --set metrics.hash_interval=1";

/// Returns the report of a command that has found a difference.
fn differing(outcome: Outcome) -> String {
    assert!(outcome.code == Some(1) && outcome.stderr.is_empty(), "{outcome:?}");
    outcome.stdout
}

#[test]
fn runs_of_different_layouts_have_equal_bits_and_tensor_parallel_ones_do_not() {
    let fixture = Fixture::with_corpus();
    fixture.run(&format!("{TRAIN} --workers 1 --set run.name=one")).succeeded();
    for (name, settings) in [
        ("two", "--workers 2"),
        ("zero", "--workers 2 --set parallelism.zero_stage=3"),
        ("stages", "--workers 2 --set parallelism.pipeline_parallel_degree=2"),
    ] {
        fixture.run(&format!("{TRAIN} {settings} --set run.name={name}")).succeeded();
        let report = fixture.run(&format!("report diff runs/one runs/{name}")).succeeded();
        assert_contains(
            &report,
            &[
                "configs differ in what affects training:\n  parallelism.",
                "equal: 5 records in common, of steps 0 to 4\nno difference",
            ],
        );
    }
    fixture
        .run(&format!("{TRAIN} --set parallelism.tensor_parallel_degree=2 --set run.name=cut"))
        .succeeded();
    let report = differing(fixture.run("report diff runs/one runs/cut"));
    assert_contains(
        &report,
        &[
            "parallelism.tensor_parallel_degree: 1 -> 2",
            "equal: the records of step 0\nfirst difference: step 1, in the ",
        ],
    );
}

#[test]
fn a_resume_with_another_learning_rate_and_another_seed_are_located() {
    let fixture = Fixture::with_corpus();
    let whole = format!("{TRAIN} --set run.name=whole");
    fixture.run(&whole).succeeded();
    let branch = format!("{TRAIN} --resume runs/whole/checkpoints/step-2");
    fixture.run(&format!("{branch} --set run.name=branch --workers 1")).succeeded();
    let report = fixture.run("report diff runs/whole runs/branch").succeeded();
    assert_contains(&report, &["equal: 3 records in common, of steps 2 to 4\nno difference"]);
    // Steps that are repeated after a resume replace their records.
    std::fs::remove_dir_all(fixture.path("runs/whole/checkpoints/step-4")).unwrap();
    assert_contains(&fixture.run(&whole).succeeded(), &["resuming after step 2"]);
    assert_eq!(fixture.read("runs/whole/hashes.jsonl").lines().count(), 6, "steps 0 to 4, and the resume");
    let report = fixture.run("report diff runs/whole runs/branch").succeeded();
    assert_contains(&report, &["equal: 3 records in common, of steps 2 to 4\nno difference"]);
    fixture.run(&format!("{branch} --set run.name=other --set optimizer.lr=0.0004")).succeeded();
    let report = differing(fixture.run("report diff runs/whole runs/other"));
    assert_contains(
        &report,
        &[
            "optimizer.lr: 0.0003 -> 0.0004\n",
            "first difference: step 3, after the update, in the parameter ",
        ],
    );
    assert_contains(
        &report,
        &["so the update differs: learning rate", "0 of 16 gradients and 16 of 16 parameters differ"],
    );
    fixture.run(&format!("{TRAIN} --set run.name=seed --set training.seed=7")).succeeded();
    let report = differing(fixture.run("report diff runs/whole runs/seed"));
    assert_contains(
        &report,
        &[
            "training.seed: 0 -> 7\n",
            "first difference: before the first step, in the parameter ",
            "begin with different values",
        ],
    );
}

#[test]
fn one_changed_bit_of_the_first_weights_is_located() {
    let fixture = Fixture::with_corpus();
    fixture.run("train tiny.toml --set run.name=base").succeeded();
    for name in ["plain", "changed"] {
        fixture.run(&format!("checkpoint export runs/base {name}")).succeeded();
    }
    fixture.flip_bit("changed/model.safetensors");
    let config = fixture.read("tiny.toml");
    let (_, rest) = config.split_once("[data]").unwrap();
    fixture.write("tiny.toml", format!("[data]{rest}"));
    for (name, settings) in [("plain", "--workers 1"), ("changed", "--set parallelism.zero_stage=3")] {
        let settings = format!("--set model.init_from={name} --set run.name={name} {settings}");
        fixture.run(&format!("{TRAIN} {settings}")).succeeded();
    }
    let report = differing(fixture.run("report diff runs/plain runs/changed"));
    let first = "first difference: before the first step, in the parameter transformer.h.0.";
    assert_contains(
        &report,
        &[first, " of unit transformer.h.0\n", "  1 of 16 parameters differ in this record\n"],
    );
}

#[test]
fn runs_without_hashes_and_damaged_ones_are_refused() {
    let fixture = Fixture::with_corpus();
    fixture.run("train tiny.toml --set run.name=none").succeeded();
    fixture.run(&format!("{TRAIN} --set run.name=some")).succeeded();
    assert!(
        !fixture.names("runs/none").contains(&"hashes.jsonl".to_owned()),
        "nothing is hashed unless asked for"
    );
    let refused = fixture.refused_without_changes("report diff runs/some runs/none");
    assert_contains(&refused, &["runs/none has no hashes.jsonl", "[metrics] hash_interval = 1"]);
    fixture.write("runs/none/hashes.jsonl", "");
    let refused = fixture.refused_without_changes("report diff runs/some runs/none");
    assert_contains(&refused, &["runs/none has no recorded hashes yet"]);
    let hashes = fixture.read("runs/some/hashes.jsonl");
    fixture.write("runs/none/hashes.jsonl", format!("{hashes}{hashes}"));
    let refused = fixture.run("report diff runs/none runs/none").refused();
    assert_contains(
        &refused,
        &["line 6 of runs/none/hashes.jsonl has an earlier step than the line above it"],
    );
    fixture.write("runs/none/hashes.jsonl", hashes.replacen("\"parameter\":\"", "\"parameter\":\"x", 1));
    let refused = fixture.run("report diff runs/some runs/none").refused();
    assert_contains(
        &refused,
        &["line 1 of runs/none/hashes.jsonl is not a record of hashes", "16 hexadecimal digits"],
    );
}
