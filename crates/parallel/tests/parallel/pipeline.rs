//! A pipeline gives the bits of one rank, with any schedule, and together with data parallelism.

use crate::common::{Layout, OPTIONS, Pipeline, SHAPE, STEPS, batches, executor_with_layout};
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use trireme_comm::{Diagnosis, FlightRecorder, OperationState};
use trireme_model::ModelConfig;
use trireme_parallel::{Determinism, Executor, ExecutorOptions, GradNorm, StepPlan};
use trireme_schedule::pipeline::ScheduleKind;
use trireme_schedule::{Keep, StateClass, StateLayout, Tier};
use trireme_tensor::Precision;
use trireme_testkit::{random_batch, run_ranks};

/// A model of eight units, whose output layer may be tied to the embedding.
fn model(is_tied: bool) -> ModelConfig {
    let text = r#"{"model_type": "llama", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40,
        "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
        "max_position_embeddings": 32, "tie_word_embeddings": TIED}"#;
    ModelConfig::from_json(&text.replace("TIED", &is_tied.to_string())).unwrap()
}

/// The losses and norms of some steps, the loss of an evaluation, and all parameters, as bits.
type Found = (Vec<[u64; 2]>, Option<u64>, Vec<u32>);

fn train(mut executor: Executor, num_microbatches: usize) -> Found {
    let mut found = Vec::new();
    for step in 1..=STEPS {
        let batches = batches(&executor, num_microbatches, step);
        let plan = StepPlan { step, lr: 1e-2, grad_norm: GradNorm::Clip(0.5), has_loss: true };
        let outcome = executor.run(plan, &mut batches.into_iter()).unwrap();
        found.push([outcome.loss.to_bits(), outcome.grad_norm.unwrap().to_bits()]);
    }
    executor.check_replicas().unwrap();
    let device = executor.device().clone();
    let evaluated = executor.evaluate(Some(random_batch(&device, (1, SHAPE.1), 61, 0, 0))).unwrap()[0];
    let all = executor.gather_parameters().unwrap();
    let flat = |unit| all.as_ref().map(|all| all.values(unit).unwrap()).unwrap_or_default();
    let bits = (0..executor.model().num_units()).flat_map(flat).map(f32::to_bits).collect();
    (found, (evaluated.num_rows > 0).then(|| evaluated.sum.to_bits()), bits)
}

/// Returns the results of all ranks, which must agree, with the parameters of rank 0 and the loss of the ranks with the output layer.
fn run(model: &ModelConfig, layout: &Layout<'_>, world_size: usize, num_microbatches: usize) -> Found {
    let pipeline_degree = layout.pipeline.map_or(1, |pipeline| pipeline.num_ranks);
    let accumulation = num_microbatches * pipeline_degree / world_size;
    let results = run_ranks(world_size, |group| {
        train(executor_with_layout(model, group, 1, accumulation, layout), num_microbatches)
    });
    assert!(results.iter().all(|(steps, ..)| *steps == results[0].0), "ranks agree");
    let evaluated: Vec<u64> = results.iter().filter_map(|(_, evaluated, _)| *evaluated).collect();
    assert_eq!(evaluated.len(), world_size / pipeline_degree, "the ranks with the head know the loss");
    assert!(evaluated.iter().all(|loss| *loss == evaluated[0]));
    (results[0].0.clone(), Some(evaluated[0]), results.into_iter().next().unwrap().2)
}

#[test]
fn every_schedule_gives_the_bits_of_one_rank() {
    let bf16 = ExecutorOptions { precision: Precision::Bf16, ..OPTIONS };
    for (options, is_tied) in [(OPTIONS, false), (OPTIONS, true), (bf16, false), (bf16, true)] {
        let model = model(is_tied);
        for num_microbatches in [4, 8] {
            let oracle = run(&model, &Layout { options, ..Layout::default() }, 1, num_microbatches);
            assert!(oracle.0[0][0] != oracle.0[2][0], "training changes the loss");
            for (kind, stages_per_rank) in ScheduleKind::synchronous(2) {
                for (num_ranks, data_degree) in [(2, 1), (4, 1), (2, 2)] {
                    let microbatches_min =
                        if kind == ScheduleKind::DualPipeV { 2 * num_ranks } else { num_ranks };
                    if num_microbatches / data_degree < microbatches_min {
                        continue;
                    }
                    let pipeline = Some(Pipeline { kind, num_ranks, stages_per_rank });
                    let layout = Layout { options, pipeline, ..Layout::default() };
                    let found = run(&model, &layout, num_ranks * data_degree, num_microbatches);
                    assert!(
                        found == oracle,
                        "{pipeline:?} x {data_degree}, {}, tied {is_tied}",
                        options.precision
                    );
                }
            }
        }
    }
}

/// If sums may be in any order, the output layer's contribution to the gradient of the embedding is sent once per step.
#[test]
fn a_tied_head_may_send_once_a_step() {
    let (model, num_microbatches) = (model(true), 4);
    let oracle = run(&model, &Layout::default(), 1, num_microbatches);
    for (kind, stages_per_rank) in ScheduleKind::synchronous(2) {
        let pipeline = Some(Pipeline { kind, num_ranks: 2, stages_per_rank });
        let of = |determinism| {
            let options = ExecutorOptions { determinism, ..OPTIONS };
            let layout = Layout { options, pipeline, ..Layout::default() };
            let bytes = run_ranks(2, |group| {
                let mut executor = executor_with_layout(&model, group, 1, num_microbatches, &layout);
                let before = executor.ranks().payload_bytes();
                let batches = batches(&executor, num_microbatches, 1);
                let plan = StepPlan { step: 1, lr: 1e-2, grad_norm: GradNorm::Clip(0.5), has_loss: true };
                executor.run(plan, &mut batches.into_iter()).unwrap();
                executor.ranks().payload_bytes() - before
            });
            (run(&model, &layout, 2, num_microbatches), bytes.iter().sum::<u64>())
        };
        let (each, bytes_each) = of(Determinism::Layout);
        let (once, bytes_once) = of(Determinism::Run);
        assert!(each == oracle, "{kind}");
        for (once, each) in once.0.iter().flatten().zip(each.0.iter().flatten()) {
            let (once, each) = (f64::from_bits(*once), f64::from_bits(*each));
            assert!((once / each - 1.0).abs() < 1e-5, "{kind}: {once} instead of {each}");
        }
        // In a V-shaped schedule, the embedding and the output layer are on the same rank. The automatic schedule may be V-shaped.
        let saved = (num_microbatches as u64 - 1) * 61 * 24 * 4;
        match kind {
            ScheduleKind::DualPipeV | ScheduleKind::ZeroBubbleV => {
                assert_eq!(bytes_once, bytes_each, "{kind}")
            }
            ScheduleKind::Automatic => assert!([0, saved].contains(&(bytes_each - bytes_once)), "{kind}"),
            _ => assert_eq!(bytes_each - bytes_once, saved, "{kind}"),
        }
    }
}

#[test]
fn recomputation_and_sharding_keep_the_bits() {
    let bf16 = ExecutorOptions { precision: Precision::Bf16, ..OPTIONS };
    for (options, is_tied) in [(OPTIONS, false), (OPTIONS, true), (bf16, true)] {
        check_sharding(&model(is_tied), options);
    }
}

fn check_sharding(model: &ModelConfig, options: ExecutorOptions) {
    let oracle = run(model, &Layout { options, ..Layout::default() }, 1, 8);
    let segments = [
        Keep::All,
        Keep::Input,
        Keep::Nothing,
        Keep::Nothing,
        Keep::Products,
        Keep::Input,
        Keep::Nothing,
        Keep::All,
    ];
    let disk = tempfile::tempdir().unwrap();
    let parameters_on_disk = StateLayout::zero(3).with_tier(StateClass::Parameters, Tier::Disk);
    for (state, num_shards) in [
        (StateLayout::zero(0), 1),
        (StateLayout::zero(1), 2),
        (StateLayout::zero(2), 2),
        (StateLayout::zero(3), 2),
        (parameters_on_disk, 2),
    ] {
        for (kind, keeps) in [
            (ScheduleKind::OneFOneB, &[][..]),
            (ScheduleKind::OneFOneB, &segments),
            (ScheduleKind::ZeroBubbleH1, &[]),
            (ScheduleKind::ZeroBubbleH1, &segments),
        ] {
            let pipeline = Some(Pipeline { kind, num_ranks: 2, stages_per_rank: 1 });
            let folder = disk.path();
            let layout = Layout { options, state, pipeline, num_shards, keeps, folder, ..Layout::default() };
            assert!(run(model, &layout, 4, 8) == oracle, "{kind} {state:?} {keeps:?}");
        }
    }
}

#[test]
fn each_action_of_a_step_has_its_time() {
    let pipeline = Some(Pipeline { kind: ScheduleKind::OneFOneB, num_ranks: 2, stages_per_rank: 1 });
    run_ranks(2, |group| {
        let mut executor =
            executor_with_layout(&model(false), group, 1, 4, &Layout { pipeline, ..Layout::default() });
        assert!(executor.timeline().is_empty());
        for step in 1..=2 {
            let before = Instant::now();
            let batches = batches(&executor, 4, step);
            let plan = StepPlan { step, lr: 1e-2, grad_norm: GradNorm::Clip(0.5), has_loss: true };
            executor.run(plan, &mut batches.into_iter()).unwrap();
            let times = executor.timeline();
            assert_eq!(times.len(), executor.program().actions.len());
            assert!(before <= times[0].issued && times[times.len() - 1].end <= Instant::now());
            assert!(times.iter().all(|time| time.issued <= time.start && time.start <= time.end));
            assert!(times.windows(2).all(|pair| pair[0].end == pair[1].issued));
        }
    });
}

/// In the first layers, a pass waits for the partial results of the other tensor rank. This wait is not work.
#[test]
fn waits_within_a_pass_are_not_work() {
    const LATE: Duration = Duration::from_millis(50);
    let recorder = OnceLock::new();
    run_ranks(2, |group| {
        let mut executor =
            executor_with_layout(&model(false), group, 1, 1, &Layout { tensor: 2, ..Layout::default() });
        let is_late = executor.group().rank().0 == 1;
        if is_late {
            let waits_for_this = || {
                let report = recorder.get().map(FlightRecorder::report)?;
                let operation = report.place().operation?;
                Some(operation.state == OperationState::Running && operation.line.starts_with("step 1"))
            };
            while waits_for_this() != Some(true) {
                std::thread::yield_now();
            }
            let began = Instant::now();
            while began.elapsed() < LATE {
                std::thread::yield_now();
            }
        } else {
            recorder.get_or_init(|| executor.ranks().world().flight_recorder().clone());
        }
        let batches = batches(&executor, 1, 1);
        let plan = StepPlan { step: 1, lr: 1e-2, grad_norm: GradNorm::Clip(0.5), has_loss: true };
        executor.run(plan, &mut batches.into_iter()).unwrap();
        let first = executor.timeline()[0];
        assert!(is_late || first.start - first.issued >= LATE, "{first:?}");
    });
}

/// Pipeline ranks run different programs. A flight recorder report must not treat that as a disagreement.
#[test]
fn a_report_finds_no_difference_between_the_programs_of_a_pipeline() {
    let pipeline = Some(Pipeline { kind: ScheduleKind::OneFOneB, num_ranks: 2, stages_per_rank: 1 });
    let layout = Layout { pipeline, ..Layout::default() };
    let reports = run_ranks(2, |group| {
        let mut executor = executor_with_layout(&model(false), group, 1, 2, &layout);
        let batches = batches(&executor, 2, 1);
        let plan = StepPlan { step: 1, lr: 1e-2, grad_norm: GradNorm::Clip(0.5), has_loss: true };
        executor.run(plan, &mut batches.into_iter()).unwrap();
        executor.ranks().world().flight_recorder().report()
    });
    let lines = |rank: usize| {
        let operations = reports[rank].groups.iter().flat_map(|group| &group.operations);
        operations.map(|operation| operation.line.clone()).collect::<Vec<_>>()
    };
    assert_ne!(lines(0), lines(1), "both have issued collectives within their programs");
    assert!(lines(1).iter().any(|line| line.starts_with("step 1, pipeline rank 1, ")), "{:?}", lines(1));
    assert_eq!(Diagnosis::of(&reports).disagreement, None);
}
