//! Runs units on a device that computes, so that its kernels can be timed.

use crate::bundle::{Batch, Bundle};
use crate::error::ModelError;
use crate::model::Model;
use crate::rehearsal::{Rehearsal, Rehearser, Watched};
use std::cell::Cell;
use trireme_tensor::{Category, Device, Fp8Recipe, Fp8State, Parameters, Precision};

impl Model {
    /// Runs a unit `num_rounds` times forward and backward, also with its record made again and with the halves of backward apart,
    /// on values as at the begin of a training: the passes of its rehearsal. `begin` is called before each round. Who wants to
    /// know how long kernels take [keeps a journal](Device::keep_journal), in which pauses separate passes.
    ///
    /// It takes memory for this unit alone, and that whose parameters it reads.
    ///
    /// # Errors
    /// What the device refuses.
    pub fn exercise(
        &self,
        unit: usize,
        device: &Device,
        (precision, fp8): (Precision, Option<Fp8Recipe>),
        rehearsal: &Rehearsal,
        num_rounds: usize,
        begin: &dyn Fn(),
    ) -> Result<(), ModelError> {
        let table = self.table();
        let owner = table.tie().filter(|tie| tie.reader == unit).map(|tie| tie.span.unit);
        let mut parts = table.shards(0, 1);
        let others =
            parts.iter_mut().enumerate().filter(|(other, _)| *other != unit && Some(*other) != owner);
        others.for_each(|(_, part)| *part = 0..0);
        let mut parameters = Parameters::zeros_of(table, parts, device, Category::Parameters)?;
        parameters.for_each_mut(|info, held, values| {
            info.initial.fill(&info.name, 0, held.start, values);
            Ok::<(), ModelError>(())
        })?;
        let parameters = Watched { parameters: &parameters, was_read: Cell::new(false) };
        let fp8 = fp8.map(|recipe| Fp8State::of_matrices(recipe, table));
        let fp8 = fp8.as_ref().map(Fp8State::scales);
        let rehearser = Rehearser { model: self, device, precision, fp8, parameters: &parameters };
        let specs: Vec<_> = rehearsal.batch.iter().map(|tensor| tensor.spec).collect();
        for _ in 0..num_rounds {
            let mut batch: Batch = rehearser.tensors(&specs)?;
            let inputs = match unit.checked_sub(1) {
                Some(below) => rehearser.tensors(&rehearsal.units[below].outputs)?,
                None => Bundle::new(),
            };
            begin();
            rehearser.unit(unit, inputs, &mut batch)?;
        }
        Ok(())
    }
}
