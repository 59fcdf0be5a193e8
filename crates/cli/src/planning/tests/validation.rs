//! Memory of validations whose last batch is short.

use super::experts::model;
use super::*;

#[test]
fn a_short_batch_takes_memory_of_its_own() {
    let [_, llama] = small_models();
    let alone = Case { shape: (2, 16), num_microbatches: 2, num_validated: Some(5), ..Case::default() };
    let bf16 = ExecutorOptions { precision: Precision::Bf16, ..OPTIONS };
    let unsharded = ExecutorOptions { shards_rows: false, ..OPTIONS };
    for (case, world_size) in [
        (alone.clone(), 1),
        (alone.clone(), 2),
        (Case { num_shards: 2, state: StateLayout::zero(3), options: bf16, ..alone.clone() }, 2),
        (Case { tensor_degree: 2, ..alone.clone() }, 2),
        (Case { tensor_degree: 2, options: unsharded, keep: Keep::Input, ..alone.clone() }, 4),
        (Case { context: (2, 1), ..alone.clone() }, 2),
        (Case { context: (2, 2), options: bf16, ..alone.clone() }, 4),
        (Case { pipeline: Some((ScheduleKind::OneFOneB, 2, 1)), ..alone.clone() }, 2),
        (Case { pipeline: Some((ScheduleKind::PipeDream2Bw, 2, 1)), ..alone.clone() }, 4),
        (Case { pipeline: Some((ScheduleKind::ZeroBubbleH1, 2, 1)), tensor_degree: 2, ..alone.clone() }, 4),
        // The second of two sample ranks reads the short batch, and one worker is planned for all.
        (Case { tensor_degree: 2, num_validated: Some(7), ..alone.clone() }, 4),
        // A single batch, which is short.
        (Case { tensor_degree: 2, num_validated: Some(1), ..alone.clone() }, 2),
    ] {
        case.check(&llama, world_size);
    }
}

#[test]
fn ranks_with_different_experts_read_the_short_batch() {
    let config = model(Some(1.25), 1);
    // Batches of 3 and 1 samples, and of 3, 3 and 1.
    for num_validated in [4, 7] {
        let num_validated = Some(num_validated);
        let case = Case { experts: 2, shape: (3, 5), num_validated, num_microbatches: 2, ..Case::default() };
        case.check(&config, 2);
    }
}

#[test]
fn the_first_worker_is_planned_for_the_batches_of_all() {
    let [_, llama] = small_models();
    let case = Case { tensor_degree: 2, shape: (2, 16), num_validated: Some(7), ..Case::default() };
    let peaks = [0, 2].map(|rank| case.dry_run(&llama, BackendKind::Cpu, &[0; 4], rank).peaks);
    assert_eq!(peaks[0], peaks[1]);
}
