use crate::block::Block;
use crate::build::build_units;
use crate::config::{Architecture, ModelConfig};
use crate::error::ModelError;
use std::sync::Arc;
use trireme_base::{DType, RandomKey};
use trireme_tensor::tape::{Embedding, KeyValueCache, LossHead, Norm, RotaryTable};
use trireme_tensor::{
    Category, Device, DeviceError, ParameterId, ParameterInfo, ParameterSource, ParameterSpan,
    ParameterTable, Parameters, Tape, Tensor, Var,
};

/// A part of the model that is run, reduced and stepped as one.
#[derive(Debug, Clone)]
pub(crate) enum Unit {
    Embedding(Embedding),
    Block(Box<Block>),
    Head { norm: Norm, loss: LossHead },
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

/// What a unit's forward pass needs besides its input.
#[derive(Debug, Clone, Copy)]
pub struct Step<'a> {
    /// Values of all parameters.
    pub parameters: &'a dyn ParameterSource,
    /// Sequences and tokens of each.
    pub shape: (usize, usize),
}

/// What comes before the tokens of a forward pass.
#[derive(Debug)]
pub(crate) struct Past<'a> {
    /// Position of the first token.
    pub(crate) position: usize,
    /// Table of all positions up to the last token's (llama).
    pub(crate) rotary: Option<&'a Arc<RotaryTable>>,
    /// Keys and values of a block at earlier positions.
    pub(crate) cache: Option<&'a mut KeyValueCache>,
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
    rotary: Option<Arc<RotaryTable>>,
}

impl Model {
    /// Builds the model of a config, to run [`Model::forward`] on sequences of at most `seq_len_max` tokens.
    ///
    /// A [`Generation`](crate::Generation) has its own limit.
    pub fn new(config: ModelConfig, seq_len_max: usize, device: &Device) -> Result<Self, ModelError> {
        config.check()?;
        let (units, table) = build_units(&config);
        let rotary = rotary_table(&config, seq_len_max, device)?;
        Ok(Model { config, units, table: Arc::new(table), rotary })
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
    pub fn forward(&self, unit: usize, tape: &mut Tape, step: Step<'_>, x: Var) -> Result<Var, DeviceError> {
        let past = Past { position: 0, rotary: self.rotary.as_ref(), cache: None };
        self.forward_after(unit, tape, step, x, past)
    }

    /// As [`Model::forward`] for tokens that follow `past`.
    pub(crate) fn forward_after(
        &self,
        unit: usize,
        tape: &mut Tape,
        step: Step<'_>,
        x: Var,
        past: Past<'_>,
    ) -> Result<Var, DeviceError> {
        match &self.units[unit] {
            Unit::Embedding(embedding) => tape.embedding(step.parameters, embedding, x, past.position),
            Unit::Block(block) => {
                block.forward(tape, step.parameters, step.shape, past.rotary, x, past.cache)
            }
            Unit::Head { .. } => panic!("the head makes a loss or logits, not a value for a next unit"),
        }
    }

    /// Runs the head as a loss over `targets`; see [`Tape::loss`] for when it is known, and for the scale of
    /// gradients.
    pub fn forward_loss(
        &self,
        tape: &mut Tape,
        step: Step<'_>,
        x: Var,
        targets: Var,
        loss_scale: f32,
    ) -> Result<(), DeviceError> {
        let (norm, loss) = self.head();
        let normed = tape.norm(step.parameters, norm, x)?;
        tape.loss(step.parameters, loss, normed, targets, loss_scale)
    }

    /// Runs the head as logits: `[rows, vocab_size]`.
    pub fn forward_logits(&self, tape: &mut Tape, step: Step<'_>, x: Var) -> Result<Var, DeviceError> {
        let (norm, loss) = self.head();
        let normed = tape.norm(step.parameters, norm, x)?;
        tape.logits(step.parameters, loss, normed)
    }

    fn head(&self) -> (&Norm, &LossHead) {
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
