//! A model that is not a language model: any unit may pass on several tensors, read the batch, and add to the loss.

use std::ops::RangeInclusive;
use std::sync::Arc;
use trireme_base::{DType, Random, RandomKey};
use trireme_model::{Batch, Model, ModelError, TensorSpec, Unit, UnitContext};
use trireme_tensor::tape::{
    Accuracy, BackwardContext, Concat, Convert, CrossEntropy, Dropout, EmbeddingBag, ForwardContext,
    InputActivation, Linear, MeanLoss, Norm, Operation, SquaredError, Tanh,
};
use trireme_tensor::{Activation, Category, Device, DeviceError, Initial, Parameter, ParameterTable};

const FEATURES: usize = 6;
const WIDTH: usize = 8;
const ROWS: usize = 11;
const CLASSES: usize = 3;

/// A unit for dense features and bags of ids, with one output for each.
#[derive(Debug)]
struct Stem {
    dense: Arc<Linear>,
    bags: Arc<EmbeddingBag>,
}

impl Unit for Stem {
    fn forward(&self, cx: &mut UnitContext<'_>) -> Result<(), DeviceError> {
        let (features, ids) = (cx.batch("features"), cx.batch("ids"));
        let features = cx.apply(&Convert, [features])?;
        let dense = cx.apply(&self.dense, [features])?;
        let sparse = cx.apply(&self.bags, [ids])?;
        cx.output("dense", dense)?;
        cx.output("sparse", sparse)
    }
}

/// A unit with a layer on the sparse tensor. Without `reconstruction`, the dense tensor passes through. With it, a linear layer
/// reconstructs the features from the dense tensor, the loss includes their squared error, and tanh is applied to the dense tensor.
#[derive(Debug)]
struct Middle {
    norm: Arc<Norm>,
    linear: Arc<Linear>,
    dropout: Arc<Dropout>,
    reconstruction: Option<Arc<Linear>>,
}

impl Unit for Middle {
    fn forward(&self, cx: &mut UnitContext<'_>) -> Result<(), DeviceError> {
        let (dense, sparse) = (cx.input("dense"), cx.input("sparse"));
        let normed = cx.apply(&self.norm, [&sparse])?;
        let hidden = cx.apply(&self.linear, (normed, sparse))?;
        let hidden = cx.apply(&self.dropout, [hidden])?;
        cx.output("sparse", hidden)?;
        let Some(reconstruction) = &self.reconstruction else {
            return cx.output("dense", dense);
        };
        let features = cx.batch("features");
        let features = cx.apply(&Convert, [features])?;
        let near = cx.apply(reconstruction, [&dense])?;
        cx.apply_metric("distance", &MeanLoss(SquaredError), (&near, &features))?;
        cx.apply_loss(&MeanLoss(SquaredError), (near, features), 0.25)?;
        let dense = cx.apply(&Tanh, [dense])?;
        cx.output("dense", dense)
    }
}

/// Metric: the fraction of the rows of class 0 whose score for class 0 is positive.
#[derive(Debug)]
struct Recall;

impl Operation for Recall {
    fn num_inputs(&self) -> RangeInclusive<usize> {
        2..=2
    }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<(), DeviceError> {
        let (scores, device) = (cx.in_f32(cx.input(0))?, cx.device());
        let mut found = (0.0, 0);
        // Row by row, because a step must not allocate.
        for row in 0..scores.view().shape().rows() {
            let (mut score, mut class) = ([0.0_f32; CLASSES], [0_u32]);
            device.download(scores.view().rows(row, 1), &mut score).unwrap();
            device.download(cx.input(1).part(row, [1].into()), &mut class).unwrap();
            if class == [0] {
                found = (found.0 + f64::from(score[0] > 0.0), found.1 + 1);
            }
        }
        drop(scores);
        let sum = cx.scalar(found.0)?;
        cx.add_loss(sum, found.1)
    }

    fn backward_input(&self, _: &mut BackwardContext<'_>) -> Result<(), DeviceError> {
        Ok(())
    }
}

#[derive(Debug)]
struct Head {
    linear: Arc<Linear>,
    sparse_norm: Arc<Norm>,
}

impl Unit for Head {
    fn forward(&self, cx: &mut UnitContext<'_>) -> Result<(), DeviceError> {
        let (dense, sparse) = (cx.input("dense"), cx.input("sparse"));
        let sparse = cx.apply(&self.sparse_norm, [sparse])?;
        let both = cx.apply(&Concat { dim: 1 }, [dense, sparse])?;
        let logits = cx.apply(&self.linear, [both])?;
        let labels = cx.batch("labels");
        cx.apply_metric("accuracy", &Accuracy, (&logits, &labels))?;
        cx.apply_metric("recall", &Recall, (&logits, &labels))?;
        cx.apply_metric("cross_entropy", &CrossEntropy, (&logits, &labels))?;
        cx.apply_loss(&CrossEntropy, (logits, labels), 1.0)
    }
}

/// Builds a classifier of dense features and bags of ids, and adds its parameters to `table`. Two of its middle units also learn to
/// reproduce the features.
///
/// Its metrics are `distance` (of these two units), `accuracy`, `recall` (over the rows of class 0) and `cross_entropy`.
///
/// # Errors
/// Never. The return type is the one that [`Model::build_at`] expects.
pub fn build_classifier(_: &Device, mut table: ParameterTable) -> Result<Model, ModelError> {
    let normal = Initial::Normal { standard_deviation: 0.3 };
    let linear = |table: &mut ParameterTable, name: &str, inputs, outputs, activation| {
        Arc::new(Linear::new(table, name, [inputs, outputs], normal, activation))
    };
    let norm = |table: &mut ParameterTable, name: &str| {
        let weight = table.add(Parameter::vector(name, WIDTH, Initial::ONES));
        Arc::new(Norm { weight, bias: None, weight_offset: 0.0, epsilon: 1e-5, is_centered: false })
    };
    let identity = InputActivation::Identity;
    table.begin_unit("stem");
    let gelu = InputActivation::Elementwise(Activation::Gelu);
    let dense = linear(&mut table, "stem.dense", FEATURES, WIDTH, gelu);
    let bag = table.add(Parameter::embedding("stem.table", &[ROWS, WIDTH], normal));
    let bags = Arc::new(EmbeddingBag { table: bag, is_mean: true, is_padded: false });
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
                InputActivation::Elementwise(Activation::Gelu),
            ),
            dropout: Arc::new(Dropout::new(format!("{name}.dropout"), 0.2)),
            reconstruction: (layer != 2)
                .then(|| linear(&mut table, &format!("{name}.near"), WIDTH, FEATURES, identity)),
        }));
    }
    table.begin_unit("classes");
    let sparse_norm = norm(&mut table, "classes.norm");
    let linear = linear(&mut table, "classes", 2 * WIDTH, CLASSES, identity);
    units.push(Arc::new(Head { linear, sparse_norm }));
    Ok(Model::new(units, table))
}

/// Returns the tensors of one sample of the classifier.
pub fn classifier_sample() -> [TensorSpec; 3] {
    [
        TensorSpec::new("features", &[FEATURES], DType::F32),
        TensorSpec::new("ids", &[2], DType::U32),
        TensorSpec::new("labels", &[], DType::U32),
    ]
}

/// Returns the tensors of a microbatch of the classifier.
pub fn classifier_specs(num_samples: usize) -> [TensorSpec; 3] {
    classifier_sample().map(|spec| spec.in_batch(num_samples))
}

/// Returns the microbatch with the global index `index` of a step, the same on every rank.
///
/// # Panics
/// If the device has too little memory.
pub fn classifier_batch(device: &Device, num_samples: usize, step: u64, index: usize) -> Batch {
    let key = RandomKey::new(step << 32 | index as u64, "batch");
    let mut random = Random::new(key, 1 << 20);
    let tensor = |spec: TensorSpec| {
        let mut tensor = device.empty(spec.shape, spec.dtype, Category::Activations)?;
        let num = spec.shape.num_elements();
        let bound = match spec.name {
            "features" => {
                let mut values = vec![0.0_f32; num];
                key.fill_normal(&mut values, 1.0);
                device.upload(&values, tensor.view_mut());
                return Ok((spec.name, tensor));
            }
            "ids" => ROWS,
            _ => CLASSES,
        };
        let ids: Vec<u32> = (0..num).map(|_| random.below(bound as u64) as u32).collect();
        device.upload(&ids, tensor.view_mut());
        Ok((spec.name, tensor))
    };
    let batch = classifier_specs(num_samples).into_iter().map(tensor);
    batch.collect::<Result<_, DeviceError>>().expect("memory for a batch")
}
