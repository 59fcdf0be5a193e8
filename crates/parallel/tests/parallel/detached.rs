//! Training on a device that runs kernels asynchronously and whose memory the host cannot access: the bits equal the bits of the CPU.

use crate::common::{DEFAULT, Layout, OPTIONS, Pipeline, STEPS, dynamic, executor_of_model};
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Mutex;
use trireme_base::{DType, Pending};
use trireme_codec::{CodecName, Compression, CompressionOptions};
use trireme_model::{Batch, ModelConfig, token_specs};
use trireme_optim::{MuonScale, OptimizerName, OptimizerSettings};
use trireme_parallel::{
    Determinism, Executor, ExecutorOptions, Generation, GradNorm, StepPlan, ZeroPlusPlus,
};
use trireme_schedule::pipeline::ScheduleKind;
use trireme_schedule::{Keep, Portion, StateClass, StateLayout, Tier};
use trireme_tensor::{
    BackendKind, Category, DetachedOptions, Device, DeviceOptions, Fp8Formats, Fp8Recipe, IntegerFormat,
    Precision, WaitSite,
};
use trireme_testkit::{random_tokens, run_ranks_on};

/// Samples and positions of a microbatch. Two ranks can split either.
const SHAPE: (usize, usize) = (2, 16);

/// A model with norms per head, for whose gradients ranks of the tensor axis compute partial sums.
fn model() -> ModelConfig {
    let qwen3 = r#"{"model_type": "qwen3", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
        "max_position_embeddings": 32}"#;
    ModelConfig::from_json(qwen3).unwrap()
}

/// A training run, with its ranks.
struct Case<'a> {
    name: &'static str,
    /// The host of each rank.
    hosts: &'static [usize],
    layout: Layout<'a>,
    /// Number of microbatches per step, over all ranks.
    num_microbatches: usize,
    generates: bool,
}

fn compression() -> Compression {
    let options = CompressionOptions { codec: CodecName::PowerSgd, rank: Some(2), ..Default::default() };
    Compression::new(&options).unwrap()
}

/// Returns layouts that together use every kind of transfer between a device, its host, the disk and other ranks.
fn cases(folder: &Path) -> Vec<Case<'_>> {
    let plain = || Layout { folder, ..Layout::default() };
    let case = |name, layout| Case { name, hosts: &[0, 0], layout, num_microbatches: 4, generates: false };
    let sharded = |stage| Layout { num_shards: 2, state: StateLayout::zero(stage), ..plain() };
    let pipeline =
        |kind| Layout { pipeline: Some(Pipeline { kind, num_ranks: 2, stages_per_rank: 1 }), ..plain() };
    let with = |options| Layout { options, ..plain() };
    let bf16 = ExecutorOptions { precision: Precision::Bf16, ..OPTIONS };
    let f16 = ExecutorOptions { precision: Precision::F16, loss_scaling: dynamic(256), ..OPTIONS };
    let fp8 = ExecutorOptions { fp8: Some(Fp8Recipe::new(Fp8Formats::Hybrid)), ..bf16 };
    let rounded = ExecutorOptions { reduce_dtype: Precision::Bf16, ..bf16 };
    let determinism = Determinism::Run;
    let compressed = ExecutorOptions { compression: compression(), determinism, ..OPTIONS };
    let zero_plus_plus = ZeroPlusPlus {
        quantized_weights: true,
        secondary_shards: true,
        quantized_gradients: Some(IntegerFormat::Int8),
    };
    let methods = ExecutorOptions { zero_plus_plus, ..OPTIONS };
    let away = |stage, tiers: [Tier; 4]| {
        let classes = StateClass::ALL.into_iter().zip(tiers);
        let state = StateLayout::zero(stage);
        let state = classes.fold(state, |state, (class, tier)| state.with_tier(class, tier));
        Layout { state, num_shards: if stage == 0 { 1 } else { 2 }, ..plain() }
    };
    let mut shards = StateLayout::zero(0);
    shards.gradients.portion = Portion::Shard;
    let settings = OptimizerSettings { relative_step: false, ..DEFAULT };
    let adafactor = (OptimizerName::Adafactor, settings);
    let muon = (
        OptimizerName::Muon,
        OptimizerSettings {
            muon_momentum: 0.9,
            muon_iterations: 2,
            muon_scale: MuonScale::Original,
            muon_adamw_lr_scale: 0.5,
            ..DEFAULT
        },
    );
    let rows = ExecutorOptions { shards_rows: true, ..OPTIONS };
    let (host, disk) = (Tier::Host, Tier::Disk);
    let on_host = Layout { options: bf16, ..away(3, [host; 4]) };
    Vec::from([
        Case { hosts: &[0], generates: true, ..case("one rank", plain()) },
        case("data parallel", plain()),
        Case { generates: true, ..case("ZeRO-3", Layout { keeps: &[Keep::Input; 4], ..sharded(3) }) },
        case("ZeRO-2, rounded", Layout { options: rounded, ..sharded(2) }),
        case("gradients alone in shards", Layout { state: shards, ..sharded(0) }),
        Case { hosts: &[0; 4], ..case("shards and replicas", sharded(3)) },
        Case {
            hosts: &[0, 0, 1, 1],
            ..case("ZeRO++", Layout { options: methods, num_shards: 4, ..sharded(3) })
        },
        case("a pipeline", pipeline(ScheduleKind::OneFOneB)),
        case("a pipeline in halves", Layout { options: bf16, ..pipeline(ScheduleKind::ZeroBubbleH1) }),
        case("activations on the host", away(0, [Tier::Device, Tier::Device, Tier::Device, host])),
        case("all on the host", on_host),
        Case { num_microbatches: 2, ..case("all on a disk", away(3, [disk; 4])) },
        case("the optimizer on the host", away(1, [host, Tier::Device, Tier::Device, Tier::Device])),
        case("f16", with(f16)),
        Case { hosts: &[0], ..case("fp8", with(fp8)) },
        case("compression", with(compressed)),
        case("norms of parameters", Layout { optimizer: (OptimizerName::Lamb, DEFAULT), ..sharded(1) }),
        case("factored moments", Layout { optimizer: adafactor, ..sharded(2) }),
        case("orthogonal updates", Layout { optimizer: muon, ..sharded(2) }),
        case("tensor parallel", Layout { tensor: 2, ..plain() }),
        case("sequence parallel", Layout { tensor: 2, options: rows, ..plain() }),
        Case {
            hosts: &[0, 0, 1, 1],
            num_microbatches: 2,
            ..case("tensor parallel, ZeRO++", Layout { tensor: 2, options: methods, ..sharded(3) })
        },
        case("a cut matrix", Layout { tensor: 2, optimizer: muon, ..plain() }),
        case("a ring", Layout { context: (2, 1), ..plain() }),
    ])
}

/// Returns this rank's part of the microbatches of a step.
fn batches(executor: &Executor, model: &ModelConfig, num_microbatches: usize, step: u64) -> Vec<Batch> {
    let (device, context) = (executor.device(), executor.ranks().context_rank());
    let batch = |index| {
        let batch = random_tokens(SHAPE, model.vocab_size, step, executor.global_microbatch(index));
        batch.upload_positions(device, context).unwrap()
    };
    (0..num_microbatches / executor.ranks().sample_rank().degree).map(batch).collect()
}

/// Trains some steps, and evaluates a batch. Returns as bits: losses and norms, the evaluated loss, all weights, and the logits of a
/// sequence if the case generates one.
fn train(executor: &mut Executor, model: &ModelConfig, case: &Case<'_>) -> Vec<u64> {
    let mut found = Vec::new();
    for step in 1..=STEPS {
        let batches = batches(executor, model, case.num_microbatches, step);
        let plan = StepPlan { step, lr: 1e-2, grad_norm: GradNorm::Clip(0.5), has_loss: true };
        let outcome = executor.run(plan, &mut batches.into_iter()).unwrap();
        found.extend([outcome.loss.to_bits(), outcome.grad_norm.unwrap().to_bits()]);
    }
    let batch = batches(executor, model, executor.ranks().sample_rank().degree, 99).remove(0);
    found.extend(executor.evaluate(Some(batch)).unwrap().iter().map(|mean| mean.sum.to_bits()));
    executor.check_replicas().unwrap();
    let weights = executor.gather_parameters().unwrap();
    let flat = |unit| weights.as_ref().map_or_else(Vec::new, |all| all.values(unit).unwrap());
    let weights = (0..executor.model().num_units()).flat_map(flat);
    found.extend(weights.map(|weight| u64::from(weight.to_bits())));
    if case.generates {
        let mut generation = Generation::new(executor, 8);
        let logits = [&[1, 2, 3][..], &[4]].map(|tokens| generation.append(tokens).unwrap());
        found.extend(logits.iter().flatten().map(|logit| u64::from(logit.to_bits())));
    }
    found
}

/// Returns the results of [`train`] on each rank, and adds its wait sites to `sites`.
fn run(
    model: &ModelConfig,
    case: &Case<'_>,
    backend: BackendKind,
    sites: &Mutex<BTreeSet<WaitSite>>,
) -> Vec<Vec<u64>> {
    run_on(model, case, backend, |executor| {
        let found = train(executor, model, case);
        sites.lock().unwrap().extend(executor.device().wait_sites());
        found
    })
}

/// Returns the results of `rank`, called with each rank's executor.
fn run_on<T: Send>(
    model: &ModelConfig,
    case: &Case<'_>,
    backend: BackendKind,
    rank: impl Fn(&mut Executor) -> T + Sync,
) -> Vec<T> {
    let Layout { pipeline, tensor, context, .. } = case.layout;
    let degree = tensor * context.0 * pipeline.map_or(1, |pipeline| pipeline.num_ranks);
    let accumulation = case.num_microbatches * degree / case.hosts.len();
    let layout = Layout { backend, ..case.layout.clone() };
    run_ranks_on(case.hosts, |group| {
        let build = |device: &Device, table| model.build_into(table, SHAPE.1, device);
        let specs = token_specs(SHAPE.0, SHAPE.1);
        rank(&mut executor_of_model(&build, &specs, group, 1, accumulation, &layout))
    })
}

fn detached(seed: u64) -> BackendKind {
    BackendKind::Detached(DetachedOptions { seed, ignored_wait: None })
}

/// Seeds, each of which determines an order of kernels and copies. An environment variable sets their number.
fn seeds() -> std::ops::Range<u64> {
    0..std::env::var("TRIREME_DETACHED_SEEDS").ok().and_then(|num| num.parse().ok()).unwrap_or(40)
}

#[test]
fn every_order_of_kernels_and_copies_gives_the_bits_of_the_cpu() {
    let (folder, sites) = (tempfile::tempdir().unwrap(), Mutex::default());
    let model = model();
    for case in cases(folder.path()) {
        let expected = run(&model, &case, BackendKind::Cpu, &sites);
        for seed in seeds() {
            assert!(run(&model, &case, detached(seed), &sites) == expected, "{}, seed {seed}", case.name);
        }
    }
}

/// A peer leaves between steps. The next step must fail before it changes a parameter.
#[test]
fn a_peer_that_leaves_is_an_error_of_the_step() {
    let folder = tempfile::tempdir().unwrap();
    let model = model();
    let cases = cases(folder.path());
    for case in cases.iter().filter(|case| case.hosts.len() > 1) {
        let (state, num_shards) = (&case.layout.state, case.layout.num_shards);
        let is_on_device = StateClass::ALL.iter().all(|&class| !state.is_fetched(class));
        // Full parameters cannot be read while they are being gathered from shards.
        let are_weights_readable =
            is_on_device && (num_shards == 1 || state.is_sharded(StateClass::Parameters));
        for seed in 0..8 {
            run_on(&model, case, detached(seed), |executor| {
                let is_last = executor.group().rank().0 + 1 == case.hosts.len();
                let weights = |executor: &Executor| {
                    let device = executor.shard_device();
                    let unit = |unit| device.read::<u8>(executor.shard(unit).as_bytes()).unwrap();
                    (0..executor.model().num_units())
                        .filter(|_| are_weights_readable)
                        .map(unit)
                        .collect::<Vec<_>>()
                };
                let step = |executor: &mut Executor, step| {
                    let batches = batches(executor, &model, case.num_microbatches, step);
                    let plan = StepPlan { step, lr: 1e-2, grad_norm: GradNorm::Clip(0.5), has_loss: true };
                    executor.run(plan, &mut batches.into_iter())
                };
                step(executor, 1).unwrap();
                if is_last {
                    return;
                }
                let before = weights(executor);
                step(executor, 2).expect_err("a rank has left");
                assert!(weights(executor) == before, "{}, seed {seed}", case.name);
            });
        }
    }
}

/// Runs several copies through the same host memory, without a kernel between them.
fn copies(backend: BackendKind, sites: &Mutex<BTreeSet<WaitSite>>) -> [Vec<u8>; 3] {
    let device = Device::open(DeviceOptions { num_threads: 1, backend, ..DeviceOptions::default() }).unwrap();
    let zeros = || device.zeros([256].into(), DType::F32, Category::Activations).unwrap();
    let (mut x, mut y, mut z) = (zeros(), zeros(), zeros());
    device.map_in_place(y.view_mut(), 1, |_| 2.0.into());
    let mut host = Pending::new(vec![1; 1024]);
    device.upload_async(&mut host, 0, x.view_mut());
    device.download_async(y.view(), &mut host, 0);
    device.upload_async(&mut host, 0, z.view_mut());
    device.wait_for(&host.event());
    sites.lock().unwrap().extend(device.wait_sites());
    [device.read(x.view().as_bytes()).unwrap(), device.read(z.view().as_bytes()).unwrap(), host.wait()]
}

/// If a wait can be removed without a failure, it is not needed or not tested.
#[test]
fn a_missing_wait_is_detected() {
    let (folder, sites) = (tempfile::tempdir().unwrap(), Mutex::default());
    let model = model();
    let cases = cases(folder.path());
    let expected: Vec<_> = cases.iter().map(|case| run(&model, case, detached(0), &sites)).collect();
    let expected_copies = copies(detached(0), &sites);
    let all = sites.lock().unwrap().clone();
    assert!(all.len() >= 10, "{all:?}");
    let is_missed = |site: &WaitSite| {
        let is_found = |seed: u64| {
            let backend = BackendKind::Detached(DetachedOptions { seed, ignored_wait: Some(*site) });
            let differs = |found: std::thread::Result<bool>| !found.unwrap_or(false);
            differs(catch_unwind(|| copies(backend, &sites) == expected_copies))
                || cases.iter().zip(&expected).any(|(case, expected)| {
                    differs(catch_unwind(AssertUnwindSafe(|| {
                        run(&model, case, backend, &sites) == *expected
                    })))
                })
        };
        !(0..100).any(is_found)
    };
    let missed: Vec<&WaitSite> = all.iter().filter(|site| is_missed(site)).collect();
    assert!(missed.is_empty(), "nothing misses the waits at {missed:?}, of {all:?}");
}
