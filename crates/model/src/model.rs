use crate::error::Result;
use crate::unit::Unit;
use std::fmt;
use std::sync::Arc;
use trireme_tensor::{Device, DeviceOptions, ModelPlace, ParameterTable};

/// A model: a chain of units, and the table of their parameters. It is a description; its caller provides the values.
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
    /// The model of these units, in forward order; the units of `table` are theirs.
    ///
    /// # Panics
    /// If the table has another number of units.
    pub fn new(units: Vec<Arc<dyn Unit>>, table: ParameterTable) -> Self {
        assert_eq!(units.len(), table.units().len(), "each unit has its place in the table of parameters");
        Model { units, table: Arc::new(table) }
    }

    /// Builds what a rank has of a model. `build` adds its parameters to the table that it is given, and builds its
    /// operations of what it gets in return.
    ///
    /// # Errors
    /// Those of `build`, [`Uncuttable`](crate::ModelError::Uncuttable) and [`Experts`](crate::ModelError::Experts).
    pub fn build_at(
        place: impl Into<ModelPlace>,
        device: &Device,
        build: impl Fn(&Device, ParameterTable) -> Result<Model>,
    ) -> Result<Self> {
        let place = place.into();
        if place != ModelPlace::WHOLE {
            let counting = Device::counting(DeviceOptions::default())?;
            let whole = build(&counting, ParameterTable::default())?;
            whole.table().check_degree(place.tensor.degree)?;
            whole.table().check_expert_degree(place.experts.degree)?;
        }
        build(device, ParameterTable::of_place(place))
    }

    /// Its parameters' names, shapes and places.
    pub fn table(&self) -> &Arc<ParameterTable> {
        &self.table
    }

    /// A unit.
    ///
    /// # Panics
    /// If there is no such unit.
    pub fn unit(&self, unit: usize) -> &dyn Unit {
        &*self.units[unit]
    }

    /// Number of units.
    pub fn num_units(&self) -> usize {
        self.units.len()
    }
}
