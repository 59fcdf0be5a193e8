//! Short gradients that are fused into one message.

use crate::common::{OPTIONS, batches, executor, train};
use trireme_parallel::{ExecutorOptions, GradNorm, StepPlan};
use trireme_tensor::{Category, Precision};
use trireme_testkit::{run_ranks, small_models};

#[test]
fn gradients_have_the_same_bits_in_fewer_messages() {
    for (config, reduce_dtype) in small_models().iter().zip([Precision::F32, Precision::Bf16]) {
        let run = |fusion_bytes| {
            let options = ExecutorOptions { fusion_bytes, reduce_dtype, ..OPTIONS };
            run_ranks(2, |group| train(executor(config, group, 1, 2, options), 4)).remove(0)
        };
        let num_reductions = |fusion_bytes| {
            let options = ExecutorOptions { fusion_bytes, reduce_dtype, ..OPTIONS };
            let counted = run_ranks(2, |group| {
                let mut executor = executor(config, group, 1, 1, options);
                let memory = executor.device().memory().usage(Category::Communication).current;
                let batches = batches(&executor, 2, 1);
                let before = executor.group().statistics();
                let plan = StepPlan { step: 1, lr: 1e-2, grad_norm: GradNorm::Off, has_loss: true };
                executor.run(plan, &mut batches.into_iter()).unwrap();
                let after = executor.group().statistics();
                let payload_bytes = after.payload_bytes - before.payload_bytes;
                (after.num_operations - before.num_operations, payload_bytes, memory)
            });
            counted[0]
        };
        let num_units = 4;
        let alone = num_reductions(0);
        assert_eq!(alone.0, num_units + 1, "each unit, and the loss");
        for fusion_bytes in [1 << 20, 60 << 10] {
            let together = num_reductions(fusion_bytes);
            assert!(together.0 <= num_units && together.0 > 1, "{together:?}");
            assert!(together.1 == alone.1, "as many bytes");
            assert!(together.2 > alone.2, "memory for batches is counted");
            assert!(run(fusion_bytes) == run(0), "{fusion_bytes}, {reduce_dtype}");
        }
        assert_eq!(num_reductions(1 << 20).0, 2, "all units at once, and the loss");
    }
}
