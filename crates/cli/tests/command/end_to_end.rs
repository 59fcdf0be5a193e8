//! From a text to a model and beyond, without failures.

use crate::common::{Fixture, Running, assert_contains, free_port};

#[test]
fn from_text_to_text() {
    let fixture = Fixture::with_corpus();
    let printed = fixture.run("train tiny.toml").succeeded();
    assert_contains(
        &printed,
        &[
            "2 workers x 1 thread",
            "seconds_to_first_step: ",
            "step: 4  loss: ",
            "the bigram baseline of",
            "--- sample ---",
            "run folder: runs/tiny",
            "last checkpoint: runs/tiny/checkpoints/step-4",
            "trireme generate runs/tiny",
        ],
    );
    for name in ["config.toml", "program.txt", "metrics.jsonl", "logs", "checkpoints"] {
        assert!(fixture.path("runs/tiny").join(name).exists(), "{name}");
    }
    let collectives = fixture.read("runs/tiny/collectives.txt");
    assert_contains(
        &collectives,
        &["2 workers, hosts: 1, transport: shm", "messages within a host ", "shared memory "],
    );
    assert_contains(&collectives, &["all_gather            48B           6 x 8B  direct"]);
    assert_eq!(fixture.names("runs/tiny/checkpoints"), ["latest", "step-2", "step-4"]);
    assert_eq!(fixture.complete_checkpoints("tiny"), 2);
    // The resolved config is a config.
    fixture.run("config runs/tiny/config.toml").succeeded();
    let inspected = fixture.run("checkpoint inspect runs/tiny").succeeded();
    assert_contains(&inspected, &["step: 4", "transformer.wte.weight", "[257, 32]", "weights: 16 tensors"]);

    fixture.run("checkpoint export runs/tiny model").succeeded();
    assert_contains(
        &fixture.run("checkpoint inspect model").succeeded(),
        &["hugging_face", "weights: 16 tensors"],
    );
    let generate = "--num-tokens 12 --seed 3 --prompt one";
    let text = fixture.run(&format!("generate runs/tiny {generate}")).succeeded();
    assert!(text.starts_with("one"), "{text}");
    assert_eq!(fixture.run(&format!("generate model {generate}")).succeeded(), text);

    let printed = fixture.run("train tiny.toml --set training.steps=6").succeeded();
    assert_contains(&printed, &["resuming after step 4 of 6", "step: 6 "]);
    assert_eq!(fixture.losses("tiny").iter().map(|(step, _)| *step).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6]);

    // As if the run had been killed after its last checkpoint, before the cleanup.
    std::fs::remove_file(fixture.path("runs/tiny/checkpoints/latest")).unwrap();
    std::fs::create_dir(fixture.path("runs/tiny/checkpoints/step-2.partial-0123abcd")).unwrap();
    fixture.run("train tiny.toml --set training.steps=6").succeeded();
    assert_eq!(fixture.names("runs/tiny/checkpoints"), ["latest", "step-2", "step-4", "step-6"]);
}

#[test]
fn a_run_whose_sample_cannot_be_made_is_a_success() {
    let fixture = Fixture::with_corpus();
    fixture.write(
        "long.toml",
        fixture.read("tiny.toml") + "prompt = \"more than the sixteen positions of this model\"\n",
    );
    for workers in [1, 2] {
        let train = format!("train long.toml --workers {workers} --set run.name=run-{workers}");
        let printed = fixture.run(&train).succeeded();
        assert_contains(&printed, &["cannot generate a sample: ", "last checkpoint: "]);
    }
}

#[test]
fn a_run_is_summarized_and_drawn() {
    let fixture = Fixture::with_corpus();
    fixture.run("train tiny.toml --set training.validation_interval=2").succeeded();
    let report = fixture.run("report run runs/tiny --svg losses.svg").succeeded();
    assert_contains(
        &report,
        &["steps: 4, tokens: 512", "best validation loss: ", "bigram baseline: ", "peak memory of rank 0: "],
    );
    let svg = fixture.read("losses.svg");
    assert_contains(&svg, &["runs/tiny: 4 steps", "validation loss", "bigram baseline"]);
    // The points are the validation losses before the first step and after steps 2 and 4.
    assert_eq!(svg.matches("<circle").count(), 3, "{svg}");
    // An unfinished line does not count, and a line that is no record is named.
    fixture.cut("runs/tiny/metrics.jsonl", 5);
    assert_contains(&fixture.run("report run runs/tiny").succeeded(), &["steps: 3, "]);
    fixture.write("runs/tiny/metrics.jsonl", "no record\n");
    assert_contains(
        &fixture.run("report run runs/tiny").refused(),
        &["skipped 1 line of runs/tiny/metrics.jsonl"],
    );
    assert_contains(&fixture.run("report run nowhere").refused(), &["nowhere has no metrics.jsonl"]);
}

#[test]
fn an_export_into_a_run_is_refused() {
    let fixture = Fixture::with_corpus();
    fixture.run("train tiny.toml").succeeded();
    for target in ["runs/tiny/checkpoints/step-2", "runs/tiny", "runs/tiny/model", "corpus"] {
        let error = fixture.refused_without_changes(&format!("checkpoint export runs/tiny {target} --force"));
        assert_contains(&error, &[target]);
    }
}

#[test]
fn an_exported_model_is_trained_on() {
    let fixture = Fixture::with_corpus();
    fixture.run("train tiny.toml").succeeded();
    fixture.run("checkpoint export runs/tiny model --max-shard-size 40KiB").succeeded();
    assert_contains(&fixture.read("model/model.safetensors.index.json"), &["model-00002-of-"]);
    let config = fixture.read("tiny.toml");
    let (_, sections) = config.split_once("[data]").unwrap();
    fixture.write("more.toml", format!("[model]\ninit_from = \"model\"\n[data]{sections}"));
    fixture.run("train more.toml").succeeded();
    let (first, more) = (fixture.losses("tiny"), fixture.losses("more"));
    let loss = |record: &(u64, u64)| f64::from_bits(record.1);
    assert_eq!(first.len(), more.len());
    assert!(
        first.iter().zip(&more).any(|(first, more)| loss(first) != loss(more)),
        "it starts from new weights"
    );
}

#[test]
fn the_launcher_does_not_change_the_run() {
    let fixture = Fixture::with_corpus();
    fixture.run("train tiny.toml --workers 1 --set run.name=alone").succeeded();
    fixture.run("train tiny.toml --set run.name=launched").succeeded();
    let alone = fixture.losses("alone");
    assert_eq!(alone.len(), 4);
    assert_eq!(fixture.losses("launched"), alone);
    for transport in ["tcp", "shm"] {
        let port = free_port();
        let train = format!("train tiny.toml --set comm.transport={transport} --set run.name={transport}");
        let [first, second] = [0, 1].map(|rank| Running::start(fixture.worker(rank, port, &train)));
        assert_contains(&first.end().succeeded(), &[&format!("over {transport}"), "run folder: "]);
        second.end().succeeded();
        assert_eq!(fixture.losses(transport), alone, "{transport}");
    }
}

#[test]
fn help_has_examples_and_fits_a_terminal() {
    let fixture = Fixture::new();
    for command in [
        "",
        "train",
        "prepare",
        "generate",
        "checkpoint",
        "checkpoint inspect",
        "config",
        "bench",
        "bench step",
        "bench disk",
        "bench schedule",
    ] {
        let help = fixture.run(&format!("{command} --help")).succeeded();
        assert!(help.lines().all(|line| line.chars().count() <= 100), "{help}");
        assert!(!help.contains("Arguments of"), "{help}");
    }
    assert_contains(&fixture.run("train --help").succeeded(), &["Examples:", "config --explain"]);
}
