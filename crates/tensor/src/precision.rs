use std::fmt;
use trireme_base::DType;

/// What activations are kept in and products are made of.
///
/// The residual stream, statistics, sums, losses, parameters and their gradients are f32 whatever the precision:
/// mixed precision as Micikevicius et al. describe it ("Mixed precision training", 2018).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// All f32.
    #[default]
    F32,
    /// bfloat16: the range of f32, 8 significant bits.
    Bf16,
    /// IEEE half: 11 significant bits, values from 6e-8 to 65504, so that gradients need loss scaling.
    F16,
}

impl Precision {
    /// Every precision.
    pub const ALL: [Precision; 3] = [Precision::F32, Precision::Bf16, Precision::F16];

    /// Element type of activations.
    pub const fn dtype(self) -> DType {
        match self {
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::Bf16,
            Precision::F16 => DType::F16,
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.dtype().fmt(f)
    }
}
