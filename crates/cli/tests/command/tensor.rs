//! Tensor and context parallelism from a config.

use crate::common::{Fixture, assert_contains};

const CONTEXT: &str = "parallelism.context_parallel_degree";
const DEGREE: &str = "parallelism.tensor_parallel_degree";

#[test]
fn tensor_parallelism_has_the_losses_of_one_worker() {
    let fixture = Fixture::with_corpus();
    fixture.run("train tiny.toml --workers 1 --set run.name=one").succeeded();
    for (name, settings) in [
        ("shm", format!("--workers 2 --set {DEGREE}=2 --set comm.transport=shm")),
        ("tcp", format!("--workers 2 --set {DEGREE}=2 --set comm.transport=tcp")),
        ("grid", format!("--workers 4 --set {DEGREE}=2 --set parallelism.zero_stage=3")),
        ("deep", format!("--workers 4 --set {DEGREE}=2 --set parallelism.pipeline_parallel_degree=2")),
    ] {
        let text = fixture.run(&format!("train tiny.toml {settings} --set run.name={name}")).succeeded();
        let (found, expected) = (fixture.losses(name), fixture.losses("one"));
        assert_eq!(found.len(), expected.len(), "{name}");
        for ((step, found), (_, expected)) in found.iter().zip(&expected) {
            let difference = f64::from_bits(*found) / f64::from_bits(*expected) - 1.0;
            assert!(difference.abs() < 1e-5, "{name}, step {step}: {difference:e}");
        }
        // The prediction for the rank that needs the most memory equals the measurement.
        let total = text.lines().find(|line| line.starts_with("total")).unwrap();
        let columns: Vec<&str> = total.split_whitespace().collect();
        assert_eq!(columns[1], columns[3], "{text}");
        assert!(fixture.complete_checkpoints(name) > 0);
    }
    // The model directory has full tensors under the usual names, whatever the layout was.
    fixture.run("checkpoint export runs/shm exported").succeeded();
    fixture.run("generate exported --prompt word --num-tokens 4").succeeded();
}

#[test]
fn plan_shows_the_tensor_and_context_ranks() {
    let fixture = Fixture::with_corpus();
    let settings = format!("--workers 4 --set {DEGREE}=2 --set parallelism.zero_stage=2");
    let text = fixture.run(&format!("plan tiny.toml {settings}")).succeeded();
    assert_contains(
        &text,
        &["data_shard  tensor  0  1\n         0          0  1\n         1          2  3\n"],
    );
    let settings = format!("--workers 4 --set {DEGREE}=2 --set {CONTEXT}=2");
    let text = fixture.run(&format!("plan tiny.toml {settings}")).succeeded();
    assert_contains(&text, &["context  tensor  0  1\n      0          0  1\n      1          2  3\n"]);
}

#[test]
fn degrees_that_cannot_be_are_refused_before_a_worker_starts() {
    let fixture = Fixture::with_corpus();
    for (settings, facts) in [
        (
            format!("--workers 3 --set {DEGREE}=2"),
            ["not a multiple of the tensor degree 2", "use 2 or 4 workers"],
        ),
        (
            format!("--workers 4 --set {DEGREE}=2 --set parallelism.pipeline_parallel_degree=3"),
            ["the pipeline degree 3 times the tensor degree 2 = 6", "use 6 workers"],
        ),
        (format!("--workers 16 --set {DEGREE}=16"), ["16 ranks cannot split", "; nearest possible degree: "]),
        (
            format!("--workers 4 --set {CONTEXT}=4 --set training.seq_len=17"),
            ["17 is not a multiple of 8", "use 16 or 24"],
        ),
        (
            format!("--workers 8 --set {CONTEXT}=2 --set {DEGREE}=4 --set training.seq_len=20"),
            ["2 workers have 4 equal parts each", "use 16 or 24"],
        ),
        (
            format!("--workers 4 --set {CONTEXT}=4 --set parallelism.context_parallel_heads_degree=3"),
            ["3 does not divide", "use a divisor"],
        ),
        (
            format!("--workers 8 --set {CONTEXT}=8 --set parallelism.context_parallel_heads_degree=8"),
            ["8 ranks cannot have equal parts of", "such as 1"],
        ),
        (
            format!("--workers 2 --set {DEGREE}=2 --set training.seq_len=17"),
            ["cannot have equal parts", "sequence_parallel = false"],
        ),
    ] {
        assert_contains(&fixture.refused_without_changes(&format!("train tiny.toml {settings}")), &facts);
    }
}
