//! Description of a parameter and of its shard on a rank.

use crate::declaration::{Initial, ParameterClass};
use crate::shape::Shape;
use std::ops::Range;
use trireme_base::{AxisRank, AxisSplit, Segment};

/// A parameter's declaration, its shapes and its place in the flat buffer of its unit.
#[derive(Debug, Clone, PartialEq)]
pub struct ParameterInfo {
    /// Fully qualified name, as in Hugging Face checkpoints.
    pub name: String,
    /// Shape of the full parameter, as in Hugging Face checkpoints.
    pub full_shape: Shape,
    /// Shape of the shard on this rank of the tensor axis.
    pub shape: Shape,
    /// Values before training.
    pub initial: Initial,
    /// Determines optimizer update and weight decay.
    pub class: ParameterClass,
    /// How tensor parallelism may split the parameter; `None` if every rank needs all of it.
    pub split: Option<AxisSplit>,
    /// Place of this rank on the tensor axis.
    pub tensor_rank: AxisRank,
    /// Index of the parameter's expert in its unit; `None` if the parameter belongs to no expert.
    pub expert: Option<usize>,
    /// Unit that holds the parameter.
    pub unit: usize,
    /// First element within the unit's flat buffer.
    pub offset: usize,
}

impl ParameterInfo {
    /// Returns the number of ranks of the tensor axis that store the same elements as this rank, including this rank. These ranks are
    /// consecutive, and the first one's index is a multiple of this number.
    ///
    /// # Panics
    /// If the ranks of the tensor axis [cannot split](crate::ParameterTable::check_tensor_degree) the parameter.
    pub fn num_replicas(&self) -> usize {
        let num_holders =
            |cut: AxisSplit| cut.num_holders(self.full_shape.dims()[cut.dim], self.tensor_rank.degree);
        self.split
            .map_or(self.tensor_rank.degree, |cut| num_holders(cut).expect("the table was checked to be cut"))
    }

    /// Returns the same parameter for another rank of the tensor axis. Keeps `shape`, which is equal on all ranks.
    pub fn at(&self, place: AxisRank) -> Self {
        ParameterInfo { tensor_rank: place, ..self.clone() }
    }

    /// Returns whether this rank is the first that stores its elements. Only the first one counts them in sums over all ranks.
    pub fn is_first_replica(&self) -> bool {
        self.tensor_rank.rank.is_multiple_of(self.num_replicas())
    }

    /// Returns the segments of a dim of the full parameter that this rank of the tensor axis stores.
    pub fn segments(&self, dim: usize) -> Vec<Segment> {
        let len = self.full_shape.dims()[dim];
        match self.split {
            Some(cut) if cut.dim == dim => cut.segments(len, self.tensor_rank).collect(),
            _ => vec![Segment { start: 0, offset: 0, len }],
        }
    }

    /// Maps the elements `held` of this rank's shard to contiguous runs of the full, row-major parameter. Returns, for each run, its first
    /// element in the full parameter and its range in the shard.
    pub fn runs(&self, held: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> + use<> {
        // A replicated parameter is a single row.
        let one_row = (AxisSplit::along(0), [self.full_shape.num_elements()], AxisRank::ALONE);
        match self.split {
            Some(cut) if self.tensor_rank.degree > 1 => {
                cut.runs(self.full_shape.dims(), self.tensor_rank, held)
            }
            _ => one_row.0.runs(&one_row.1, one_row.2, held),
        }
    }

    /// Writes the initial values of the elements `held` of this rank's shard.
    pub fn initialize(&self, seed: u64, held: Range<usize>, values: &mut [f32]) {
        for (first, run) in self.runs(held.clone()) {
            let run = run.start - held.start..run.end - held.start;
            self.initial.fill(&self.name, seed, first, &mut values[run]);
        }
    }

    /// Returns the range of the parameter within its unit's flat buffer.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset.saturating_add(self.shape.num_elements())
    }

    /// Returns the elements that lie in `part` of the unit's flat buffer, as a range of the parameter; `None` if there are none.
    pub fn stored(&self, part: &Range<usize>) -> Option<Range<usize>> {
        let range = self.range();
        let (start, end) = (range.start.max(part.start), range.end.min(part.end));
        (start < end).then(|| start - self.offset..end - self.offset)
    }
}
