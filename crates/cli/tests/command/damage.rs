//! A run whose newest checkpoint is damaged resumes from the previous one.

use crate::common::{Fixture, assert_contains};
use std::fs;

/// Creates a fixture with a run of four steps, with checkpoints after two and four.
fn trained() -> Fixture {
    let fixture = Fixture::with_corpus();
    fixture.run("train tiny.toml").succeeded();
    fixture
}

const NEWEST: &str = "runs/tiny/checkpoints/step-4";
const SHARD: &str = "runs/tiny/checkpoints/step-4/shard-00001.safetensors";
const MANIFEST: &str = "runs/tiny/checkpoints/step-4/checkpoint.json";
const TOKENIZER: &str = "runs/tiny/checkpoints/step-4/tokenizer.bytes.json";

/// Damages the newest checkpoint. Asserts that the next command resumes from the previous one with the losses of the undisturbed run, and
/// renames the damaged one.
fn check_damage(what: &str, damage: impl Fn(&Fixture)) {
    let fixture = trained();
    let losses = fixture.losses("tiny");
    damage(&fixture);
    let printed = fixture.run("train tiny.toml").succeeded();
    let notice = format!("note: renamed {NEWEST} to {NEWEST}.damaged-");
    assert_contains(&printed, &[&notice, "resuming after step 2 of 4"]);
    assert_eq!(fixture.losses("tiny"), losses, "{what}");
    let names = fixture.names("runs/tiny/checkpoints");
    assert_eq!(names.len(), 4, "{what}: {names:?}");
    assert!(names[3].starts_with("step-4.damaged-"), "{what}: {names:?}");
    assert_eq!(fixture.complete_checkpoints("tiny"), 2, "{what}");
    assert_contains(&fixture.run("train tiny.toml").succeeded(), &["the run is complete at step"]);
}

fn flip_bit_at(fixture: &Fixture, name: &str, position: impl FnOnce(&[u8]) -> usize) {
    let mut content = fs::read(fixture.path(name)).unwrap();
    let position = position(&content);
    content[position] ^= 4;
    fixture.write(name, content);
}

#[test]
fn a_missing_shard() {
    check_damage("missing", |fixture| fs::remove_file(fixture.path(SHARD)).unwrap());
}

#[test]
fn a_cut_shard() {
    check_damage("cut", |fixture| fixture.cut(SHARD, 1));
}

#[test]
fn an_empty_shard() {
    check_damage("empty", |fixture| fixture.write(SHARD, ""));
}

#[test]
fn a_flipped_bit_of_a_shards_header() {
    check_damage("header", |fixture| flip_bit_at(fixture, SHARD, |_| 20));
}

#[test]
fn a_flipped_bit_of_a_weight() {
    check_damage("weight", |fixture| flip_bit_at(fixture, SHARD, |content| content.len() - 3));
}

#[test]
fn a_missing_manifest() {
    check_damage("no manifest", |fixture| fs::remove_file(fixture.path(MANIFEST)).unwrap());
}

#[test]
fn a_flipped_bit_of_a_manifest() {
    check_damage("manifest", |fixture| fixture.flip_bit(MANIFEST));
}

#[test]
fn a_cut_manifest() {
    check_damage("cut manifest", |fixture| fixture.cut(MANIFEST, 40));
}

#[test]
fn a_flipped_bit_of_a_stored_tokenizer() {
    check_damage("tokenizer", |fixture| fixture.flip_bit(TOKENIZER));
}

#[test]
fn a_file_that_is_missing() {
    check_damage("tokenizer", |fixture| fs::remove_file(fixture.path(TOKENIZER)).unwrap());
}

#[test]
fn a_copy_of_an_older_checkpoint() {
    check_damage("copy", |fixture| {
        fs::remove_dir_all(fixture.path(NEWEST)).unwrap();
        let older = fixture.path("runs/tiny/checkpoints/step-2");
        fs::create_dir(fixture.path(NEWEST)).unwrap();
        for entry in fs::read_dir(older).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), fixture.path(NEWEST).join(entry.file_name())).unwrap();
        }
    });
}

#[test]
fn a_run_without_a_complete_checkpoint_does_not_restart_by_itself() {
    let fixture = trained();
    for step in [2, 4] {
        fs::remove_file(fixture.path(&format!("runs/tiny/checkpoints/step-{step}/checkpoint.json"))).unwrap();
    }
    let names = fixture.names("runs/tiny/checkpoints");
    for workers in [1, 2] {
        let refused = fixture.run(&format!("train tiny.toml --workers {workers}")).refused();
        assert_contains(
            &refused,
            &[
                "none of the checkpoints in runs/tiny/checkpoints can be resumed",
                "resume = \"never\"",
                "step-4",
            ],
        );
        assert_eq!(fixture.names("runs/tiny/checkpoints"), names);
    }
    fixture.run("train tiny.toml --set checkpoint.resume=never").succeeded();
    assert_eq!(fixture.names("runs/tiny/previous-1/checkpoints"), names);
}

#[test]
fn a_checkpoint_that_was_asked_for_is_not_replaced_by_another() {
    let fixture = trained();
    flip_bit_at(&fixture, SHARD, |content| content.len() - 3);
    let names = fixture.names("runs/tiny/checkpoints");
    for workers in [1, 2] {
        let command = format!(
            "train tiny.toml --workers {workers} --set checkpoint.resume={NEWEST} --set training.steps=6"
        );
        assert_contains(&fixture.run(&command).refused(), &["step-4", "damaged", "checksum"]);
        assert_eq!(fixture.names("runs/tiny/checkpoints"), names);
    }
    let verified = fixture.run("checkpoint inspect runs/tiny --verify");
    assert_eq!(verified.code, Some(1));
    assert_contains(&verified.stderr, &["step-4/shard-00001.safetensors is damaged", "checksum"]);
    // The previous checkpoint can still be resumed from.
    let earlier = "--set checkpoint.resume=runs/tiny/checkpoints/step-2 --set run.name=again";
    assert_contains(
        &fixture.run(&format!("train tiny.toml {earlier}")).succeeded(),
        &["resuming after step 2 of 4"],
    );
}
