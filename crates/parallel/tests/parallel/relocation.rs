//! Units that move between pipeline ranks during training: no bit changes, and no memory is left behind.

use crate::common::{
    DEFAULT, Layout, OPTIONS, Pipeline, SHAPE, batches, executor_with_layout, with_stages_at,
};
use trireme_comm::Group;
use trireme_model::ModelConfig;
use trireme_optim::{OptimizerName, OptimizerSettings};
use trireme_parallel::{Executor, ExecutorOptions, GradNorm, StepPlan, ValidationBatches};
use trireme_schedule::pipeline::ScheduleKind;
use trireme_schedule::{StateClass, StateLayout, Tier};
use trireme_tensor::{Category, Precision};
use trireme_testkit::{random_batch, run_ranks};

const NUM_MICROBATCHES: usize = 4;
/// Number of steps between moves.
const STEPS: u64 = 2;

/// A model of eight units.
fn model(is_tied: bool) -> ModelConfig {
    let text = r#"{"model_type": "llama", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40,
        "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
        "max_position_embeddings": 32, "tie_word_embeddings": false}"#;
    ModelConfig { tie_word_embeddings: is_tied, ..ModelConfig::from_json(text).unwrap() }
}

/// The bits of losses and norms, of evaluated losses, and of all parameters at rank 0; and the bytes in use by category.
#[derive(Debug, PartialEq)]
struct Found {
    steps: Vec<[u64; 2]>,
    evaluated: Vec<u64>,
    parameters: Vec<u32>,
    in_use: [usize; 5],
}

fn start(group: Group, is_tied: bool, layout: &Layout<'_>) -> Executor {
    let pipeline_degree = layout.pipeline.map_or(1, |pipeline| pipeline.num_ranks);
    let accumulation = NUM_MICROBATCHES * pipeline_degree / group.world_size();
    executor_with_layout(&model(is_tied), group, 1, accumulation, layout)
}

/// Trains in several parts. If there is a pipeline, splits the model into different stages before each part except the first.
fn train(mut executor: Executor, layout: &Layout<'_>, cuts: &[&[usize]]) -> Found {
    let (mut steps, mut evaluated) = (Vec::new(), Vec::new());
    let device = executor.device().clone();
    // The reports stay counted until the executor is dropped, even if units move.
    let _reports = executor.allocate_validation_reports(&ValidationBatches::new(10, 4)).unwrap();
    for part in 0..=cuts.len() as u64 {
        if let (Some(cut), Some(_)) = ((part as usize).checked_sub(1).map(|cut| cuts[cut]), layout.pipeline) {
            executor.relocate(with_stages_at(&executor, cut, layout)).unwrap();
            executor.check_replicas().unwrap();
        }
        for step in part * STEPS + 1..=(part + 1) * STEPS {
            let batches = batches(&executor, NUM_MICROBATCHES, step);
            let plan = StepPlan { step, lr: 1e-2, grad_norm: GradNorm::Clip(0.5), has_loss: true };
            let outcome = executor.run(plan, &mut batches.into_iter()).unwrap();
            steps.push([outcome.loss.to_bits(), outcome.grad_norm.unwrap().to_bits()]);
        }
        let batch = random_batch(&device, (1, SHAPE.1), 61, 0, 0);
        let losses = executor.evaluate(Some(batch)).unwrap().into_iter().filter(|loss| loss.num_rows > 0);
        evaluated.extend(losses.map(|loss| loss.sum.to_bits()));
    }
    let in_use = Category::ALL.map(|category| device.memory().usage(category).current);
    let all = executor.gather_parameters().unwrap();
    let flat = |unit| all.as_ref().map(|all| all.values(unit).unwrap()).unwrap_or_default();
    let parameters = (0..executor.model().num_units()).flat_map(flat).map(f32::to_bits).collect();
    Found { steps, evaluated, parameters, in_use }
}

/// Compares a run whose units move with a run on one rank. After the last move, each rank must use as much memory as in a run that has had
/// only that split.
fn check(layout: &Layout<'_>, world_size: usize, cuts: &[&[usize]], what: &str) {
    for is_tied in [false, true] {
        let what = if is_tied { format!("{what}, tied") } else { what.to_owned() };
        check_model(is_tied, layout, world_size, cuts, &what);
    }
}

fn check_model(is_tied: bool, layout: &Layout<'_>, world_size: usize, cuts: &[&[usize]], what: &str) {
    let alone = Layout { options: layout.options, optimizer: layout.optimizer, ..Layout::default() };
    let oracle = run_ranks(1, |group| train(start(group, is_tied, &alone), &alone, cuts)).remove(0);
    let moved = run_ranks(world_size, |group| train(start(group, is_tied, layout), layout, cuts));
    for found in &moved {
        assert_eq!(found.steps, oracle.steps, "{what}");
    }
    let losses: Vec<&u64> = moved.iter().flat_map(|found| &found.evaluated).collect();
    let num_data = world_size / layout.pipeline.unwrap().num_ranks;
    assert_eq!(
        losses.len(),
        num_data * oracle.evaluated.len(),
        "{what}: the ranks with the head know the loss"
    );
    assert!(losses.iter().all(|loss| oracle.evaluated.contains(loss)), "{what}");
    assert!(moved[0].parameters == oracle.parameters, "{what}: parameters");
    // A run that moves its units before the first step, and never again.
    let last = &cuts[cuts.len() - 1..];
    let once = run_ranks(world_size, |group| {
        let mut executor = start(group, is_tied, layout);
        executor.relocate(with_stages_at(&executor, last[0], layout)).unwrap();
        train(executor, layout, &[])
    });
    let in_use = |found: &[Found]| found.iter().map(|found| found.in_use).collect::<Vec<_>>();
    assert_eq!(in_use(&moved), in_use(&once), "{what}: bytes in use");
}

fn two_rank_pipeline(kind: ScheduleKind, stages_per_rank: usize) -> Option<Pipeline> {
    Some(Pipeline { kind, num_ranks: 2, stages_per_rank })
}

/// The initial stages have four units each.
const SPLITS: [&[usize]; 3] = [&[1], &[7], &[3]];

#[test]
fn units_move_with_data_parallelism_and_zero() {
    for precision in [Precision::F32, Precision::Bf16] {
        for (zero_stage, num_shards) in [(0, 1), (1, 1), (1, 2), (2, 2)] {
            let (options, state) = (ExecutorOptions { precision, ..OPTIONS }, StateLayout::zero(zero_stage));
            let pipeline = two_rank_pipeline(ScheduleKind::OneFOneB, 1);
            let layout = Layout { options, num_shards, state, pipeline, ..Layout::default() };
            check(&layout, 4, &SPLITS, &format!("{precision} stage {zero_stage} of {num_shards}"));
        }
    }
}

#[test]
fn units_move_whatever_the_schedule() {
    let bf16 = ExecutorOptions { precision: Precision::Bf16, ..OPTIONS };
    for (kind, stages_per_rank, cuts) in [
        (ScheduleKind::GPipe, 1, &SPLITS[..]),
        (ScheduleKind::Interleaved, 2, &[&[1, 2, 3], &[5, 6, 7], &[2, 3, 7]]),
        (ScheduleKind::ZeroBubbleV, 2, &[&[1, 2, 3], &[3, 4, 7]]),
    ] {
        let layout =
            Layout { options: bf16, pipeline: two_rank_pipeline(kind, stages_per_rank), ..Layout::default() };
        check(&layout, 2, cuts, &format!("{kind}"));
    }
    let pipeline = Some(Pipeline { kind: ScheduleKind::OneFOneB, num_ranks: 4, stages_per_rank: 1 });
    check(&Layout { pipeline, ..Layout::default() }, 4, &[&[1, 2, 3], &[5, 6, 7], &[1, 3, 7]], "four ranks");
}

#[test]
fn all_optimizer_state_moves() {
    let muon = OptimizerSettings { muon_iterations: 3, ..DEFAULT };
    for optimizer in
        [(OptimizerName::Adafactor, DEFAULT), (OptimizerName::Muon, muon), (OptimizerName::Lamb, DEFAULT)]
    {
        let (state, pipeline) = (StateLayout::zero(2), two_rank_pipeline(ScheduleKind::OneFOneB, 1));
        let layout = Layout { optimizer, num_shards: 2, state, pipeline, ..Layout::default() };
        check(&layout, 4, &SPLITS, &format!("{optimizer:?}"));
    }
}

#[test]
fn offloaded_state_moves() {
    let folder = tempfile::tempdir().unwrap();
    for precision in [Precision::F32, Precision::Bf16] {
        for optimizer in [Tier::Host, Tier::Disk] {
            let layout = Layout {
                options: ExecutorOptions { precision, ..OPTIONS },
                num_shards: 2,
                pipeline: two_rank_pipeline(ScheduleKind::OneFOneB, 1),
                state: StateLayout::zero(2)
                    .with_tier(StateClass::Optimizer, optimizer)
                    .with_tier(StateClass::Activations, Tier::Disk),
                folder: folder.path(),
                ..Layout::default()
            };
            check(&layout, 4, &SPLITS, &format!("{precision} {optimizer:?}"));
        }
    }
}
