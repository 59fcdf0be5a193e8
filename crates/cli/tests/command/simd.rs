//! Verification of kernels, and lower SIMD levels by `TRIREME_SIMD`.

use crate::common::{Fixture, Outcome, Running, assert_contains};
use serde_json::Value;
use std::fs;
use trireme_tensor::SimdLevel;
use trireme_testkit::or_skip;

impl Fixture {
    fn run_with_simd(&self, level: &str, arguments: &str) -> Outcome {
        let mut command = self.command(arguments);
        command.env("TRIREME_SIMD", level);
        Running::start(command).end()
    }

    fn doctor(&self, level: &str) -> Value {
        let told =
            self.run_with_simd(level, "doctor --json --shape 2x3x4 --threads 1 --seconds 0").succeeded();
        serde_json::from_str(&told).unwrap()
    }

    /// Returns the loss of each step of a run on one worker.
    fn losses_with_simd(&self, level: &str) -> Vec<(u64, u64)> {
        let run = format!("train tiny.toml --workers 1 --set run.name=at-{level}");
        self.run_with_simd(level, &run).succeeded();
        self.losses(&format!("at-{level}"))
    }
}

/// Returns the levels of this machine, without the lowest one.
fn levels() -> impl Iterator<Item = SimdLevel> {
    SimdLevel::ALL.into_iter().filter(|level| (SimdLevel::Avx2..=SimdLevel::detect()).contains(level))
}

/// Returns the highest level of this machine, if there is another one to compare it with.
pub(crate) fn level_above_portable() -> Option<SimdLevel> {
    let level = SimdLevel::detect();
    let found = if level == SimdLevel::Portable { Err("all kernels are portable") } else { Ok(level) };
    or_skip("SIMD level above the portable one", found)
}

#[test]
fn the_kernels_of_this_machine_prove_themselves() {
    let printed = Fixture::new().run("prove-kernels").succeeded();
    let lines: Vec<&str> = printed.lines().collect();
    for pair in lines.chunks(2) {
        assert!(pair[0].starts_with("try ") && pair[1] == "proven", "{printed}");
    }
    assert_eq!(lines.is_empty(), SimdLevel::detect() == SimdLevel::Portable);
    assert!(!Fixture::new().run("--help").succeeded().contains("prove-kernels"));
}

#[test]
fn the_user_chooses_a_lower_level() {
    let fixture = Fixture::with_own_cache();
    let highest = fixture.doctor("");
    assert_eq!(highest["uses"]["features"], SimdLevel::detect().to_string());
    assert_eq!(highest["uses"]["excluded"], Value::Array(Vec::new()));
    for level in levels().chain([SimdLevel::Portable]) {
        let found = fixture.doctor(&level.to_string());
        assert_eq!(found["uses"]["features"], level.to_string());
        let is_lower = level < SimdLevel::detect();
        let reason = found["uses"]["features_reason"].as_str().unwrap();
        assert_eq!(reason.contains("TRIREME_SIMD"), is_lower, "{reason}");
        let used = found["products"].as_array().unwrap().iter().filter(|product| product["is_used"] == true);
        assert_eq!(used.count(), 3, "{level}");
    }
}

#[test]
fn training_computes_at_the_level_that_was_chosen() {
    let fixture = Fixture::with_own_cache();
    let model = r#"{"model_type": "gpt2", "vocab_size": 50, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}"#;
    fs::create_dir(fixture.path("model")).unwrap();
    fixture.write("model/config.json", model);
    for level in levels().chain([SimdLevel::Portable]) {
        let arguments =
            "bench kernels --model model --batch 1 --seq 4 --seconds 0 --threads 1 --only norm --json";
        let told = fixture.run_with_simd(&level.to_string(), arguments).succeeded();
        let found: Value = serde_json::from_str(&told).unwrap();
        assert_eq!(found["features"], level.to_string());
    }
    // In f32 all levels with fused multiply-adds agree to the bit, and the lowest level differs from them.
    let portable = fixture.losses_with_simd("portable");
    for level in levels() {
        let fused = fixture.losses_with_simd(&level.to_string());
        assert_eq!(fused.len(), portable.len());
        assert_ne!(fused, portable, "{level}");
        assert_eq!(fused, fixture.losses_with_simd("avx2"), "{level}");
    }
}

#[test]
fn workers_take_the_level_of_their_launcher() {
    let fixture = Fixture::with_own_cache();
    let mut losses = Vec::new();
    for level in ["portable", ""] {
        let name = format!("level-{level}");
        fixture.run_with_simd(level, &format!("train tiny.toml --set run.name={name}")).succeeded();
        losses.push(fixture.losses(&name));
    }
    assert_eq!(losses[0] == losses[1], SimdLevel::detect() == SimdLevel::Portable);
}

#[test]
fn levels_that_this_machine_has_not_are_refused() {
    let fixture = Fixture::with_own_cache();
    for arguments in ["train tiny.toml", "plan tiny.toml", "doctor", "generate nowhere"] {
        let before = fixture.everything();
        let error = fixture.run_with_simd("sse9", arguments).refused();
        assert_contains(&error, &["TRIREME_SIMD is 'sse9'", "portable"]);
        assert!(fixture.everything() == before, "{arguments}");
    }
    if SimdLevel::detect() < SimdLevel::AmxBf16 {
        let error = fixture.run_with_simd("amx_bf16", "doctor").refused();
        assert_contains(&error, &["TRIREME_SIMD is 'amx_bf16'", "portable", "AMX"]);
    }
}

#[test]
fn verdicts_are_cached_until_doctor_verifies_again() {
    let Some(_) = level_above_portable() else { return };
    let fixture = Fixture::with_own_cache();
    let plan = || Running::start(fixture.command("plan tiny.toml")).end();
    plan().succeeded();
    let cached = fixture.cached_verdicts();
    assert_eq!(cached.len(), 1);
    let first = fs::read_to_string(&cached[0]).unwrap();
    plan().succeeded();
    assert_eq!(fs::read_to_string(&cached[0]).unwrap(), first);

    let fused = "f32 products on fma 256";
    let excluded = first
        .replace(&format!("\"{fused}\": \"proven\""), &format!("\"{fused}\": {{\"wrong\": \"1 is 2\"}}"));
    assert_ne!(excluded, first);
    fs::write(&cached[0], &excluded).unwrap();
    let warned = Running::start({
        let mut command = fixture.command("plan tiny.toml");
        command.env("TRIREME_SIMD", "avx2");
        command
    });
    let warned = warned.end();
    assert_eq!(warned.code, Some(0));
    assert_contains(&warned.stderr, &[fused, "because 1 is 2", "f32 products run on mul+add 128"]);
    assert_eq!(warned.stderr.lines().count(), 1, "{}", warned.stderr);
    // Two workers print one warning.
    let mut command = fixture.command("train tiny.toml");
    command.env("TRIREME_SIMD", "avx2");
    let trained = Running::start(command).end();
    assert!(trained.code == Some(0) && trained.stderr == warned.stderr, "{trained:?}");

    assert_eq!(fixture.doctor("avx2")["uses"]["features"], "avx2");
    assert_eq!(fs::read_to_string(&cached[0]).unwrap(), first);

    for broken in
        [first.replace("bytes of", "bytes from"), first[..first.len() / 2].to_owned(), String::new()]
    {
        fs::write(&cached[0], broken).unwrap();
        plan().succeeded();
        assert_eq!(fs::read_to_string(&cached[0]).unwrap(), first);
    }
}
