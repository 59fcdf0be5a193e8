//! Ranks that are started by hand and given different runs.

use crate::common::{Running, Scene, free_port, tells};

/// Starts rank 0 with `first` and rank 1 with `second`; both end with the same error, which is returned.
fn refused_by_both(scene: &Scene, first: &str, second: &str) -> String {
    let port = free_port();
    let ranks =
        [(0, first), (1, second)].map(|(rank, command)| Running::start(scene.worker(rank, port, command)));
    let [first, second] = ranks.map(|rank| rank.end().refused());
    assert_eq!(first, second);
    first
}

#[test]
fn a_key_that_differs_is_named_with_its_values_and_ranks() {
    let scene = Scene::with_corpus();
    let llama = scene.read("tiny.toml").replace("gpt2", "llama");
    scene.write("tiny.toml", llama);
    for (key, own, other) in [
        ("optimizer.lr", "0.0003", "0.001"),
        ("optimizer.weight_decay", "0.1", "0.2"),
        ("optimizer.eps", "0.00000001", "0.0000001"),
        ("training.dtype", "\"f32\"", "\"bf16\""),
        ("training.max_norm", "1.0", "0.5"),
        ("lr_scheduler.warmup_steps", "0", "2"),
        ("model.norm_eps", "0.00001", "0.000001"),
        ("model.rope_theta", "10000.0", "500000.0"),
        ("training.seed", "0", "1"),
    ] {
        let error =
            refused_by_both(&scene, "train tiny.toml", &format!("train tiny.toml --set {key}={other}"));
        let line = format!("{key}: {own} on rank 0, {other} on rank 1");
        tells(&error, &["the ranks disagree about the run", &line]);
    }
    assert!(!scene.path("runs/tiny/metrics.jsonl").exists(), "no rank has begun");
}

#[test]
fn the_same_config_with_other_contents_is_refused_and_other_paths_are_not() {
    let scene = Scene::with_corpus();
    scene.write("other.txt", "an other text ".repeat(2000));
    scene.run("prepare other.txt --out other").succeeded();
    let error = refused_by_both(&scene, "train tiny.toml", "train tiny.toml --set data.folder=other");
    tells(&error, &["train tokens: ", "checksum", "on rank 1"]);
    // A copy on another host has a path of its own.
    scene.run("prepare text.txt --out copy").succeeded();
    let port = free_port();
    let commands = ["train tiny.toml", "train tiny.toml --set data.folder=copy --set training.threads=2"];
    let ranks = [0, 1].map(|rank| Running::start(scene.worker(rank, port, commands[rank])));
    ranks.into_iter().for_each(|rank| drop(rank.end().succeeded()));
    assert_eq!(scene.whole_checkpoints("tiny"), 2);
}
