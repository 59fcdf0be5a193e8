//! Steps after the first ones do not allocate, on any thread of any rank.

#[allow(dead_code, reason = "the other test binary uses the rest")]
#[path = "train/common/mod.rs"]
mod common;

use common::{job, options, trainer};
use std::path::Path;
use std::sync::{Arc, Barrier};
use trireme_codec::CodecName;
use trireme_model::{Model, ModelError, TensorSpec};
use trireme_tensor::{Device, ParameterTable};
use trireme_testkit::{CountingAllocator, build_classifier, classifier_sample, run_ranks_on};
use trireme_train::config::{Config, Metrics, TaskKind};
use trireme_train::metrics::MetricsWriter;
use trireme_train::{Dataset, NullObserver, Sample, Task, TrainError, Trainer};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

#[test]
fn steps_allocate_nothing() {
    // There is one test, because allocations of another one at the same time would be counted.
    check_metrics();
    let f16 = ["training.dtype=f16", "training.reduce_dtype=bf16", "training.loss_scale_initial=256"];
    // More threads of two ranks compete for the processors, so few checks have them.
    let threads = "training.threads=2";
    check(&[threads]);
    check(&[&[threads], &f16[..]].concat());
    check(&[threads, "training.dtype=bf16", "training.fp8=hybrid"]);
    check(&["training.dtype=bf16", "memory.bf16_parameters=true"]);
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
    let tensor = "parallelism.tensor_parallel_degree=2";
    check(&[tensor]);
    check(&[tensor, "training.dtype=bf16", "activation_checkpoint.mode=block"]);
    check(&[tensor, "parallelism.sequence_parallel=false", "optimizer.name=lamb"]);
    check(&[tensor, "optimizer.name=adafactor"]);
    let context = "parallelism.context_parallel_degree=2";
    check(&[context]);
    check(&[context, "parallelism.context_parallel_heads_degree=2", "data.mask_documents=true"]);
    check(&[context, "parallelism.zero_stage=2", "training.dtype=bf16"]);
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
        // The loss scale grows once in the counted steps, which rescales the state of compressors.
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

/// Checks a run with its two ranks on these hosts.
fn check_on(hosts: &[usize; 2], keys: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let config = job(folder.path(), "run", 2, 1000, keys);
    count_on(hosts, &config, None);
}

/// Checks a model that reports metrics.
fn check_metrics() {
    let drains = [
        "parallelism.pipeline_parallel_drain_interval=2",
        "parallelism.pipeline_parallel_schedule=pipedream",
    ];
    for (degree, keys) in [(1, &[][..]), (2, &[]), (2, &drains)] {
        let folder = tempfile::tempdir().unwrap();
        let toml = format!(
            "run = {{ name = \"run\", folder = {:?} }}\n\
             training = {{ local_batch_size = 2, global_batch_size = 16, steps = 1000, threads = 2, validation_interval = 0 }}\n\
             checkpoint = {{ enable = false }}\n\
             parallelism = {{ pipeline_parallel_degree = {degree} }}\n\
             launch = {{ workers = 2 }}",
            folder.path()
        );
        let overrides: Vec<String> = keys.iter().map(|&key| key.to_owned()).collect();
        let path = Path::new("job.toml");
        let config = Config::parse_for_task(TaskKind::CustomTask, &toml, path, &overrides, None).unwrap();
        count_on(&[0, 0], &config, Some(Arc::new(Classifier)));
    }
}

/// The task of `testkit`'s classifier, which reports four metrics.
struct Classifier;

impl Task for Classifier {
    fn description(&self) -> String {
        "classifier".to_owned()
    }

    fn build(&self, device: &Device, table: ParameterTable) -> Result<Model, ModelError> {
        build_classifier(device, table)
    }

    fn train_data(&self, _: u64) -> Result<Box<dyn Dataset>, TrainError> {
        Ok(Box::new(Classifier))
    }
}

impl Dataset for Classifier {
    fn sample(&self) -> Vec<TensorSpec> {
        classifier_sample().to_vec()
    }

    fn num_samples(&self) -> u64 {
        100
    }

    fn read(&mut self, index: u64, sample: &mut Sample<'_>) -> Result<(), TrainError> {
        sample.f32s("features").fill(index as f32 / 100.0);
        sample.u32s("ids").fill((index % 11) as u32);
        sample.u32s("labels").fill((index % 3) as u32);
        Ok(())
    }
}

/// Counts the allocations of 20 steps of a task, or of a language model.
fn count_on(hosts: &[usize; 2], config: &Config, task: Option<Arc<dyn Task>>) {
    let folder = tempfile::tempdir().unwrap();
    let barrier = Barrier::new(2);
    run_ranks_on(hosts, |group| {
        let mut observer = NullObserver;
        let rank = group.rank().0;
        let mut trainer = match &task {
            None => trainer(config, group, &mut observer),
            Some(task) => {
                Trainer::new(config, Arc::clone(task), group, options(config), &mut observer).unwrap()
            }
        };
        let metrics = folder.path().join(format!("metrics-{rank}"));
        std::fs::create_dir(&metrics).unwrap();
        let mut metrics = MetricsWriter::open(&metrics, &Metrics::default(), 0).unwrap();
        let mut run = |num_steps| {
            for _ in 0..num_steps {
                metrics.write(trainer.step().unwrap()).unwrap();
            }
        };
        run(5);
        barrier.wait();
        let before = ALLOCATOR.num_allocations();
        barrier.wait();
        run(20);
        barrier.wait();
        let made = ALLOCATOR.num_allocations() - before;
        barrier.wait();
        assert_eq!(made, 0, "20 steps of 2 ranks allocated {made} times: {:?}", config.parallelism());
    });
}
