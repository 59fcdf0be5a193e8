//! What of a model each rank has where ranks cut parameters or have different experts.

use super::{ParameterInfo, ParameterTable, UnitInfo};
use std::ops::Range;
use trireme_base::{AxisPlace, Cut};

/// Degrees of tensor parallelism beyond this are not suggested.
const DEGREE_MAX: usize = 1024;

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
#[expect(missing_docs, reason = "messages explain the fields")]
pub enum ExpertsError {
    /// There are none.
    #[error(
        "the model has no experts, so {degree} ranks cannot have different ones; use an expert-parallel degree of 1"
    )]
    None { degree: usize },
    /// Ranks would have units of different forms.
    #[error(
        "{degree} ranks cannot have different experts of '{unit}': its experts have different shapes, or are declared in an order that leaves \
         what all ranks have at different places"
    )]
    Unlike { unit: String, degree: usize },
    /// They do not divide.
    #[error(
        "{degree} ranks cannot have equally many of the {num_experts} experts of '{unit}'; nearest possible degree: {}",
        join(.nearest)
    )]
    Indivisible {
        unit: String,
        num_experts: usize,
        degree: usize,
        /// The next smaller and the next larger number of ranks that divide those of all units, if there is one.
        nearest: Vec<usize>,
    },
}

/// A parameter that so many ranks of the tensor axis cannot cut.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{degree} ranks cannot cut dim {dim} of '{name}' into equal parts: it has {num_granules} pieces of {granule} elements that stay together{}; \
     nearest possible degree: {}",
    groups(*.num_groups), join(.nearest)
)]
#[expect(missing_docs, reason = "the message explains the fields")]
pub struct UncuttableError {
    /// Of the first such parameter.
    pub name: String,
    pub dim: usize,
    pub num_groups: usize,
    pub num_granules: usize,
    pub granule: usize,
    pub degree: usize,
    /// Numbers of ranks that can cut all parameters: the next smaller and the next larger one, if there is one.
    pub nearest: Vec<usize>,
}

fn groups(num_groups: usize) -> String {
    if num_groups == 1 { String::new() } else { format!(" in each of {num_groups} groups") }
}

fn join(degrees: &[usize]) -> String {
    degrees.iter().map(usize::to_string).collect::<Vec<_>>().join(" or ")
}

impl ParameterTable {
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
    /// The first unit whose experts do not divide, or differ, or that there are no experts.
    pub fn check_expert_degree(&self, degree: usize) -> Result<(), ExpertsError> {
        let nums = || self.units.iter().filter(|unit| unit.num_experts > 0);
        if degree <= 1 {
            return Ok(());
        }
        let Some(fewest) = nums().map(|unit| unit.num_experts).min() else {
            return Err(ExpertsError::None { degree });
        };
        let divides = |degree: usize| nums().all(|unit| unit.num_experts.is_multiple_of(degree));
        let Some(unit) = nums().find(|unit| !unit.num_experts.is_multiple_of(degree)) else {
            return match nums().find(|unit| !self.is_alike(unit, degree)) {
                None => Ok(()),
                Some(unit) => Err(ExpertsError::Unlike { unit: unit.name.clone(), degree }),
            };
        };
        let below = (1..degree).rev().find(|&degree| divides(degree));
        let above = (degree + 1..=fewest).find(|&degree| divides(degree));
        Err(ExpertsError::Indivisible {
            unit: unit.name.clone(),
            num_experts: unit.num_experts,
            degree,
            nearest: below.into_iter().chain(above).collect(),
        })
    }

    /// Whether so many ranks have equal shapes of a unit's parameters, of equal experts among their own, in the same order.
    fn is_alike(&self, unit: &UnitInfo, degree: usize) -> bool {
        let num_own = unit.num_experts / degree;
        let form = |rank: usize| {
            let all = self.parameters[unit.parameters.clone()].iter();
            let own = all.filter(move |info| info.expert.is_none_or(|expert| expert / num_own == rank));
            own.map(move |info| (info.whole, info.expert.map(|expert| expert % num_own)))
        };
        (1..degree).all(|rank| form(rank).eq(form(0)))
    }

    /// Whether so many ranks of the tensor axis can have parts of the parameters of this table, which has all of them.
    ///
    /// # Errors
    /// The first parameter that they cannot cut.
    pub fn check_degree(&self, degree: usize) -> Result<(), UncuttableError> {
        let cuts = |info: &ParameterInfo| Some((info.cut?, info.whole.dims()[info.cut?.dim]));
        let is_cut = |info: &ParameterInfo, degree: usize| {
            cuts(info).is_none_or(|(cut, len)| degree > 0 && cut.num_holders(len, degree).is_some())
        };
        let can_cut = |degree: usize| self.parameters.iter().all(|info| is_cut(info, degree));
        let refusing = self.parameters.iter().find(|info| !is_cut(info, degree));
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
