use std::ops::Range;
use trireme_base::{DType, Rank};
use trireme_plan::{Axis, Mesh, Placement, TensorPlacement};
use trireme_schedule::{ProgramHeader, StateClass};
use trireme_tensor::{ParameterInfo, ParameterTable};

/// The placements of all parameters, with their optimizer state, on the ranks that update them, in memory and in checkpoints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placements {
    mesh: Mesh,
    tensors: Vec<TensorPlacement>,
}

impl Placements {
    /// Places every parameter. Along the pipeline axis, a parameter is on the rank of its unit. If optimizer state is sharded, the
    /// parameter is split along the shard axis at the bounds of the shards of its unit's flat buffer. Along the tensor axis, it is split as
    /// the model declares. An expert's parameters are on one of the adjacent data-parallel ranks that hold different experts.
    pub fn new(table: &ParameterTable, header: &ProgramHeader, mesh: Mesh) -> Self {
        let is_sharded = header.state.is_sharded(StateClass::Optimizer);
        let (experts_along_shards, experts_along_replicas) = expert_degrees(table, &mesh);
        let along = |info: &ParameterInfo, axis, degree: usize| match (axis, table.owner(info)) {
            (Axis::PIPELINE, _) => Placement::Single { rank: header.rank_of(info.unit) },
            (Axis::DATA_REPLICATE, Some(owner)) if experts_along_replicas > 1 => {
                Placement::OneOf { rank: owner / experts_along_shards, num: experts_along_replicas }
            }
            (Axis::DATA_SHARD, Some(owner)) if is_sharded && experts_along_shards > 1 => {
                let bounds = shard_bounds(table, table.counterpart(info), degree / experts_along_shards);
                // Ranks with other experts hold an empty range between the ranks that hold a part.
                let bound = |rank: usize| {
                    bounds[rank / experts_along_shards
                        + usize::from(rank % experts_along_shards > owner % experts_along_shards)]
                };
                Placement::Ragged { bounds: (0..=degree).map(|rank| bound(rank.min(degree))).collect() }
            }
            (Axis::DATA_SHARD, Some(_)) if is_sharded => {
                Placement::Ragged { bounds: shard_bounds(table, table.counterpart(info), degree) }
            }
            (Axis::DATA_SHARD, Some(owner)) if experts_along_shards > 1 => {
                Placement::OneOf { rank: owner % experts_along_shards, num: experts_along_shards }
            }
            (Axis::DATA_SHARD, None) if is_sharded => {
                let num = if table.units()[info.unit].has_experts() {
                    degree / experts_along_shards
                } else {
                    degree
                };
                Placement::Ragged { bounds: shard_bounds(table, info, num) }
            }
            (Axis::TENSOR, _) => {
                info.split.filter(|_| degree > 1).map_or(Placement::Replicate, Placement::Split)
            }
            _ => Placement::Replicate,
        };
        let placement = |info: &ParameterInfo| TensorPlacement {
            name: info.name.clone(),
            shape: info.full_shape.dims().to_vec(),
            dtype: DType::F32,
            placements: mesh.axes().iter().map(|&(axis, degree)| along(info, axis, degree)).collect(),
        };
        let tensors = table.parameters().iter().map(placement).collect();
        Placements { mesh, tensors }
    }

    /// Returns the placement of a value that is replicated on all ranks that hold the parameter `info`, or a part of it.
    pub fn replicated_with(
        &self,
        table: &ParameterTable,
        header: &ProgramHeader,
        info: &ParameterInfo,
    ) -> Vec<Placement> {
        let (experts_along_shards, experts_along_replicas) = expert_degrees(table, &self.mesh);
        let along = |&(axis, _): &(Axis, usize)| match (axis, table.owner(info)) {
            (Axis::PIPELINE, _) => Placement::Single { rank: header.rank_of(info.unit) },
            (Axis::DATA_REPLICATE, Some(owner)) => {
                Placement::OneOf { rank: owner / experts_along_shards, num: experts_along_replicas }
            }
            (Axis::DATA_SHARD, Some(owner)) => {
                Placement::OneOf { rank: owner % experts_along_shards, num: experts_along_shards }
            }
            _ => Placement::Replicate,
        };
        self.mesh.axes().iter().map(along).collect()
    }

    /// The mesh of ranks on which the parameters are placed.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// The placement of each parameter, in the table's order.
    pub fn tensors(&self) -> &[TensorPlacement] {
        &self.tensors
    }

    /// Returns the elements of each unit's flat buffer that `rank` updates.
    ///
    /// # Panics
    /// If `rank` is outside of the mesh, or `table` is of another model.
    pub fn parts(&self, table: &ParameterTable, rank: Rank) -> Vec<Range<usize>> {
        let mut parts: Vec<Option<Range<usize>>> = vec![None; table.units().len()];
        for (info, tensor) in table.parameters().iter().zip(&self.tensors) {
            let (_, held) = tensor.local_part(&self.mesh, rank).expect("placements are made for their mesh");
            if held.is_empty() {
                continue;
            }
            let held = info.offset + held.start..info.offset + held.end;
            let part = parts[info.unit].get_or_insert(held.start..held.start);
            assert_eq!(part.end, held.start, "a rank holds one part of a unit");
            part.end = held.end;
        }
        parts.into_iter().map(Option::unwrap_or_default).collect()
    }
}

/// Returns the degree of expert parallelism along the shard axis, and along the replica axis. Expert ranks fill the shard axis first.
fn expert_degrees(table: &ParameterTable, mesh: &Mesh) -> (usize, usize) {
    let shards = mesh.axes().iter().find(|(axis, _)| *axis == Axis::DATA_SHARD);
    let (degree, num_shards) = (table.expert_rank().degree, shards.map_or(1, |&(_, degree)| degree));
    (degree.min(num_shards), degree.div_ceil(num_shards))
}

/// Returns the bounds within a parameter at which the shards of its unit end.
fn shard_bounds(table: &ParameterTable, info: &ParameterInfo, degree: usize) -> Vec<usize> {
    let (unit, range) = (&table.units()[info.unit], info.range());
    let bound = |index| unit.shard(index, degree).end.clamp(range.start, range.end) - range.start;
    std::iter::once(0).chain((0..degree).map(bound)).collect()
}
