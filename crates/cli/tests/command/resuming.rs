//! A run that resumes reports the changes of its config, and an earlier run is not replaced unasked.

use crate::common::{Running, Scene, tells};

/// The folder of a run may contain an earlier run, whose checkpoints do not belong to this run.
#[test]
fn a_run_is_not_continued_from_what_was_moved_aside_in_its_folder() {
    let scene = Scene::with_corpus();
    scene.run("train tiny.toml --set training.steps=6").succeeded();
    scene.run("train tiny.toml --resume never").succeeded();
    let earlier = "--resume runs/tiny/previous-1/checkpoints/step-6";
    let refused = scene.refused_without_trace(&format!("train tiny.toml --set training.steps=8 {earlier}"));
    tells(&refused, &["runs/tiny", "--resume never"]);
    let branch = format!("train tiny.toml --set training.steps=8 --set run.name=branch {earlier}");
    scene.run(&branch).succeeded();
}

#[test]
fn metrics_of_an_earlier_run_are_not_replaced_unasked() {
    let scene = Scene::with_corpus();
    scene.run("train tiny.toml --set checkpoint.enable=false").succeeded();
    let losses = scene.losses("tiny");
    for command in ["train tiny.toml", "train tiny.toml --workers 1 --set checkpoint.enable=false"] {
        let refused = scene.refused_without_trace(command);
        tells(
            &refused,
            &[
                "runs/tiny contains an earlier run, which this one would not continue",
                "--resume never",
                "[run] name",
            ],
        );
    }
    let anew = scene.run("train tiny.toml --resume never --set training.seed=1").succeeded();
    tells(&anew, &["the earlier run was moved to runs/tiny/previous-1"]);
    scene.run("report run runs/tiny/previous-1").succeeded();
    assert_ne!(scene.losses("tiny"), losses);
    // The run has its own checkpoints now. A checkpoint of another run has not produced its metrics.
    scene.run("train tiny.toml --set training.seed=1 --set training.steps=5").succeeded();
    scene.run("train tiny.toml --set run.name=other").succeeded();
    let branch = "train tiny.toml --set training.steps=6 --resume runs/other";
    tells(&scene.refused_without_trace(branch), &["runs/tiny contains an earlier run"]);
    let resumed = scene.run(&format!("{branch} --set run.name=other"));
    tells(&resumed.succeeded(), &["resuming after step 4 of 6"]);
}

#[test]
fn a_resume_shows_what_has_changed() {
    let scene = Scene::with_corpus();
    scene.run("train tiny.toml").succeeded();
    let resumed = scene.run("train tiny.toml --workers 1 --set training.steps=6 --set optimizer.lr=1e-3");
    tells(
        &resumed.succeeded(),
        &[
            "the config has changed since the checkpoint:\n",
            "\n  optimizer.lr: 0.0003 -> 0.001\n",
            "\n  training.steps: 4 -> 6\n",
            "\n  parallelism.data_parallel_replicate_degree: 2 -> 1\n",
        ],
    );
    let same = "train tiny.toml --workers 1 --set training.steps=6 --set optimizer.lr=1e-3";
    assert!(!scene.run(same).succeeded().contains("has changed"));
}

#[test]
fn another_optimizer_model_or_corpus_is_refused_unless_allowed() {
    let scene = Scene::with_corpus();
    scene.run("train tiny.toml").succeeded();
    scene.write("other.txt", "something else altogether\n".repeat(900));
    scene.run("prepare other.txt --out other").succeeded();
    let config = scene.read("tiny.toml");
    for (what, set, facts) in [
        ("optimizer", "optimizer.name=sgd", ["[optimizer] name = \"adamw\"", "this run has \"sgd\""]),
        ("model", "model.norm_eps=1e-3", ["norm_eps 0.00001 instead of 0.001", "allow_changed"]),
        ("data", "data.folder=other", ["corpus", "allow_changed"]),
    ] {
        scene.write(&format!("{what}.toml"), &config);
        let name = format!("--set run.name=from-{what}");
        scene.run(&format!("train tiny.toml {name}")).succeeded();
        let train = format!("train tiny.toml {name} --set training.steps=6 --set {set}");
        let refused = scene.run(&train).refused();
        tells(&refused, &facts);
        tells(&refused, &[&format!("allow_changed = [\"{what}\"]")]);
        let allowed = scene.run(&format!("{train} --set checkpoint.allow_changed=[\"{what}\"]")).succeeded();
        tells(&allowed, &["resuming after step 4 of 6", "step: 6 "]);
    }
}

#[test]
fn a_run_keeps_the_config_that_it_was_given() {
    let scene = Scene::with_corpus();
    scene.run("train tiny.toml --set optimizer.lr=1e-3 --set training.steps=3").succeeded();
    let given = scene.read("runs/tiny/config.given.toml");
    tells(&given, &["lr = 1e-3", "steps = 3", "name = \"tiny\"", "given in tiny.toml"]);
    let losses = scene.losses("tiny");
    let again = "train runs/tiny/config.given.toml --workers 4 --set run.name=again";
    scene.run(again).succeeded();
    assert_eq!(scene.losses("again"), losses);
}

#[test]
fn a_dry_run_tells_what_a_run_would_do_and_does_nothing() {
    let scene = Scene::new();
    let dry = |scene: &Scene| {
        let before = scene.everything();
        let printed = scene.run("train tiny.toml --dry-run --set training.steps=6").succeeded();
        assert!(scene.everything() == before, "{printed}");
        printed
    };
    tells(
        &dry(&scene),
        &["would be prepared from text.txt into runs/tiny/data", "would train 6 steps", "parameters"],
    );
    scene.run("train tiny.toml").succeeded();
    tells(
        &dry(&scene),
        &["tokens to train on, in runs/tiny/data", "would resume after step 4 of 6, from runs/tiny/"],
    );
    // Passes over the data are shown as the number of steps that they take.
    let epochs = "train tiny.toml --set run.name=epochs --set training.steps=0 --set training.epochs=0.1";
    let dry = scene.run(&format!("{epochs} --dry-run --set data.folder=runs/tiny/data")).succeeded();
    scene.run(epochs).succeeded();
    let steps = scene.records("epochs").last().unwrap()["step"].as_u64().unwrap();
    tells(&dry, &[&format!("would train {steps} steps from the beginning")]);
    // A dry run refuses what `train` refuses.
    scene.run("train tiny.toml --set run.name=earlier --set checkpoint.enable=false").succeeded();
    let refused = scene.refused_without_trace("train tiny.toml --set run.name=earlier --dry-run");
    tells(&refused, &["runs/earlier", "--resume never"]);
    scene.write("torn.jsonl", "{\"text\": \"a\"}\n{\"text\": \n");
    for (inputs, fact) in [("none.txt", "none.txt does not exist"), ("torn.jsonl", "torn.jsonl, line 2")] {
        let dry = format!("train tiny.toml --dry-run --set run.name=other --set data.inputs=[\"{inputs}\"]");
        tells(&scene.refused_without_trace(&dry), &[fact]);
    }
    let mut launched = scene.command("train tiny.toml --dry-run");
    launched.envs([("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")]);
    tells(&Running::start(launched).end().refused(), &["--dry-run needs no launcher"]);
    let unknown = "train tiny.toml --set checkpoint.allow_changed=[\"weights\"]";
    tells(&scene.refused_without_trace(unknown), &["allow_changed", "\"optimizer\"", "\"data\""]);
    let refused = scene.refused_without_trace("train tiny.toml --dry-run --set memory.device_budget=100KiB");
    tells(&refused, &["more than its limit of 100.00KiB"]);
}
