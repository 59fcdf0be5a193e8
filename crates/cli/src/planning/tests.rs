//! Predicted memory against the memory of real steps.

mod case;
mod communication;
mod entries;
mod experts;
mod limits;
mod validation;

use case::Case;
use trireme_base::{Category, CategoryBytes, ContextRank, MemoryUse, Rank};
use trireme_codec::Compression;
use trireme_comm::{Group, GroupOptions, TransportKind};
use trireme_model::{Batch, Model, ModelConfig, ModelError, ModelProfile, TensorSpec, token_specs};
use trireme_optim::{LossScaling, MuonScale, OptimizerName, OptimizerOptions, OptimizerSettings};
use trireme_parallel::{
    Degrees, Determinism, Executor, ExecutorOptions, ExecutorSetup, GradNorm, OffloadOptions, ParallelError,
    RankGrid, StepPlan, ValidationBatches, ZeroPlusPlus, chain,
};
use trireme_schedule::collective::Hosts;
use trireme_schedule::lowering::{apply_layout, recompute};
use trireme_schedule::pipeline::{
    Costs, ScheduleKind, Sizes, StageCosts, generate, partition_units, programs,
};
use trireme_schedule::{
    ClassLayout, Keep, Portion, Program, ProgramHeader, StateClass, StateLayout, Tier, UnitChain, single,
};
use trireme_tensor::{
    BackendKind, DetachedOptions, Device, DeviceOptions, Fp8Formats, Fp8Recipe, ModelRank, ParameterTable,
    Precision,
};
use trireme_testkit::{
    build_classifier, classifier_batch, classifier_specs, random_tokens, run_ranks, run_ranks_on,
    small_models,
};

const OPTIONS: ExecutorOptions = ExecutorOptions {
    precision: Precision::F32,
    shards_rows: true,
    fp8: None,
    reduce_dtype: Precision::F32,
    fusion_bytes: 60 << 10,
    bf16_parameters: false,
    zero_plus_plus: ZeroPlusPlus::NONE,
    compression: Compression::none(),
    seed: 0,
    loss_scaling: LossScaling::Off,
    determinism: Determinism::Layout,
};

fn adamw() -> OptimizerOptions {
    OptimizerOptions { weight_decay: 0.1, ..OptimizerOptions::new(OptimizerName::AdamW) }
}

/// Returns a model of some hundred thousand parameters, in which no size is a power of two.
fn medium_model() -> ModelConfig {
    model_of_layers(5)
}

fn model_of_layers(num_layers: usize) -> ModelConfig {
    let text = r#"{"model_type": "llama", "vocab_size": 2500, "hidden_size": 72, "intermediate_size": 200,
        "num_hidden_layers": LAYERS, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 12,
        "max_position_embeddings": 96, "tie_word_embeddings": false}"#;
    ModelConfig::from_json(&text.replace("LAYERS", &num_layers.to_string())).unwrap()
}

/// A model with batches. A `shape` is the samples of a microbatch and the tokens of a sample.
trait TestModel: Sync {
    fn build(
        &self,
        shape: (usize, usize),
        device: &Device,
        table: ParameterTable,
    ) -> Result<Model, ModelError>;
    fn specs(&self, shape: (usize, usize)) -> Vec<TensorSpec>;
    /// Returns a rank's part of the microbatch `index` of a step.
    fn batch(
        &self,
        device: &Device,
        shape: (usize, usize),
        step: u64,
        index: usize,
        context: ContextRank,
    ) -> Batch;
}

impl TestModel for ModelConfig {
    fn build(
        &self,
        shape: (usize, usize),
        device: &Device,
        table: ParameterTable,
    ) -> Result<Model, ModelError> {
        self.build_into(table, shape.1, device)
    }

    fn specs(&self, shape: (usize, usize)) -> Vec<TensorSpec> {
        token_specs(shape.0, shape.1).to_vec()
    }

    fn batch(
        &self,
        device: &Device,
        shape: (usize, usize),
        step: u64,
        index: usize,
        context: ContextRank,
    ) -> Batch {
        random_tokens(shape, self.vocab_size, step, index).upload_positions(device, context).unwrap()
    }
}

/// A model other than a language model: its samples have no tokens.
struct Classifier;

impl TestModel for Classifier {
    fn build(&self, _: (usize, usize), device: &Device, table: ParameterTable) -> Result<Model, ModelError> {
        build_classifier(device, table)
    }

    fn specs(&self, (num_samples, _): (usize, usize)) -> Vec<TensorSpec> {
        classifier_specs(num_samples).to_vec()
    }

    fn batch(
        &self,
        device: &Device,
        (num_samples, _): (usize, usize),
        step: u64,
        index: usize,
        _: ContextRank,
    ) -> Batch {
        classifier_batch(device, num_samples, step, index)
    }
}

/// Stages of ZeRO.
const ZERO_STAGES: [usize; 4] = [0, 1, 2, 3];

fn shards(stage: usize, num_shards: usize) -> usize {
    if stage == 0 { 1 } else { num_shards }
}

#[test]
fn every_stage_and_every_keep() {
    let [gpt2, llama] = small_models();
    let fp8 = Fp8Recipe { formats: Fp8Formats::Hybrid, amax_history_len: 4, margin: 0 };
    let bf16 = ExecutorOptions { precision: Precision::Bf16, ..OPTIONS };
    let emulated = ExecutorOptions { fp8: Some(fp8), ..bf16 };
    for (config, options) in [(&gpt2, OPTIONS), (&llama, bf16), (&llama, emulated)] {
        for (stage, keep) in ZERO_STAGES.into_iter().flat_map(|stage| Keep::ALL.map(|keep| (stage, keep))) {
            let (state, num_shards) = (StateLayout::zero(stage), shards(stage, 2));
            let case = Case { options, num_microbatches: 2, num_shards, state, keep, ..Case::default() };
            case.check(config, 2);
        }
    }
}

#[test]
fn a_chain_that_is_no_language_model() {
    for precision in [Precision::F32, Precision::Bf16] {
        let case = Case {
            options: ExecutorOptions { precision, seed: 9, ..OPTIONS },
            num_microbatches: 3,
            shape: (371, 0),
            ..Case::default()
        };
        for keep in Keep::ALL {
            Case { keep, ..case.clone() }.check(&Classifier, 2);
            let state = StateLayout::UNSHARDED.with_tier(StateClass::Activations, Tier::Host);
            Case { keep, state, ..case.clone() }.check(&Classifier, 1);
        }
        for stage in ZERO_STAGES {
            let state = StateLayout::zero(stage);
            Case { state, num_shards: shards(stage, 2), ..case.clone() }.check(&Classifier, 4);
        }
        for (kind, stages_per_rank) in [(ScheduleKind::OneFOneB, 1), (ScheduleKind::ZeroBubbleV, 2)] {
            let pipeline = Some((kind, 2, stages_per_rank));
            Case { pipeline, num_microbatches: 4, ..case.clone() }.check(&Classifier, 4);
        }
    }
}

#[test]
fn every_layout() {
    let config = medium_model();
    let layouts = [(1, 1), (2, 2), (2, 1), (4, 4), (4, 2)];
    for (stage, (world_size, num_shards)) in
        ZERO_STAGES.into_iter().flat_map(|stage| layouts.map(|at| (stage, at)))
    {
        for (num_microbatches, determinism, dtype) in [
            (1, Determinism::Layout, Precision::Bf16),
            (3, Determinism::Run, Precision::F32),
            (4, Determinism::Layout, Precision::Bf16),
        ] {
            let options = ExecutorOptions { precision: dtype, reduce_dtype: dtype, determinism, ..OPTIONS };
            let (state, num_shards) = (StateLayout::zero(stage), shards(stage, num_shards));
            let keep = Keep::Products;
            Case { options, num_microbatches, num_shards, state, keep, ..Case::default() }
                .check(&config, world_size);
        }
    }
}

#[test]
fn layouts_that_are_no_zero_stage() {
    let gradients = ClassLayout { portion: Portion::Shard, tier: Tier::Device };
    let full_gradients = ClassLayout { portion: Portion::Full, tier: Tier::Device };
    for state in [
        StateLayout { gradients, ..StateLayout::UNSHARDED },
        StateLayout { gradients: full_gradients, ..StateLayout::zero(3) },
    ] {
        for (world_size, num_shards, num_microbatches, dtype) in [
            (2, 2, 1, Precision::F32),
            (2, 2, 3, Precision::Bf16),
            (4, 2, 2, Precision::F32),
            (4, 4, 1, Precision::Bf16),
        ] {
            let options = ExecutorOptions { precision: dtype, reduce_dtype: dtype, ..OPTIONS };
            let case = Case { options, num_microbatches, num_shards, state, ..Case::default() };
            case.check(&medium_model(), world_size);
        }
    }
}

#[test]
fn communication_takes_no_more_for_more_units() {
    for (stage, dtype) in [2, 3]
        .into_iter()
        .flat_map(|stage| [Precision::F32, Precision::Bf16, Precision::F16].map(|dtype| (stage, dtype)))
    {
        for (world_size, num_microbatches) in [(2, 1), (2, 3), (4, 1)] {
            let options = ExecutorOptions { reduce_dtype: dtype, ..OPTIONS };
            let (state, keep) = (StateLayout::zero(stage), Keep::Input);
            let case = Case { options, num_microbatches, num_shards: 2, state, keep, ..Case::default() };
            let [few, many] = [4, 8].map(|num_layers| {
                let config = model_of_layers(num_layers);
                case.check(&config, world_size);
                case.dry_run(&config, BackendKind::Cpu, &vec![0; world_size], 0)
                    .peaks
                    .get(Category::Communication)
            });
            assert_eq!(few, many, "{case:?}");
        }
    }
}

#[test]
fn pipelines() {
    let config = medium_model();
    for (kind, stages_per_rank) in [
        (ScheduleKind::GPipe, 1),
        (ScheduleKind::OneFOneB, 1),
        (ScheduleKind::Interleaved, 2),
        (ScheduleKind::BreadthFirst, 3),
        (ScheduleKind::ZeroBubbleH1, 1),
        (ScheduleKind::DualPipeV, 2),
        (ScheduleKind::PipeDream, 1),
        (ScheduleKind::PipeDream2Bw, 1),
    ] {
        for (stage, data_degree, keep) in [(0, 1, Keep::All), (1, 2, Keep::Input), (2, 2, Keep::Nothing)] {
            let pipeline = Some((kind, 2, stages_per_rank));
            let (state, num_shards) = (StateLayout::zero(stage), shards(stage, data_degree));
            let case = Case { num_microbatches: 4, num_shards, state, keep, pipeline, ..Case::default() };
            case.check(&config, 2 * data_degree);
            // Asynchronous schedules keep versions, which would differ for tied weights.
            if !kind.is_synchronous() {
                continue;
            }
            case.check(&ModelConfig { tie_word_embeddings: true, ..config.clone() }, 2 * data_degree);
        }
    }
}

#[test]
fn offloaded_state() {
    use Tier::{Device, Disk, Host};
    let config = medium_model();
    for (stage, tiers, num_moved) in [
        (0, [Device, Device, Device, Host], usize::MAX),
        (0, [Device, Device, Device, Host], 2),
        (1, [Host, Device, Device, Disk], 3),
        (2, [Disk, Device, Host, Device], 0),
        (2, [Host, Device, Disk, Host], 1),
        (3, [Host, Host, Host, Host], usize::MAX),
        (3, [Disk, Disk, Disk, Disk], usize::MAX),
    ] {
        for (dtype, num_microbatches) in [(Precision::F32, 1), (Precision::Bf16, 1), (Precision::Bf16, 2)] {
            let state = StateLayout { num_offloaded_units: num_moved, ..StateLayout::zero(stage) };
            let classes = StateClass::ALL.into_iter().zip(tiers);
            let state = classes.fold(state, |state, (class, tier)| state.with_tier(class, tier));
            if !state.is_possible(num_microbatches) {
                continue;
            }
            let options = ExecutorOptions { precision: dtype, ..OPTIONS };
            let num_shards = shards(stage, 2);
            Case { options, num_microbatches, num_shards, state, ..Case::default() }.check(&config, 2);
        }
    }
}

#[test]
fn tensor_parallelism() {
    let [gpt2, llama] = small_models();
    let shape = (2, 16);
    let alone = Case { shape, tensor_degree: 2, ..Case::default() };
    let unsharded = ExecutorOptions { shards_rows: false, ..OPTIONS };
    for (stage, options) in [(0, OPTIONS), (0, unsharded), (1, OPTIONS), (2, OPTIONS), (3, OPTIONS)] {
        let (state, num_shards) = (StateLayout::zero(stage), shards(stage, 2));
        let num_microbatches = 2;
        let case = Case { options, num_shards, state, num_microbatches, ..alone.clone() };
        case.check(&llama, 2 * num_shards);
    }
    // Three heads can be split among three ranks only.
    Case { tensor_degree: 3, shape: (2, 18), ..alone.clone() }.check(&gpt2, 3);
    // Pairs of ranks share heads of keys and values.
    Case { tensor_degree: 4, ..alone.clone() }.check(&llama, 4);
    for kind in [ScheduleKind::OneFOneB, ScheduleKind::ZeroBubbleH1] {
        let pipeline = Some((kind, 2, 1));
        Case { pipeline, num_microbatches: 2, ..alone.clone() }.check(&llama, 4);
    }
    for name in [OptimizerName::Lamb, OptimizerName::Adafactor] {
        let settings = OptimizerSettings { relative_step: false, ..OptimizerSettings::DEFAULT };
        let optimizer = OptimizerOptions { name, settings, ..adamw() };
        Case { optimizer, ..alone.clone() }.check(&llama, 2);
    }
    let options = ExecutorOptions { precision: Precision::Bf16, ..OPTIONS };
    Case { options, keep: Keep::Input, ..alone }.check(&llama, 2);
}

#[test]
fn context_parallelism() {
    let [gpt2, llama] = small_models();
    let alone = Case { shape: (2, 16), context: (2, 1), ..Case::default() };
    for (stage, context) in [(0, (2, 1)), (0, (2, 2)), (1, (2, 1)), (2, (2, 2)), (3, (2, 1))] {
        let (state, num_shards) = (StateLayout::zero(stage), shards(stage, 4));
        let case = Case { num_shards, state, context, num_microbatches: 2, ..alone.clone() };
        case.check(&llama, if stage == 0 { 2 } else { 4 });
    }
    Case { context: (4, 1), ..alone.clone() }.check(&gpt2, 4);
    Case { context: (4, 2), ..alone.clone() }.check(&llama, 4);
    let options = ExecutorOptions { precision: Precision::Bf16, ..OPTIONS };
    for keep in [Keep::Input, Keep::Products] {
        Case { options, keep, tensor_degree: 2, ..alone.clone() }.check(&llama, 4);
    }
    let pipeline = Some((ScheduleKind::ZeroBubbleH1, 2, 1));
    Case { pipeline, num_microbatches: 2, ..alone }.check(&llama, 4);
}

#[test]
fn optimizers_with_scratch_memory_and_exchanges() {
    let [config, _] = small_models();
    let settings = OptimizerSettings { muon_scale: MuonScale::Original, ..OptimizerSettings::DEFAULT };
    for name in [OptimizerName::Lamb, OptimizerName::Muon] {
        for (stage, num_shards) in [(0, 1), (2, 2)] {
            let optimizer = OptimizerOptions { name, settings, ..adamw() };
            let (state, keep) = (StateLayout::zero(stage), Keep::Input);
            Case { optimizer, num_shards, state, keep, ..Case::default() }.check(&config, 2);
        }
    }
}

#[test]
fn a_budget_below_the_prediction_ends_the_step_at_the_predicted_line() {
    let config = medium_model();
    let case = Case::default();
    let (device, profile) = (
        Device::counting(case.device_options(None)).unwrap(),
        case.profile(&config, ModelRank::ALONE, ContextRank::ALONE),
    );
    let model = config.build(case.shape.1, &device).unwrap();
    let program = case.program(&chain(model.table(), &profile, case.options.determinism), 0);
    let predicted = case.dry_run(&config, BackendKind::Cpu, &[0], 0);
    let total = predicted.total();
    let run = |budget: usize| {
        let device = Device::cpu(case.device_options(Some(budget))).unwrap();
        let host = device.host().unwrap();
        let outcome = run_ranks(1, |group| case.run(&config, group, &device, &host)).remove(0);
        assert!(device.memory().total().peak <= budget);
        outcome
    };
    run(total).unwrap();
    let Err(ParallelError::OverBudget { line, source }) = run(total - 1) else {
        panic!("one byte less does not suffice")
    };
    assert_eq!((source.category, source.excess() < 64), (Category::Activations, true), "{source}");
    let action = program.actions[predicted.line - 2];
    assert_eq!(line, format!("step 1, line {} ({})", predicted.line, action.words()));
}

#[test]
fn models_larger_than_any_machine_are_predicted() {
    let text = r#"{"model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
        "max_position_embeddings": 4096, "tie_word_embeddings": false}"#;
    let config = ModelConfig::from_json(text).unwrap();
    let options = ExecutorOptions { precision: Precision::Bf16, ..OPTIONS };
    let state = StateLayout::zero(3);
    let case = Case { options, num_shards: 8, state, keep: Keep::Input, shape: (1, 4096), ..Case::default() };
    let predicted = case.dry_run(&config, BackendKind::Cpu, &[0; 8], 0);
    // 70.6 billion parameters, with three floats each, split among eight ranks.
    let states = predicted.peaks.get(Category::Optimizer) as f64;
    assert!((states / (70.55e9 * 12.0 / 8.0) - 1.0).abs() < 0.01, "{states}");
}
