use crate::block::{Block, Past};
use crate::build::build_units;
use crate::config::{Architecture, ModelConfig};
use crate::error::ModelError;
use std::sync::Arc;
use trireme_base::{DType, RandomKey};
use trireme_tensor::tape::{Embedding, LossHead, Norm, Recorder, RotaryTable};
use trireme_tensor::{
    Category, Device, DeviceError, ParameterId, ParameterInfo, ParameterSpan, ParameterTable, Parameters,
    Tensor, Var,
};

/// A part of the model that is run, reduced and stepped as one.
#[derive(Debug, Clone)]
pub(crate) enum Unit {
    Embedding(Arc<Embedding>),
    Block(Block),
    Head { norm: Arc<Norm>, loss: Arc<LossHead> },
}

/// Token ids of one microbatch.
#[derive(Debug)]
pub struct Batch {
    /// What is read: `[batch, seq_len]`, u32.
    pub inputs: Tensor,
    /// What is to be predicted, one position further: `[batch, seq_len]`, u32.
    pub targets: Tensor,
}

impl Batch {
    /// Room for `batch` sequences of `seq_len` tokens, zeroed.
    pub fn zeros(device: &Device, batch: usize, seq_len: usize) -> Result<Self, DeviceError> {
        let tensor = || device.zeros([batch, seq_len].into(), DType::U32, Category::Activations);
        Ok(Batch { inputs: tensor()?, targets: tensor()? })
    }

    /// Fills row `row` from a window of `seq_len + 1` tokens.
    ///
    /// # Panics
    /// If the window or the row does not fit.
    pub fn set_row(&mut self, row: usize, window: &[u32]) {
        let seq_len = self.inputs.shape().cols();
        assert_eq!(window.len(), seq_len + 1, "a window holds its targets");
        let range = row * seq_len..(row + 1) * seq_len;
        self.inputs.view_mut().u32s()[range.clone()].copy_from_slice(&window[..seq_len]);
        self.targets.view_mut().u32s()[range].copy_from_slice(&window[1..]);
    }
}

/// The rotary table of a model that has one, for positions below `num_positions`.
pub(crate) fn rotary_table(
    config: &ModelConfig,
    num_positions: usize,
    device: &Device,
) -> Result<Option<Arc<RotaryTable>>, DeviceError> {
    if config.architecture == Architecture::Gpt2 {
        return Ok(None);
    }
    let dim = config.head_dim;
    let frequency = |pair: usize| config.rope_theta.powf(-2.0 * pair as f64 / dim as f64);
    let frequencies: Vec<f64> = (0..dim / 2).map(frequency).collect();
    Ok(Some(Arc::new(RotaryTable::new(device, num_positions, &frequencies)?)))
}

/// A model: its units, and the table of their parameters.
#[derive(Debug, Clone)]
pub struct Model {
    config: ModelConfig,
    units: Vec<Unit>,
    table: Arc<ParameterTable>,
}

impl Model {
    /// Builds the model of a config, to run [`Model::forward`] on sequences of at most `seq_len_max` tokens.
    ///
    /// A [`Generation`](crate::Generation) has its own limit.
    pub fn new(config: ModelConfig, seq_len_max: usize, device: &Device) -> Result<Self, ModelError> {
        config.check()?;
        let rotary = rotary_table(&config, seq_len_max, device)?;
        let (units, table) = build_units(&config, rotary.as_ref());
        Ok(Model { config, units, table: Arc::new(table) })
    }

    /// What the model was built from.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Its parameters' names, shapes and places.
    pub fn table(&self) -> &Arc<ParameterTable> {
        &self.table
    }

    pub(crate) fn units(&self) -> &[Unit] {
        &self.units
    }

    /// Number of units: the embedding, one a block, the head.
    pub fn num_units(&self) -> usize {
        self.units.len()
    }

    /// The first parameter of the weight of each linear layer of the blocks: those that fp8 is for.
    pub fn linear_layers(&self) -> Vec<ParameterId> {
        let blocks = self.units.iter().filter_map(|unit| match unit {
            Unit::Block(block) => Some(block.linear_layers()),
            Unit::Embedding(_) | Unit::Head { .. } => None,
        });
        blocks.flatten().map(|linear| linear.weight.first).collect()
    }

    /// Random initial parameters. A parameter's values depend on the seed and its name alone.
    ///
    /// Matrices are normal with the config's standard deviation; gpt2 divides that of projections into the residual
    /// stream by `sqrt(2 num_layers)` (Radford et al. 2019, section 2.3). Norm weights are 1, biases 0.
    pub fn initial_parameters(&self, device: &Device, seed: u64) -> Result<Parameters, ModelError> {
        let mut parameters = Parameters::zeros(&self.table, device, Category::Parameters)?;
        parameters.for_each_mut(|info, held, values| {
            self.initialize(info, held.start, values, seed);
            Ok::<(), ModelError>(())
        })?;
        Ok(parameters)
    }

    /// Writes the random initial values of a parameter's elements from `first` on.
    pub fn initialize(&self, info: &ParameterInfo, first: usize, values: &mut [f32], seed: u64) {
        if info.shape.dims().len() >= 2 {
            let into_residual =
                self.config.architecture == Architecture::Gpt2 && info.name.ends_with("c_proj.weight");
            let divisor = if into_residual { (2.0 * self.config.num_layers as f32).sqrt() } else { 1.0 };
            let standard_deviation = self.config.initializer_range / divisor;
            RandomKey::new(seed, &info.name).fill_normal_from(first as u64, values, standard_deviation);
        } else if !info.name.ends_with(".bias") {
            values.fill(1.0);
        }
    }

    /// Runs unit `unit`, which is not the head, on what the unit before it made (the first: token ids).
    ///
    /// # Panics
    /// If `unit` is the head.
    pub fn forward(&self, unit: usize, recorder: &mut Recorder<'_>, x: Var) -> Result<Var, DeviceError> {
        self.forward_after(unit, recorder, x, None)
    }

    /// As [`Model::forward`] for tokens that follow `past`, if the unit is a block.
    pub(crate) fn forward_after(
        &self,
        unit: usize,
        recorder: &mut Recorder<'_>,
        x: Var,
        past: Option<Past<'_>>,
    ) -> Result<Var, DeviceError> {
        match &self.units[unit] {
            Unit::Embedding(embedding) => recorder.apply(embedding, [x]),
            Unit::Block(block) => block.forward(recorder, x, past),
            Unit::Head { .. } => panic!("the head makes a loss or logits, not a value for a next unit"),
        }
    }

    /// Runs the head as a loss over `targets`; see [`LossHead`] for when it is known.
    pub fn forward_loss(&self, recorder: &mut Recorder<'_>, x: Var, targets: Var) -> Result<(), DeviceError> {
        let (norm, loss) = self.head();
        let normed = recorder.apply(norm, [x])?;
        recorder.apply_loss(loss, (normed, targets))
    }

    /// Runs the head as logits: `[.., vocab_size]`.
    pub fn forward_logits(&self, recorder: &mut Recorder<'_>, x: Var) -> Result<Var, DeviceError> {
        let (norm, loss) = self.head();
        let normed = recorder.apply(norm, [x])?;
        recorder.logits(loss, &normed)
    }

    fn head(&self) -> (&Arc<Norm>, &Arc<LossHead>) {
        match self.units.last() {
            Some(Unit::Head { norm, loss }) => (norm, loss),
            _ => unreachable!("every model ends with its head"),
        }
    }

    /// Units that read another unit's parameters, the reader and the owner: the head those of the embedding, where they
    /// are tied.
    pub fn ties(&self) -> Vec<(usize, usize)> {
        let tie = |span: ParameterSpan| (self.num_units() - 1, span.unit);
        self.tied_span().map(tie).into_iter().collect()
    }

    /// The parameters that a unit other than theirs reads, if there are any: the head, those of the embedding.
    pub fn tied_span(&self) -> Option<ParameterSpan> {
        let weight = self.head().1.weight;
        (weight.unit + 1 < self.num_units()).then_some(weight)
    }
}
