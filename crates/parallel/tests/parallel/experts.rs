//! A mixture of experts, composed of operations, under different layouts: the bits equal the bits of one rank.

use crate::common::{Layout, OPTIONS, Pipeline, train_classifier};
use std::sync::Arc;
use trireme_model::{Model, ModelError, Unit, UnitContext};
use trireme_parallel::ExecutorOptions;
use trireme_schedule::pipeline::ScheduleKind;
use trireme_schedule::{Keep, StateClass, StateLayout, Tier};
use trireme_tensor::tape::{
    CombineRows, Convert, CrossEntropy, GroupRows, GroupedLinear, InputActivation, Linear, PermuteRows,
    Router, Softmax, TopK,
};
use trireme_tensor::{
    Activation, BackendKind, DetachedOptions, Device, DeviceError, Initial, Parameter, ParameterTable,
    Precision, RoutingRule,
};

const SAMPLES: usize = 4;
const FEATURES: usize = 6;
const WIDTH: usize = 8;
const INNER: usize = 5;
const CLASSES: usize = 3;
const NUM_EXPERTS: usize = 4;

#[derive(Debug)]
struct Stem(Arc<Linear>);

impl Unit for Stem {
    fn forward(&self, cx: &mut UnitContext<'_>) -> Result<(), DeviceError> {
        let features = cx.batch("features");
        let features = cx.apply(&Convert, [features])?;
        let x = cx.apply(&self.0, [features])?;
        cx.output("x", x)
    }
}

/// Gated experts. Each token is routed to two of them.
#[derive(Debug)]
struct Experts {
    router: Arc<Router>,
    top_k: Arc<TopK>,
    groups: Arc<GroupRows>,
    up: Arc<GroupedLinear>,
    down: Arc<GroupedLinear>,
}

impl Unit for Experts {
    fn forward(&self, cx: &mut UnitContext<'_>) -> Result<(), DeviceError> {
        let x = cx.input("x");
        let logits = cx.apply(&self.router, [&x])?;
        let probabilities = cx.apply(&Softmax, [logits])?;
        let [weights, choices] = outputs(cx.apply_many(&self.top_k, [probabilities])?);
        let [starts, order, places] = outputs(cx.apply_many(&self.groups, [choices])?);
        let rows = cx.apply(&PermuteRows, (&x, &order, &places))?;
        let inner = cx.apply(&self.up, (rows, &starts))?;
        let rows = cx.apply(&self.down, (inner, starts))?;
        let sum = cx.apply(&Arc::new(CombineRows::default()), [rows, order, places, weights])?;
        cx.output("x", sum)
    }
}

fn outputs<T, const N: usize>(mut all: impl Iterator<Item = T>) -> [T; N] {
    std::array::from_fn(|_| all.next().expect("an operation has its outputs"))
}

#[derive(Debug)]
struct Head(Arc<Linear>);

impl Unit for Head {
    fn forward(&self, cx: &mut UnitContext<'_>) -> Result<(), DeviceError> {
        let x = cx.input("x");
        let logits = cx.apply(&self.0, [x])?;
        let labels = cx.batch("labels");
        cx.apply_loss(&CrossEntropy, (logits, labels), 1.0)
    }
}

fn build(_: &Device, mut table: ParameterTable) -> Result<Model, ModelError> {
    let normal = Initial::Normal { standard_deviation: 0.4 };
    table.begin_unit("stem");
    let identity = InputActivation::Identity;
    let stem = Linear::new(&mut table, "stem", [FEATURES, WIDTH], normal, identity);
    let mut units: Vec<Arc<dyn Unit>> = vec![Arc::new(Stem(Arc::new(stem)))];
    for layer in 0..2 {
        table.begin_unit(format!("experts.{layer}"));
        let weight = |name: &str, dims: [usize; 2]| {
            Parameter::matrix(format!("experts.{layer}.{name}"), &dims, normal)
        };
        let experts = |table: &mut ParameterTable, name: &str, dims: [usize; 2], activation| {
            let parts = (0..NUM_EXPERTS).map(|expert| weight(&format!("{name}.{expert}"), dims));
            let weight = table.add_stacked(parts);
            Arc::new(GroupedLinear { weight, num_groups: NUM_EXPERTS, activation })
        };
        units.push(Arc::new(Experts {
            router: Arc::new(Router { weight: table.add(weight("router", [NUM_EXPERTS, WIDTH])) }),
            top_k: Arc::new(TopK {
                rule: RoutingRule { normalizes: true, ..RoutingRule::largest(2) },
                bias: None,
            }),
            groups: Arc::new(GroupRows { num_groups: NUM_EXPERTS, capacity: None }),
            up: experts(&mut table, "into", [2 * INNER, WIDTH], identity),
            down: experts(&mut table, "back", [WIDTH, INNER], InputActivation::Gated(Activation::Silu)),
        }));
    }
    table.begin_unit("classes");
    let classes = Linear::new(&mut table, "classes", [WIDTH, CLASSES], normal, identity);
    units.push(Arc::new(Head(Arc::new(classes))));
    Ok(Model::new(units, table))
}

/// Returns the losses and norms of the steps, and the weights of all ranks.
fn run(layout: &Layout<'_>, world_size: usize, accumulation: usize) -> (Vec<[u64; 2]>, Vec<u32>) {
    train_classifier(build, SAMPLES, layout, world_size, accumulation)
}

#[test]
fn experts_give_the_bits_of_one_rank() {
    for precision in [Precision::F32, Precision::Bf16] {
        let options = ExecutorOptions { precision, ..OPTIONS };
        let folder = std::env::temp_dir();
        let plain = || Layout { options, folder: &folder, ..Layout::default() };
        let oracle = run(&plain(), 1, 4);
        assert_ne!(oracle.0[0], oracle.0[1], "it learns");
        let keeps = [Keep::Input, Keep::Nothing, Keep::Products, Keep::Input];
        assert!(run(&Layout { keeps: &keeps, ..plain() }, 1, 4) == oracle, "recomputed in {precision}");
        let state = StateLayout::UNSHARDED.with_tier(StateClass::Activations, Tier::Disk);
        assert!(run(&Layout { state, ..plain() }, 1, 4) == oracle, "activations on a disk in {precision}");
        for seed in 0..4 {
            let backend = BackendKind::Detached(DetachedOptions { seed, ignored_wait: None });
            assert!(run(&Layout { backend, ..plain() }, 1, 4) == oracle, "detached in {precision}");
        }
        assert!(run(&plain(), 2, 2).0 == oracle.0, "two replicas in {precision}");
        assert!(run(&Layout { tensor: 2, ..plain() }, 2, 4).0 == oracle.0, "a tensor axis in {precision}");
        let sharded = Layout { num_shards: 2, state: StateLayout::zero(3), ..plain() };
        assert!(run(&sharded, 2, 2).0 == oracle.0, "ZeRO-3 in {precision}");
        for kind in [ScheduleKind::OneFOneB, ScheduleKind::ZeroBubbleH1] {
            let pipeline = Some(Pipeline { kind, num_ranks: 2, stages_per_rank: 1 });
            let (steps, mut weights) = run(&Layout { pipeline, ..plain() }, 2, 4);
            assert!(steps == oracle.0, "{kind:?} in {precision}");
            let mut expected = oracle.1.clone();
            weights.sort_unstable();
            expected.sort_unstable();
            assert!(weights == expected, "{kind:?} in {precision} has other weights");
        }
    }
}
