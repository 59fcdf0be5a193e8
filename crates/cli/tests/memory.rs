//! Counted memory against the resident set of the process.

use std::process::Command;

/// Large enough that the uncounted memory of the program itself is a small part.
const MODEL: &str = r#"{"model_type": "gpt2", "vocab_size": 512, "n_positions": 256, "n_embd": 448, "n_layer": 12, "n_head": 7}"#;

#[test]
fn peak_memory_is_within_a_tenth_of_the_counted_memory() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), MODEL).unwrap();
    for workers in ["1", "2"] {
        let output = Command::new(env!("CARGO_BIN_EXE_trireme"))
            .args([
                "bench",
                "step",
                "--json",
                "--steps",
                "1",
                "--warmup",
                "1",
                "--batch",
                "2",
                "--threads",
                "1",
            ])
            .args(["--workers", workers, "--model"])
            .arg(folder.path())
            .env("XDG_CACHE_HOME", folder.path())
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let bytes = |key: &str| found[key].as_u64().unwrap() as f64;
        let ratio = bytes("peak_rss_bytes") / bytes("memory_counted_bytes");
        assert!((0.9..1.1).contains(&ratio), "{workers} workers: {ratio} in {found}");
    }
}
