trireme_base::named! {
    /// The codecs.
    #[derive(Default)]
    pub enum CodecName {
        /// f32, as it is.
        #[default]
        None = "none",
        /// Rounded to IEEE half precision.
        F16 = "f16",
        /// Rounded to bfloat16.
        Bf16 = "bf16",
        /// Rounded to 8-bit floats with 4 bits of exponent, and a scale.
        Fp8E4m3 = "fp8_e4m3",
        /// Rounded to 8-bit floats with 5 bits of exponent, and a scale.
        Fp8E5m2 = "fp8_e5m2",
        /// QSGD with 8 bits.
        Int8 = "int8",
        /// QSGD with 4 bits.
        Int4 = "int4",
        /// Signs, and the mean of either sign's values.
        OneBit = "one_bit",
        /// The largest magnitudes, each with its index.
        TopK = "top_k",
        /// Random elements, the same on all ranks.
        RandomK = "random_k",
        /// PowerSGD: a product of two thin matrices.
        PowerSgd = "powersgd",
    }
}

impl CodecName {
    /// The options that it has, by their names in [`CompressionOptions`](super::CompressionOptions).
    pub const fn options(self) -> &'static [&'static str] {
        match self {
            CodecName::None => &[],
            CodecName::F16 | CodecName::Bf16 | CodecName::Fp8E4m3 | CodecName::Fp8E5m2 => {
                &["warmup_steps", "error_feedback", "normalize"]
            }
            CodecName::Int8 => &["block_len", "warmup_steps", "error_feedback", "normalize"],
            CodecName::Int4 | CodecName::OneBit => {
                &["block_len", "warmup_steps", "warmup_codec", "error_feedback", "normalize"]
            }
            CodecName::TopK => &["ratio", "momentum", "warmup_steps", "error_feedback", "normalize"],
            CodecName::RandomK => &["ratio", "warmup_steps", "error_feedback", "normalize"],
            CodecName::PowerSgd => &["rank", "warmup_steps", "warmup_codec", "error_feedback", "normalize"],
        }
    }

    pub(super) fn owners(option: &str) -> Vec<CodecName> {
        CodecName::ALL.into_iter().filter(|codec| codec.options().contains(&option)).collect()
    }

    /// Whether what a message leaves out is kept for later steps, unless said otherwise: with codecs that are biased.
    pub(super) const fn feeds_errors_back(self) -> bool {
        use CodecName::{Bf16, F16, Int4, Int8, None};
        !matches!(self, None | F16 | Bf16 | Int8 | Int4)
    }
}

pub(super) fn list(codecs: &[CodecName]) -> String {
    codecs.iter().map(CodecName::to_string).collect::<Vec<_>>().join(", ")
}
