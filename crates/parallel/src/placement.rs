use trireme_base::DType;
use trireme_plan::{Mesh, TensorPlacement};
use trireme_tensor::ParameterTable;

/// Where every parameter of a table lies on `mesh`: data parallelism replicates them all.
pub fn parameter_placements(table: &ParameterTable, mesh: &Mesh) -> Vec<TensorPlacement> {
    let placement = |info: &trireme_tensor::ParameterInfo| {
        TensorPlacement::replicated(info.name.clone(), info.shape.dims(), DType::F32, mesh)
    };
    table.parameters().iter().map(placement).collect()
}
