//! Moves units between pipeline ranks, with their parameters and optimizer state.
//!
//! Between steps, nothing is in flight: the state of a unit consists of its parameters and its optimizer state. Each data-parallel
//! rank sends its own shard, as it is in memory, to the rank with the same place in the target stage. The order of sums does not depend on
//! the stages, so later steps have the same bits.

use super::parallelize::forward_program;
use super::{Executor, InFlight, Optimization, PendingMessages, ShardExchange, StepReports, Timeline};
use crate::error::Result;
use crate::gradients::Gradients;
use crate::layout::Placements;
use crate::memory::CountedMemory;
use crate::offload::{OffloadStores, try_each};
use std::ops::Range;
use std::sync::Arc;
use trireme_base::Rank;
use trireme_comm::Buffer;
use trireme_schedule::{Program, ProgramHeader, Stage, StateClass, validate};
use trireme_tensor::{Category, Device, ViewMut};

/// The class of the state that moves with a unit. It includes the weights that a rank updates, because units move only if parameters are
/// not sharded ([`StateLayout::class_of_weights`](trireme_schedule::StateLayout::class_of_weights)).
const CLASS: StateClass = StateClass::Optimizer;

impl Executor {
    /// Replaces the program with one whose stages have different units, and moves units to their new pipeline ranks, with their parameters
    /// and optimizer state. Collective; must be called between steps.
    ///
    /// Units move one after the other, each in one message: with AdamW in f32, 12 bytes per element of the shard. Memory is allocated when
    /// a unit arrives and freed when it has left, so a rank needs memory for at most its units before and after, and one message.
    ///
    /// # Errors
    /// If the program is not valid; nothing changes then. After errors of the device, groups and disks, the executor cannot be used.
    ///
    /// # Panics
    /// If the program differs from the current one in more than the units of stages and the order of actions; if gradients are compressed
    /// or parameters sharded, because their state does not move; if the pipeline does not drain between updates, because bits then depend
    /// on the stages.
    pub fn relocate(&mut self, program: Program) -> Result<()> {
        validate(&program, program.header.num_microbatches)?;
        // Stages stay on their ranks, so a unit that reads a tied parameter of another rank still reads it from the copy on its own rank.
        let without_units = |header: &ProgramHeader| {
            let stage = |stage: &Stage| Stage { units: 0..0, rank: stage.rank };
            ProgramHeader { stages: header.stages.iter().map(stage).collect(), ..header.clone() }
        };
        assert_eq!(
            without_units(&program.header),
            without_units(&self.program.header),
            "only the cut changes"
        );
        assert!(self.compressors().next().is_none(), "nothing is kept of gradients");
        let is_sharded = program.header.state.is_sharded(StateClass::Parameters);
        assert!(!is_sharded, "ranks have whole parameters");
        assert!(self.updates.is_none(), "a pipeline that does not drain has other bits with each cut");
        for unit in 0..self.model.num_units() {
            // Gathers after the last update may still be in flight.
            self.outside_step(|executor| {
                executor.parameters.await_gathered_unit(unit, &mut executor.waiting)
            })?;
        }
        let before = std::mem::replace(&mut self.program, program).header;
        self.renew_step_memory()?;
        self.move_units(&before)?;
        self.update_copies()
    }

    /// Reallocates the memory that holds no values between steps, for the new program.
    fn renew_step_memory(&mut self) -> Result<()> {
        let header = &self.program.header;
        self.gradients.release();
        self.passes.in_flight = InFlight::new(header, &self.profile);
        self.messages = PendingMessages::new(&self.ranks, header.num_microbatches, &self.device);
        let on = &self.optimization.device;
        self.optimization.exchanges = ShardExchange::of_units(&self.ranks, header, on, &self.device);
        let requests = Arc::clone(&self.reports.requests);
        self.reports = StepReports::new(header, &self.ranks, &self.profile, &self.device, requests)?;
        self.timeline = Timeline::new(self.program.actions.len());
        self.forward_program = forward_program(header)?;
        let shards_device =
            self.offload.options.device_of(&header.state, StateClass::Gradients, &self.device);
        let (table, device, messages) = (self.model.table(), &self.device, &self.messages.pool);
        self.gradients =
            Gradients::new(table, header, &self.ranks, device, shards_device, messages, &self.options)?;
        self.offload.is_squared.fill(false);
        Ok(())
    }

    fn move_units(&mut self, before: &ProgramHeader) -> Result<()> {
        let now = &self.program.header;
        let table = self.model.table();
        self.placements = Placements::new(table, now, self.ranks.mesh().clone());
        let parts = self.placements.parts(table, self.ranks.world().rank());
        if self.offload.stores.moves(CLASS) {
            // A swap file has space only for the units that it was created for. A new file replaces it, and needs the sizes of all states.
            for unit in now.held().filter(|&unit| !before.holds(unit)).collect::<Vec<_>>() {
                self.set_part(unit, parts[unit].clone(), true)?;
                self.release(CLASS, unit);
            }
        }
        let mut previous = std::mem::replace(
            &mut self.offload.stores,
            OffloadStores::new(&self.offload.options, &self.program, &self.device),
        );
        self.declare_offload_sizes();
        for (unit, part) in parts.into_iter().enumerate() {
            self.move_unit(unit, part, before, &mut previous)?;
        }
        self.offload.stores.earlier_disk_bytes = previous.disk_bytes();
        Ok(())
    }

    /// Moves a unit to its pipeline rank in the current program; this rank then updates `part` of it. `previous` holds the offloaded state
    /// of the earlier program, whose header is `before`.
    fn move_unit(
        &mut self,
        unit: usize,
        part: Range<usize>,
        before: &ProgramHeader,
        previous: &mut OffloadStores,
    ) -> Result<()> {
        let now = &self.program.header;
        let (own, from, to) = (now.rank, before.rank_of(unit), now.rank_of(unit));
        if from == own {
            std::mem::swap(&mut self.offload.stores, previous);
            let brought = self.fetch_state(CLASS, unit);
            std::mem::swap(&mut self.offload.stores, previous);
            brought?;
        }
        if from == own && to != own {
            self.send_unit(unit, to)?;
            self.set_part(unit, part, false)?;
        } else if to == own && from != own {
            if self.offload.stores.moves(CLASS) {
                self.reallocate(CLASS, unit)?
            } else {
                self.set_part(unit, part, true)?
            }
            self.receive_unit(unit, from)?;
        }
        if to == own { self.evict_state(CLASS, unit, true) } else { Ok(()) }
    }

    /// Changes the part of a unit that this rank updates. The full unit is allocated if this pipeline rank `holds` it.
    fn set_part(&mut self, unit: usize, part: Range<usize>, holds: bool) -> Result<()> {
        self.optimization.optimizer.set_part(unit, part.clone(), &self.optimization.device)?;
        self.parameters.set_part(unit, part, holds)
    }

    /// Calls `visit` for each allocation that moves with a unit: the weights that this rank updates, and the optimizer's state. They must
    /// be [in memory](Executor::fetch_state). Returns the first failure.
    fn visit_moving_memory(
        &mut self,
        unit: usize,
        mut visit: impl FnMut(&Device, ViewMut<'_>) -> Result<()>,
    ) -> Result<()> {
        let device = self.shard_device().clone();
        visit(&device, self.parameters.shard_mut(unit))?;
        let Optimization { optimizer, device, .. } = &mut self.optimization;
        try_each(&mut |each| optimizer.for_each_state_tensor(unit, |tensor| each(tensor)), |tensor| {
            visit(device, tensor.view_mut())
        })
    }

    /// Allocates a message for all memory that moves with a unit, and counts it.
    fn unit_message(&mut self, unit: usize) -> Result<(Buffer<u8>, CountedMemory)> {
        let (mut num_bytes, counted) = (0, CountedMemory::new(&self.device));
        self.visit_moving_memory(unit, |_, part| {
            num_bytes += part.num_bytes();
            Ok(())
        })?;
        counted.charge(Category::Communication, num_bytes)?;
        Ok((self.ranks.pipeline().buffer(num_bytes)?, counted))
    }

    fn send_unit(&mut self, unit: usize, to: usize) -> Result<()> {
        let (mut message, _counted) = self.unit_message(unit)?;
        let mut rest = &mut message[..];
        self.visit_moving_memory(unit, |device, part| {
            let (own, others) = std::mem::take(&mut rest).split_at_mut(part.num_bytes());
            rest = others;
            Ok(device.download(part.as_view(), own)?)
        })?;
        self.ranks.pipeline().send(message, Rank(to)).wait()?;
        Ok(())
    }

    fn receive_unit(&mut self, unit: usize, from: usize) -> Result<()> {
        let (message, _counted) = self.unit_message(unit)?;
        let message = self.ranks.pipeline().receive(message, Rank(from)).wait()?;
        let mut rest = &message[..];
        self.visit_moving_memory(unit, |device, part| {
            let (own, others) = rest.split_at(part.num_bytes());
            device.upload(own, part);
            rest = others;
            Ok(())
        })
    }
}
