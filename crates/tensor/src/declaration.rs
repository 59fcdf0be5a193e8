//! What a model declares of a parameter.

use trireme_base::{Cut, RandomKey};

/// A parameter as a model declares it, once. Whoever initializes, updates, cuts or stores it reads it from here.
#[derive(Debug, Clone, PartialEq)]
pub struct Parameter {
    /// Fully qualified name, as Hugging Face checkpoints spell it.
    pub name: String,
    /// Sizes of its dims, as Hugging Face checkpoints store it.
    pub dims: Vec<usize>,
    /// Its values before training.
    pub initial: Initial,
    /// What it is for.
    pub class: ParameterClass,
    /// How tensor parallelism may cut it; `None` if each rank needs all of it.
    pub cut: Option<Cut>,
    /// Which of a unit's experts it belongs to, and how many there are; `None` if it is for all tokens.
    pub expert: Option<(usize, usize)>,
}

impl Parameter {
    /// A factor of a product: [`ParameterClass::Matrix`].
    pub fn matrix(name: impl Into<String>, dims: &[usize], initial: Initial) -> Self {
        let (name, class) = (name.into(), ParameterClass::Matrix);
        Parameter { name, dims: dims.into(), initial, class, cut: None, expert: None }
    }

    /// A table of rows, or the weight of an output layer or of a router: [`ParameterClass::Embedding`].
    pub fn embedding(name: impl Into<String>, dims: &[usize], initial: Initial) -> Self {
        Parameter { class: ParameterClass::Embedding, ..Parameter::matrix(name, dims, initial) }
    }

    /// The weight of a normalisation, or a bias: [`ParameterClass::Vector`].
    pub fn vector(name: impl Into<String>, len: usize, initial: Initial) -> Self {
        Parameter { class: ParameterClass::Vector, ..Parameter::matrix(name, &[len], initial) }
    }

    /// A bias that balances loads, of `len` experts: [`ParameterClass::Balance`].
    pub fn balance(name: impl Into<String>, len: usize) -> Self {
        Parameter { class: ParameterClass::Balance, ..Parameter::vector(name, len, Initial::ZEROS) }
    }

    /// The same, which tensor parallelism may cut.
    ///
    /// # Panics
    /// If it has no such dim, or the dim does not consist of whole granules in each group.
    pub fn with_cut(self, cut: Cut) -> Self {
        let Cut { dim, num_groups, granule, .. } = cut;
        let whole = num_groups.saturating_mul(granule);
        let has_whole = self.dims.get(dim).is_some_and(|&len| whole > 0 && len.is_multiple_of(whole));
        assert!(has_whole, "{} of {:?} cannot be cut as {cut:?}", self.name, self.dims);
        Parameter { cut: Some(cut), ..self }
    }

    /// The same, of one of the `num_experts` of its unit: ranks of the expert axis have equally many experts each, and nothing of the others.
    ///
    /// # Panics
    /// If there is no such expert.
    pub fn of_expert(self, expert: usize, num_experts: usize) -> Self {
        assert!(expert < num_experts, "expert {expert} of {num_experts}");
        Parameter { expert: Some((expert, num_experts)), ..self }
    }
}

/// What a parameter is for: which updates and which weight decay it gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ParameterClass {
    /// A factor of a product between hidden values. It decays. Muon is for those of two dims.
    Matrix,
    /// A table of rows, or the weight of an output layer or of a router. It decays.
    Embedding,
    /// The weight of a normalisation or a bias. It decays only where that is asked for.
    Vector,
    /// A bias whose gradient says how much more often each expert was chosen than others, and is no derivative: each update lowers or raises elements by
    /// the same amount. It neither decays nor counts in the norm of gradients.
    Balance,
}

impl ParameterClass {
    /// Whether a gradient of the loss updates parameters of this class: one that can be rounded and counts in the norm.
    pub fn has_gradient(self) -> bool {
        self != ParameterClass::Balance
    }
}

/// The values of a parameter before training.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Initial {
    /// Each element has this value.
    Constant(f32),
    /// Normal with mean 0, from the run's seed and the parameter's name.
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

    /// Writes the elements from `first` on of the parameter `name`. An element's value depends on the seed, the name and its index alone.
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
        let weight = weight.with_cut(Cut::along(1).with_groups(3).with_granule(6));
        _ = weight.with_cut(Cut::along(1).with_groups(3).with_granule(5));
    }
}
