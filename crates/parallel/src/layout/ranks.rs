//! The ranks of a world, as a grid of stages, replicas and shards.

use crate::error::{ParallelError, Result};
use crate::layout::PerExperts;
use std::sync::Arc;
use trireme_base::{AxisPlace, ContextPlace, Rank};
use trireme_comm::{Group, ProgramLine};
use trireme_plan::{Axis, Mesh};
use trireme_schedule::collective::Hosts;
use trireme_schedule::{Outline, StateClass};
use trireme_tensor::{ModelPlace, ParameterInfo, ParameterTable, UnitInfo};

/// How many ranks there are along the axes of a mesh; the axis of replicas has as many as these leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Degrees {
    /// Along [`Axis::PIPELINE`].
    pub pipeline: usize,
    /// Ranks that shard a replica of the training state: along [`Axis::DATA_SHARD`] and [`Axis::CONTEXT`], or 1 if nothing is sharded.
    pub shards: usize,
    /// Along [`Axis::CONTEXT`].
    pub context: usize,
    /// Of these, neighbours that exchange positions for heads; among the others keys and values travel in a ring.
    pub heads: usize,
    /// Along [`Axis::TENSOR`].
    pub tensor: usize,
    /// Neighbours among all data-parallel ranks, those of the context axis among them, that have different experts.
    pub experts: usize,
}

impl Degrees {
    /// Replicas alone.
    pub const ONE: Degrees = Degrees { pipeline: 1, shards: 1, context: 1, heads: 1, tensor: 1, experts: 1 };

    /// The mesh of so many ranks, which [`RankGrid`] describes.
    ///
    /// # Panics
    /// If the degrees do not divide the number of ranks.
    pub fn mesh(self, world_size: usize) -> Mesh {
        let Degrees { pipeline, shards, context, tensor, .. } = self;
        assert!(shards == 1 || shards.is_multiple_of(context), "{self:?}");
        let data_shards = (shards / context).max(1);
        let num_of_replica = pipeline * data_shards * context * tensor;
        assert!(world_size.is_multiple_of(num_of_replica), "{self:?} for {world_size} ranks");
        let axes = [
            (Axis::PIPELINE, pipeline),
            (Axis::DATA_REPLICATE, world_size / num_of_replica),
            (Axis::DATA_SHARD, data_shards),
            (Axis::CONTEXT, context),
            (Axis::TENSOR, tensor),
        ];
        Mesh::new(&axes).expect("groups have ranks")
    }

    /// As the [mesh](Degrees::mesh), with its numbers, for the training state: ranks of the context axis are shards or replicas.
    pub fn state_mesh(self, world_size: usize) -> Mesh {
        Degrees { context: 1, ..self }.mesh(world_size)
    }

    /// As the [mesh](Degrees::mesh), with its numbers, for units with experts: data-parallel neighbours along [`Axis::EXPERT`]
    /// differ in them.
    ///
    /// # Panics
    /// As [`mesh`](Degrees::mesh), and if ranks with different experts are neither shards of one replica nor whole replicas.
    pub fn expert_mesh(self, world_size: usize) -> Mesh {
        let Degrees { pipeline, shards, tensor, experts, .. } = self;
        let replicas = world_size / (pipeline * shards * tensor);
        let (replicas, shards) = match shards.is_multiple_of(experts) {
            true => (replicas, shards / experts),
            false => (replicas * shards / experts, 1),
        };
        assert_eq!(pipeline * replicas * shards * experts * tensor, world_size, "{self:?}");
        let axes = [
            (Axis::PIPELINE, pipeline),
            (Axis::DATA_REPLICATE, replicas),
            (Axis::DATA_SHARD, shards),
            (Axis::EXPERT, experts),
            (Axis::TENSOR, tensor),
        ];
        Mesh::new(&axes).expect("groups have ranks")
    }

    /// Which part of a model a rank has.
    pub fn model_place(self, rank: Rank) -> ModelPlace {
        let Degrees { tensor, experts, .. } = self;
        ModelPlace {
            tensor: AxisPlace::new(rank.0 % tensor, tensor),
            experts: AxisPlace::new(rank.0 / tensor % experts, experts),
        }
    }

    /// Which of the ranks that have the positions of a sequence a rank is.
    pub fn context_place(self, rank: Rank) -> ContextPlace {
        ContextPlace::new(AxisPlace::new(rank.0 / self.tensor % self.context, self.context), self.heads)
    }
}

/// The ranks of a world, as a mesh of the axes [pipeline](Axis::PIPELINE), [replicas](Axis::DATA_REPLICATE),
/// [shards](Axis::DATA_SHARD), [context](Axis::CONTEXT) and [tensor](Axis::TENSOR), the last varying fastest: those that exchange most are
/// neighbours. So the rank at the places `p`, `r`, `s`, `c` and `t` is `(((p * replicas + r) * shards + s) * context + c) * tensor + t`.
///
/// Ranks with the same place in the pipeline run the same units. Those that differ in their tensor place alone see the same microbatches,
/// and have parts of the same parameters. The others are data-parallel: those of a replica shard its training state; ranks with the same
/// shard hold the same values (hybrid sharding: Zhao et al., "PyTorch FSDP", 2023, section 3.2.2). Ranks of the context axis are among
/// them: they see parts of the same sequences, and shard the state of a replica with the others if it is sharded.
pub struct RankGrid {
    mesh: Mesh,
    degrees: Degrees,
    world: Arc<Group>,
    pipeline: Arc<Group>,
    /// Those among which the state of units lies.
    pub(crate) state: PerExperts<StateRanks>,
    experts: Option<Arc<Group>>,
    ring: Arc<Group>,
    heads: Arc<Group>,
    tensor: Arc<Group>,
    /// The shards' ranks by hosts, if they were split.
    pub(crate) levels: Option<Levels>,
    /// The ranks of the tensor axis that hold the same elements of a parameter, by their number.
    holders: Vec<Arc<Group>>,
    groups: Vec<Arc<Group>>,
}

/// The ranks that run the same units, with the same experts, for other microbatches or positions.
#[derive(Clone)]
pub struct StateRanks {
    /// All of them.
    pub data: Arc<Group>,
    /// Those of this rank's replica of the training state.
    pub shards: Arc<Group>,
    /// Those with this rank's shard.
    pub replicas: Arc<Group>,
    /// This rank alone.
    own: Arc<Group>,
}

impl StateRanks {
    /// The ranks that update a unit together: each its shard of it, or this rank all of it.
    pub(crate) fn updating(&self, outline: &Outline) -> &Arc<Group> {
        if outline.state.is_sharded(StateClass::Optimizer) { &self.shards } else { &self.own }
    }

    /// The ranks that update what this rank updates.
    pub(crate) fn alike(&self, outline: &Outline) -> &Arc<Group> {
        if outline.state.is_sharded(StateClass::Optimizer) { &self.replicas } else { &self.data }
    }
}

/// Groups along axes of a mesh, each of which is made once.
struct Groups<'a> {
    mesh: &'a Mesh,
    /// Axes along which there are several ranks, and the group; first the world.
    made: Vec<(Vec<Axis>, Arc<Group>)>,
}

impl<'a> Groups<'a> {
    fn new(mesh: &'a Mesh, world: Group) -> Self {
        let several = mesh.axes().iter().filter(|(_, degree)| *degree > 1);
        Groups { mesh, made: vec![(several.map(|&(axis, _)| axis).collect(), Arc::new(world))] }
    }

    /// The ranks that differ from this one along `axes` only. Collective.
    fn along(&mut self, name: &str, axes: &[Axis]) -> Result<Arc<Group>> {
        let (several, world) = &self.made[0];
        let those: Vec<Axis> = several.iter().copied().filter(|axis| axes.contains(axis)).collect();
        if let Some((_, group)) = self.made.iter().find(|(made, _)| *made == those) {
            return Ok(Arc::clone(group));
        }
        let group = Arc::new(match those[..] {
            [] => world.singleton(),
            _ => world.split_by(name, |rank| self.mesh.group_of(rank, axes) as u64)?,
        });
        self.made.push((those, Arc::clone(&group)));
        Ok(group)
    }
}

/// The groups of `len` ranks each that have a color in common; collective over `group`.
fn part(group: &Arc<Group>, name: &str, len: usize, color: impl Fn(usize) -> usize) -> Result<Arc<Group>> {
    Ok(match len {
        _ if len == group.world_size() => Arc::clone(group),
        1 => Arc::new(group.singleton()),
        _ => Arc::new(group.split_by(name, |rank| color(rank.0) as u64)?),
    })
}

fn add_once(groups: &mut Vec<Arc<Group>>, group: &Arc<Group>) {
    if !groups.iter().any(|made| Arc::ptr_eq(made, group)) {
        groups.push(Arc::clone(group));
    }
}

impl RankGrid {
    /// Arranges the ranks of `world`; collective over it.
    ///
    /// # Panics
    /// If the degrees do not divide the number of ranks.
    pub fn new(world: Group, degrees: Degrees) -> Result<Self> {
        let mesh = degrees.mesh(world.world_size());
        let mut groups = Groups::new(&mesh, world);
        let pipeline = groups.along("pipeline", &[Axis::PIPELINE])?;
        let data = groups.along("data", &[Axis::DATA_REPLICATE, Axis::DATA_SHARD, Axis::CONTEXT])?;
        let (sharding, replicating): (&[Axis], &[Axis]) = match degrees.shards {
            1 => (&[], &[Axis::DATA_REPLICATE, Axis::CONTEXT]),
            _ => (&[Axis::DATA_SHARD, Axis::CONTEXT], &[Axis::DATA_REPLICATE]),
        };
        let shards = groups.along("shards", sharding)?;
        let replicas = groups.along("replicas", replicating)?;
        let context = groups.along("context", &[Axis::CONTEXT])?;
        let tensor = groups.along("tensor", &[Axis::TENSOR])?;
        let own = groups.along("own", &[])?;
        let shared = StateRanks { data, shards, replicas, own: Arc::clone(&own) };
        let mut groups: Vec<_> = groups.made.into_iter().map(|(_, group)| group).collect();
        let (world, heads) = (Arc::clone(&groups[0]), degrees.heads);
        let ring = part(&context, "ring", degrees.context / heads, |rank| rank % heads)?;
        // What units exchange must not wait for what is gathered ahead or reduced behind them: these ranks may be all data-parallel ones.
        let heads = match heads {
            1 => Arc::clone(&own),
            _ => Arc::new(context.split_by("heads", |rank| (rank.0 / heads) as u64)?),
        };
        for group in [&ring, &heads] {
            add_once(&mut groups, group);
        }
        let (mut experts, mut of_experts) = (None, None);
        if degrees.experts > 1 {
            let mesh = degrees.expert_mesh(world.world_size());
            // As with heads: tokens do not wait for gradients. Gradients of shadowed experts are summed as an expert's own rank would sum them.
            let of_axis = |rank| mesh.group_of(rank, &[Axis::EXPERT]) as u64;
            let axis = Arc::new(world.split_in_order("experts", of_axis)?);
            groups.push(Arc::clone(&axis));
            let mut along = |name: &str, axes: &[Axis]| -> Result<_> {
                let group = Arc::new(world.split_by(name, |rank| mesh.group_of(rank, axes) as u64)?);
                groups.push(Arc::clone(&group));
                Ok(group)
            };
            of_experts = Some(StateRanks {
                data: along("expert data", &[Axis::DATA_REPLICATE, Axis::DATA_SHARD])?,
                shards: along("expert shards", &[Axis::DATA_SHARD])?,
                replicas: along("expert replicas", &[Axis::DATA_REPLICATE])?,
                own: Arc::clone(&own),
            });
            experts = Some(axis);
        }
        let mesh = degrees.state_mesh(world.world_size());
        Ok(RankGrid {
            mesh,
            degrees,
            world,
            pipeline,
            state: PerExperts { shared, experts: of_experts },
            experts,
            ring,
            heads,
            tensor,
            levels: None,
            holders: Vec::new(),
            groups,
        })
    }

    /// Makes the groups of those ranks of the tensor axis that hold the same elements of parameters; collective over all ranks.
    pub(crate) fn split_holders(&mut self, table: &ParameterTable) -> Result<()> {
        let numbers = table.parameters().iter().map(ParameterInfo::num_holders);
        let mut numbers: Vec<usize> = numbers.filter(|number| *number > 1).collect();
        numbers.sort_unstable();
        numbers.dedup();
        for num_holders in numbers {
            let group = part(&self.tensor, "holders", num_holders, |rank| rank / num_holders)?;
            add_once(&mut self.groups, &group);
            self.holders.push(group);
        }
        Ok(())
    }

    /// Makes another group of the pipeline's ranks, for operations that they come to between different others; collective over all ranks.
    pub(crate) fn split_pipeline(&mut self, name: &str) -> Result<Arc<Group>> {
        let group = Arc::new(self.pipeline.split_by(name, |_| 0)?);
        self.groups.push(Arc::clone(&group));
        Ok(group)
    }

    /// The ranks of the tensor axis that hold the same elements of a parameter, if `num_holders` do, which are several.
    ///
    /// # Panics
    /// If no parameter is held by so many.
    pub(crate) fn holders(&self, num_holders: usize) -> &Arc<Group> {
        let group = self.holders.iter().find(|group| group.world_size() == num_holders);
        group.expect("groups were made for all parameters")
    }

    /// Splits the shards' ranks by hosts, if a replica has equally many on each of its hosts; collective over all ranks.
    pub(crate) fn split_by_hosts(&mut self) -> Result<()> {
        let group_of = |rank: usize| self.mesh.group_of(Rank(rank), &[Axis::DATA_SHARD]);
        let num_ranks = self.world.world_size();
        let mut expected = None;
        for replica in 0..num_ranks / self.shards().world_size() {
            let ranks = (0..num_ranks).filter(|&rank| group_of(rank) == replica);
            let hosts: Vec<usize> = ranks.map(|rank| self.world.hosts().host_of(Rank(rank))).collect();
            let hosts = Hosts::new(&hosts);
            if hosts.ranks_per_host().is_none() {
                let ranks = (0..hosts.num_hosts()).map(|host| hosts.ranks(host).len()).collect();
                return Err(ParallelError::UnequalHosts { replica, ranks });
            }
            // Ranks of the tensor axis exchange in one order, so they gather and sum by the same levels.
            let (num_hosts, expected) = (hosts.num_hosts(), *expected.get_or_insert(hosts.num_hosts()));
            if self.tensor.world_size() > 1 && num_hosts != expected {
                return Err(ParallelError::UnlikeHosts { replica, num_hosts, expected });
            }
        }
        let levels = self.levels.insert(Levels::new(&self.state.shared.shards)?);
        let made = [&levels.within, &levels.across]
            .into_iter()
            .filter(|group| !Arc::ptr_eq(group, &self.state.shared.shards));
        self.groups.extend(made.cloned());
        Ok(())
    }

    /// All ranks.
    pub fn world(&self) -> &Arc<Group> {
        &self.world
    }

    /// The ranks that run the other units of the model for the same microbatches, in the order of the pipeline.
    pub fn pipeline(&self) -> &Arc<Group> {
        &self.pipeline
    }

    /// The ranks that run the same units for other microbatches, or for other positions of the same ones.
    pub fn data(&self) -> &Arc<Group> {
        &self.state.shared.data
    }

    /// The ranks among which the state of a unit lies.
    pub fn state_of(&self, unit: &UnitInfo) -> &StateRanks {
        self.state.of(unit)
    }

    /// The ranks with different experts, if they are several.
    pub fn experts(&self) -> Option<&Arc<Group>> {
        self.experts.as_ref()
    }

    /// Among the ranks that together have all of the state of a pipeline's place once: the larger of those of a replica and those with different
    /// experts; and whether the others of these have what this rank has of units without experts.
    pub(crate) fn squares_group(&self) -> (&Arc<Group>, bool) {
        match self.experts() {
            Some(axis) if axis.world_size() > self.shards().world_size() => {
                (axis, axis.rank().0 < self.shards().world_size())
            }
            _ => (self.shards(), true),
        }
    }

    /// Which part of the model this rank has.
    pub fn model_place(&self) -> ModelPlace {
        self.degrees.model_place(self.world.rank())
    }

    /// The ranks that shard a replica with this one.
    pub fn shards(&self) -> &Arc<Group> {
        &self.state.shared.shards
    }

    /// The ranks that hold the same shard as this one.
    pub fn replicas(&self) -> &Arc<Group> {
        &self.state.shared.replicas
    }

    /// This rank's place among those that see different samples.
    pub fn sample_place(&self) -> AxisPlace {
        let context = self.degrees.context;
        AxisPlace::new(self.data().rank().0 / context, self.data().world_size() / context)
    }

    /// Which of the ranks that have the positions of the same sequences this is.
    pub fn context_place(&self) -> ContextPlace {
        self.degrees.context_place(self.world.rank())
    }

    /// The ranks among which keys and values of the same sequences travel, in the order of their positions.
    pub fn ring(&self) -> &Arc<Group> {
        &self.ring
    }

    /// The ranks that exchange positions of the same sequences for heads.
    pub fn heads(&self) -> &Arc<Group> {
        &self.heads
    }

    /// The ranks that have parts of the same parameters, and see the same microbatches.
    pub fn tensor(&self) -> &Arc<Group> {
        &self.tensor
    }

    /// The ranks as a mesh on which the training state lies: those of the context axis are shards or replicas like others.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Says which line of a program issues what the groups are given from now on.
    pub(crate) fn set_line(&self, line: ProgramLine<'_>) {
        self.groups.iter().for_each(|group| group.set_line(format_args!("{line}")));
    }

    /// Says that no line of a program issues what the groups are given from now on.
    pub(crate) fn forget_line(&self) {
        self.groups.iter().for_each(|group| group.set_line(format_args!("")));
    }

    /// Bytes of vectors that this rank has sent, by all groups, messages among them.
    pub fn payload_bytes(&self) -> u64 {
        let all = self.groups.iter().map(|group| group.statistics());
        all.map(|statistics| statistics.payload_bytes + statistics.message_bytes).sum()
    }

    /// The part of it that went to other hosts by groups that hold one rank of each host; `None` where none were made.
    pub fn payload_bytes_across(&self) -> Option<u64> {
        self.levels.as_ref().map(|levels| levels.across.statistics().payload_bytes)
    }

    /// Bytes of memory that the groups themselves take on this rank, besides buffers.
    pub(crate) fn fixed_bytes(&self) -> usize {
        self.groups.iter().map(|group| group.fixed_bytes()).sum()
    }
}

/// The ranks of a replica by hosts, on each of which there are equally many.
pub(crate) struct Levels {
    hosts: Hosts,
    /// Those of this rank's host.
    pub(crate) within: Arc<Group>,
    /// Those with this rank's number on their hosts.
    pub(crate) across: Arc<Group>,
}

impl Levels {
    fn new(shards: &Arc<Group>) -> Result<Self> {
        let (rank, hosts) = (shards.rank(), shards.hosts().clone());
        let num_local = hosts.ranks(hosts.host_of(rank)).len();
        let within = part(shards, "within", num_local, |rank| hosts.host_of(Rank(rank)))?;
        let across = part(shards, "across", hosts.num_hosts(), |rank| hosts.local_rank(Rank(rank)))?;
        Ok(Levels { hosts, within, across })
    }

    /// Which shard the rank of a number on a host has.
    pub(crate) fn shard(&self, host: usize, local_rank: usize) -> usize {
        self.hosts.ranks(host)[local_rank].0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trireme_testkit::run_ranks_on;

    #[test]
    fn shards_are_split_by_hosts_of_equally_many_ranks() {
        let levels = run_ranks_on(&[0, 1, 0, 1, 1, 0, 1, 0], |group| {
            let mut ranks = RankGrid::new(group, Degrees { shards: 4, ..Degrees::ONE }).unwrap();
            ranks.split_by_hosts().unwrap();
            let Levels { hosts, within, across } = ranks.levels.as_ref().unwrap();
            let (host, local) = (hosts.host_of(ranks.shards().rank()), within.rank().0);
            assert_eq!(ranks.levels.as_ref().unwrap().shard(host, local), ranks.shards().rank().0);
            assert_eq!(across.rank().0, host);
            [within.world_size(), across.world_size(), host, local]
        });
        let of_replica = [[2, 2, 0, 0], [2, 2, 1, 0], [2, 2, 0, 1], [2, 2, 1, 1]];
        assert_eq!(levels, [of_replica, of_replica].concat());
    }

    #[test]
    fn replicas_on_different_numbers_of_hosts_are_refused_by_all() {
        // Of the first replica, the ranks with the first part of each parameter share a host, and those with the others do not.
        let found = run_ranks_on(&[0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2], |group| {
            let degrees = Degrees { shards: 2, tensor: 3, ..Degrees::ONE };
            RankGrid::new(group, degrees).unwrap().split_by_hosts().map_err(|error| error.to_string())
        });
        assert!(found.iter().all(|found| found.as_ref().is_err_and(|error| error.contains("spread alike"))));
    }

    #[test]
    fn hosts_of_unequally_many_ranks_are_refused_by_all() {
        for hosts in [&[0, 0, 1, 0, 1, 0][..], &[0, 1, 1, 0, 0, 0]] {
            let found = run_ranks_on(hosts, |group| {
                let mut ranks = RankGrid::new(group, Degrees { shards: 3, ..Degrees::ONE }).unwrap();
                ranks.split_by_hosts().map_err(|error| error.to_string())
            });
            assert!(found.iter().all(|found| {
                found.as_ref().is_err_and(|error| error.contains("the same number on each host"))
            }));
        }
    }
}
