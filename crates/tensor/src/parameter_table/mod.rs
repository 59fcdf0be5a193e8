//! The parameters of a model and their places in the flat buffers of units.

mod info;
mod model_rank;
mod unit;

use crate::declaration::{Parameter, ParameterClass};
use crate::shape::Shape;
use std::ops::Range;

pub use info::ParameterInfo;
pub use model_rank::{ExpertDegreeError, ModelRank, UnsplittableError};
pub(crate) use unit::leaf_sum;
pub use unit::{NUM_LEAVES, UnitInfo};

/// Index of a parameter in its [`ParameterTable`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ParameterId(pub usize);

/// One parameter, or several adjacent ones that operations read as one matrix, stacked along dim 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParameterSpan {
    /// Unit that holds the parameters.
    pub unit: usize,
    /// First element within the unit's flat buffer.
    pub offset: usize,
    /// Shape of the stacked matrix.
    pub shape: Shape,
    /// First parameter.
    pub first: ParameterId,
    /// Number of parameters.
    pub num_parameters: usize,
    /// The shard on this rank, if tensor parallelism splits the span.
    pub shard: Option<SpanShard>,
}

/// The shard of a span on a rank of the tensor axis. Indices and lengths are per parameter of the span.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpanShard {
    /// The sharded dim.
    pub dim: usize,
    /// First index along the dim in this shard.
    pub start: usize,
    /// Number of indices along the dim in this shard, without padding.
    pub len: usize,
    /// Length of the dim over all ranks.
    pub full_len: usize,
}

/// All parameters of a model, by unit, with the shards that one rank of the tensor and expert axes stores.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ParameterTable {
    parameters: Vec<ParameterInfo>,
    units: Vec<UnitInfo>,
    matrices: Vec<ParameterSpan>,
    tie: Option<Tie>,
    model_rank: ModelRank,
}

/// Parameters that a unit reads although another unit holds them (tied weights).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tie {
    /// The unit that reads the parameters and adds to their gradient.
    pub reader: usize,
    /// The parameters, with the unit that holds them.
    pub span: ParameterSpan,
}

impl ParameterTable {
    /// Creates an empty table for the rank at `place` on the tensor and expert axes.
    pub fn for_rank(place: impl Into<ModelRank>) -> Self {
        ParameterTable { model_rank: place.into(), ..ParameterTable::default() }
    }

    /// Returns the table of the full parameters, without tensor or expert parallelism, in the same order. It only describes parameters: it
    /// has no ties and no [`matrices`](ParameterTable::matrices).
    pub fn full(&self) -> ParameterTable {
        let mut whole = ParameterTable::default();
        for unit in &self.units {
            whole.begin_unit(unit.name.clone());
            for info in &self.parameters[unit.parameters.clone()] {
                let ParameterInfo { name, initial, class, split: cut, .. } = info.clone();
                let dims = info.full_shape.dims().to_vec();
                let expert = info.expert.map(|expert| (expert, unit.num_experts));
                whole.push(Parameter { name, dims, initial, class, split: cut, expert });
            }
        }
        whole
    }

    /// Begins a unit, to which the parameters added next belong. Returns its index.
    pub fn begin_unit(&mut self, name: impl Into<String>) -> usize {
        let next = self.parameters.len();
        let name = name.into();
        self.units.push(UnitInfo { name, parameters: next..next, num_elements: 0, num_experts: 0 });
        self.units.len() - 1
    }

    /// Adds a parameter to the last unit.
    ///
    /// # Panics
    /// If there is no unit, if tensor parallelism cannot split the parameter, or if experts are inconsistent.
    pub fn add(&mut self, parameter: Parameter) -> ParameterSpan {
        self.add_stacked([parameter])
    }

    /// Adds parameters that operations read as one matrix, stacked along dim 0.
    ///
    /// # Panics
    /// If there are no parameters, if their dims other than 0 differ, if they are sharded along different dims, and in the cases of
    /// [`add`](ParameterTable::add).
    pub fn add_stacked(&mut self, parts: impl IntoIterator<Item = Parameter>) -> ParameterSpan {
        let mut parts = parts.into_iter();
        let first = parts.next().expect("a span has parameters");
        let is_matrix = first.class == ParameterClass::Matrix;
        let span = parts.fold(self.push(first), |stack, part| {
            let (part, mut dims) = (self.push(part), stack.shape.dims().to_vec());
            assert_eq!(part.shape.dims()[1..], dims[1..], "parameters of unequal rows do not stack");
            dims[0] = dims[0].saturating_add(part.shape.dims()[0]);
            let cut_dims = [part, stack].map(|span| span.shard.map(|part| part.dim));
            assert_eq!(cut_dims[0], cut_dims[1], "parameters that are cut along different dims do not stack");
            ParameterSpan { shape: Shape::new(&dims), num_parameters: stack.num_parameters + 1, ..stack }
        });
        self.matrices.extend(Some(span).filter(|_| is_matrix));
        span
    }

    fn push(&mut self, parameter: Parameter) -> ParameterSpan {
        let Parameter { name, dims, initial, class, split: cut, expert } = parameter;
        let unit = self.last_unit();
        let is_here = expert.is_none_or(|(expert, num_experts)| {
            let own = &mut self.units[unit].num_experts;
            assert!([0, num_experts].contains(own), "a unit has one number of experts");
            *own = num_experts;
            self.own_experts(num_experts).contains(&expert)
        });
        let expert = expert.map(|(expert, _)| expert);
        let info = &mut self.units[unit];
        let (first, offset) = (ParameterId(self.parameters.len()), info.num_elements);
        let (whole, place) = (Shape::new(&dims), self.model_rank.tensor);
        let (mut dims, mut part) = (dims, None);
        if let Some(cut) = cut.filter(|_| place.degree > 1) {
            let first = cut.segments(dims[cut.dim], place).next().expect("there is a group");
            part =
                Some(SpanShard { dim: cut.dim, start: first.start, len: first.len, full_len: dims[cut.dim] });
            dims[cut.dim] = cut.part_len(dims[cut.dim], place.degree);
        }
        if !is_here {
            dims[0] = 0;
        }
        let shape = Shape::new(&dims);
        // Saturates like `Shape::num_elements`: devices refuse such sizes.
        info.num_elements = info.num_elements.saturating_add(shape.num_elements());
        info.parameters.end += 1;
        let info = ParameterInfo {
            name,
            full_shape: whole,
            shape,
            initial,
            class,
            split: cut,
            tensor_rank: place,
            expert,
            unit,
            offset,
        };
        self.parameters.push(info);
        ParameterSpan { unit, offset, shape, first, num_parameters: 1, shard: part }
    }

    fn last_unit(&self) -> usize {
        self.units.len().checked_sub(1).expect("a parameter belongs to a unit")
    }

    /// Lets the last unit read parameters of an earlier unit, as an output layer that is tied to the embedding does.
    ///
    /// # Panics
    /// If the parameters belong to the last unit, or if the table already has a tie.
    pub fn add_tie(&mut self, span: ParameterSpan) -> ParameterSpan {
        let reader = self.last_unit();
        assert!(span.unit < reader, "a unit needs no tie to its own parameters");
        let first = self.tie.replace(Tie { reader, span });
        assert_eq!(first, None, "a model has at most one tie");
        span
    }

    /// Returns the tied parameters, if there are any.
    pub fn tie(&self) -> Option<Tie> {
        self.tie
    }

    /// Returns the weights that multiply hidden values, stacked as operations read them. With fp8, the matmuls with these weights are
    /// quantized.
    pub fn matrices(&self) -> &[ParameterSpan] {
        &self.matrices
    }

    /// Returns all parameters, in the order of [`ParameterId`].
    pub fn parameters(&self) -> &[ParameterInfo] {
        &self.parameters
    }

    /// Returns all units, in forward order.
    pub fn units(&self) -> &[UnitInfo] {
        &self.units
    }

    /// Returns shard `index` of `num_shards` of every unit's flat buffer.
    ///
    /// # Panics
    /// If `index` is not less than `num_shards`.
    pub fn shards(&self, index: usize, num_shards: usize) -> Vec<Range<usize>> {
        self.units.iter().map(|unit| unit.shard(index, num_shards)).collect()
    }

    /// Returns, in order, the parameters that overlap `parts`, one range of each unit's flat buffer. Each comes with the overlapping
    /// elements twice: as a range of the parameter and as a range of the part.
    pub fn stored<'a>(
        &'a self,
        parts: &'a [Range<usize>],
    ) -> impl Iterator<Item = (&'a ParameterInfo, Range<usize>, Range<usize>)> {
        self.parameters.iter().filter_map(|info| {
            let part = &parts[info.unit];
            let held = info.stored(part)?;
            let first = info.offset + held.start - part.start;
            let within = first..first + held.len();
            Some((info, held, within))
        })
    }

    /// Returns the number of elements of all parameters; saturates.
    pub fn num_elements(&self) -> usize {
        self.units.iter().fold(0, |sum: usize, unit| sum.saturating_add(unit.num_elements))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::declaration::Initial;

    #[test]
    fn stacked_parameters_are_adjacent_in_their_unit() {
        let mut table = ParameterTable::default();
        table.begin_unit("embedding");
        table.add(Parameter::embedding("wte", &[5, 4], Initial::ZEROS));
        let unit = table.begin_unit("block");
        table.add(Parameter::vector("norm", 4, Initial::ONES));
        let part = |(name, rows)| Parameter::matrix(name, &[rows, 4], Initial::ZEROS);
        let qkv = table.add_stacked([("q", 6), ("k", 2), ("v", 2)].map(part));
        assert_eq!(table.matrices(), [qkv]);
        assert_eq!((qkv.unit, qkv.offset, qkv.shape.dims()), (unit, 4, &[10, 4][..]));
        assert_eq!((qkv.first, qkv.num_parameters), (ParameterId(2), 3));
        assert_eq!(table.parameters()[4].range(), 36..44);
        assert_eq!(table.units()[unit].num_elements, 44);
        assert_eq!(table.num_elements(), 64);
    }
}
