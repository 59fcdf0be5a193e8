//! A model that is no language model, under layouts: units that pass on several tensors, read the batch and add to the loss anywhere.

mod common;

use common::{Build, Layout, OPTIONS, Pipeline, laid_out_model, train_on};
use std::sync::Arc;
use trireme_base::{DType, Random, RandomKey};
use trireme_model::{Batch, Model, ModelError, Pass, TensorSpec, Unit, empty_batch};
use trireme_parallel::{Executor, ExecutorOptions};
use trireme_schedule::lowering::{Offload, Sharding, Tier};
use trireme_schedule::pipeline::Kind;
use trireme_schedule::{Keep, ZeroStage};
use trireme_tensor::tape::{
    Concat, Convert, CrossEntropy, Dropout, EmbeddingBag, InputActivation, Linear, MeanLoss, Norm,
    SquaredError, Tanh,
};
use trireme_tensor::{Activation, Device, DeviceError, Initial, Parameter, ParameterTable, Precision};
use trireme_testkit::run_ranks;

const SAMPLES: usize = 4;
const FEATURES: usize = 6;
const WIDTH: usize = 8;
const ROWS: usize = 11;
const CLASSES: usize = 3;

/// Dense features and bags of ids, beside each other.
#[derive(Debug)]
struct Stem {
    dense: Arc<Linear>,
    bags: Arc<EmbeddingBag>,
}

impl Unit for Stem {
    fn forward(&self, pass: &mut Pass<'_>) -> Result<(), DeviceError> {
        let (features, ids) = (pass.batch("features"), pass.batch("ids"));
        let features = pass.apply(&Convert, [features])?;
        let dense = pass.apply(&self.dense, [features])?;
        let sparse = pass.apply(&self.bags, [ids])?;
        pass.output("dense", dense);
        pass.output("sparse", sparse);
        Ok(())
    }
}

/// A layer on one of two tensors. The other passes through, or is changed and has a loss of its own: to be near the features.
#[derive(Debug)]
struct Middle {
    norm: Arc<Norm>,
    linear: Arc<Linear>,
    dropout: Arc<Dropout>,
    near: Option<Arc<Linear>>,
}

impl Unit for Middle {
    fn forward(&self, pass: &mut Pass<'_>) -> Result<(), DeviceError> {
        let (dense, sparse) = (pass.input("dense"), pass.input("sparse"));
        let normed = pass.apply(&self.norm, [&sparse])?;
        let hidden = pass.apply(&self.linear, (normed, sparse))?;
        let hidden = pass.apply(&self.dropout, [hidden])?;
        pass.output("sparse", hidden);
        let Some(near) = &self.near else {
            pass.output("dense", dense);
            return Ok(());
        };
        let features = pass.batch("features");
        let features = pass.apply(&Convert, [features])?;
        let near = pass.apply(near, [&dense])?;
        pass.apply_loss(&MeanLoss(SquaredError), (near, features), 0.25)?;
        let dense = pass.apply(&Tanh, [dense])?;
        pass.output("dense", dense);
        Ok(())
    }
}

#[derive(Debug)]
struct Classes {
    linear: Arc<Linear>,
    fit: Arc<Norm>,
}

impl Unit for Classes {
    fn forward(&self, pass: &mut Pass<'_>) -> Result<(), DeviceError> {
        let (dense, sparse) = (pass.input("dense"), pass.input("sparse"));
        let sparse = pass.apply(&self.fit, [sparse])?;
        let both = pass.apply(&Concat { dim: 1 }, [dense, sparse])?;
        let logits = pass.apply(&self.linear, [both])?;
        let labels = pass.batch("labels");
        pass.apply_loss(&CrossEntropy, (logits, labels), 1.0)
    }
}

fn build(_: &Device) -> Result<Model, ModelError> {
    let mut table = ParameterTable::default();
    let normal = Initial::Normal { standard_deviation: 0.3 };
    let linear = |table: &mut ParameterTable, name: &str, inputs, outputs, activation| {
        Arc::new(Linear::new(table, name, [inputs, outputs], normal, activation))
    };
    let norm = |table: &mut ParameterTable, name: &str| {
        let weight = table.add(Parameter::vector(name, WIDTH, Initial::ONES));
        Arc::new(Norm { weight, bias: None, weight_offset: 0.0, epsilon: 1e-5, centred: false })
    };
    let identity = InputActivation::Identity;
    table.begin_unit("stem");
    let gelu = InputActivation::Of(Activation::Gelu);
    let dense = linear(&mut table, "stem.dense", FEATURES, WIDTH, gelu);
    let bag = table.add(Parameter::embedding("stem.table", &[ROWS, WIDTH], normal));
    let bags = Arc::new(EmbeddingBag { table: bag, takes_mean: true, is_padded: false });
    let mut units: Vec<Arc<dyn Unit>> = vec![Arc::new(Stem { dense, bags })];
    for layer in 0..3 {
        let name = format!("middle.{layer}");
        table.begin_unit(&name);
        units.push(Arc::new(Middle {
            norm: norm(&mut table, &format!("{name}.norm")),
            linear: linear(
                &mut table,
                &format!("{name}.linear"),
                WIDTH,
                WIDTH,
                InputActivation::Of(Activation::Gelu),
            ),
            dropout: Arc::new(Dropout::new(format!("{name}.dropout"), 0.2)),
            near: (layer != 2)
                .then(|| linear(&mut table, &format!("{name}.near"), WIDTH, FEATURES, identity)),
        }));
    }
    table.begin_unit("classes");
    let fit = norm(&mut table, "classes.norm");
    let linear = linear(&mut table, "classes", 2 * WIDTH, CLASSES, identity);
    units.push(Arc::new(Classes { linear, fit }));
    Ok(Model::new(units, table))
}

fn specs() -> [TensorSpec; 3] {
    [
        TensorSpec::new("features", &[SAMPLES, FEATURES], DType::F32),
        TensorSpec::new("ids", &[SAMPLES, 2], DType::U32),
        TensorSpec::new("labels", &[SAMPLES], DType::U32),
    ]
}

fn batch(device: &Device, step: u64, index: usize) -> Batch {
    let mut batch = empty_batch(device, &specs()).unwrap();
    let key = RandomKey::new(step << 32 | index as u64, "batch");
    key.fill_normal(batch.get_mut("features").unwrap().view_mut().f32s(), 1.0);
    let mut random = Random::new(key, 1 << 20);
    for (name, bound) in [("ids", ROWS), ("labels", CLASSES)] {
        let mut view = batch.get_mut(name).unwrap().view_mut();
        view.u32s().iter_mut().for_each(|id| *id = random.below(bound as u64) as u32);
    }
    batch
}

type Found = (Vec<[u64; 2]>, Vec<u32>);

fn run(layout: &Layout<'_>, world_size: usize, accumulation: usize) -> Found {
    let batches = |executor: &Executor, step: u64| -> Vec<Batch> {
        let place = |index| executor.global_microbatch(index);
        (0..accumulation).map(|index| batch(executor.device(), step, place(index))).collect()
    };
    let found = run_ranks(world_size, |group| {
        let model = (&build as Build<'_>, &specs()[..]);
        train_on(laid_out_model(model, group, 1, accumulation, layout), &batches)
    });
    assert!(found.iter().all(|(steps, _)| *steps == found[0].0), "ranks agree");
    (found[0].0.clone(), found.into_iter().flat_map(|(_, weights)| weights).collect())
}

#[test]
fn any_chain_of_units_gives_the_bits_of_one_rank() {
    for precision in [Precision::F32, Precision::Bf16] {
        let options = ExecutorOptions { precision, seed: 9, ..OPTIONS };
        let plain = Layout { options, ..Layout::default() };
        let oracle = run(&plain, 1, 4);
        assert_ne!(oracle.0[0], oracle.0[1], "it learns");
        let keeps = [Keep::Input, Keep::Nothing, Keep::Products, Keep::Input, Keep::All];
        let recomputed = Layout { options, keeps: &keeps, ..Layout::default() };
        assert!(run(&recomputed, 1, 4) == oracle, "recomputed in {precision}");
        let folder = std::env::temp_dir();
        for (tier, keeps) in [(Tier::Host, &[][..]), (Tier::Disk, &[][..]), (Tier::Disk, &keeps[..])] {
            let places = Offload { activations: tier, ..Offload::default() };
            let moved = Layout { options, places, keeps, folder: &folder, ..Layout::default() };
            assert!(run(&moved, 1, 4) == oracle, "activations on {tier:?} in {precision}");
        }
        let (steps, _) = run(&plain, 2, 2);
        assert!(steps == oracle.0, "two replicas in {precision}");
        for zero_stage in [ZeroStage::One, ZeroStage::Two, ZeroStage::Three] {
            let sharding = Sharding { zero_stage, prefetch: 1, keep_after_forward: false };
            let options = ExecutorOptions { sharding, ..options };
            let sharded = Layout { options, num_shards: 2, ..Layout::default() };
            let (steps, _) = run(&sharded, 2, 2);
            assert!(steps == oracle.0, "{zero_stage:?} in {precision}");
        }
        for (kind, stages_per_rank) in
            [(Kind::OneFOneB, 1), (Kind::GPipe, 1), (Kind::Interleaved, 2), (Kind::ZeroBubbleV, 2)]
        {
            let pipeline = Some(Pipeline { kind, num_ranks: 2, stages_per_rank });
            let stages = Layout { options, pipeline, ..Layout::default() };
            let found = run(&stages, 2, 4);
            assert!(found.0 == oracle.0, "{kind:?} in {precision}");
            let (mut weights, mut expected) = (found.1, oracle.1.clone());
            weights.sort_unstable();
            expected.sort_unstable();
            assert!(weights == expected, "{kind:?} in {precision} has other weights");
        }
    }
}

#[test]
fn a_batch_of_other_tensors_is_refused() {
    let mut found = run_ranks(1, |group| {
        let model = (&build as Build<'_>, &specs()[..]);
        let mut executor = laid_out_model(model, group, 1, 1, &Layout::default());
        let mut batch = batch(executor.device(), 1, 0);
        batch.take("ids");
        executor.evaluate(Some(batch)).unwrap_err().to_string()
    });
    assert_eq!(
        found.remove(0),
        "tensor 'ids' of a microbatch: found none, expected u32 [4, 2], as in the rehearsal of the model"
    );
}
