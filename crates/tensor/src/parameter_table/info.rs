//! What a parameter is, and what of it is here.

use crate::declaration::{Initial, ParameterClass};
use crate::shape::Shape;
use std::ops::Range;
use trireme_base::{AxisPlace, Cut, Segment};

/// What a parameter is called, its shape, and where it lies.
#[derive(Debug, Clone, PartialEq)]
pub struct ParameterInfo {
    /// Fully qualified name, as Hugging Face checkpoints spell it.
    pub name: String,
    /// Shape of the whole, as Hugging Face checkpoints store it.
    pub whole: Shape,
    /// Shape of what this rank of the tensor axis has of it.
    pub shape: Shape,
    /// Its values before training.
    pub initial: Initial,
    /// What it is for.
    pub class: ParameterClass,
    /// How tensor parallelism may cut it; `None` if each rank needs all of it.
    pub cut: Option<Cut>,
    /// Which rank of the tensor axis this is.
    pub place: AxisPlace,
    /// Which of its unit's experts it belongs to; `None` if it is for all tokens.
    pub expert: Option<usize>,
    /// Unit that holds it.
    pub unit: usize,
    /// First element within the unit's flat buffer.
    pub offset: usize,
}

impl ParameterInfo {
    /// How many ranks of the tensor axis hold the same elements as this one: neighbours, the first of which has a multiple of that as its
    /// number.
    pub fn num_holders(&self) -> usize {
        let holders = |cut: Cut| cut.num_holders(self.whole.dims()[cut.dim], self.place.degree);
        self.cut.map_or(self.place.degree, |cut| holders(cut).expect("the table was checked to be cut"))
    }

    /// The same parameter as another rank of the tensor axis has it.
    pub fn at(&self, place: AxisPlace) -> Self {
        ParameterInfo { place, ..self.clone() }
    }

    /// Whether this is the first of the ranks that hold the same elements: the one that counts them in sums over all ranks.
    pub fn is_counted(&self) -> bool {
        self.place.rank.is_multiple_of(self.num_holders())
    }

    /// What this rank of the tensor axis has of a dim of the whole parameter.
    pub fn segments(&self, dim: usize) -> Vec<Segment> {
        let len = self.whole.dims()[dim];
        match self.cut {
            Some(cut) if cut.dim == dim => cut.segments(len, self.place).collect(),
            _ => vec![Segment { start: 0, place: 0, len }],
        }
    }

    /// The runs of the whole parameter, row-major, that the elements `held` make up, counted within what this rank of the tensor axis has:
    /// for each its first element in the whole, and the range within what the rank has.
    pub fn runs(&self, held: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> + use<> {
        // A parameter that is not cut is one row.
        let one_row = (Cut::along(0), [self.whole.num_elements()], AxisPlace::ALONE);
        match self.cut {
            Some(cut) if self.place.degree > 1 => cut.runs(self.whole.dims(), self.place, held),
            _ => one_row.0.runs(&one_row.1, one_row.2, held),
        }
    }

    /// Writes the initial values of the elements `held` of what this rank has.
    pub fn initialize(&self, seed: u64, held: Range<usize>, values: &mut [f32]) {
        for (first, run) in self.runs(held.clone()) {
            let run = run.start - held.start..run.end - held.start;
            self.initial.fill(&self.name, seed, first, &mut values[run]);
        }
    }

    /// The parameter's elements within its unit's flat buffer.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset.saturating_add(self.shape.num_elements())
    }

    /// Which of the parameter's elements lie in `part` of the flat buffer, if any do.
    pub fn held(&self, part: &Range<usize>) -> Option<Range<usize>> {
        let range = self.range();
        let (start, end) = (range.start.max(part.start), range.end.min(part.end));
        (start < end).then(|| start - self.offset..end - self.offset)
    }
}
