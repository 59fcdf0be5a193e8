//! A residual network (He et al., "Deep residual learning for image recognition", 2016) that classifies the shapes in small images.
//!
//! `cargo run --release --package residual_network -- train examples/residual_network/shapes.toml --workers 2`

pub(crate) mod convolution;
pub(crate) mod images;

use convolution::Convolution;
use images::{CLASSES, Images, SIZE};
use std::process::ExitCode;
use std::sync::Arc;
use trireme::model::{Model, ModelError, Unit, UnitContext};
use trireme::tape::{
    Accuracy, Add, Convert, CopyToRanks, CrossEntropy, InputActivation, Linear, Mean, Relu, SumOverRanks,
};
use trireme::tensor::{Device, Initial, ParameterTable};
use trireme::train::TrainError;
use trireme::{Dataset, Task};

const CHANNELS: usize = 8;
const NUM_BLOCKS: usize = 4;

pub(crate) struct Shapes;

impl Task for Shapes {
    fn description(&self) -> String {
        format!("residual network of {NUM_BLOCKS} blocks and {CHANNELS} channels")
    }

    fn build(&self, _: &Device, mut table: ParameterTable) -> Result<Model, ModelError> {
        let mut units: Vec<Arc<dyn Unit>> = Vec::new();
        table.begin_unit("stem");
        let convolution = Convolution::new(&mut table, "stem", SIZE, (1, CHANNELS), None);
        units.push(Arc::new(move |cx: &mut UnitContext<'_>| {
            let image = cx.batch("image");
            let x = cx.apply(&convolution, [image])?;
            cx.output("x", x)
        }));
        for block in 0..NUM_BLOCKS {
            table.begin_unit(format!("block.{block}"));
            let [first, second] =
                [("first", Convolution::by_outputs()), ("second", Convolution::by_inputs())].map(
                    |(name, cut)| {
                        let name = format!("block.{block}.{name}");
                        Convolution::new(&mut table, &name, SIZE, (CHANNELS, CHANNELS), Some(cut))
                    },
                );
            units.push(Arc::new(move |cx: &mut UnitContext<'_>| {
                let x = cx.input("x");
                let hidden = cx.apply(&CopyToRanks, [&x])?;
                let hidden = cx.apply(&first, [hidden])?;
                let hidden = cx.apply(&Relu, [hidden])?;
                let hidden = cx.apply(&second, [hidden])?;
                let hidden = cx.apply(&SumOverRanks, [hidden])?;
                let sum = cx.apply(&Add, (x, hidden))?;
                let x = cx.apply(&Relu, [sum])?;
                cx.output("x", x)
            }));
        }
        table.begin_unit("head");
        let initial = Initial::Normal { standard_deviation: 0.1 };
        let sizes = [CHANNELS, CLASSES];
        let linear = Linear::new(&mut table, "head", sizes, initial, InputActivation::Identity);
        let linear = Arc::new(linear);
        units.push(Arc::new(move |cx: &mut UnitContext<'_>| {
            let (x, label) = (cx.input("x"), cx.batch("label"));
            let pooled = cx.apply(&Mean { dim: 1 }, [x])?;
            let pooled = cx.apply(&Convert, [pooled])?;
            let logits = cx.apply(&linear, [pooled])?;
            cx.apply_metric("accuracy", &Accuracy, (&logits, &label))?;
            cx.apply_loss(&CrossEntropy, (logits, label), 1.0)
        }));
        Ok(Model::new(units, table))
    }

    fn train_data(&self, seed: u64) -> Result<Box<dyn Dataset>, TrainError> {
        Ok(Box::new(Images { num_samples: 1 << 16, seed, name: "train" }))
    }

    fn validation_data(&self) -> Result<Option<Box<dyn Dataset>>, TrainError> {
        Ok(Some(Box::new(Images { num_samples: 256, seed: 0, name: "validation" })))
    }
}

fn main() -> ExitCode {
    trireme::run(Shapes)
}
