//! Declarations of parameters.

use trireme_base::{AxisSplit, RandomKey};

/// A parameter as its model declares it. Initialization, updates, sharding and checkpoints all read this declaration.
#[derive(Debug, Clone, PartialEq)]
pub struct Parameter {
    /// Fully qualified name, as in Hugging Face checkpoints.
    pub name: String,
    /// Dims, as in Hugging Face checkpoints.
    pub dims: Vec<usize>,
    /// Values before training.
    pub initial: Initial,
    /// Determines optimizer update and weight decay.
    pub class: ParameterClass,
    /// How tensor parallelism may split the parameter; `None` if every rank needs all of it.
    pub split: Option<AxisSplit>,
    /// Index of the parameter's expert and number of experts of the unit; `None` if the parameter belongs to no expert.
    pub expert: Option<(usize, usize)>,
}

impl Parameter {
    /// Declares a matmul weight: [`ParameterClass::Matrix`].
    pub fn matrix(name: impl Into<String>, dims: &[usize], initial: Initial) -> Self {
        let (name, class) = (name.into(), ParameterClass::Matrix);
        Parameter { name, dims: dims.into(), initial, class, split: None, expert: None }
    }

    /// Declares an embedding table, or the weight of an output layer or router: [`ParameterClass::Embedding`].
    pub fn embedding(name: impl Into<String>, dims: &[usize], initial: Initial) -> Self {
        Parameter { class: ParameterClass::Embedding, ..Parameter::matrix(name, dims, initial) }
    }

    /// Declares the weight of a normalization, or a bias: [`ParameterClass::Vector`].
    pub fn vector(name: impl Into<String>, len: usize, initial: Initial) -> Self {
        Parameter { class: ParameterClass::Vector, ..Parameter::matrix(name, &[len], initial) }
    }

    /// Declares the load-balancing bias of `len` experts: [`ParameterClass::Balance`].
    pub fn balance(name: impl Into<String>, len: usize) -> Self {
        Parameter { class: ParameterClass::Balance, ..Parameter::vector(name, len, Initial::ZEROS) }
    }

    /// Declares how tensor parallelism may split the parameter.
    ///
    /// # Panics
    /// If the parameter does not have the split dim, or the dim's length is not a multiple of `num_groups * granule`.
    pub fn with_split(self, split: AxisSplit) -> Self {
        let AxisSplit { dim, num_groups, granule, .. } = split;
        let whole = num_groups.saturating_mul(granule);
        let is_divisible = self.dims.get(dim).is_some_and(|&len| whole > 0 && len.is_multiple_of(whole));
        assert!(is_divisible, "{} of {:?} cannot be cut as {split:?}", self.name, self.dims);
        Parameter { split: Some(split), ..self }
    }

    /// Assigns the parameter to expert `expert` of the `num_experts` of its unit. Each rank of the expert axis stores an equal number of
    /// experts.
    ///
    /// # Panics
    /// If `expert` is not less than `num_experts`.
    pub fn of_expert(self, expert: usize, num_experts: usize) -> Self {
        assert!(expert < num_experts, "expert {expert} of {num_experts}");
        Parameter { expert: Some((expert, num_experts)), ..self }
    }
}

/// The role of a parameter. Determines its optimizer update and its weight decay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ParameterClass {
    /// A weight that multiplies hidden values. Weight decay applies. Muon updates the parameters of this class that have two dims.
    Matrix,
    /// An embedding table, or the weight of an output layer or router. Weight decay applies.
    Embedding,
    /// The weight of a normalization, or a bias. Weight decay applies only on request.
    Vector,
    /// A load-balancing bias of a router. Its "gradient" is no derivative: it says how much more often than average each expert was chosen,
    /// and each update raises or lowers elements by a fixed amount. Neither weight decay nor the gradient norm includes this class.
    Balance,
}

impl ParameterClass {
    /// Returns whether parameters of this class have a true gradient of the loss. Only true gradients may be rounded to a narrower dtype,
    /// and only they count in the gradient norm.
    pub fn has_gradient(self) -> bool {
        self != ParameterClass::Balance
    }
}

/// The values of a parameter before training.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Initial {
    /// Each element has this value.
    Constant(f32),
    /// Normal with mean 0. The random numbers depend on the run's seed and the parameter's name.
    Normal {
        /// Standard deviation.
        standard_deviation: f32,
    },
}

impl Initial {
    /// Zeros.
    pub const ZEROS: Initial = Initial::Constant(0.0);
    /// Ones.
    pub const ONES: Initial = Initial::Constant(1.0);

    /// Writes the initial values of the elements of parameter `name`, starting at element `first`. Each value depends only on the seed, the
    /// name and the element's index.
    pub fn fill(self, name: &str, seed: u64, first: usize, values: &mut [f32]) {
        match self {
            Initial::Constant(value) => values.fill(value),
            Initial::Normal { standard_deviation } => {
                RandomKey::new(seed, name).fill_normal_from(first as u64, values, standard_deviation);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn initial_values_depend_on_seed_name_and_index() {
        let normal = Initial::Normal { standard_deviation: 0.5 };
        let values = |name: &str, seed: u64, first: usize, len: usize| {
            let mut values = vec![9.0; len];
            normal.fill(name, seed, first, &mut values);
            values
        };
        let whole = values("weight", 1, 0, 40);
        assert_eq!(values("weight", 1, 13, 27), whole[13..]);
        assert_ne!(values("weight", 2, 0, 40), whole);
        assert_ne!(values("other", 1, 0, 40), whole);
        let mut ones = [0.0; 3];
        Initial::ONES.fill("norm", 1, 0, &mut ones);
        assert_eq!(ones, [1.0; 3]);
    }

    #[test]
    #[should_panic(expected = "cannot be cut")]
    fn granules_must_be_whole_in_each_group() {
        let weight = Parameter::matrix("qkv", &[8, 36], Initial::ZEROS);
        let weight = weight.with_split(AxisSplit::along(1).with_groups(3).with_granule(6));
        _ = weight.with_split(AxisSplit::along(1).with_groups(3).with_granule(5));
    }
}
