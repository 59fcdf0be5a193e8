//! A run that resumes reports the changes of its config, and an earlier run is not replaced unasked.

use crate::common::{Fixture, Running, assert_contains};

/// The folder of a run may contain an earlier run, whose checkpoints do not belong to this run.
#[test]
fn a_run_is_not_continued_from_what_was_moved_aside_in_its_folder() {
    let fixture = Fixture::with_corpus();
    fixture.run("train tiny.toml --set training.steps=6").succeeded();
    fixture.run("train tiny.toml --resume never").succeeded();
    let earlier = "--resume runs/tiny/previous-1/checkpoints/step-6";
    let refused =
        fixture.refused_without_changes(&format!("train tiny.toml --set training.steps=8 {earlier}"));
    assert_contains(&refused, &["runs/tiny", "--resume never"]);
    let branch = format!("train tiny.toml --set training.steps=8 --set run.name=branch {earlier}");
    fixture.run(&branch).succeeded();
}

#[test]
fn metrics_of_an_earlier_run_are_not_replaced_unasked() {
    let fixture = Fixture::with_corpus();
    fixture.run("train tiny.toml --set checkpoint.enable=false").succeeded();
    let losses = fixture.losses("tiny");
    for command in ["train tiny.toml", "train tiny.toml --workers 1 --set checkpoint.enable=false"] {
        let refused = fixture.refused_without_changes(command);
        assert_contains(
            &refused,
            &[
                "runs/tiny contains an earlier run, which this one would not continue",
                "--resume never",
                "[run] name",
            ],
        );
    }
    let restarted = fixture.run("train tiny.toml --resume never --set training.seed=1").succeeded();
    assert_contains(&restarted, &["the earlier run was moved to runs/tiny/previous-1"]);
    fixture.run("report run runs/tiny/previous-1").succeeded();
    assert_ne!(fixture.losses("tiny"), losses);
    // The run has its own checkpoints now. A checkpoint of another run has not produced its metrics.
    fixture.run("train tiny.toml --set training.seed=1 --set training.steps=5").succeeded();
    fixture.run("train tiny.toml --set run.name=other").succeeded();
    let branch = "train tiny.toml --set training.steps=6 --resume runs/other";
    assert_contains(&fixture.refused_without_changes(branch), &["runs/tiny contains an earlier run"]);
    let resumed = fixture.run(&format!("{branch} --set run.name=other"));
    assert_contains(&resumed.succeeded(), &["resuming after step 4 of 6"]);
}

#[test]
fn a_resume_shows_what_has_changed() {
    let fixture = Fixture::with_corpus();
    fixture.run("train tiny.toml").succeeded();
    let resumed = fixture.run("train tiny.toml --workers 1 --set training.steps=6 --set optimizer.lr=1e-3");
    assert_contains(
        &resumed.succeeded(),
        &[
            "the config has changed since the checkpoint:\n",
            "\n  optimizer.lr: 0.0003 -> 0.001\n",
            "\n  training.steps: 4 -> 6\n",
            "\n  parallelism.data_parallel_replicate_degree: 2 -> 1\n",
        ],
    );
    let same = "train tiny.toml --workers 1 --set training.steps=6 --set optimizer.lr=1e-3";
    assert!(!fixture.run(same).succeeded().contains("has changed"));
}

#[test]
fn another_optimizer_model_or_corpus_is_refused_unless_allowed() {
    let fixture = Fixture::with_corpus();
    fixture.run("train tiny.toml").succeeded();
    fixture.write("other.txt", "something else altogether\n".repeat(900));
    fixture.run("prepare other.txt --out other").succeeded();
    let config = fixture.read("tiny.toml");
    for (what, set, facts) in [
        ("optimizer", "optimizer.name=sgd", ["[optimizer] name = \"adamw\"", "this run has \"sgd\""]),
        ("model", "model.norm_eps=1e-3", ["norm_eps 0.00001 instead of 0.001", "allow_changed"]),
        ("data", "data.folder=other", ["corpus", "allow_changed"]),
    ] {
        fixture.write(&format!("{what}.toml"), &config);
        let name = format!("--set run.name=from-{what}");
        fixture.run(&format!("train tiny.toml {name}")).succeeded();
        let train = format!("train tiny.toml {name} --set training.steps=6 --set {set}");
        let refused = fixture.run(&train).refused();
        assert_contains(&refused, &facts);
        assert_contains(&refused, &[&format!("allow_changed = [\"{what}\"]")]);
        let allowed =
            fixture.run(&format!("{train} --set checkpoint.allow_changed=[\"{what}\"]")).succeeded();
        assert_contains(&allowed, &["resuming after step 4 of 6", "step: 6 "]);
    }
}

#[test]
fn a_run_keeps_the_config_that_it_was_given() {
    let fixture = Fixture::with_corpus();
    fixture.run("train tiny.toml --set optimizer.lr=1e-3 --set training.steps=3").succeeded();
    let given = fixture.read("runs/tiny/config.given.toml");
    assert_contains(&given, &["lr = 1e-3", "steps = 3", "name = \"tiny\"", "given in tiny.toml"]);
    let losses = fixture.losses("tiny");
    let again = "train runs/tiny/config.given.toml --workers 4 --set run.name=again";
    fixture.run(again).succeeded();
    assert_eq!(fixture.losses("again"), losses);
}

#[test]
fn a_dry_run_tells_what_a_run_would_do_and_does_nothing() {
    let fixture = Fixture::new();
    let dry = |fixture: &Fixture| {
        let before = fixture.everything();
        let printed = fixture.run("train tiny.toml --dry-run --set training.steps=6").succeeded();
        assert!(fixture.everything() == before, "{printed}");
        printed
    };
    assert_contains(
        &dry(&fixture),
        &["would be prepared from text.txt into runs/tiny/data", "would train 6 steps", "parameters"],
    );
    fixture.run("train tiny.toml").succeeded();
    assert_contains(
        &dry(&fixture),
        &["tokens to train on, in runs/tiny/data", "would resume after step 4 of 6, from runs/tiny/"],
    );
    // Passes over the data are shown as the number of steps that they take.
    let epochs = "train tiny.toml --set run.name=epochs --set training.steps=0 --set training.epochs=0.1";
    let dry = fixture.run(&format!("{epochs} --dry-run --set data.folder=runs/tiny/data")).succeeded();
    fixture.run(epochs).succeeded();
    let steps = fixture.records("epochs").last().unwrap()["step"].as_u64().unwrap();
    assert_contains(&dry, &[&format!("would train {steps} steps from the beginning")]);
    // A dry run refuses what `train` refuses.
    fixture.run("train tiny.toml --set run.name=earlier --set checkpoint.enable=false").succeeded();
    let refused = fixture.refused_without_changes("train tiny.toml --set run.name=earlier --dry-run");
    assert_contains(&refused, &["runs/earlier", "--resume never"]);
    fixture.write("torn.jsonl", "{\"text\": \"a\"}\n{\"text\": \n");
    for (inputs, fact) in [("none.txt", "none.txt does not exist"), ("torn.jsonl", "torn.jsonl, line 2")] {
        let dry = format!("train tiny.toml --dry-run --set run.name=other --set data.inputs=[\"{inputs}\"]");
        assert_contains(&fixture.refused_without_changes(&dry), &[fact]);
    }
    let mut launched = fixture.command("train tiny.toml --dry-run");
    launched.envs([("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")]);
    assert_contains(&Running::start(launched).end().refused(), &["--dry-run needs no launcher"]);
    let unknown = "train tiny.toml --set checkpoint.allow_changed=[\"weights\"]";
    assert_contains(
        &fixture.refused_without_changes(unknown),
        &["allow_changed", "\"optimizer\"", "\"data\""],
    );
    let refused =
        fixture.refused_without_changes("train tiny.toml --dry-run --set memory.device_budget=100KiB");
    assert_contains(&refused, &["more than its limit of 100.00KiB"]);
}
