//! Notices about fp8, and runs that change to fp8 and back.

use crate::common::recording_observer::RecordingObserver;
use crate::common::{job, trainer};
use std::path::Path;
use trireme_train::FP8_NOTICE;

/// Trains a run up to `steps`.
fn train(folder: &Path, steps: u64, keys: &[&str]) -> RecordingObserver {
    let config = job(folder, "run", 1, steps, &[&["training.dtype=bf16"], keys].concat());
    let mut observed = RecordingObserver::default();
    trainer(&config, trireme_comm::single(), &mut observed).run().unwrap();
    observed
}

#[test]
fn a_run_changes_to_fp8_and_back() {
    let folder = tempfile::tempdir().unwrap();
    let without = train(folder.path(), 5, &[]);
    assert_eq!(without.notices, [""; 0]);
    // The checkpoint has no history, then a history of another length, then a history that is not read.
    for (steps, keys) in [
        (10, &["training.fp8=hybrid"][..]),
        (15, &["training.fp8=e4m3", "training.fp8_amax_history_len=4", "training.fp8_margin=1"]),
    ] {
        let fp8 = train(folder.path(), steps, keys);
        assert_eq!(fp8.notices, [FP8_NOTICE]);
        assert_eq!(fp8.losses.len(), 5);
        assert!(fp8.losses.iter().all(|loss| *loss < without.losses[0]), "{:?}", fp8.losses);
    }
    assert_eq!(train(folder.path(), 20, &[]).losses.len(), 5);
}
