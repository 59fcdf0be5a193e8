//! Ranks that are started by hand with different configs, files or kernels.

use crate::common::{Fixture, Running, assert_contains, free_port};
use crate::simd::level_above_portable;
use std::fs;

/// Asserts that rank 1 reports the same error as rank 0, with its own origin.
fn assert_same(first: &str, second: &str) {
    let origin = second.strip_prefix("error: rank 1 on ").and_then(|rest| rest.split_once(": "));
    let (_, rest) = origin.unwrap_or_else(|| panic!("{second}"));
    assert_eq!(first, format!("error: {rest}"));
}

/// Starts rank 0 with `first` and rank 1 with `second`. Both must end with the same error, which is returned.
fn refused_by_both(fixture: &Fixture, first: &str, second: &str) -> String {
    let port = free_port();
    let ranks =
        [(0, first), (1, second)].map(|(rank, command)| Running::start(fixture.worker(rank, port, command)));
    let [first, second] = ranks.map(|rank| rank.end().refused());
    assert_same(&first, &second);
    first
}

#[test]
fn a_key_that_differs_is_named_with_its_values_and_ranks() {
    let fixture = Fixture::with_corpus();
    let llama = fixture.read("tiny.toml").replace("gpt2", "llama");
    fixture.write("tiny.toml", llama);
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
            refused_by_both(&fixture, "train tiny.toml", &format!("train tiny.toml --set {key}={other}"));
        let line = format!("{key}: {own} on rank 0; {other} on rank 1");
        assert_contains(&error, &["the ranks disagree about the run", &line]);
    }
    assert!(!fixture.path("runs/tiny/metrics.jsonl").exists(), "no rank has begun");
}

#[test]
fn the_same_config_with_other_contents_is_refused_and_other_paths_are_not() {
    let fixture = Fixture::with_corpus();
    fixture.write("other.txt", "an other text ".repeat(2000));
    fixture.run("prepare other.txt --out other").succeeded();
    let error = refused_by_both(&fixture, "train tiny.toml", "train tiny.toml --set data.folder=other");
    assert_contains(
        &error,
        &["corpus of training samples: ", "corpus_tokens of training samples: ", "on rank 1"],
    );
    // A copy on another host may have another path.
    fixture.run("prepare text.txt --out copy").succeeded();
    let port = free_port();
    let commands = ["train tiny.toml", "train tiny.toml --set data.folder=copy --set training.threads=2"];
    let ranks = [0, 1].map(|rank| Running::start(fixture.worker(rank, port, commands[rank])));
    ranks.into_iter().for_each(|rank| drop(rank.end().succeeded()));
    assert_eq!(fixture.complete_checkpoints("tiny"), 2);
}

/// Creates two hosts with the same paths and contents, each with its own files.
fn two_hosts() -> [Fixture; 2] {
    [(); 2].map(|()| Fixture::with_corpus())
}

/// Starts a rank on each host with the same command. Both must be refused; returns their errors.
fn refused_on_both(hosts: &[Fixture; 2], command: &str) -> [String; 2] {
    let port = free_port();
    let ranks = [0, 1].map(|rank| Running::start(hosts[rank].worker(rank, port, command)));
    ranks.map(|rank| rank.end().refused())
}

#[test]
fn ranks_that_begin_with_other_weights_of_the_same_path_are_refused() {
    let hosts = two_hosts();
    hosts[0].run("train tiny.toml --workers 1").succeeded();
    hosts[0].run("checkpoint export runs/tiny model").succeeded();
    fs::create_dir(hosts[1].path("model")).unwrap();
    for name in hosts[0].names("model") {
        fs::copy(hosts[0].path("model").join(&name), hosts[1].path("model").join(&name)).unwrap();
    }
    // With shards there are no replicas whose weights would differ.
    let train = "train tiny.toml --set parallelism.zero_stage=3 --set checkpoint.enable=false --set model.init_from=model";
    let (port, same) = (free_port(), format!("{train} --set run.name=same"));
    let ranks = [0, 1].map(|rank| Running::start(hosts[rank].worker(rank, port, &same)));
    ranks.into_iter().for_each(|rank| drop(rank.end().succeeded()));
    // The last element of the last tensor differs.
    let name = "model/model.safetensors";
    let mut content = fs::read(hosts[1].path(name)).unwrap();
    *content.last_mut().unwrap() ^= 1;
    hosts[1].write(name, content);
    let [first, second] = refused_on_both(&hosts, &format!("{train} --set run.name=other"));
    assert_same(&first, &second);
    assert_contains(
        &first,
        &["the ranks disagree about the run", "weights in model.init_from: checksum", "on rank 1"],
    );
    assert!(!hosts[0].path("runs/other/metrics.jsonl").exists(), "no rank has begun");
}

#[test]
fn ranks_that_resume_from_other_checkpoints_of_the_same_path_are_refused() {
    let hosts = two_hosts();
    hosts[0].run("train tiny.toml").succeeded();
    hosts[1].run("train tiny.toml --set optimizer.lr=0.001").succeeded();
    let names = hosts.each_ref().map(|host| host.names("runs/tiny/checkpoints"));
    let train = "train tiny.toml --set parallelism.zero_stage=3 --set training.steps=6";
    let [first, second] = refused_on_both(&hosts, train);
    assert_contains(&first, &["runs/tiny/checkpoints/step-4", "rank 1", "manifest has checksum"]);
    assert_contains(&second, &["runs/tiny/checkpoints/step-4", "rank 0", "manifest has checksum"]);
    // A host that lacks the checkpoint does not make the run resume from an older one either.
    fs::remove_dir_all(hosts[1].path("runs/tiny/checkpoints/step-4")).unwrap();
    let [first, second] = refused_on_both(&hosts, train);
    assert_contains(&first, &["runs/tiny/checkpoints/step-4", "rank 1", "contains no checkpoint"]);
    assert_contains(&second, &["runs/tiny/checkpoints/step-4", "contains no checkpoint"]);
    assert_eq!(hosts[0].names("runs/tiny/checkpoints"), names[0]);
}

#[test]
fn ranks_whose_kernels_differ_are_refused_with_the_variable_to_set() {
    let Some(highest) = level_above_portable() else { return };
    let fixture = Fixture::with_corpus();
    let port = free_port();
    let ranks = [0, 1].map(|rank| {
        let mut worker = fixture.worker(rank, port, "train tiny.toml");
        worker.env("TRIREME_SIMD", if rank == 1 { "portable" } else { "" });
        Running::start(worker)
    });
    let [first, second] = ranks.map(|rank| rank.end().refused());
    assert_same(&first, &second);
    let differs = format!("{highest} on rank 0; portable on rank 1");
    assert_contains(&first, &["the ranks disagree about the run", "SIMD level", "TRIREME_SIMD", &differs]);
    assert!(!fixture.path("runs/tiny/metrics.jsonl").exists(), "no rank has begun");
}
