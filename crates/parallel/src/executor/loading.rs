//! Loads weights and optimizer state into an executor, gathers weights, and compares replicas.

use super::Executor;
use crate::error::{ParallelError, Result};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use trireme_base::{AxisRank, Rank};
use trireme_comm::{Buffer, Group};
use trireme_optim::StateInfo;
use trireme_schedule::StateClass;
use trireme_tensor::{Category, ModelRank, ParameterInfo, ParameterTable, Parameters};

impl Executor {
    /// Calls `write` for each parameter that has elements which this rank updates, with the range of these elements and a slice of zeros
    /// for their new values. The calls are local. Afterwards, the ranks update their copies of the parameters collectively, except a rank
    /// on which `write` failed.
    ///
    /// # Errors
    /// Errors of `write`, and errors of disks and groups.
    pub fn load_parameters<E: From<ParallelError>>(
        &mut self,
        mut write: impl FnMut(&ParameterInfo, Range<usize>, &mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let class = self.class_of_weights();
        let heartbeat = self.group().heartbeat().clone();
        let mut write = |info: &ParameterInfo, held: Range<usize>, values: &mut [f32]| {
            heartbeat.beat();
            write(info, held, values)
        };
        self.for_each_held_unit(class, true, |executor, unit| executor.parameters.load(unit, &mut write))?;
        Ok(self.update_copies()?)
    }

    /// Calls `read` for each state of the optimizer that this rank stores, to write its values.
    ///
    /// # Errors
    /// Errors of `read`, and errors of disks.
    pub fn load_optimizer<E: From<ParallelError>>(
        &mut self,
        mut read: impl FnMut(&StateInfo<'_>, &mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let heartbeat = self.group().heartbeat().clone();
        let mut read = |info: &StateInfo<'_>, values: &mut [f32]| {
            heartbeat.beat();
            read(info, values)
        };
        self.for_each_held_unit(StateClass::Optimizer, true, |executor, unit| {
            executor.optimization.optimizer.load_states(unit, &executor.optimization.device, &mut read)
        })
    }

    /// Sets all parameters to their declared initial values. Collective.
    ///
    /// # Errors
    /// Errors of the device, the groups and disks.
    pub fn initialize(&mut self, seed: u64) -> Result<()> {
        self.load_parameters(|info, held, values| {
            info.initialize(seed, held, values);
            Ok(())
        })
    }

    /// Updates all copies that operations read, after parameters were loaded. Collective.
    pub(super) fn update_copies(&mut self) -> Result<()> {
        self.parameters.invalidate();
        if self.parameters.keeps_full_units() {
            let class = self.class_of_weights();
            self.for_each_held_unit(class, false, |executor, unit| executor.parameters.unshard(unit))?;
        }
        self.outside_step(|executor| {
            let Executor { model, parameters, waiting, .. } = &mut *executor;
            (0..model.num_units()).try_for_each(|unit| parameters.await_gathered_unit(unit, waiting))?;
            executor.exchange_tied_units()
        })
    }

    /// Gathers all parameters into host memory of rank 0; returns `None` on the other ranks. Collective.
    ///
    /// Every rank of a replica gathers one unit at a time, so with ZeRO the other ranks need no memory for more than one unit.
    ///
    /// # Errors
    /// Errors of the device, the groups and disks. If rank 0 cannot allocate memory for the parameters, it alone returns an error, before
    /// anything is gathered.
    pub fn gather_parameters(&mut self) -> Result<Option<Parameters>> {
        let is_root = self.group().rank() == Rank::ROOT;
        let table = Arc::clone(self.model.table());
        let is_whole = table.model_rank() == ModelRank::ALONE;
        let full_table = if is_whole { Arc::clone(&table) } else { Arc::new(table.full()) };
        let zeros = || Parameters::zeros(&full_table, &self.device.host()?, Category::Parameters);
        let all = is_root.then(zeros).transpose();
        let outcomes = self.group().all_gather_bytes(&[u8::from(all.is_err())]).wait()?;
        let mut all = all?;
        if outcomes[Rank::ROOT.0] != [0] {
            return Ok(None);
        }
        let tensor = Arc::clone(self.ranks.tensor());
        for (unit, info) in table.units().iter().enumerate() {
            let group = Arc::clone(self.ranks.state_of(info).update_group(&self.program.header));
            let mut buffer = group.buffer::<f32>(info.padded_len())?;
            let owner = self.program.header.rank_of(unit);
            if self.program.header.holds(unit) {
                let part = self.parameters.parts()[unit].clone();
                let class = self.class_of_weights();
                self.fetch_state(class, unit)?;
                self.shard_device().download_f32s(self.parameters.shard(unit), &mut buffer[part])?;
                self.evict_state(class, unit, false)?;
                buffer = group.all_gather(buffer).wait()?;
            }
            let buffer = self.ranks.pipeline().broadcast(buffer, Rank(owner)).wait()?;
            if is_whole {
                all.iter_mut().for_each(|all| all.set(unit, &buffer[..info.num_elements]));
                continue;
            }
            let mut parts = gather_from(&tensor, buffer)?;
            if let Some(experts) = self.ranks.experts().filter(|_| info.has_experts()) {
                parts = gather_from(experts, parts)?;
            }
            if let Some(all) = &mut all {
                all.set(unit, &assemble_unit(&table, &full_table, unit, &parts));
            }
        }
        Ok(all)
    }

    /// Checks that parameters are equal on all ranks that hold them: on data-parallel replicas, and where they are replicated along the
    /// tensor or expert axis. Collective.
    ///
    /// # Errors
    /// [`ParallelError::ReplicasDiffer`] if they differ; errors of the device, the groups and disks.
    pub fn check_replicas(&mut self) -> Result<()> {
        let table = Arc::clone(self.model.table());
        let [mut without_experts, mut with_experts, mut shared_by_experts] = [Fnv1a::EMPTY; 3];
        let mut by_num_replicas: BTreeMap<usize, Fnv1a> = BTreeMap::new();
        let replicated =
            table.parameters().iter().map(ParameterInfo::num_replicas).filter(|number| *number > 1);
        by_num_replicas.extend(replicated.map(|number| (number, Fnv1a::EMPTY)));
        self.for_each_held_unit(self.class_of_weights(), false, |executor, unit| {
            let values = executor.shard_device().read_f32s(executor.parameters.shard(unit))?;
            let bits: &[u32] = bytemuck::cast_slice(&values);
            let has_experts = table.units()[unit].has_experts();
            if has_experts { &mut with_experts } else { &mut without_experts }.add(bits);
            let part = &executor.parameters.parts()[unit];
            for info in &table.parameters()[table.units()[unit].parameters.clone()] {
                let Some(held) = info.stored(part) else { continue };
                let bits = &bits[info.offset + held.start - part.start..][..held.len()];
                if let Some(hash) = by_num_replicas.get_mut(&info.num_replicas()) {
                    hash.add(bits);
                }
                if has_experts && info.expert.is_none() {
                    shared_by_experts.add(bits);
                }
            }
            Ok::<_, ParallelError>(())
        })?;
        let header = &self.program.header;
        self.compare(self.ranks.state.dense.same_update_group(header), without_experts)?;
        self.compare(self.ranks.state.of_experts().same_update_group(header), with_experts)?;
        self.ranks.experts().map_or(Ok(()), |experts| self.compare(experts, shared_by_experts))?;
        by_num_replicas
            .into_iter()
            .try_for_each(|(number, hash)| self.compare(self.ranks.replicated_on(number), hash))
    }

    fn compare(&self, group: &Group, Fnv1a(own): Fnv1a) -> Result<()> {
        // Each hash is sent with its world rank.
        let own = [self.group().rank().0 as u64, own];
        let hashes = group.all_gather_bytes(bytemuck::bytes_of(&own)).wait()?;
        let numbers =
            |bytes: &Vec<u8>| bytemuck::try_pod_read_unaligned::<[u64; 2]>(bytes).unwrap_or_default();
        let [other, expected] = numbers(&hashes[0]);
        match hashes.iter().map(numbers).find(|[_, found]| *found != expected) {
            Some([rank, found]) => {
                let [rank, other] = [rank, other].map(|rank| Rank(rank as usize));
                Err(ParallelError::ReplicasDiffer { rank, found, other, expected })
            }
            None => Ok(()),
        }
    }
}

/// An FNV-1a hash over 32-bit words.
#[derive(Clone, Copy)]
struct Fnv1a(u64);

impl Fnv1a {
    const EMPTY: Fnv1a = Fnv1a(0xcbf2_9ce4_8422_2325);

    fn add(&mut self, words: &[u32]) {
        for word in words {
            self.0 = (self.0 ^ u64::from(*word)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}

/// Gathers the buffers of all ranks of a group, of equal length, in rank order.
fn gather_from(group: &Group, own: Buffer<f32>) -> Result<Buffer<f32>> {
    let len = own.len();
    let mut all = group.buffer::<f32>(group.world_size() * len)?;
    all[group.rank().0 * len..][..len].copy_from_slice(&own);
    Ok(group.all_gather(all).wait()?)
}

/// Assembles the full flat buffer of a unit, in the layout of `full_table`. `parts` are the flat buffers of the unit on all tensor ranks;
/// for a unit with experts, on the tensor ranks of each expert rank in turn.
fn assemble_unit(
    table: &ParameterTable,
    full_table: &ParameterTable,
    unit: usize,
    parts: &[f32],
) -> Vec<f32> {
    let degree = table.tensor_rank().degree;
    let has_experts = table.units()[unit].has_experts();
    let len = parts.len() / degree / if has_experts { table.expert_rank().degree } else { 1 };
    let mut values = vec![0.0; full_table.units()[unit].num_elements];
    for index in table.units()[unit].parameters.clone() {
        let (info, offset) = (&table.parameters()[index], full_table.parameters()[index].offset);
        let first = table.owner(info).unwrap_or(0) * degree;
        let info = &ParameterInfo { offset: table.counterpart(info).offset, ..info.clone() };
        let num_elements = table.counterpart(info).shape.num_elements();
        let replicated =
            AxisRank::all(degree).map(|place| info.at(place)).filter(ParameterInfo::is_first_replica);
        for info in replicated {
            let part = &parts[(first + info.tensor_rank.rank) * len + info.offset..];
            for (first, run) in info.runs(0..num_elements) {
                values[offset + first..][..run.len()].copy_from_slice(&part[run]);
            }
        }
    }
    values
}
