//! Activations of the microbatches under way.

use crate::setup::{BatchMemory, MemorySetup};
use crate::usage::Usage;
use trireme_base::{Category, UnitPasses};
use trireme_schedule::{Action, Keep, Message, MessageKind, Outline};

const ACTIVATIONS: Category = Category::Activations;

#[derive(Debug)]
pub(super) struct Passes<'a> {
    setup: &'a MemorySetup,
    num_microbatches: usize,
    /// For each microbatch: bytes of what the last unit made.
    outputs: Vec<usize>,
    /// For each microbatch: bytes of the gradient of what the unit below made.
    grads: Vec<usize>,
    /// What forward kept, by unit, then microbatch.
    keeps: Vec<Keep>,
    /// Whether that has left the device.
    is_away: Vec<bool>,
    /// By microbatch, then tensor of the batch: units on this rank that have not yet read it for the last time.
    num_readers: Vec<usize>,
}

impl<'a> Passes<'a> {
    pub(super) fn new(setup: &'a MemorySetup, num_microbatches: usize) -> Self {
        let zeros = || vec![0; num_microbatches];
        let num_passes = num_microbatches * setup.units.len();
        let (keeps, is_away) = (vec![Keep::All; num_passes], vec![false; num_passes]);
        let num_readers = vec![0; num_microbatches * setup.batch.len()];
        Passes { setup, num_microbatches, outputs: zeros(), grads: zeros(), keeps, is_away, num_readers }
    }

    fn sizes(&self, unit: usize) -> &'a UnitPasses {
        &self.setup.units[unit].passes
    }

    /// The tensors of a step's microbatches are there from its beginning, as far as units on this rank read them.
    pub(super) fn begin(&mut self, outline: &Outline, usage: &mut Usage) {
        let tensors = &self.setup.batch;
        for (place, num_readers) in self.num_readers.iter_mut().enumerate() {
            let BatchMemory { bytes, readers } = &tensors[place % tensors.len()];
            *num_readers = readers.iter().filter(|&&unit| outline.holds(unit)).count();
            usage.take(ACTIVATIONS, if *num_readers > 0 { *bytes } else { 0 });
        }
    }

    /// What another rank has sent for a pass is copied to the device.
    pub(super) fn arrive(&mut self, action: Action, usage: &mut Usage) {
        let (unit, microbatch) = (action.unit(), action.microbatch().unwrap_or(0));
        let (slots, bytes) = match action {
            Action::Forward { .. } => (&mut self.outputs, self.setup.units[unit].passes.input),
            _ => (&mut self.grads, self.setup.units[unit].passes.output),
        };
        slots[microbatch] = bytes;
        usage.take(ACTIVATIONS, bytes);
    }

    /// What passes have made goes to another rank.
    pub(super) fn leave_sent(&mut self, message: Message, usage: &mut Usage) {
        let made = match message.kind {
            MessageKind::Activation => &mut self.outputs[message.microbatch],
            MessageKind::Gradient => &mut self.grads[message.microbatch],
            MessageKind::TiedGradient | MessageKind::Parameters => return,
        };
        usage.give(ACTIVATIONS, std::mem::take(made));
    }

    pub(super) fn forward(&mut self, unit: usize, microbatch: usize, keep: Keep, usage: &mut Usage) {
        let sizes = self.sizes(unit);
        self.record(unit, microbatch, usage);
        usage.give(ACTIVATIONS, sizes.record - kept(sizes, keep));
        self.keeps[unit * self.num_microbatches + microbatch] = keep;
    }

    /// What forward has kept leaves the device; its bytes.
    pub(super) fn evict(&mut self, unit: usize, microbatch: usize, usage: &mut Usage) -> usize {
        let pass = unit * self.num_microbatches + microbatch;
        self.is_away[pass] = true;
        let bytes = kept(self.sizes(unit), self.keeps[pass]);
        usage.give(ACTIVATIONS, bytes);
        bytes
    }

    /// What forward has kept is back when it is worked with; the bytes that have come.
    pub(super) fn restore(&mut self, unit: usize, microbatch: usize, usage: &mut Usage) -> usize {
        let pass = unit * self.num_microbatches + microbatch;
        if !std::mem::take(&mut self.is_away[pass]) {
            return 0;
        }
        let bytes = kept(self.sizes(unit), self.keeps[pass]);
        usage.take(ACTIVATIONS, bytes);
        bytes
    }

    pub(super) fn recompute(&mut self, unit: usize, microbatch: usize, usage: &mut Usage) {
        let sizes = self.sizes(unit);
        match self.keeps[unit * self.num_microbatches + microbatch] {
            Keep::All => (),
            Keep::Products => {
                usage.touch(ACTIVATIONS, sizes.renewal_peak - sizes.products);
                usage.take(ACTIVATIONS, sizes.record - sizes.products);
            }
            Keep::Input => {
                self.outputs[microbatch] = sizes.input;
                self.record(unit, microbatch, usage);
            }
            Keep::Nothing => self.record(unit, microbatch, usage),
        }
    }

    /// From the input to the record and the output.
    fn record(&mut self, unit: usize, microbatch: usize, usage: &mut Usage) {
        let sizes = self.sizes(unit);
        let input = std::mem::replace(&mut self.outputs[microbatch], sizes.output);
        usage.touch(ACTIVATIONS, sizes.forward_peak - input);
        usage.give(ACTIVATIONS, input);
        usage.take(ACTIVATIONS, sizes.record + sizes.output);
    }

    /// What a recomputation has made for a unit above that needs it no more.
    pub(super) fn leave_output(&mut self, microbatch: usize, usage: &mut Usage) {
        usage.give(ACTIVATIONS, std::mem::take(&mut self.outputs[microbatch]));
    }

    pub(super) fn backward(&mut self, unit: usize, microbatch: usize, usage: &mut Usage) {
        let sizes = self.sizes(unit);
        self.differentiate(sizes, sizes.backward_peak, microbatch, usage);
        self.leave_batch(unit, microbatch, usage);
    }

    pub(super) fn backward_input(&mut self, unit: usize, microbatch: usize, usage: &mut Usage) {
        let sizes = self.sizes(unit);
        self.differentiate(sizes, sizes.input_half_peak, microbatch, usage);
        usage.take(ACTIVATIONS, sizes.halved);
    }

    pub(super) fn backward_weight(&mut self, unit: usize, microbatch: usize, usage: &mut Usage) {
        let sizes = self.sizes(unit);
        usage.touch(ACTIVATIONS, sizes.weight_half_peak - sizes.halved);
        usage.give(ACTIVATIONS, sizes.halved);
        self.leave_batch(unit, microbatch, usage);
    }

    /// From the record and the output's gradient to the input's.
    fn differentiate(&mut self, sizes: &UnitPasses, peak: usize, microbatch: usize, usage: &mut Usage) {
        let before = sizes.record + self.grads[microbatch];
        usage.touch(ACTIVATIONS, peak - before);
        usage.give(ACTIVATIONS, before);
        usage.take(ACTIVATIONS, sizes.input_grad);
        self.grads[microbatch] = sizes.input_grad;
    }

    /// A unit has read the batch for the last time.
    fn leave_batch(&mut self, unit: usize, microbatch: usize, usage: &mut Usage) {
        let first = microbatch * self.setup.batch.len();
        for (tensor, num_readers) in self.setup.batch.iter().zip(&mut self.num_readers[first..]) {
            if tensor.readers.contains(&unit) {
                *num_readers -= 1;
                usage.give(ACTIVATIONS, if *num_readers == 0 { tensor.bytes } else { 0 });
            }
        }
    }
}

/// Bytes that forward of a unit leaves.
pub(crate) fn kept(sizes: &UnitPasses, keep: Keep) -> usize {
    match keep {
        Keep::All => sizes.record,
        Keep::Products => sizes.products,
        Keep::Input => sizes.input,
        Keep::Nothing => 0,
    }
}
