use trireme_base::DType;

trireme_base::named! {
    /// The type of activations and of the factors of products.
    ///
    /// The residual stream, statistics, sums, losses, parameters and their gradients are f32 whatever the precision:
    /// mixed precision as Micikevicius et al. describe it ("Mixed precision training", 2018).
    #[derive(Default)]
    pub enum Precision {
        /// All f32.
        #[default]
        F32 = "f32",
        /// bfloat16: the range of f32, 8 significant bits.
        Bf16 = "bf16",
        /// IEEE half: 11 significant bits, values from 6e-8 to 65504, so that gradients need loss scaling.
        F16 = "f16",
    }
}

impl Precision {
    /// Element type of activations.
    pub const fn dtype(self) -> DType {
        match self {
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::Bf16,
            Precision::F16 => DType::F16,
        }
    }
}
