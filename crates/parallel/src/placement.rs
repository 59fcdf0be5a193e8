use trireme_base::DType;
use trireme_plan::{Axis, Mesh, Placement, TensorPlacement};
use trireme_schedule::Outline;
use trireme_tensor::{ParameterInfo, ParameterTable};

/// Where every parameter of a table lies on `mesh`, and with it what the optimizer keeps of it: with the unit's rank of the
/// pipeline, replicated, or cut where shards of its unit's flat buffer end.
pub fn parameter_placements(table: &ParameterTable, outline: &Outline, mesh: &Mesh) -> Vec<TensorPlacement> {
    let placement = |info: &ParameterInfo| TensorPlacement {
        name: info.name.clone(),
        shape: info.shape.dims().to_vec(),
        dtype: DType::F32,
        placements: mesh
            .axes()
            .iter()
            .map(|&(axis, degree)| match axis {
                Axis::Pipeline => Placement::Single { rank: outline.rank_of(info.unit) },
                Axis::DataReplicate => Placement::Replicate,
                Axis::DataShard => shards(table, info, degree),
            })
            .collect(),
    };
    table.parameters().iter().map(placement).collect()
}

fn shards(table: &ParameterTable, info: &ParameterInfo, degree: usize) -> Placement {
    let (unit, range) = (&table.units()[info.unit], info.range());
    let bound = |index| unit.shard(index, degree).end.clamp(range.start, range.end) - range.start;
    Placement::Ragged { bounds: std::iter::once(0).chain((0..degree).map(bound)).collect() }
}
