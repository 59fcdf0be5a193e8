use crate::error::Result;
use crate::unit::Unit;
use std::fmt;
use std::sync::Arc;
use trireme_tensor::{Device, DeviceOptions, ModelRank, ParameterTable};

/// A model: a chain of units, and the table of their parameters. The values of parameters are not part of it.
#[derive(Clone)]
pub struct Model {
    units: Vec<Arc<dyn Unit>>,
    table: Arc<ParameterTable>,
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Model").field("table", &self.table).finish_non_exhaustive()
    }
}

impl Model {
    /// Creates a model of these units, in forward order. `table` has one unit of parameters for each of them.
    ///
    /// # Panics
    /// If the number of units in the table differs.
    pub fn new(units: Vec<Arc<dyn Unit>>, table: ParameterTable) -> Self {
        assert_eq!(units.len(), table.units().len(), "each unit has its place in the table of parameters");
        Model { units, table: Arc::new(table) }
    }

    /// Builds the part of a model that the rank at `place` has. `build` adds full parameters to the table that it receives, and the table
    /// returns the rank's part of each parameter. If there are several ranks, `build` is also called once for the full model, on a
    /// counting device.
    ///
    /// # Errors
    /// Errors of `build`, [`CannotSplit`](crate::ModelError::CannotSplit) and [`Experts`](crate::ModelError::Experts).
    pub fn build_at(
        place: impl Into<ModelRank>,
        device: &Device,
        build: impl Fn(&Device, ParameterTable) -> Result<Model>,
    ) -> Result<Self> {
        let place = place.into();
        if place != ModelRank::ALONE {
            let counting = Device::counting(DeviceOptions::default())?;
            let whole = build(&counting, ParameterTable::default())?;
            whole.table().check_tensor_degree(place.tensor.degree)?;
            whole.table().check_expert_degree(place.experts.degree)?;
        }
        build(device, ParameterTable::for_rank(place))
    }

    /// Returns the table of parameter names, shapes and offsets.
    pub fn table(&self) -> &Arc<ParameterTable> {
        &self.table
    }

    /// Returns a unit.
    ///
    /// # Panics
    /// If there is no such unit.
    pub fn unit(&self, unit: usize) -> &dyn Unit {
        &*self.units[unit]
    }

    /// Returns the number of units.
    pub fn num_units(&self) -> usize {
        self.units.len()
    }
}
