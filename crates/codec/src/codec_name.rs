trireme_base::named! {
    /// The name of a codec.
    #[derive(Default)]
    pub enum CodecName {
        /// Sends f32 values unchanged.
        #[default]
        None = "none",
        /// Rounds to IEEE half precision.
        F16 = "f16",
        /// Rounds to bfloat16.
        Bf16 = "bf16",
        /// Rounds to fp8 E4M3 with one scale for each message.
        Fp8E4m3 = "fp8_e4m3",
        /// Rounds to fp8 E5M2 with one scale for each message.
        Fp8E5m2 = "fp8_e5m2",
        /// Quantizes to 8 bits by QSGD.
        Int8 = "int8",
        /// Quantizes to 4 bits by QSGD.
        Int4 = "int4",
        /// Sends the sign of each element, with the mean of the positive and of the negative values of each block.
        OneBit = "one_bit",
        /// Sends the elements of largest magnitude with their indices.
        TopK = "top_k",
        /// Sends randomly chosen elements, the same ones on all ranks.
        RandomK = "random_k",
        /// PowerSGD: approximates each matrix by a product of two low-rank factors.
        PowerSgd = "powersgd",
    }
}

impl CodecName {
    /// Returns the options that this codec has, by their field names in
    /// [`CompressionOptions`](super::CompressionOptions).
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

    pub(super) fn codecs_with_option(option: &str) -> Vec<CodecName> {
        CodecName::ALL.into_iter().filter(|codec| codec.options().contains(&option)).collect()
    }

    /// Whether error feedback is on by default. It is on for biased codecs, and for fp8, which rounds small values to
    /// 0.
    pub(super) const fn has_error_feedback_by_default(self) -> bool {
        use CodecName::{Bf16, F16, Int4, Int8, None};
        !matches!(self, None | F16 | Bf16 | Int8 | Int4)
    }
}

pub(super) fn comma_separated(codecs: &[CodecName]) -> String {
    codecs.iter().map(CodecName::to_string).collect::<Vec<_>>().join(", ")
}
