//! Runs step programs.

mod finishing;

use crate::error::ParallelError;
use crate::fp8::AgreedScales;
use crate::gradients::Gradients;
use crate::step::{ExecutorOptions, StepOutcome, StepPlan};
use crate::tree::TreeSum;
use std::sync::Arc;
use trireme_base::{Rank, ReduceOp};
use trireme_comm::{Buffer, Compression, Compressor, Group, Work};
use trireme_model::{Batch, Model, Step};
use trireme_optim::{LossScaler, Optimizer, WholeUnits};
use trireme_schedule::{Action, Program, validate};
use trireme_tensor::tape::Recording;
use trireme_tensor::{Device, Fp8State, Parameters, Tape, Tensor, Var};

/// A unit's forward pass of one microbatch, kept for its backward.
struct Pass {
    tape: Tape,
    input: Var,
    /// `None` for the head, whose backward starts from the loss.
    output: Option<Var>,
}

/// Microbatches under way.
struct InFlight {
    /// For each microbatch: what the last unit made, to be read by the next.
    activations: Vec<Option<Tensor>>,
    targets: Vec<Option<Tensor>>,
    /// For each microbatch: gradient of what the unit below made.
    grads: Vec<Option<Tensor>>,
    /// By unit, then microbatch.
    passes: Vec<Option<Pass>>,
    /// Tapes to be used again, so that steps allocate nothing.
    spare_tapes: Vec<Tape>,
}

/// One rank's share of a model in training: parameters, gradients, optimizer, and what runs its programs.
pub struct Executor {
    model: Model,
    device: Device,
    group: Arc<Group>,
    options: ExecutorOptions,
    program: Program,
    parameters: Parameters,
    optimizer: Optimizer,
    gradients: Gradients,
    in_flight: InFlight,
    loss_scaler: LossScaler,
    fp8: Option<AgreedScales>,
    losses: TreeSum<f64>,
    loss_buffer: Option<Buffer<f64>>,
    loss_reduction: Option<Work<Buffer<f64>>>,
}

impl Executor {
    /// Proves `program` and takes memory for gradients from the group; collective over the group.
    pub fn new(
        model: Model,
        parameters: Parameters,
        optimizer: Optimizer,
        group: Arc<Group>,
        device: &Device,
        program: Program,
        options: ExecutorOptions,
    ) -> Result<Self, ParallelError> {
        validate(&program, 1)?;
        let gradients = Gradients::new(model.table(), device, &group, &options)?;
        let loss_buffer = Some(group.buffer(1)?);
        let fp8 = options.fp8.map(|recipe| AgreedScales::new(recipe, &model, &group)).transpose()?;
        let none = |len: usize| (0..len).map(|_| None).collect();
        let in_flight = InFlight {
            activations: none(program.num_microbatches),
            targets: none(program.num_microbatches),
            grads: none(program.num_microbatches),
            passes: (0..program.num_units * program.num_microbatches).map(|_| None).collect(),
            spare_tapes: Vec::with_capacity(program.num_units * program.num_microbatches),
        };
        Ok(Executor {
            model,
            device: device.clone(),
            group,
            options,
            program,
            parameters,
            optimizer,
            gradients,
            in_flight,
            loss_scaler: LossScaler::new(options.loss_scaling),
            fp8,
            losses: TreeSum::new(),
            loss_buffer,
            loss_reduction: None,
        })
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The device that this rank computes on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The data-parallel group.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// The step program.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// The parameters.
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// The optimizer with its state.
    pub fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    /// Parameters and optimizer, to load.
    pub fn state_mut(&mut self) -> (&mut Parameters, &mut Optimizer) {
        (&mut self.parameters, &mut self.optimizer)
    }

    /// The scale of the loss.
    pub fn loss_scaler(&self) -> &LossScaler {
        &self.loss_scaler
    }

    /// The scale of the loss, to load; alike on all ranks.
    pub fn loss_scaler_mut(&mut self) -> &mut LossScaler {
        &mut self.loss_scaler
    }

    /// The scales of fp8, if the model works in it.
    pub fn fp8_state(&self) -> Option<&Fp8State> {
        self.fp8.as_ref().map(AgreedScales::state)
    }

    /// The scales of fp8, to load; alike on all ranks.
    pub fn fp8_state_mut(&mut self) -> Option<&mut Fp8State> {
        self.fp8.as_mut().map(AgreedScales::state_mut)
    }

    /// How gradients are compressed.
    pub fn compression(&self) -> Compression {
        self.options.compression
    }

    /// The compressors of the units whose gradients are compressed, each with the unit's name.
    pub fn compressors(&self) -> impl Iterator<Item = (&str, &Compressor)> {
        self.gradients.compressors()
    }

    /// The same, to load; what is not a rank's own, alike on all ranks.
    pub fn compressors_mut(&mut self) -> impl Iterator<Item = (&str, &mut Compressor)> {
        self.gradients.compressors_mut()
    }

    /// Compares the parameters of all ranks; collective.
    pub fn check_replicas(&self) -> Result<(), ParallelError> {
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        for unit in 0..self.model.num_units() {
            for value in self.parameters.flat(unit).f32s() {
                hash = (hash ^ u64::from(value.to_bits())).wrapping_mul(0x0100_0000_01b3);
            }
        }
        let hashes = self.group.all_gather_bytes(&hash.to_le_bytes()).wait()?;
        let number = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
        let expected = number(&hashes[0]);
        match hashes.iter().map(|bytes| number(bytes)).enumerate().find(|(_, found)| *found != expected) {
            Some((rank, found)) => Err(ParallelError::ReplicasDiffer { rank: Rank(rank), found, expected }),
            None => Ok(()),
        }
    }

    /// Runs the program once: a training step over this rank's microbatches, taken from `batches` in order.
    ///
    /// With a dynamic loss scale, a step that overflows is skipped on all ranks: it leaves parameters and optimizer as
    /// they are, and halves the scale.
    ///
    /// # Errors
    /// [`ParallelError::NotFinite`] and [`ParallelError::LossScaleExhausted`] before anything is updated; and what device,
    /// model and group refuse.
    pub fn run(
        &mut self,
        plan: StepPlan,
        batches: &mut dyn ExactSizeIterator<Item = Batch>,
    ) -> Result<StepOutcome, ParallelError> {
        let expected = self.program.num_microbatches;
        if batches.len() < expected {
            return Err(ParallelError::TooFewMicrobatches { expected, found: batches.len() });
        }
        let mut finished = None;
        for index in 0..self.program.actions.len() {
            let action = self.program.actions[index];
            // As in the program's text, which begins with a line of sizes.
            self.group.set_line(format_args!("step {}, line {}: {action}", plan.step, index + 2));
            match action {
                Action::Forward { unit, microbatch } => {
                    if unit == 0 {
                        let batch = batches.next().expect("the number of microbatches was checked");
                        self.in_flight.activations[microbatch] = Some(batch.inputs);
                        self.in_flight.targets[microbatch] = Some(batch.targets);
                    }
                    self.forward(unit, microbatch)?;
                }
                Action::Backward { unit, microbatch } => self.backward(unit, microbatch)?,
                Action::ReduceGrad { unit } => self.gradients.reduce(unit, &self.group)?,
                Action::Step { unit } => {
                    let (_, update) = match finished {
                        Some(finished) => finished,
                        None => *finished.insert(self.finish_gradients(plan)?),
                    };
                    if let Some(settings) = update {
                        let grads = self.gradients.reduced(unit);
                        let parameters = self.parameters.flat_mut(unit);
                        let shards = &mut WholeUnits;
                        self.optimizer.step_unit(&self.device, unit, parameters, grads, settings, shards)?;
                    }
                }
            }
        }
        self.group.set_line(format_args!(""));
        Ok(finished.expect("a valid program steps every unit").0)
    }

    fn forward(&mut self, unit: usize, microbatch: usize) -> Result<(), ParallelError> {
        let in_flight = &mut self.in_flight;
        let mut tape = in_flight
            .spare_tapes
            .pop()
            .unwrap_or_else(|| new_tape(&self.device, Recording::On, &self.options, self.fp8.as_ref()));
        let step = Step {
            parameters: &self.parameters,
            shape: (self.options.local_batch_size, self.options.seq_len),
        };
        let activation = in_flight.activations[microbatch].take().expect("the unit below has run");
        let input = tape.input(activation);
        let output = if unit + 1 == self.program.num_units {
            let targets = in_flight.targets[microbatch].take().expect("targets wait for the head");
            let targets = tape.input(targets);
            let loss_scale = self.loss_scaler.scale() as f32;
            self.model.forward_loss(&mut tape, step, input, targets, loss_scale)?;
            None
        } else {
            let output = self.model.forward(unit, &mut tape, step, input)?;
            in_flight.activations[microbatch] = Some(tape.take_value(output));
            Some(output)
        };
        in_flight.passes[unit * self.program.num_microbatches + microbatch] =
            Some(Pass { tape, input, output });
        Ok(())
    }

    fn backward(&mut self, unit: usize, microbatch: usize) -> Result<(), ParallelError> {
        let in_flight = &mut self.in_flight;
        let slot = unit * self.program.num_microbatches + microbatch;
        let Pass { mut tape, input, output } = in_flight.passes[slot].take().expect("forward has run");
        let output = output.map(|output| {
            (output, in_flight.grads[microbatch].take().expect("the unit above has run backward"))
        });
        let is_head = output.is_none();
        tape.backward(&self.parameters, output, &mut self.gradients)?;
        in_flight.grads[microbatch] = tape.take_grad(input);
        let loss_sum = tape.loss_sum();
        tape.clear();
        in_flight.spare_tapes.push(tape);
        self.gradients.close(unit);
        if is_head {
            let loss = loss_sum.expect("backward of the head computes the loss");
            self.losses.push(loss, |left, right| *left += right);
            if microbatch + 1 == self.program.num_microbatches {
                self.reduce_loss();
            }
        }
        Ok(())
    }

    /// The loss travels ahead of the first gradient.
    fn reduce_loss(&mut self) {
        let mut buffer = self.loss_buffer.take().expect("the loss is reduced once a step");
        buffer[0] = self.losses.finish(|left, right| *left += right).expect("a step has microbatches");
        self.loss_reduction = Some(self.group.all_reduce(buffer, ReduceOp::Sum));
    }

    /// Sum of the losses of a batch's rows in nats, without training; not collective.
    pub fn evaluate(&mut self, batch: Batch) -> Result<f64, ParallelError> {
        let shape = batch.inputs.shape();
        let step = Step { parameters: &self.parameters, shape: (shape.rows(), shape.cols()) };
        let new_tape = || new_tape(&self.device, Recording::Off, &self.options, self.fp8.as_ref());
        let mut activation = batch.inputs;
        for unit in 0..self.program.num_units - 1 {
            let mut tape = new_tape();
            let input = tape.input(activation);
            let output = self.model.forward(unit, &mut tape, step, input)?;
            activation = tape.take_value(output);
        }
        let mut tape = new_tape();
        let (input, targets) = (tape.input(activation), tape.input(batch.targets));
        self.model.forward_loss(&mut tape, step, input, targets, 1.0)?;
        Ok(tape.loss_sum().expect("a tape that does not record computes the loss at once"))
    }
}

fn new_tape(
    device: &Device,
    recording: Recording,
    options: &ExecutorOptions,
    fp8: Option<&AgreedScales>,
) -> Tape {
    let scales = fp8.map(|fp8| Arc::clone(fp8.state().scales()));
    Tape::new(device, recording, options.precision).with_fp8(scales)
}
