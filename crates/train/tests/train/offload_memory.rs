//! State on a disk is in memory one unit at a time, from its initial values to a checkpoint and back.

use crate::common::{job, trainer};
use trireme_base::Category;
use trireme_testkit::run_ranks;
use trireme_train::NullObserver;

#[test]
fn state_on_disk_is_in_memory_one_unit_at_a_time() {
    let folder = tempfile::tempdir().unwrap();
    let swap_folder = format!("offload.folder={}", folder.path().display());
    let keys = [
        "model.num_layers=12",
        "parallelism.zero_stage=3",
        "offload.optimizer=disk",
        "offload.parameters=disk",
        "offload.prefetch=0",
        "checkpoint.interval=1",
        &swap_folder,
    ];
    // The second run resumes from the first one's checkpoint.
    for steps in [2, 3] {
        run_ranks(1, |group| {
            let config = job(folder.path(), "disk", 1, steps, &keys);
            let mut observer = NullObserver;
            let mut trainer = trainer(&config, group, &mut observer);
            trainer.run().unwrap();
            let executor = trainer.executor();
            let units = executor.model().table().units();
            let largest = units.iter().map(|unit| unit.num_elements).max().unwrap();
            let all: usize = units.iter().map(|unit| unit.num_elements).sum();
            // The parameter and both moments, in f32.
            let usage = |category| executor.host().memory().usage(category).peak;
            let (state, peak) = (largest * 12, usage(Category::Optimizer) + usage(Category::Parameters));
            assert!(peak <= state + state / 10 && peak < all * 4, "{peak} bytes, of {state} for a unit");
            // Each file has five chunks to write, of which one is being filled, and one chunk to read. A chunk has the size of one unit.
            let (chunks, peak) = (6 * state, usage(Category::Communication));
            assert!(peak <= chunks + chunks / 10, "{peak} bytes on the way, of {state} for a unit");
        });
    }
}
