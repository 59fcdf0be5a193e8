//! Every optimizer that a config can name trains.

use crate::common::{job, open, trainer};
use trireme_testkit::run_ranks;
use trireme_train::{NullObserver, RunSummary, TrainError};

/// The keys of each optimizer, with a suitable learning rate.
const OPTIMIZERS: [&[&str]; 10] = [
    &["optimizer.name=adamw"],
    &["optimizer.name=adam", "optimizer.weight_decay=0"],
    &["optimizer.name=sgd", "optimizer.lr=0.1"],
    &["optimizer.name=lion", "optimizer.lr=2e-3"],
    &["optimizer.name=adafactor", "optimizer.lr=0.1"],
    &["optimizer.name=lamb"],
    &["optimizer.name=lars", "optimizer.lr=5.0", "optimizer.trust_coefficient=0.01"],
    &["optimizer.name=muon"],
    &["optimizer.name=one_bit_adam", "training.max_norm=0", "training.determinism=run"],
    &[
        "optimizer.name=zero_one_adam",
        "optimizer.var_update_scaler=4",
        "training.max_norm=0",
        "training.determinism=run",
    ],
];

const STATE_DTYPES: [&str; 3] = ["f32", "bf16", "int8"];

/// Returns the validation losses of two ranks after 5 steps and at the end.
fn losses(keys: &[&str], steps: u64) -> [f64; 2] {
    let folder = tempfile::tempdir().unwrap();
    let config = job(folder.path(), "run", 2, steps, &[&["checkpoint.enable=false"], keys].concat());
    let mut summaries = run_ranks(2, |group| {
        let mut observer = NullObserver;
        let mut trainer = trainer(&config, group, &mut observer);
        [5, steps].map(|end| trainer.run_until(end).unwrap())
    });
    summaries.remove(0).map(|summary: RunSummary| summary.validation_loss.unwrap())
}

#[test]
fn every_optimizer_lowers_the_loss() {
    for keys in OPTIMIZERS {
        let [before, after] = losses(keys, 40);
        assert!(after < before - 0.3, "{keys:?}: {before} to {after}");
    }
}

#[test]
fn compressed_momentum_ends_near_adamw() {
    let shared =
        ["training.max_norm=0", "training.determinism=run", "optimizer.beta2=0.99", "optimizer.lr=5e-3"];
    let run = |own: &[&str]| losses(&[&shared[..], own].concat(), 60);
    let [first, adamw] = run(&[]);
    for own in [
        ["optimizer.name=one_bit_adam", "optimizer.freeze_step=20"],
        ["optimizer.name=zero_one_adam", "optimizer.var_update_scaler=8"],
    ] {
        let [_, found] = run(&own);
        assert!(found < first - 0.3 && (found - adamw).abs() < 0.1, "{own:?}: {found}, and AdamW {adamw}");
        assert!(found != adamw, "{own:?} compresses");
    }
}

#[test]
fn narrow_states_train_as_well() {
    // Units are large enough for 8-bit state in blocks.
    let wide = ["model.hidden_size=128", "optimizer.lr=3e-3"];
    let losses = STATE_DTYPES.map(|dtype| {
        let dtype = format!("optimizer.state_dtype={dtype}");
        losses(&[&wide[..], &[&dtype]].concat(), 30)[1]
    });
    let [expected, narrow @ ..] = losses;
    assert!(narrow.iter().all(|loss| (loss - expected).abs() < 0.05), "{losses:?}");
    assert!(narrow[0] != expected && narrow[1] != expected, "{losses:?}");
}

#[test]
fn runs_resume_from_checkpoints_with_the_same_bits() {
    for keys in OPTIMIZERS {
        let folder = tempfile::tempdir().unwrap();
        let narrow = ["model.hidden_size=128", "checkpoint.interval=2", "optimizer.state_dtype=int8"];
        let keys = [&narrow, keys].concat();
        let run = |name: &str, stops: &[u64]| {
            let config = job(folder.path(), name, 1, 4, &keys);
            let mut loss = None;
            for &stop in stops {
                let mut observer = NullObserver;
                let mut trainer = trainer(&config, trireme_comm::single(), &mut observer);
                loss = trainer.run_until(stop).unwrap().loss;
            }
            loss.unwrap()
        };
        assert_eq!(run("whole", &[4]).to_bits(), run("stopped", &[2, 4]).to_bits(), "{keys:?}");
    }
}

#[test]
fn a_group_that_no_parameter_belongs_to_ends_the_run_before_it_begins() {
    let folder = tempfile::tempdir().unwrap();
    let groups = "optimizer.groups=[{match = \"*.bias\", weight_decay = 0.1}]";
    let config = job(folder.path(), "run", 1, 2, &[groups]);
    let error = match open(&config, trireme_comm::single(), &mut NullObserver) {
        Err(error @ TrainError::Config(_)) => error.to_string(),
        other => panic!("{:?}", other.err()),
    };
    assert!(
        error.contains("matches none of the model's parameters, such as model.embed_tokens.weight"),
        "{error}"
    );
}
