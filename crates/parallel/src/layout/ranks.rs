//! The grid of all ranks: pipeline stages, replicas, shards, and the context, tensor and expert axes.

use crate::error::{ParallelError, Result};
use crate::layout::DenseAndExpert;
use std::sync::Arc;
use trireme_base::{AxisRank, ContextRank, Rank};
use trireme_comm::{Group, ProgramLine};
use trireme_plan::{Axis, Mesh};
use trireme_schedule::collective::Hosts;
use trireme_schedule::{ProgramHeader, StateClass};
use trireme_tensor::{ModelRank, ParameterInfo, ParameterTable, UnitInfo};

/// The number of ranks along each axis of a mesh. The remaining factor of the world size is the number of replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Degrees {
    /// Ranks along [`Axis::PIPELINE`].
    pub pipeline: usize,
    /// Ranks that shard one replica of the training state, along [`Axis::DATA_SHARD`] and [`Axis::CONTEXT`] together; 1 if nothing is
    /// sharded.
    pub shards: usize,
    /// Ranks along [`Axis::CONTEXT`].
    pub context: usize,
    /// Size of the groups of neighboring ranks on the context axis that change a split of sequences by position into a split by
    /// attention head, by all-to-all (Jacobs et al., "DeepSpeed Ulysses", 2023). Keys and values travel in a ring between these groups.
    pub heads: usize,
    /// Ranks along [`Axis::TENSOR`].
    pub tensor: usize,
    /// Neighboring data-parallel ranks with different experts. Ranks of the context axis count as data-parallel.
    pub experts: usize,
}

impl Degrees {
    /// One rank along every axis except the replicas.
    pub const ONE: Degrees = Degrees { pipeline: 1, shards: 1, context: 1, heads: 1, tensor: 1, experts: 1 };

    /// Returns the mesh of `world_size` ranks that [`RankGrid`] describes.
    ///
    /// # Panics
    /// If `pipeline * max(shards, context) * tensor` does not divide `world_size`, or if `shards` is neither 1 nor a multiple of `context`.
    pub fn mesh(self, world_size: usize) -> Mesh {
        let Degrees { pipeline, shards, context, tensor, .. } = self;
        assert!(shards == 1 || shards.is_multiple_of(context), "{self:?}");
        let data_shards = (shards / context).max(1);
        let ranks_per_replica = pipeline * data_shards * context * tensor;
        assert!(world_size.is_multiple_of(ranks_per_replica), "{self:?} for {world_size} ranks");
        let axes = [
            (Axis::PIPELINE, pipeline),
            (Axis::DATA_REPLICATE, world_size / ranks_per_replica),
            (Axis::DATA_SHARD, data_shards),
            (Axis::CONTEXT, context),
            (Axis::TENSOR, tensor),
        ];
        Mesh::new(&axes).expect("groups have ranks")
    }

    /// Returns the mesh for the training state, with the same rank numbers as [`mesh`](Degrees::mesh). It has no context axis: these ranks
    /// are shards or replicas.
    pub fn state_mesh(self, world_size: usize) -> Mesh {
        Degrees { context: 1, ..self }.mesh(world_size)
    }

    /// Returns the mesh for units with experts, with the same rank numbers as [`mesh`](Degrees::mesh). Neighboring data-parallel ranks
    /// along [`Axis::EXPERT`] have different experts.
    ///
    /// # Panics
    /// As [`mesh`](Degrees::mesh), and if the ranks with different experts are neither shards of one replica nor complete replicas.
    pub fn expert_mesh(self, world_size: usize) -> Mesh {
        let Degrees { pipeline, shards, tensor, experts, .. } = self;
        let replicas = world_size / (pipeline * shards * tensor);
        let (replicas, shards) = if shards.is_multiple_of(experts) {
            (replicas, shards / experts)
        } else {
            (replicas * shards / experts, 1)
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

    /// Returns the place of a rank on the tensor and expert axes, which determines its part of the model.
    pub fn model_rank(self, rank: Rank) -> ModelRank {
        let Degrees { tensor, experts, .. } = self;
        ModelRank {
            tensor: AxisRank::new(rank.0 % tensor, tensor),
            experts: AxisRank::new(rank.0 / tensor % experts, experts),
        }
    }

    /// Returns the place of a rank on the context axis.
    pub fn context_rank(self, rank: Rank) -> ContextRank {
        ContextRank::new(AxisRank::new(rank.0 / self.tensor % self.context, self.context), self.heads)
    }
}

/// The ranks of a world, as a mesh of the axes [pipeline](Axis::PIPELINE), [replicas](Axis::DATA_REPLICATE), [shards](Axis::DATA_SHARD),
/// [context](Axis::CONTEXT) and [tensor](Axis::TENSOR). The last axis varies fastest, so that the ranks that exchange most are neighbors.
/// The rank at the places `p`, `r`, `s`, `c` and `t` has the number `(((p * replicas + r) * shards + s) * context + c) * tensor + t`.
///
/// Ranks with the same place in the pipeline run the same units. Ranks that differ only in their tensor place see the same microbatches and
/// hold parts of the same parameters. All other ranks of a stage are data-parallel: the ranks of a replica shard its training state, and
/// ranks with the same shard hold the same values (hybrid sharding: Zhao et al., "PyTorch FSDP", 2023, section 3.2.2). Ranks of the context
/// axis are data-parallel as well: they see parts of the same sequences. If state is sharded, they are among the ranks that shard a
/// replica.
pub struct RankGrid {
    mesh: Mesh,
    degrees: Degrees,
    world: Arc<Group>,
    pipeline: Arc<Group>,
    /// The groups that store the state of units.
    pub(crate) state: DenseAndExpert<StateRanks>,
    experts: Option<Arc<Group>>,
    ring: Arc<Group>,
    heads: Arc<Group>,
    tensor: Arc<Group>,
    /// The ranks of `shards` by host, after [`split_by_hosts`](RankGrid::split_by_hosts).
    pub(crate) levels: Option<HostLevels>,
    /// The ranks of the tensor axis that hold the same elements of a parameter: one group for each number of such ranks.
    replicated: Vec<Arc<Group>>,
    groups: Vec<Arc<Group>>,
}

/// The groups of data-parallel ranks that store the state of a unit. All run the same units with the same experts.
#[derive(Clone)]
pub struct StateRanks {
    /// All data-parallel ranks. They see different microbatches, or different positions of the same microbatches.
    pub data: Arc<Group>,
    /// The ranks that shard this rank's replica of the training state.
    pub shards: Arc<Group>,
    /// The ranks that hold the same shard as this rank.
    pub replicas: Arc<Group>,
    /// This rank alone.
    own: Arc<Group>,
}

impl StateRanks {
    /// Returns the ranks that update a unit together. Each updates its shard; without sharding, this rank alone updates the full unit.
    pub(crate) fn update_group(&self, header: &ProgramHeader) -> &Arc<Group> {
        if header.state.is_sharded(StateClass::Optimizer) { &self.shards } else { &self.own }
    }

    /// Returns the ranks that update the same elements as this rank.
    pub(crate) fn same_update_group(&self, header: &ProgramHeader) -> &Arc<Group> {
        if header.state.is_sharded(StateClass::Optimizer) { &self.replicas } else { &self.data }
    }
}

/// Creates groups along axes of a mesh, and reuses a group that was created before.
struct Groups<'a> {
    mesh: &'a Mesh,
    /// The created groups, each with its axes that have several ranks. The first one is the world.
    made: Vec<(Vec<Axis>, Arc<Group>)>,
}

impl<'a> Groups<'a> {
    fn new(mesh: &'a Mesh, world: Group) -> Self {
        let several = mesh.axes().iter().filter(|(_, degree)| *degree > 1);
        Groups { mesh, made: vec![(several.map(|&(axis, _)| axis).collect(), Arc::new(world))] }
    }

    /// Returns the ranks that differ from this one only along `axes`. Collective.
    fn along(&mut self, name: &str, axes: &[Axis]) -> Result<Arc<Group>> {
        let (several, world) = &self.made[0];
        let several_axes: Vec<Axis> = several.iter().copied().filter(|axis| axes.contains(axis)).collect();
        if let Some((_, group)) = self.made.iter().find(|(made, _)| *made == several_axes) {
            return Ok(Arc::clone(group));
        }
        let group = Arc::new(match several_axes[..] {
            [] => world.singleton(),
            _ => world.split_by(name, |rank| self.mesh.group_of(rank, axes) as u64)?,
        });
        self.made.push((several_axes, Arc::clone(&group)));
        Ok(group)
    }
}

/// Splits `group` into groups of `len` ranks with the same color, and returns this rank's group. Collective over `group`.
fn split_or_reuse(
    group: &Arc<Group>,
    name: &str,
    len: usize,
    color: impl Fn(usize) -> usize,
) -> Result<Arc<Group>> {
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
    /// Arranges the ranks of `world`, and creates the groups of its axes. Collective over `world`.
    ///
    /// # Errors
    /// If a group cannot be created.
    ///
    /// # Panics
    /// As [`Degrees::mesh`]; if ranks have different experts, also as [`Degrees::expert_mesh`].
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
        let dense = StateRanks { data, shards, replicas, own: Arc::clone(&own) };
        let mut groups: Vec<_> = groups.made.into_iter().map(|(_, group)| group).collect();
        let (world, heads) = (Arc::clone(&groups[0]), degrees.heads);
        let ring = split_or_reuse(&context, "ring", degrees.context / heads, |rank| rank % heads)?;
        // The heads have their own group, even if `data` has the same ranks: an all-to-all within a unit must not wait behind gathers of
        // later units or pending reductions. The ring mainly sends messages, which do not wait behind collectives, so it may reuse a group.
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
            // The expert axis has its own group as well, so that tokens do not wait behind gradients. The group keeps the canonical order,
            // so that the gradients of shadowed experts are summed as an expert's own rank would sum them.
            let of_axis = |rank| mesh.group_of(rank, &[Axis::EXPERT]) as u64;
            let axis = Arc::new(world.split_keeping_order("experts", of_axis)?);
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
            state: DenseAndExpert { dense, experts: of_experts },
            experts,
            ring,
            heads,
            tensor,
            levels: None,
            replicated: Vec::new(),
            groups,
        })
    }

    /// Creates the groups of ranks of the tensor axis that hold the same elements of a parameter. Collective over all ranks.
    pub(crate) fn split_replicated_parameters(&mut self, table: &ParameterTable) -> Result<()> {
        let numbers = table.parameters().iter().map(ParameterInfo::num_replicas);
        let mut numbers: Vec<usize> = numbers.filter(|number| *number > 1).collect();
        numbers.sort_unstable();
        numbers.dedup();
        for num_holders in numbers {
            let group = split_or_reuse(&self.tensor, "holders", num_holders, |rank| rank / num_holders)?;
            add_once(&mut self.groups, &group);
            self.replicated.push(group);
        }
        Ok(())
    }

    /// Creates another group of the pipeline's ranks, for operations whose order relative to the other operations differs between the
    /// ranks. Collective over all ranks.
    pub(crate) fn split_pipeline(&mut self, name: &str) -> Result<Arc<Group>> {
        let group = Arc::new(self.pipeline.split_by(name, |_| 0)?);
        self.groups.push(Arc::clone(&group));
        Ok(group)
    }

    /// Returns the `num_holders` ranks (at least 2) of the tensor axis that hold the same elements of a parameter as this rank.
    ///
    /// # Panics
    /// If no parameter is held by `num_holders` ranks.
    pub(crate) fn replicated_on(&self, num_holders: usize) -> &Arc<Group> {
        let group = self.replicated.iter().find(|group| group.world_size() == num_holders);
        group.expect("groups were made for all parameters")
    }

    /// Splits the ranks of each replica by host. Collective over all ranks.
    ///
    /// # Errors
    /// [`ParallelError::UnevenRanksPerHost`] if the hosts of a replica have different numbers of its ranks.
    /// [`ParallelError::DifferentHostCounts`] if, with tensor parallelism, replicas are on different numbers of hosts.
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
                return Err(ParallelError::UnevenRanksPerHost { replica, ranks });
            }
            // Ranks of the tensor axis issue exchanges in one order, so all must gather and sum by the same levels.
            let (num_hosts, expected) = (hosts.num_hosts(), *expected.get_or_insert(hosts.num_hosts()));
            if self.tensor.world_size() > 1 && num_hosts != expected {
                return Err(ParallelError::DifferentHostCounts { replica, num_hosts, expected });
            }
        }
        let levels = self.levels.insert(HostLevels::new(&self.state.dense.shards)?);
        let made = [&levels.within, &levels.across]
            .into_iter()
            .filter(|group| !Arc::ptr_eq(group, &self.state.dense.shards));
        self.groups.extend(made.cloned());
        Ok(())
    }

    /// All ranks.
    pub fn world(&self) -> &Arc<Group> {
        &self.world
    }

    /// The ranks that run the stages of the pipeline for the same microbatches, in pipeline order.
    pub fn pipeline(&self) -> &Arc<Group> {
        &self.pipeline
    }

    /// The data-parallel ranks. They run the same units for different microbatches, or for different positions of the same
    /// microbatches.
    pub fn data(&self) -> &Arc<Group> {
        &self.state.dense.data
    }

    /// Returns the groups of ranks that store the state of a unit.
    pub fn state_of(&self, unit: &UnitInfo) -> &StateRanks {
        self.state.of(unit)
    }

    /// The ranks with different experts; `None` if all ranks have all experts.
    pub fn experts(&self) -> Option<&Arc<Group>> {
        self.experts.as_ref()
    }

    /// Returns the group over which squared gradient norms are summed, and whether this rank counts units without experts. The group
    /// consists of the shards of a replica, or of the ranks with different experts if these are more. Apart from the tensor axis, its ranks
    /// together hold all parameters of a stage, and each expert once. If the group has more ranks than there are shards, only its first
    /// ranks, one for each shard, count units without experts.
    pub(crate) fn grad_norm_group(&self) -> (&Arc<Group>, bool) {
        match self.experts() {
            Some(axis) if axis.world_size() > self.shards().world_size() => {
                (axis, axis.rank().0 < self.shards().world_size())
            }
            _ => (self.shards(), true),
        }
    }

    /// This rank's place on the tensor and expert axes, which determines its part of the model.
    pub fn model_rank(&self) -> ModelRank {
        self.degrees.model_rank(self.world.rank())
    }

    /// The ranks that shard this rank's replica of the training state.
    pub fn shards(&self) -> &Arc<Group> {
        &self.state.dense.shards
    }

    /// The ranks that hold the same shard as this one.
    pub fn replicas(&self) -> &Arc<Group> {
        &self.state.dense.replicas
    }

    /// This rank's place among the groups of ranks that see different samples.
    pub fn sample_rank(&self) -> AxisRank {
        let context = self.degrees.context;
        AxisRank::new(self.data().rank().0 / context, self.data().world_size() / context)
    }

    /// This rank's place on the context axis.
    pub fn context_rank(&self) -> ContextRank {
        self.degrees.context_rank(self.world.rank())
    }

    /// The ranks among which keys and values of the same sequences travel in a ring, in the order of their positions.
    pub fn ring(&self) -> &Arc<Group> {
        &self.ring
    }

    /// The ranks that change a split of sequences by position into a split by attention head, by all-to-all.
    pub fn heads(&self) -> &Arc<Group> {
        &self.heads
    }

    /// The ranks that hold parts of the same parameters and see the same microbatches.
    pub fn tensor(&self) -> &Arc<Group> {
        &self.tensor
    }

    /// The mesh on which the training state is placed. Ranks of the context axis are shards or replicas in it.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Joins the device communicators of all groups that [need](Group::need_devices) one, one group after another. If ranks joined while
    /// groups exchange vectors, devices could wait for each other forever. Collective over all ranks.
    pub(crate) fn join_devices(&self) -> Result<()> {
        for group in &self.groups {
            group.join_devices()?.wait()?;
        }
        Ok(())
    }

    /// Sets the line of the program that issues all later operations of the groups.
    pub(crate) fn set_line(&self, line: ProgramLine<'_>) {
        self.groups.iter().for_each(|group| group.set_program_line(format_args!("{line}")));
    }

    /// Declares that later operations of the groups belong to no line of a program.
    pub(crate) fn forget_line(&self) {
        self.groups.iter().for_each(|group| group.set_program_line(format_args!("")));
    }

    /// Bytes that this rank has sent, by collectives and messages of all groups.
    pub fn payload_bytes(&self) -> u64 {
        let all = self.groups.iter().map(|group| group.statistics());
        all.map(|statistics| statistics.payload_bytes + statistics.message_bytes).sum()
    }

    /// The part of [`payload_bytes`](RankGrid::payload_bytes) that groups with one rank per host have sent across hosts, by collectives.
    /// `None` if there are no such groups.
    pub fn payload_bytes_across(&self) -> Option<u64> {
        self.levels.as_ref().map(|levels| levels.across.statistics().payload_bytes)
    }

    /// Bytes of memory that the groups take on this rank, without buffers.
    pub(crate) fn fixed_bytes(&self) -> usize {
        self.groups.iter().map(|group| group.fixed_bytes()).sum()
    }
}

/// The ranks of a replica by host. Every host has the same number of them.
pub(crate) struct HostLevels {
    hosts: Hosts,
    /// The ranks on this rank's host.
    pub(crate) within: Arc<Group>,
    /// The ranks with this rank's local number, one on each host.
    pub(crate) across: Arc<Group>,
}

impl HostLevels {
    fn new(shards: &Arc<Group>) -> Result<Self> {
        let (rank, hosts) = (shards.rank(), shards.hosts().clone());
        let num_local = hosts.ranks(hosts.host_of(rank)).len();
        let within = split_or_reuse(shards, "within", num_local, |rank| hosts.host_of(Rank(rank)))?;
        let across =
            split_or_reuse(shards, "across", hosts.num_hosts(), |rank| hosts.local_rank(Rank(rank)))?;
        Ok(HostLevels { hosts, within, across })
    }

    /// Returns the index of the shard that a rank has, from its host and its number on that host.
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
            let HostLevels { hosts, within, across } = ranks.levels.as_ref().unwrap();
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
        // In the first replica, the ranks at tensor place 0 are on one host, and the ranks at places 1 and 2 are on two hosts.
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
