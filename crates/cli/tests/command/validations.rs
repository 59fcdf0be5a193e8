//! Validations: before the first step, the best checkpoint, and early stopping. Evaluations of finished models.

use crate::common::{Fixture, assert_contains};
use serde_json::Value;

const VALIDATED: &str = "--set training.validation_interval=1 --set training.validation_samples=8";

#[test]
fn the_best_checkpoint_stays() {
    let fixture = Fixture::with_corpus();
    // A learning rate that is too high makes later losses worse.
    let train = format!(
        "train tiny.toml {VALIDATED} --set training.steps=8 --set optimizer.lr=0.3 --set lr_scheduler.warmup_steps=4 \
         --set checkpoint.keep_latest_k=1 --set checkpoint.interval=1000"
    );
    let printed = fixture.run(&train).succeeded();
    assert_contains(&printed, &["validation loss before the first step: "]);
    let losses: Vec<(u64, f64)> = fixture
        .records("tiny")
        .iter()
        .map(|record| (record["step"].as_u64().unwrap(), record["validation_loss"].as_f64().unwrap()))
        .collect();
    assert!(fixture.records("tiny")[0]["initial_validation_loss"].is_number());
    let (best, loss) = losses.iter().copied().min_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
    assert!(best < 8, "{losses:?}");
    assert_eq!(fixture.read("runs/tiny/checkpoints/best"), format!("step-{best}\n"));
    assert_eq!(
        fixture.names("runs/tiny/checkpoints"),
        ["best".into(), "latest".into(), format!("step-{best}"), "step-8".into()]
    );
    assert_contains(
        &printed,
        &[&format!("lowest validation loss: {loss:.4} after step {best}, in runs/tiny/checkpoints/best")],
    );
    let state = fixture.run("checkpoint inspect runs/tiny/checkpoints/best --json").succeeded();
    assert_eq!(serde_json::from_str::<Value>(&state).unwrap()["step"], best);
    // A crash may occur between writing a checkpoint and naming it the best.
    fixture.write("runs/tiny/checkpoints/best", "step-1\n");
    let more = train.replace("training.steps=8", "training.steps=9");
    fixture.run(&more).succeeded();
    let named = fixture.read("runs/tiny/checkpoints/best");
    assert_ne!(named, "step-1\n");
    assert!(fixture.path(&format!("runs/tiny/checkpoints/{}", named.trim())).exists());
    // Without `keep_best`, only the loss is reported.
    let without = format!("{train} --set run.name=without --set checkpoint.keep_best=false");
    let printed = fixture.run(&without).succeeded();
    assert_contains(&printed, &[&format!("lowest validation loss: {loss:.4} after step {best}\n")]);
    // A run can resume from the best checkpoint.
    let back = format!(
        "train tiny.toml --resume runs/tiny/checkpoints/best --set run.name=back --set training.steps={}",
        best + 1
    );
    assert_contains(
        &fixture.run(&back).succeeded(),
        &[&format!("resuming after step {best} of {}", best + 1)],
    );
}

#[test]
fn a_run_that_does_not_improve_ends() {
    let fixture = Fixture::with_corpus();
    let train = format!(
        "train tiny.toml {VALIDATED} --set training.steps=50 --set optimizer.lr=0.0 --set training.early_stopping_patience=3"
    );
    let printed = fixture.run(&train).succeeded();
    // The first validation of a model that does not change is the best.
    assert_contains(
        &printed,
        &["stopping early after step 4: no lower loss in 3 validations", "checkpoint of step 4: "],
    );
    assert_eq!(fixture.losses("tiny").len(), 4);
    let refused = fixture
        .refused_without_changes("train tiny.toml --set training.early_stopping_patience=3 --set run.name=x");
    assert_contains(&refused, &["needs validations: set validation_interval"]);
}

#[test]
fn a_run_may_be_as_long_as_passes_over_the_text() {
    let fixture = Fixture::with_corpus();
    let config = fixture.read("tiny.toml").replace("steps = 4\n", "epochs = 0.5\n");
    fixture.write("half.toml", &config);
    let epoch = |record: &Value| record["epoch"].as_f64().unwrap();
    for workers in [1, 2] {
        let run = format!("half-{workers}");
        let train = format!(
            "train half.toml --workers {workers} --set run.name={run} --set checkpoint.interval=1000"
        );
        fixture.run(&train).succeeded();
        let records = fixture.records(&run);
        // The first step that reaches half a pass is the last.
        let (last, one_step) = (epoch(&records[records.len() - 1]), epoch(&records[0]));
        assert!(last >= 0.5 && last - one_step < 0.5, "{last} in steps of {one_step}");
        assert!((last / one_step - records.len() as f64).abs() < 1e-9, "{last} in steps of {one_step}");
        assert!(records[0]["unix_seconds"].as_f64().unwrap() > 1.7e9);
    }
    assert_eq!(fixture.losses("half-1"), fixture.losses("half-2"));
    // Steps on the command line replace the epochs.
    fixture.run("train half.toml --set training.steps=3 --set run.name=three").succeeded();
    assert_eq!(fixture.losses("three").len(), 3);
    let many = fixture.run("train half.toml --set training.seq_len=64 --set training.epochs=5 --set run.name=many --set checkpoint.interval=1000");
    assert_contains(&many.succeeded(), &["the run makes 5.0 passes over its data"]);
    fixture.write("both.toml", config.replace("epochs", "steps = 4\nepochs"));
    assert_contains(
        &fixture.refused_without_changes("train both.toml"),
        &["`steps` already says how long to train"],
    );
}

#[test]
fn a_model_is_evaluated_on_texts_and_corpora() {
    let fixture = Fixture::with_corpus();
    fixture.run(&format!("train tiny.toml {VALIDATED} --set training.validation_samples=0")).succeeded();
    let json = |command: &str| -> Value { serde_json::from_str(&fixture.run(command).succeeded()).unwrap() };
    let found = json("eval runs/tiny corpus --seq-len 16 --json");
    // The validation of the run leaves out an incomplete last sequence.
    let validated = fixture.records("tiny")[3]["validation_loss"].as_f64().unwrap();
    assert!((found["loss"].as_f64().unwrap() - validated).abs() < 0.02, "{found} {validated}");
    let bits =
        found["loss"].as_f64().unwrap() / std::f64::consts::LN_2 * found["num_tokens"].as_f64().unwrap();
    assert!(
        (found["bits_per_byte"].as_f64().unwrap() * found["num_bytes"].as_f64().unwrap() - bits).abs()
            < 1e-6 * bits
    );
    fixture.run("checkpoint export runs/tiny model").succeeded();
    assert_eq!(
        json("eval model text.txt --seq-len 16 --json"),
        json("eval runs/tiny text.txt --seq-len 16 --json")
    );
    assert_contains(
        &fixture.run("eval model text.txt").succeeded(),
        &["nats per token", "perplexity: ", "bits per byte: "],
    );
    assert_contains(
        &fixture.run("eval model text.txt --seq-len 99").refused(),
        &["seq_len is 99", "at most 16"],
    );
    fixture.run("prepare text.txt --train-bpe 300 --out other").succeeded();
    assert_contains(&fixture.run("eval model other").refused(), &["other does not have the tokenizer"]);
    assert_contains(&fixture.run("eval model nowhere.txt").refused(), &["nowhere.txt does not exist"]);
}

#[test]
fn a_text_of_one_byte_has_a_loss_and_no_bits_per_byte() {
    let fixture = Fixture::with_corpus();
    fixture.run("train tiny.toml").succeeded();
    fixture.write("one.txt", "a");
    let printed = fixture.run("eval runs/tiny one.txt").succeeded();
    assert_contains(&printed, &["(1 tokens, ", "bits per byte: unknown (0 bytes)"]);
    let found: Value =
        serde_json::from_str(&fixture.run("eval runs/tiny one.txt --json").succeeded()).unwrap();
    assert!(found["loss"].is_number() && found["bits_per_byte"].is_null(), "{found}");
}
