//! Which parameters a model has, and where each is in the flat buffer of its unit.

use crate::declaration::{Initial, Parameter, ParameterClass};
use crate::shape::Shape;
use std::ops::Range;
use trireme_base::{AxisPlace, Cut, Segment};

/// A parameter's place in its [`ParameterTable`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ParameterId(pub usize);

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

/// Leaves of the canonical tree over a unit's flat buffer: sums over a unit's elements are taken within leaves of equal
/// length, and then of neighbours first. So up to so many ranks, if they are a power of two, come to the same sum by adding
/// what each of them finds in its shard, in the order of any reduction.
pub const LEAVES: usize = 1024;

/// Sum over some leaves, of neighbours first: what the tree over all leaves comes to if the others are zero. `zero` is the
/// sum of no leaves.
pub(crate) fn leaf_sum<T: Copy>(
    leaves: Range<usize>,
    zero: T,
    leaf: &mut impl FnMut(usize) -> T,
    add: &impl Fn(T, T) -> T,
) -> T {
    if leaves.is_empty() {
        return zero;
    }
    if leaves.len() == 1 {
        return leaf(leaves.start);
    }
    // The two halves of the smallest subtree that has them all.
    let height = (leaves.start ^ (leaves.end - 1)).ilog2();
    let middle = (leaves.end - 1) >> height << height;
    let left = leaf_sum(leaves.start..middle, zero, leaf, add);
    let right = leaf_sum(middle..leaves.end, zero, leaf, add);
    add(left, right)
}

/// Degrees of tensor parallelism beyond this are not suggested.
const DEGREE_MAX: usize = 1024;

/// What is gathered, reduced, fetched and stepped together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnitInfo {
    /// Name in reports, such as `transformer.h.3`.
    pub name: String,
    /// Its parameters, consecutive in the table.
    pub parameters: Range<usize>,
    /// Elements of its flat buffer.
    pub num_elements: usize,
    /// Its experts, on all ranks of the expert axis; 0 if it has none.
    pub num_experts: usize,
}

impl UnitInfo {
    /// Elements of a leaf: the last leaves may have fewer, or none.
    pub fn leaf_len(&self) -> usize {
        self.num_elements.div_ceil(LEAVES)
    }

    /// Elements of the flat buffer with all leaves filled up, which is what ranks shard: equal shards are whole leaves.
    pub fn padded_len(&self) -> usize {
        self.leaf_len().saturating_mul(LEAVES)
    }

    /// The elements of shard `index` of `num_shards`, without what fills up the last leaves.
    ///
    /// # Panics
    /// If there is no such shard.
    pub fn shard(&self, index: usize, num_shards: usize) -> Range<usize> {
        assert!(index < num_shards, "shard {index} of {num_shards}");
        let (base, longer) = (self.padded_len() / num_shards, self.padded_len() % num_shards);
        let start = |index: usize| (index * base + index.min(longer)).min(self.num_elements);
        start(index)..start(index + 1)
    }
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
    /// Which part of it is here, if the tensor axis has several ranks and they cut it.
    pub part: Option<SpanPart>,
}

/// The part of a span that a rank of the tensor axis has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpanPart {
    /// The dim that is cut.
    pub dim: usize,
    /// The first element of the dim that is here, of a parameter by itself.
    pub start: usize,
    /// How many elements of the dim are here, of a parameter by itself, without those that fill it up.
    pub len: usize,
    /// How many elements the dim has on all ranks, of a parameter by itself.
    pub whole: usize,
}

/// All parameters of a model, by unit.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ParameterTable {
    parameters: Vec<ParameterInfo>,
    units: Vec<UnitInfo>,
    matrices: Vec<ParameterSpan>,
    tie: Option<Tie>,
    place: ModelPlace,
}

/// Which part of a model a rank has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ModelPlace {
    /// Among the ranks that cut parameters.
    pub tensor: AxisPlace,
    /// Among the ranks with different experts.
    pub experts: AxisPlace,
}

impl ModelPlace {
    /// All of it.
    pub const WHOLE: ModelPlace = ModelPlace { tensor: AxisPlace::ALONE, experts: AxisPlace::ALONE };
}

impl From<AxisPlace> for ModelPlace {
    fn from(tensor: AxisPlace) -> Self {
        ModelPlace { tensor, ..ModelPlace::WHOLE }
    }
}

/// Experts that so many ranks cannot divide.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExpertsError {
    /// There are none.
    #[error("the model has no experts that {degree} ranks could divide")]
    None {
        /// The ranks.
        degree: usize,
    },
    /// They do not divide.
    #[error(
        "{degree} ranks cannot have equally many of the {num_experts} experts of '{unit}'; the nearest degrees that divide them are {}",
        join(.nearest)
    )]
    Indivisible {
        /// The first unit whose experts do not divide.
        unit: String,
        /// Its experts.
        num_experts: usize,
        /// The ranks.
        degree: usize,
        /// The next smaller and the next larger number of ranks that divide those of all units, if there is one.
        nearest: Vec<usize>,
    },
}

/// A parameter that so many ranks of the tensor axis cannot cut.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{degree} ranks cannot cut dim {dim} of '{name}' into equal parts: it has {num_granules} pieces of {granule} elements that stay together{}; \
     the nearest degrees that divide the model are {}",
    groups(*.num_groups), join(.nearest)
)]
pub struct UncuttableError {
    /// The first such parameter.
    pub name: String,
    /// The dim that is cut.
    pub dim: usize,
    /// Groups, of each of which a rank gets its part.
    pub num_groups: usize,
    /// Pieces that are not cut, in each group.
    pub num_granules: usize,
    /// Elements of such a piece.
    pub granule: usize,
    /// The ranks.
    pub degree: usize,
    /// Numbers of ranks that can cut all parameters: the next smaller and the next larger one, if there is one.
    pub nearest: Vec<usize>,
}

fn groups(num_groups: usize) -> String {
    if num_groups == 1 { String::new() } else { format!(" in each of {num_groups} groups") }
}

fn join(degrees: &[usize]) -> String {
    degrees.iter().map(usize::to_string).collect::<Vec<_>>().join(" and ")
}

/// Parameters that a unit reads although another unit holds them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tie {
    /// The unit that reads them and adds to their gradient.
    pub reader: usize,
    /// The parameters, with the unit that holds them.
    pub span: ParameterSpan,
}

impl ParameterTable {
    /// An empty table of what a rank of the tensor axis, and of that of experts, has of parameters.
    pub fn of_place(place: impl Into<ModelPlace>) -> Self {
        ParameterTable { place: place.into(), ..ParameterTable::default() }
    }

    /// Which rank of the tensor axis the table is for.
    pub fn place(&self) -> AxisPlace {
        self.place.tensor
    }

    /// Which rank of the axis of experts the table is for.
    pub fn expert_place(&self) -> AxisPlace {
        self.place.experts
    }

    /// Which part of the model the table is for.
    pub fn model_place(&self) -> ModelPlace {
        self.place
    }

    /// Of so many experts those that this rank has.
    ///
    /// # Panics
    /// If they do not divide; [`check_expert_degree`](ParameterTable::check_expert_degree) refuses that before.
    pub fn own_experts(&self, num_experts: usize) -> Range<usize> {
        let AxisPlace { rank, degree } = self.place.experts;
        assert!(num_experts.is_multiple_of(degree), "{num_experts} experts on {degree} ranks");
        rank * (num_experts / degree)..(rank + 1) * (num_experts / degree)
    }

    /// The rank of the axis of experts that has a parameter, unless all have it.
    pub fn owner(&self, info: &ParameterInfo) -> Option<usize> {
        let num_own = self.units[info.unit].num_experts / self.place.experts.degree;
        info.expert.map(|expert| expert / num_own)
    }

    /// Whether this rank has a parameter, or a part of it.
    pub fn has(&self, info: &ParameterInfo) -> bool {
        self.owner(info).is_none_or(|owner| owner == self.place.experts.rank)
    }

    /// The parameter that lies on this rank where another one lies on the rank that has it: all ranks of the axis of experts have units of one
    /// form.
    pub fn counterpart(&self, info: &ParameterInfo) -> &ParameterInfo {
        let unit = &self.units[info.unit];
        let all = &self.parameters[unit.parameters.clone()];
        let Some(expert) = info.expert else {
            let found = all.iter().find(|other| other.name == info.name);
            return found.expect("the parameter is of this table");
        };
        let own = self.own_experts(unit.num_experts);
        let counterpart = own.start + expert % own.len();
        let of = |expert: usize| all.iter().filter(move |other| other.expert == Some(expert));
        let place = of(expert).position(|other| other.name == info.name);
        let found = place.and_then(|place| of(counterpart).nth(place));
        found.expect("experts have the same parameters")
    }

    /// Whether so many ranks can have equally many experts of each unit of this table, which has all of them.
    ///
    /// # Errors
    /// The first unit whose experts do not divide, or that there are no experts.
    pub fn check_expert_degree(&self, degree: usize) -> Result<(), ExpertsError> {
        let nums = || self.units.iter().filter(|unit| unit.num_experts > 0);
        if degree <= 1 {
            return Ok(());
        }
        let Some(fewest) = nums().map(|unit| unit.num_experts).min() else {
            return Err(ExpertsError::None { degree });
        };
        let divides = |degree: usize| nums().all(|unit| unit.num_experts.is_multiple_of(degree));
        let Some(unit) = nums().find(|unit| !unit.num_experts.is_multiple_of(degree)) else { return Ok(()) };
        let below = (1..degree).rev().find(|&degree| divides(degree));
        let above = (degree + 1..=fewest).find(|&degree| divides(degree));
        Err(ExpertsError::Indivisible {
            unit: unit.name.clone(),
            num_experts: unit.num_experts,
            degree,
            nearest: below.into_iter().chain(above).collect(),
        })
    }

    /// The parameters of all ranks of the tensor axis and of that of experts, in the same order. Nothing is tied, for nothing runs with them.
    pub fn whole(&self) -> ParameterTable {
        let mut whole = ParameterTable::default();
        for unit in &self.units {
            whole.begin_unit(unit.name.clone());
            for info in &self.parameters[unit.parameters.clone()] {
                let ParameterInfo { name, initial, class, cut, .. } = info.clone();
                let dims = info.whole.dims().to_vec();
                let expert = info.expert.map(|expert| (expert, unit.num_experts));
                whole.push(Parameter { name, dims, initial, class, cut, expert });
            }
        }
        whole
    }

    /// Whether so many ranks of the tensor axis can have parts of the parameters of this table, which has all of them.
    ///
    /// # Errors
    /// The first parameter that they cannot cut.
    pub fn check_degree(&self, degree: usize) -> Result<(), UncuttableError> {
        let cuts = |info: &ParameterInfo| Some((info.cut?, info.whole.dims()[info.cut?.dim]));
        let can_cut = |degree: usize| {
            let mut cuts = self.parameters.iter().filter_map(cuts);
            degree > 0 && cuts.all(|(cut, len)| cut.num_holders(len, degree).is_some())
        };
        let refusing = self.parameters.iter().find(|info| {
            cuts(info).is_some_and(|(cut, len)| degree == 0 || cut.num_holders(len, degree).is_none())
        });
        let Some(info) = refusing else { return Ok(()) };
        let (cut, len) = cuts(info).expect("it is cut");
        let num_granules = cut.num_granules(len);
        let below = (1..degree).rev().find(|&degree| can_cut(degree));
        let above = (degree + 1..=DEGREE_MAX.max(degree)).find(|&degree| can_cut(degree));
        Err(UncuttableError {
            name: info.name.clone(),
            dim: cut.dim,
            num_groups: cut.num_groups,
            num_granules,
            granule: cut.granule,
            degree,
            nearest: below.into_iter().chain(above).collect(),
        })
    }

    /// What this rank of the tensor axis has of so many things that are cut like this, such as heads.
    ///
    /// # Panics
    /// If they cannot be cut; [`check_degree`](ParameterTable::check_degree) refuses the parameters that belong to them before.
    pub fn part_of(&self, cut: Cut, len: usize) -> usize {
        cut.part_len(len, self.place.tensor.degree)
    }

    /// Begins a unit; the parameters added next belong to it. Returns its index.
    pub fn begin_unit(&mut self, name: impl Into<String>) -> usize {
        let next = self.parameters.len();
        let name = name.into();
        self.units.push(UnitInfo { name, parameters: next..next, num_elements: 0, num_experts: 0 });
        self.units.len() - 1
    }

    /// Adds a parameter to the last unit.
    ///
    /// # Panics
    /// If no unit was begun.
    pub fn add(&mut self, parameter: Parameter) -> ParameterSpan {
        self.add_stacked([parameter])
    }

    /// Adds parameters that operations read as one, stacked along dim 0.
    ///
    /// # Panics
    /// If there are none, if their shapes differ in another dim, or if no unit was begun.
    pub fn add_stacked(&mut self, parts: impl IntoIterator<Item = Parameter>) -> ParameterSpan {
        let mut parts = parts.into_iter();
        let first = parts.next().expect("a span has parameters");
        let is_matrix = first.class == ParameterClass::Matrix;
        let span = parts.fold(self.push(first), |stack, part| {
            let (part, mut dims) = (self.push(part), stack.shape.dims().to_vec());
            assert_eq!(part.shape.dims()[1..], dims[1..], "parameters of unequal rows do not stack");
            dims[0] = dims[0].saturating_add(part.shape.dims()[0]);
            let cut_dims = [part, stack].map(|span| span.part.map(|part| part.dim));
            assert_eq!(cut_dims[0], cut_dims[1], "parameters that are cut along different dims do not stack");
            ParameterSpan { shape: Shape::new(&dims), num_parameters: stack.num_parameters + 1, ..stack }
        });
        self.matrices.extend(Some(span).filter(|_| is_matrix));
        span
    }

    fn push(&mut self, parameter: Parameter) -> ParameterSpan {
        let Parameter { name, dims, initial, class, cut, expert } = parameter;
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
        let (whole, place) = (Shape::new(&dims), self.place.tensor);
        let (mut dims, mut part) = (dims, None);
        if let Some(cut) = cut.filter(|_| place.degree > 1) {
            let first = cut.segments(dims[cut.dim], place).next().expect("there is a group");
            part = Some(SpanPart { dim: cut.dim, start: first.start, len: first.len, whole: dims[cut.dim] });
            dims[cut.dim] = cut.part_len(dims[cut.dim], place.degree);
        }
        if !is_here {
            dims[0] = 0;
        }
        let shape = Shape::new(&dims);
        // Saturates, as shapes do: a device refuses to hold so many.
        info.num_elements = info.num_elements.saturating_add(shape.num_elements());
        info.parameters.end += 1;
        self.parameters.push(ParameterInfo {
            name,
            whole,
            shape,
            initial,
            class,
            cut,
            place,
            expert,
            unit,
            offset,
        });
        ParameterSpan { unit, offset, shape, first, num_parameters: 1, part }
    }

    fn last_unit(&self) -> usize {
        self.units.len().checked_sub(1).expect("a parameter belongs to a unit")
    }

    /// Lets the last unit read parameters of an earlier one, as an output layer does that is tied to the embedding.
    ///
    /// # Panics
    /// If they are its own, or if the table has a tie already.
    pub fn add_tie(&mut self, span: ParameterSpan) -> ParameterSpan {
        let reader = self.last_unit();
        assert!(span.unit < reader, "a unit needs no tie to its own parameters");
        let first = self.tie.replace(Tie { reader, span });
        assert_eq!(first, None, "a model has at most one tie");
        span
    }

    /// What a unit reads of another unit's parameters, if one does.
    pub fn tie(&self) -> Option<Tie> {
        self.tie
    }

    /// The factors of products between hidden values, each as operations read it: those that fp8 is for.
    pub fn matrices(&self) -> &[ParameterSpan] {
        &self.matrices
    }

    /// Every parameter, in order of [`ParameterId`].
    pub fn parameters(&self) -> &[ParameterInfo] {
        &self.parameters
    }

    /// Every unit, in forward order.
    pub fn units(&self) -> &[UnitInfo] {
        &self.units
    }

    /// Shard `index` of `num_shards` of every unit's flat buffer; 0 of 1 is all of it.
    ///
    /// # Panics
    /// If there is no such shard.
    pub fn shards(&self, index: usize, num_shards: usize) -> Vec<Range<usize>> {
        self.units.iter().map(|unit| unit.shard(index, num_shards)).collect()
    }

    /// Each parameter of which something lies in `parts` of the units' flat buffers, which of its elements do, and where they
    /// lie within the part, in order.
    pub fn held<'a>(
        &'a self,
        parts: &'a [Range<usize>],
    ) -> impl Iterator<Item = (&'a ParameterInfo, Range<usize>, Range<usize>)> {
        self.parameters.iter().filter_map(|info| {
            let part = &parts[info.unit];
            let held = info.held(part)?;
            let first = info.offset + held.start - part.start;
            let within = first..first + held.len();
            Some((info, held, within))
        })
    }

    /// Number of elements of all parameters.
    pub fn num_elements(&self) -> usize {
        self.units.iter().fold(0, |sum: usize, unit| sum.saturating_add(unit.num_elements))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn shards_are_whole_leaves_and_cover_the_unit() {
        for num_elements in [0, 1, 768, 1024, 1025, 5000] {
            let unit = UnitInfo { name: "unit".into(), parameters: 0..0, num_elements, num_experts: 0 };
            assert!(unit.padded_len() >= num_elements && unit.padded_len() < num_elements + LEAVES);
            for num_shards in [1, 2, 3, 4, 64] {
                let shards: Vec<Range<usize>> =
                    (0..num_shards).map(|index| unit.shard(index, num_shards)).collect();
                assert_eq!((shards[0].start, shards[num_shards - 1].end), (0, num_elements));
                assert!(shards.windows(2).all(|pair| pair[0].end == pair[1].start), "{shards:?}");
                let whole_leaves = |shard: &Range<usize>| shard.start.is_multiple_of(unit.leaf_len().max(1));
                let is_power = num_shards.is_power_of_two();
                assert!(
                    !is_power || shards.iter().all(|shard| shard.is_empty() || whole_leaves(shard)),
                    "{shards:?}"
                );
            }
        }
    }

    #[test]
    fn leaves_are_summed_as_their_tree_says() {
        let mut leaf = |leaf: usize| (leaf % 7) as f64 + 0.1;
        let add = |a: f64, b: f64| a + b;
        for range in [0..0, 3..4, 0..8, 5..13, 1..1024] {
            let mut sums: Vec<f64> =
                (0..LEAVES).map(|index| if range.contains(&index) { leaf(index) } else { 0.0 }).collect();
            while sums.len() > 1 {
                sums = sums.chunks(2).map(|pair| pair[0] + pair[1]).collect();
            }
            assert_eq!(leaf_sum(range.clone(), 0.0, &mut leaf, &add), sums[0], "{range:?}");
        }
    }
}
