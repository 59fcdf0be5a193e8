//! Parameter values in flat buffers, one per unit.

use crate::device::{Device, Result};
use crate::parameter_table::{ParameterId, ParameterInfo, ParameterSpan, ParameterTable};
use crate::tensor::Tensor;
use crate::view::{View, ViewMut};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use trireme_base::{Category, DType};

/// Values of parameters, as operations read them.
pub trait ParameterSource: fmt::Debug {
    /// Returns the flat buffer of `unit`, in f32 or a narrower float.
    ///
    /// # Panics
    /// If the full buffer is not in memory.
    fn unit(&self, unit: usize) -> View<'_>;

    /// Returns the values that `span` covers.
    fn span(&self, span: &ParameterSpan) -> View<'_> {
        self.unit(span.unit).part(span.offset, span.shape)
    }
}

/// Values of a table's parameters: one flat buffer per unit, or a shard of each, in f32 or bf16.
#[derive(Debug)]
pub struct Parameters {
    table: Arc<ParameterTable>,
    /// The elements of each unit's flat buffer that are stored here.
    parts: Vec<Range<usize>>,
    flats: Vec<Tensor>,
    dtype: DType,
    device: Device,
    category: Category,
}

impl Parameters {
    /// Allocates zeros in f32, counted as `category`.
    ///
    /// # Errors
    /// If the device cannot allocate memory.
    pub fn zeros(table: &Arc<ParameterTable>, device: &Device, category: Category) -> Result<Self> {
        Self::zeros_of(table, table.shards(0, 1), DType::F32, device, category)
    }

    /// Allocates zeros in `dtype`, f32 or bf16, for the elements `parts` of each unit's flat buffer, counted as `category`.
    ///
    /// # Errors
    /// If the device cannot allocate memory.
    ///
    /// # Panics
    /// If `parts` does not have one range per unit.
    pub fn zeros_of(
        table: &Arc<ParameterTable>,
        parts: Vec<Range<usize>>,
        dtype: DType,
        device: &Device,
        category: Category,
    ) -> Result<Self> {
        assert_eq!(parts.len(), table.units().len(), "one part for each unit");
        let num_elements = parts.iter().map(Range::len).fold(0_usize, usize::saturating_add);
        device.check_room(num_elements.saturating_mul(dtype.size()), category)?;
        let flat = |part: &Range<usize>| device.zeros([part.len()].into(), dtype, category);
        let flats = parts.iter().map(flat).collect::<Result<_, _>>()?;
        Ok(Parameters { table: Arc::clone(table), parts, flats, dtype, device: device.clone(), category })
    }

    /// Like [`zeros_of`](Parameters::zeros_of), but without memory. The caller allocates and releases one unit's memory at a time through
    /// [`memory_mut`](Parameters::memory_mut).
    ///
    /// # Errors
    /// If the device cannot allocate the memory of one unit, which is released again.
    ///
    /// # Panics
    /// As [`zeros_of`](Parameters::zeros_of).
    pub fn without_memory(
        table: &Arc<ParameterTable>,
        parts: Vec<Range<usize>>,
        dtype: DType,
        device: &Device,
        category: Category,
    ) -> Result<Self> {
        assert_eq!(parts.len(), table.units().len(), "one part for each unit");
        let flat = |part: &Range<usize>| {
            let mut flat = device.empty([part.len()].into(), dtype, category)?;
            flat.release();
            Ok(flat)
        };
        let flats = parts.iter().map(flat).collect::<Result<_>>()?;
        Ok(Parameters { table: Arc::clone(table), parts, flats, dtype, device: device.clone(), category })
    }

    /// Returns the table that describes the parameters.
    pub fn table(&self) -> &Arc<ParameterTable> {
        &self.table
    }

    /// Returns the elements of each unit's flat buffer that are stored here.
    pub fn parts(&self) -> &[Range<usize>] {
        &self.parts
    }

    /// Returns the device of the buffers.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the stored part of a unit's flat buffer.
    pub fn flat(&self, unit: usize) -> View<'_> {
        self.flats[unit].view()
    }

    /// Copies the stored part of a unit's flat buffer to the host, as f32s.
    ///
    /// # Errors
    /// If the device has failed.
    pub fn values(&self, unit: usize) -> Result<Vec<f32>> {
        self.device.read_f32s(self.flat(unit))
    }

    /// Sets the stored part of a unit's flat buffer, which is in f32.
    ///
    /// # Panics
    /// If the number of values or the dtype differs.
    pub fn set(&mut self, unit: usize, values: &[f32]) {
        let Parameters { flats, device, .. } = self;
        device.upload(values, flats[unit].view_mut());
    }

    /// Returns the stored part of a unit's flat buffer, for writing.
    pub fn flat_mut(&mut self, unit: usize) -> ViewMut<'_> {
        self.flats[unit].view_mut()
    }

    /// Frees the stored part of a unit's flat buffer and allocates zeros for `part`.
    ///
    /// # Errors
    /// If there is no memory for the zeros. The unit's buffer is then released.
    pub fn set_part(&mut self, unit: usize, part: Range<usize>) -> Result<()> {
        self.flats[unit].release();
        self.flats[unit] = self.device.zeros([part.len()].into(), self.dtype, self.category)?;
        self.parts[unit] = part;
        Ok(())
    }

    /// Returns the tensor that backs a unit's buffer.
    pub fn memory_mut(&mut self, unit: usize) -> &mut Tensor {
        &mut self.flats[unit]
    }

    /// Returns the values of one parameter.
    ///
    /// # Panics
    /// If only a part of its unit's flat buffer is stored.
    pub fn parameter(&self, id: ParameterId) -> View<'_> {
        let info = &self.table.parameters()[id.0];
        self.unit(info.unit).part(info.offset, info.shape)
    }

    /// Calls `write`, in order, with each parameter that is at least partly stored, the range of its elements that is stored, and a zeroed
    /// buffer for them. The buffer's contents become the values.
    ///
    /// # Errors
    /// If `write` fails.
    pub fn load<E>(
        &mut self,
        mut write: impl FnMut(&ParameterInfo, Range<usize>, &mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let Parameters { table, parts, flats, device, .. } = self;
        table.stored(parts).try_for_each(|(info, held, within)| {
            let values = flats[info.unit].view_mut().into_part(within.start, [within.len()].into());
            device.fill_f32s(values, |values| write(info, held, values))
        })
    }
}

impl ParameterSource for Parameters {
    fn unit(&self, unit: usize) -> View<'_> {
        let flat = self.flats[unit].view();
        assert_eq!(flat.shape().num_elements(), self.table.units()[unit].num_elements, "only a part is here");
        flat
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::declaration::{Initial, Parameter};
    use crate::device::{DeviceError, DeviceOptions};

    #[test]
    fn tables_beyond_the_address_space_return_an_error() {
        let device = Device::counting(DeviceOptions::default()).unwrap();
        let mut table = ParameterTable::default();
        for name in ["first", "second"] {
            table.begin_unit(name);
            table.add(Parameter::matrix("weight", &[1 << 40, 1 << 40], Initial::ZEROS));
            let part = |rows| Parameter::matrix("part", &[rows, 4], Initial::ZEROS);
            table.add_stacked([usize::MAX, 2].map(part));
        }
        assert_eq!(table.num_elements(), usize::MAX);
        let refused = Parameters::zeros(&Arc::new(table), &device, Category::Parameters).unwrap_err();
        assert!(refused.to_string().contains("TiB for parameters do not fit into"), "{refused}");
    }

    #[test]
    fn a_shard_loads_parts_of_parameters() {
        let device = Device::cpu(DeviceOptions { num_threads: 1, ..DeviceOptions::default() }).unwrap();
        let mut table = ParameterTable::default();
        table.begin_unit("block");
        for (name, len) in [("a", 3), ("b", 4), ("c", 2)] {
            table.add(Parameter::vector(name, len, Initial::ZEROS));
        }
        let table = Arc::new(table);
        let parts = std::iter::once(2..6).collect();
        let mut part = Parameters::zeros_of(&table, parts, DType::F32, &device, Category::Optimizer).unwrap();
        let mut found = Vec::new();
        part.load(|info, held, values| {
            values.fill(info.offset as f32);
            found.push((info.name.clone(), held));
            Ok::<(), DeviceError>(())
        })
        .unwrap();
        assert_eq!(found, [("a".to_owned(), 2..3), ("b".to_owned(), 0..3)]);
        assert_eq!(part.values(0).unwrap(), [0.0, 3.0, 3.0, 3.0]);
    }
}
