//! Parameters in flat buffers, one buffer a unit.

use crate::device::{Device, DeviceError};
use crate::memory::Category;
use crate::shape::Shape;
use crate::tensor::{Tensor, View, ViewMut};
use std::ops::Range;
use std::sync::Arc;
use trireme_base::DType;

/// A parameter's place in its [`ParameterTable`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ParameterId(pub usize);

/// What a parameter is called, its shape, and where it lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParameterInfo {
    /// Fully qualified name, as Hugging Face checkpoints spell it.
    pub name: String,
    /// Shape, as Hugging Face checkpoints store it.
    pub shape: Shape,
    /// Unit that holds it.
    pub unit: usize,
    /// First element within the unit's flat buffer.
    pub offset: usize,
}

impl ParameterInfo {
    /// The parameter's elements within its unit's flat buffer.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.shape.num_elements()
    }
}

/// What is gathered, reduced, fetched and stepped together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnitInfo {
    /// Name in reports, such as `transformer.h.3`.
    pub name: String,
    /// Its parameters, consecutive in the table.
    pub parameters: Range<usize>,
    /// Elements of its flat buffer.
    pub num_elements: usize,
}

/// One parameter, or several adjacent ones that an operation reads as one matrix, stacked along dim 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParameterSpan {
    /// Unit that holds it.
    pub unit: usize,
    /// First element within the unit's flat buffer.
    pub offset: usize,
    /// Shape of the stack.
    pub shape: Shape,
    /// First parameter.
    pub first: ParameterId,
    /// Number of parameters.
    pub num_parameters: usize,
}

/// All parameters of a model, by unit.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ParameterTable {
    parameters: Vec<ParameterInfo>,
    units: Vec<UnitInfo>,
}

impl ParameterTable {
    /// Begins a unit; the parameters added next belong to it. Returns its index.
    pub fn begin_unit(&mut self, name: impl Into<String>) -> usize {
        let next = self.parameters.len();
        self.units.push(UnitInfo { name: name.into(), parameters: next..next, num_elements: 0 });
        self.units.len() - 1
    }

    /// Adds a parameter to the last unit.
    ///
    /// # Panics
    /// If no unit was begun.
    pub fn add(&mut self, name: impl Into<String>, shape: &[usize]) -> ParameterSpan {
        let unit = self.units.len().checked_sub(1).expect("a parameter belongs to a unit");
        let info = &mut self.units[unit];
        let (id, offset, shape) = (ParameterId(self.parameters.len()), info.num_elements, Shape::new(shape));
        info.num_elements += shape.num_elements();
        info.parameters.end += 1;
        self.parameters.push(ParameterInfo { name: name.into(), shape, unit, offset });
        ParameterSpan { unit, offset, shape, first: id, num_parameters: 1 }
    }

    /// Adds parameters that operations read as one, stacked along dim 0.
    ///
    /// # Panics
    /// If the shapes differ in another dim.
    pub fn add_stacked(&mut self, parts: &[(String, Vec<usize>)]) -> ParameterSpan {
        let spans: Vec<ParameterSpan> = parts.iter().map(|(name, shape)| self.add(name, shape)).collect();
        let first = spans[0];
        let inner = &first.shape.dims()[1..];
        assert!(spans.iter().all(|span| &span.shape.dims()[1..] == inner), "{parts:?} do not stack");
        let mut dims = first.shape.dims().to_vec();
        dims[0] = spans.iter().map(|span| span.shape.dims()[0]).sum();
        ParameterSpan { shape: Shape::new(&dims), num_parameters: spans.len(), ..first }
    }

    /// Every parameter, in order of [`ParameterId`].
    pub fn parameters(&self) -> &[ParameterInfo] {
        &self.parameters
    }

    /// Every unit, in forward order.
    pub fn units(&self) -> &[UnitInfo] {
        &self.units
    }

    /// Number of elements of all parameters.
    pub fn num_elements(&self) -> usize {
        self.units.iter().map(|unit| unit.num_elements).sum()
    }
}

/// Values for every parameter of a table: one flat f32 buffer a unit.
#[derive(Debug)]
pub struct Parameters {
    table: Arc<ParameterTable>,
    flats: Vec<Tensor>,
}

impl Parameters {
    /// Zeros, counted as `category`.
    pub fn zeros(
        table: &Arc<ParameterTable>,
        device: &Device,
        category: Category,
    ) -> Result<Self, DeviceError> {
        device.check_room(table.num_elements().saturating_mul(size_of::<f32>()), category)?;
        let flat = |unit: &UnitInfo| device.zeros([unit.num_elements].into(), DType::F32, category);
        let flats = table.units().iter().map(flat).collect::<Result<_, _>>()?;
        Ok(Parameters { table: Arc::clone(table), flats })
    }

    /// The table that these values are for.
    pub fn table(&self) -> &Arc<ParameterTable> {
        &self.table
    }

    /// A unit's flat buffer.
    pub fn flat(&self, unit: usize) -> View<'_> {
        self.flats[unit].view()
    }

    /// A unit's flat buffer, to write.
    pub fn flat_mut(&mut self, unit: usize) -> ViewMut<'_> {
        self.flats[unit].view_mut()
    }

    /// What a span covers.
    pub fn span(&self, span: &ParameterSpan) -> View<'_> {
        self.flats[span.unit].view().part(span.offset, span.shape)
    }

    /// One parameter.
    pub fn parameter(&self, id: ParameterId) -> View<'_> {
        let info = &self.table.parameters[id.0];
        self.flats[info.unit].view().part(info.offset, info.shape)
    }

    /// Calls `write` with each parameter's description and elements, in order.
    pub fn for_each_mut<E>(
        &mut self,
        mut write: impl FnMut(&ParameterInfo, &mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        for info in &self.table.parameters {
            let mut flat = self.flats[info.unit].view_mut();
            write(info, &mut flat.f32s()[info.range()])?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stacked_parameters_are_adjacent_in_their_unit() {
        let mut table = ParameterTable::default();
        table.begin_unit("embedding");
        table.add("wte", &[5, 4]);
        let unit = table.begin_unit("block");
        table.add("norm", &[4]);
        let qkv = table.add_stacked(&[
            ("q".into(), vec![6, 4]),
            ("k".into(), vec![2, 4]),
            ("v".into(), vec![2, 4]),
        ]);
        assert_eq!((qkv.unit, qkv.offset, qkv.shape.dims()), (unit, 4, &[10, 4][..]));
        assert_eq!((qkv.first, qkv.num_parameters), (ParameterId(2), 3));
        assert_eq!(table.parameters()[4].range(), 36..44);
        assert_eq!(table.units()[unit].num_elements, 44);
        assert_eq!(table.num_elements(), 64);
    }
}
