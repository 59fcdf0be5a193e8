//! After the first steps, steps allocate nothing, on any thread of any rank.

mod common;

use common::{job, trainer};
use std::sync::Barrier;
use trireme_comm::CodecName;
use trireme_testkit::{CountingAllocator, run_ranks_on};
use trireme_train::Silent;
use trireme_train::metrics::{MetricsFiles, MetricsWriter};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

#[test]
fn steps_allocate_nothing() {
    let f16 = ["training.dtype=f16", "training.reduce_dtype=bf16", "training.loss_scale_initial=256"];
    check(&[]);
    check(&f16);
    check(&["training.dtype=bf16", "training.fp8=hybrid"]);
    for stage in ["parallelism.zero_stage=1", "parallelism.zero_stage=2", "parallelism.zero_stage=3"] {
        check(&[stage]);
        check(&[&[stage, "activation_checkpoint.mode=block"], &f16[..]].concat());
    }
    for format in ["int8", "int4"] {
        let format = format!("parallelism.zero_quantized_gradients={format}");
        let keys = ["parallelism.zero_stage=3", "parallelism.zero_quantized_weights=true", &format];
        check(&keys);
        check_on(&[0, 1], &[&keys[..], &["parallelism.zero_hpz=true", "training.dtype=bf16"]].concat());
    }
    let pipeline = ["parallelism.pipeline_parallel_degree=2", "model.tie_word_embeddings=false"];
    check(&pipeline);
    check(&[&pipeline[..], &["parallelism.pipeline_parallel_rebalance_interval=1"]].concat());
    for schedule in ["interleaved-1f1b", "zb-h2", "zb-v"] {
        let schedule = format!("parallelism.pipeline_parallel_schedule={schedule}");
        check(&[&pipeline[..], &[&schedule]].concat());
        check(&[&pipeline[..1], &[&schedule]].concat());
    }
    let ahead = [
        "parallelism.pipeline_parallel_drain_interval=2",
        "training.validation_interval=0",
        "checkpoint.enable=false",
    ];
    let ahead = [&pipeline[..], &ahead].concat();
    check(&[&ahead[..], &["parallelism.pipeline_parallel_schedule=pipedream"]].concat());
    for name in ["lion", "adafactor", "lamb", "lars", "muon"] {
        let keys = [&format!("optimizer.name={name}"), "optimizer.state_dtype=bf16"];
        check(&keys);
        check(&[&keys[..], &["parallelism.zero_stage=2"]].concat());
    }
    for optimizer in [
        ["optimizer.name=one_bit_adam", "optimizer.freeze_step=3"],
        ["optimizer.name=zero_one_adam", "optimizer.var_update_scaler=2"],
    ] {
        let keys = [&optimizer[..], &["training.max_norm=0", "training.determinism=run"]].concat();
        check(&keys);
        check(&[&keys[..], &["training.dtype=f16", "training.loss_scale_initial=64"]].concat());
    }
    for codec in CodecName::ALL {
        // A loss scale that grows once in the counted steps rescales what is kept.
        let scale = [
            "training.dtype=f16",
            "training.loss_scale_initial=64",
            "training.loss_scale_growth_interval=15",
        ];
        check(&[&["training.determinism=run", &format!("comm.compression={codec}")], &scale[..]].concat());
    }
}

fn check(keys: &[&str]) {
    check_on(&[0, 0], keys);
}

/// For a rank on each of two hosts.
fn check_on(hosts: &[usize; 2], keys: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let config = job(folder.path(), "run", 2, 1000, &[&["training.threads=2"], keys].concat());
    let everyone = Barrier::new(2);
    run_ranks_on(hosts, |group| {
        let mut observer = Silent;
        let rank = group.rank().0;
        let mut trainer = trainer(&config, group, &mut observer);
        let metrics = folder.path().join(format!("metrics-{rank}"));
        std::fs::create_dir(&metrics).unwrap();
        let files = MetricsFiles { jsonl: true, tensorboard: true };
        let mut metrics = MetricsWriter::open(&metrics, files, 0).unwrap();
        let mut run = |num_steps| {
            for _ in 0..num_steps {
                metrics.write(&trainer.step().unwrap()).unwrap();
            }
        };
        run(5);
        everyone.wait();
        let before = ALLOCATOR.num_allocations();
        everyone.wait();
        run(20);
        everyone.wait();
        let made = ALLOCATOR.num_allocations() - before;
        everyone.wait();
        assert_eq!(made, 0, "20 steps of 2 ranks allocated {made} times: {keys:?}");
    });
}
