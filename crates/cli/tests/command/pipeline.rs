//! Pipelines from a config.

use crate::common::{Scene, tells};

/// Six units; the head is tied to the embedding.
const MODEL: &str = "--set model.num_layers=4";

#[test]
fn a_pipeline_has_the_losses_of_one_worker() {
    let scene = Scene::with_corpus();
    let (degree, schedule) =
        ("parallelism.pipeline_parallel_degree", "parallelism.pipeline_parallel_schedule");
    scene.run(&format!("train tiny.toml --workers 1 {MODEL} --set run.name=one")).succeeded();
    for (name, settings) in [
        ("two", format!("--workers 2 --set {degree}=2")),
        ("grid", format!("--workers 4 --set {degree}=2 --set parallelism.zero_stage=1")),
        ("turns", format!("--workers 2 --set {degree}=2 --set {schedule}=interleaved-1f1b")),
        ("halves", format!("--workers 2 --set {degree}=2 --set {schedule}=zb-h2")),
        ("fold", format!("--workers 2 --set {degree}=2 --set {schedule}=zb-v")),
        ("best", format!("--workers 2 --set {degree}=2 --set {schedule}=auto")),
    ] {
        let text =
            scene.run(&format!("train tiny.toml {MODEL} {settings} --set run.name={name}")).succeeded();
        assert_eq!(scene.losses(name), scene.losses("one"), "{name}");
        // What was predicted of the rank that takes most is what was taken.
        let together = text.lines().find(|line| line.starts_with("together")).unwrap();
        let columns: Vec<&str> = together.split_whitespace().collect();
        assert_eq!(columns[1], columns[3], "{text}");
        tells(&scene.read(&format!("runs/{name}/program.txt")), &["stage 0-", "SEND_F", "RECV_B"]);
    }
}

#[test]
fn plan_tells_and_draws_a_pipeline() {
    let scene = Scene::with_corpus();
    let settings = format!("--workers 3 --set parallelism.pipeline_parallel_degree=3 {MODEL}");
    let text = scene.run(&format!("plan tiny.toml {settings} --draw --svg step.svg")).succeeded();
    tells(&text, &["pipeline rank 2: units ", "bubble: ", "which takes most", "rank 0 |F0", "\u{b7}"]);
    assert!(scene.read("step.svg").starts_with("<svg "));
    let text = scene.run("plan tiny.toml --workers 1 --draw").succeeded();
    tells(&text, &["rank 0 |F0"]);
    assert!(!text.contains("pipeline rank"), "{text}");
}

#[test]
fn pipelines_that_cannot_be_are_refused() {
    let scene = Scene::with_corpus();
    let degree = "parallelism.pipeline_parallel_degree";
    for (settings, facts) in [
        (format!("--workers 3 {MODEL} --set {degree}=2"), ["3 workers", "no multiple of the 2"]),
        (
            format!("--workers 2 {MODEL} --set {degree}=2 --set parallelism.zero_stage=3"),
            ["for every microbatch", "zero_stage = 2"],
        ),
        (
            format!(
                "--workers 4 {MODEL} --set {degree}=4 --set parallelism.pipeline_parallel_schedule=breadth-first"
            ),
            ["8 stages", "the model has 6"],
        ),
        (
            format!("--workers 2 {MODEL} --set {degree}=2 --set activation_checkpoint.mode=auto"),
            ["several in flight", "selective"],
        ),
        ("--set parallelism.pipeline_parallel_schedule=gpipe".to_owned(), ["counts only with", "above 1"]),
    ] {
        tells(&scene.refused_without_trace(&format!("train tiny.toml {settings}")), &facts);
    }
}
