//! A corrupted swap file ends a run with a clear error, and does not affect its last checkpoint.

use crate::common::{job, trainer};
use std::error::Error;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use trireme_testkit::run_ranks;
use trireme_train::NullObserver;

/// Flips a bit in every page of the unnamed files in `folder` that this process has open.
fn corrupt(folder: &Path) {
    let folder = folder.canonicalize().unwrap();
    let mut num_files = 0;
    for descriptor in fs::read_dir("/proc/self/fd").unwrap() {
        let descriptor = descriptor.unwrap().path();
        let Ok(target) = fs::read_link(&descriptor) else { continue };
        if !target.starts_with(&folder) {
            continue;
        }
        let file = OpenOptions::new().read(true).write(true).open(&descriptor).unwrap();
        for offset in (0..file.metadata().unwrap().len()).step_by(4096) {
            let mut byte = [0];
            file.read_exact_at(&mut byte, offset).unwrap();
            file.write_all_at(&[byte[0] ^ 0x10], offset).unwrap();
        }
        // The first call reports a collision with a direct write of the run that was still in flight.
        file.sync_all().or_else(|_| file.sync_all()).unwrap();
        num_files += 1;
    }
    assert!(num_files > 0, "the swap files are open");
}

#[test]
fn a_corrupted_swap_block_ends_the_run_and_spares_its_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let swap = tempfile::tempdir().unwrap();
    let swap_folder = format!("offload.folder={}", swap.path().display());
    let keys =
        ["parallelism.zero_stage=3", "offload.optimizer=disk", "offload.parameters=disk", &swap_folder];
    let losses = |name: &str, steps: u64, corrupted_after: Option<u64>| {
        let config = job(folder.path(), name, 1, steps, &keys);
        run_ranks(1, |group| {
            let mut observer = NullObserver;
            let mut trainer = trainer(&config, group, &mut observer);
            if let Some(step) = corrupted_after {
                trainer.run_until(step).unwrap();
                corrupt(swap.path());
                let error = trainer.run().unwrap_err();
                let mut text = error.to_string();
                let mut cause = error.source();
                while let Some(error) = cause {
                    text += &format!(": {error}");
                    cause = error.source();
                }
                return Err(text);
            }
            Ok(trainer.run().unwrap().loss.unwrap().to_bits())
        })
        .remove(0)
    };
    let whole = losses("whole", 10, None);
    let error = losses("spoilt", 10, Some(7)).unwrap_err();
    assert!(error.contains("checksum") && error.contains(&*swap.path().to_string_lossy()), "{error}");
    assert_eq!(losses("spoilt", 10, None), whole, "it goes on from its last checkpoint");
}
