//! The parameters of each rank under tensor and expert parallelism.

use super::{ParameterInfo, ParameterTable, UnitInfo};
use std::ops::Range;
use trireme_base::{AxisRank, AxisSplit};

/// Maximum degree of tensor parallelism that errors suggest.
const DEGREE_MAX: usize = 1024;

/// A rank's place on the tensor and expert axes, which determines its parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ModelRank {
    /// Place on the axis whose ranks shard parameters.
    pub tensor: AxisRank,
    /// Place on the axis whose ranks have different experts.
    pub experts: AxisRank,
}

impl ModelRank {
    /// The place of a rank that stores the full model.
    pub const ALONE: ModelRank = ModelRank { tensor: AxisRank::ALONE, experts: AxisRank::ALONE };
}

impl From<AxisRank> for ModelRank {
    fn from(tensor: AxisRank) -> Self {
        ModelRank { tensor, ..ModelRank::ALONE }
    }
}

/// An expert-parallel degree that does not fit a model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "messages explain the fields")]
pub enum ExpertDegreeError {
    /// The model has no experts.
    #[error(
        "the model has no experts, so {degree} ranks cannot have different ones; use an expert-parallel degree of 1"
    )]
    NoExperts { degree: usize },
    /// The units of different ranks would differ in their layout.
    #[error(
        "{degree} ranks cannot have different experts of '{unit}': its experts have different shapes, or are declared in an order that leaves \
         what all ranks have at different places"
    )]
    LayoutMismatch { unit: String, degree: usize },
    /// The degree does not divide the number of experts.
    #[error(
        "{degree} ranks cannot have equally many of the {num_experts} experts of '{unit}'; nearest possible degree: {}",
        join(.nearest)
    )]
    Indivisible {
        unit: String,
        num_experts: usize,
        degree: usize,
        /// The next smaller and the next larger valid degree, if they exist.
        nearest: Vec<usize>,
    },
}

/// A parameter that a tensor-parallel degree cannot split.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{degree} ranks cannot split dim {dim} of '{name}' into equal parts: it has {num_granules} pieces of {granule} elements that stay together{}; \
     nearest possible degree: {}",
    groups(*.num_groups), join(.nearest)
)]
#[expect(missing_docs, reason = "the message explains the fields")]
pub struct UnsplittableError {
    /// Name of the first such parameter.
    pub name: String,
    pub dim: usize,
    pub num_groups: usize,
    pub num_granules: usize,
    pub granule: usize,
    pub degree: usize,
    /// The next smaller and the next larger degree that can split all parameters, if they exist.
    pub nearest: Vec<usize>,
}

fn groups(num_groups: usize) -> String {
    if num_groups == 1 { String::new() } else { format!(" in each of {num_groups} groups") }
}

fn join(degrees: &[usize]) -> String {
    degrees.iter().map(usize::to_string).collect::<Vec<_>>().join(" or ")
}

impl ParameterTable {
    /// Returns the table's place on the tensor axis.
    pub fn tensor_rank(&self) -> AxisRank {
        self.model_rank.tensor
    }

    /// Returns the table's place on the expert axis.
    pub fn expert_rank(&self) -> AxisRank {
        self.model_rank.experts
    }

    /// Returns the table's place on the tensor and expert axes.
    pub fn model_rank(&self) -> ModelRank {
        self.model_rank
    }

    /// Returns the indices of this rank's experts, of `num_experts` in total.
    ///
    /// # Panics
    /// If the degree does not divide `num_experts`. [`check_expert_degree`](ParameterTable::check_expert_degree) refuses such degrees.
    pub fn own_experts(&self, num_experts: usize) -> Range<usize> {
        let AxisRank { rank, degree } = self.model_rank.experts;
        assert!(num_experts.is_multiple_of(degree), "{num_experts} experts on {degree} ranks");
        rank * (num_experts / degree)..(rank + 1) * (num_experts / degree)
    }

    /// Returns the rank of the expert axis that stores the parameter; `None` if all ranks do.
    pub fn owner(&self, info: &ParameterInfo) -> Option<usize> {
        let num_own = self.units[info.unit].num_experts / self.model_rank.experts.degree;
        info.expert.map(|expert| expert / num_own)
    }

    /// Returns whether this rank stores the parameter or a shard of it.
    pub fn stores(&self, info: &ParameterInfo) -> bool {
        self.owner(info).is_none_or(|owner| owner == self.model_rank.experts.rank)
    }

    /// Returns the parameter that this rank stores at the offset at which another rank of the expert axis stores `info`. A unit has the
    /// same layout on all ranks of this axis.
    ///
    /// # Panics
    /// If `info` is not a parameter of this model, or if the experts of its unit have different parameters.
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

    /// Checks that `degree` ranks can have equally many experts of each unit. The table must be the full one.
    ///
    /// # Errors
    /// If there are no experts, or for the first unit whose experts are not divisible or have different layouts.
    pub fn check_expert_degree(&self, degree: usize) -> Result<(), ExpertDegreeError> {
        let units_with_experts = || self.units.iter().filter(|unit| unit.num_experts > 0);
        if degree <= 1 {
            return Ok(());
        }
        let Some(fewest) = units_with_experts().map(|unit| unit.num_experts).min() else {
            return Err(ExpertDegreeError::NoExperts { degree });
        };
        let divides =
            |degree: usize| units_with_experts().all(|unit| unit.num_experts.is_multiple_of(degree));
        let Some(unit) = units_with_experts().find(|unit| !unit.num_experts.is_multiple_of(degree)) else {
            return match units_with_experts().find(|unit| !self.has_equal_layouts(unit, degree)) {
                None => Ok(()),
                Some(unit) => Err(ExpertDegreeError::LayoutMismatch { unit: unit.name.clone(), degree }),
            };
        };
        let below = (1..degree).rev().find(|&degree| divides(degree));
        let above = (degree + 1..=fewest).find(|&degree| divides(degree));
        Err(ExpertDegreeError::Indivisible {
            unit: unit.name.clone(),
            num_experts: unit.num_experts,
            degree,
            nearest: below.into_iter().chain(above).collect(),
        })
    }

    /// Returns whether the experts of all ranks have parameters of equal shapes in equal order within the unit.
    fn has_equal_layouts(&self, unit: &UnitInfo, degree: usize) -> bool {
        let num_own = unit.num_experts / degree;
        let form = |rank: usize| {
            let all = self.parameters[unit.parameters.clone()].iter();
            let own = all.filter(move |info| info.expert.is_none_or(|expert| expert / num_own == rank));
            own.map(move |info| (info.full_shape, info.expert.map(|expert| expert % num_own)))
        };
        (1..degree).all(|rank| form(rank).eq(form(0)))
    }

    /// Checks that `degree` ranks of the tensor axis can shard the parameters. The table must be the full one.
    ///
    /// # Errors
    /// For the first parameter that cannot be split.
    #[expect(clippy::missing_panics_doc, reason = "a parameter that cannot be split declares a split")]
    pub fn check_tensor_degree(&self, degree: usize) -> Result<(), UnsplittableError> {
        let cuts = |info: &ParameterInfo| Some((info.split?, info.full_shape.dims()[info.split?.dim]));
        let can_split = |info: &ParameterInfo, degree: usize| {
            cuts(info).is_none_or(|(cut, len)| degree > 0 && cut.num_holders(len, degree).is_some())
        };
        let can_split_all = |degree: usize| self.parameters.iter().all(|info| can_split(info, degree));
        let refusing = self.parameters.iter().find(|info| !can_split(info, degree));
        let Some(info) = refusing else { return Ok(()) };
        let (cut, len) = cuts(info).expect("it is cut");
        let num_granules = cut.num_granules(len);
        let below = (1..degree).rev().find(|&degree| can_split_all(degree));
        let above = (degree + 1..=DEGREE_MAX.max(degree)).find(|&degree| can_split_all(degree));
        Err(UnsplittableError {
            name: info.name.clone(),
            dim: cut.dim,
            num_groups: cut.num_groups,
            num_granules,
            granule: cut.granule,
            degree,
            nearest: below.into_iter().chain(above).collect(),
        })
    }

    /// Returns the number of items, such as heads, that this rank of the tensor axis gets if `cut` splits `len` items, including padding.
    ///
    /// # Panics
    /// If the items cannot be split. [`check_tensor_degree`](ParameterTable::check_tensor_degree) refuses such degrees for the
    /// corresponding parameters.
    pub fn part_len(&self, cut: AxisSplit, len: usize) -> usize {
        cut.part_len(len, self.model_rank.tensor.degree)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::declaration::{Initial, Parameter};

    #[test]
    fn experts_that_ranks_cannot_divide_are_refused() {
        let table = |rows: [usize; 4]| {
            let mut table = ParameterTable::default();
            table.begin_unit("unit");
            for (expert, rows) in rows.into_iter().enumerate() {
                let weight = Parameter::matrix(format!("{expert}.weight"), &[rows, 3], Initial::ZEROS);
                table.add(weight.of_expert(expert, 4));
            }
            table
        };
        let refusal = |rows, degree| table(rows).check_expert_degree(degree).unwrap_err().to_string();
        assert_eq!(table([2; 4]).check_expert_degree(4), Ok(()));
        assert_eq!(table([2, 5, 2, 5]).check_expert_degree(2), Ok(()), "the ranks' experts are alike");
        assert!(refusal([2, 2, 2, 5], 2).contains("its experts have different shapes"));
        assert!(refusal([2; 4], 3).ends_with("; nearest possible degree: 2 or 4"));
        assert!(refusal([2; 4], 8).ends_with("; nearest possible degree: 4"));
        let none = ParameterTable::default().check_expert_degree(2).unwrap_err().to_string();
        assert!(none.contains("the model has no experts"));
    }
}
