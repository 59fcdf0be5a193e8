use super::codec_name::comma_separated;
use super::error::Result;
use super::quantized::Bits;
use super::{Bucket, CodecName, CompressionError, Round, low_rank, one_bit, quantized, top_k};
use std::fmt;
use std::ops::RangeInclusive;
use trireme_base::{DType, Fp8Format};

/// The codec and options that a user requests. An option that is `None` has its default.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct CompressionOptions {
    /// The codec.
    pub codec: CodecName,
    /// `powersgd`: rank of the approximation, from 1 to 1024. Default: 4.
    pub rank: Option<usize>,
    /// `top_k`, `random_k`: the fraction of elements that a step sends, above 0 and at most 1. Default: 0.01.
    pub ratio: Option<f64>,
    /// `int8`, `int4`, `one_bit`: number of elements in a block, which share scales. A multiple of 64 up to 2^20.
    /// Default: 256, and 1024 for `one_bit`.
    pub block_len: Option<usize>,
    /// `top_k`: momentum of the velocity that replaces the gradient, from 0 to below 1. Default: 0. With momentum here,
    /// the optimizer must have none.
    pub momentum: Option<f32>,
    /// Number of warm-up steps at the start of a run, which are compressed less. `top_k` and `random_k` begin with a
    /// ratio of 25 % and divide it by four in equal intervals. The other codecs send these steps uncompressed, or with
    /// [`warmup_codec`](field@CompressionOptions::warmup_codec). Default: 0.
    pub warmup_steps: Option<u64>,
    /// `int4`, `one_bit`, `powersgd`: the codec of the warm-up steps: `bf16`, `int8`, `int4` (unless the codec is
    /// `int4`) or `none`. Default: `none`.
    pub warmup_codec: Option<CodecName>,
    /// Whether the compression error of a step is added to the next step's gradient. Default: off for `f16`, `bf16`,
    /// `int8` and `int4`, and on for the other codecs.
    pub error_feedback: Option<bool>,
    /// Decay of the second moment, from 0 to below 1. If given, each rank divides its gradient by the square root of
    /// its second moment, as Adam does, before compression. Default: gradients are not divided.
    pub normalize: Option<f32>,
}

/// A valid combination of a codec and its options, made from [`CompressionOptions`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Compression {
    codec: CodecName,
    pub(super) config: CodecConfig,
    warmup_steps: u64,
    /// The codec config of the warm-up steps, unless `config` has a ratio, which the warm-up raises instead.
    pub(super) warmup_config: CodecConfig,
    error_feedback: bool,
    normalize: Option<f32>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum CodecConfig {
    None,
    F16,
    Bf16,
    Fp8(Fp8Format),
    Quantized { bits: Bits, block_len: usize },
    OneBit { block_len: usize },
    TopK { ratio: f64, momentum: f32 },
    RandomK { ratio: f64 },
    LowRank { rank: usize },
}

impl CodecConfig {
    /// Returns the ratio after the warm-up; `None` for codecs without a ratio.
    fn last_ratio(self) -> Option<f64> {
        match self {
            CodecConfig::TopK { ratio, .. } | CodecConfig::RandomK { ratio } => Some(ratio),
            _ => None,
        }
    }
}

trireme_base::named! {
    /// Why a step sends a bucket uncompressed, as f32.
    pub enum UncompressedReason {
        /// The codec is `none`.
        NoCodec = "no compression",
        /// There is only one rank.
        OneRank = "a single rank sends nothing",
        /// Warm-up steps are sent uncompressed.
        WarmUp = "warm-up",
        /// The codec would not send fewer bytes: the bucket is too short, or there are too many ranks for an
        /// all-gather.
        NoGain = "compression would not save any bytes",
    }
}

const RANKS: RangeInclusive<usize> = 1..=1024;
const BLOCK_LEN_UNIT: usize = 64;
const BLOCK_LEN_MAX: usize = 1 << 20;

impl Compression {
    /// Recommended decay for [`normalize`](field@CompressionOptions::normalize), which averages over about 200 steps. A
    /// shorter average depends too much on single gradients, and each step then reduces the loss less.
    pub const NORMALIZE_DECAY: f32 = 0.995;

    /// Validates the options and resolves defaults.
    ///
    /// # Errors
    /// [`CompressionError::UnsupportedOption`] if the codec does not have an option that is given.
    /// [`CompressionError::Option`] if a value is out of range, or `top_k` has momentum without error feedback.
    pub fn new(options: &CompressionOptions) -> Result<Self> {
        options.check_option_support()?;
        let config = match options.codec {
            CodecName::None => CodecConfig::None,
            CodecName::F16 => CodecConfig::F16,
            CodecName::Bf16 => CodecConfig::Bf16,
            CodecName::Fp8E4m3 => CodecConfig::Fp8(Fp8Format::E4m3),
            CodecName::Fp8E5m2 => CodecConfig::Fp8(Fp8Format::E5m2),
            CodecName::Int8 => {
                CodecConfig::Quantized { bits: Bits::Eight, block_len: options.block_len(256)? }
            }
            CodecName::Int4 => {
                CodecConfig::Quantized { bits: Bits::Four, block_len: options.block_len(256)? }
            }
            CodecName::OneBit => CodecConfig::OneBit { block_len: options.block_len(1024)? },
            CodecName::TopK => CodecConfig::TopK { ratio: options.ratio()?, momentum: options.momentum()? },
            CodecName::RandomK => CodecConfig::RandomK { ratio: options.ratio()? },
            CodecName::PowerSgd => CodecConfig::LowRank { rank: options.rank()? },
        };
        let error_feedback = options.error_feedback.unwrap_or(options.codec.has_error_feedback_by_default());
        if !error_feedback && options.momentum.is_some_and(|momentum| momentum > 0.0) {
            let allowed = "true with momentum, which corrects what is kept for later steps";
            return Err(options.refuse("error_feedback", error_feedback, allowed));
        }
        let warmup_steps = options.warmup_steps.unwrap_or(0);
        let (warmup_method, normalize) = (options.warmup_config()?, options.normalize()?);
        let codec = options.codec;
        Ok(Compression {
            codec,
            config,
            warmup_steps,
            warmup_config: warmup_method,
            error_feedback,
            normalize,
        })
    }

    /// Returns the compression that sends every gradient unchanged.
    pub const fn none() -> Self {
        Compression {
            codec: CodecName::None,
            config: CodecConfig::None,
            warmup_steps: 0,
            warmup_config: CodecConfig::None,
            error_feedback: false,
            normalize: None,
        }
    }

    /// The codec.
    pub fn codec(&self) -> CodecName {
        self.codec
    }

    /// Whether the compression error of a step is added to the next step's gradient.
    pub fn error_feedback(&self) -> bool {
        self.error_feedback
    }

    /// The decay of the second moment, if gradients are normalized: each rank divides its gradient by the square root
    /// of its second moment. Sums of normalized gradients are dimensionless.
    pub fn normalize(&self) -> Option<f32> {
        self.normalize
    }

    /// Number of warm-up steps at the start of a run, which are compressed less.
    pub fn warmup_steps(&self) -> u64 {
        self.warmup_steps
    }

    fn config_at(&self, step: u64) -> CodecConfig {
        let is_warming_up = step < self.warmup_steps && self.config.last_ratio().is_none();
        if is_warming_up { self.warmup_config } else { self.config }
    }

    /// Whether the warm-up codec compresses step `step`, counted from 0.
    pub(super) fn uses_warmup_codec(&self, step: u64) -> bool {
        step < self.warmup_steps && self.warmup_config != CodecConfig::None
    }

    /// Returns why step `step`, counted from 0, sends `bucket` uncompressed; `None` if it is compressed.
    pub fn uncompressed_reason(
        &self,
        bucket: &Bucket,
        world_size: usize,
        step: u64,
    ) -> Option<UncompressedReason> {
        let uncompressed_bytes = Round::uncompressed(bucket.len()).bytes_sent(world_size);
        let gains = |method| {
            let rounds = self.rounds_of(method, bucket, step);
            rounds.iter().map(|round| round.bytes_sent(world_size)).sum::<u64>() < uncompressed_bytes
        };
        if self.config == CodecConfig::None {
            Some(UncompressedReason::NoCodec)
        } else if world_size == 1 {
            Some(UncompressedReason::OneRank)
        } else if !gains(self.config) {
            Some(UncompressedReason::NoGain)
        } else if self.config_at(step) == CodecConfig::None {
            Some(UncompressedReason::WarmUp)
        } else if !gains(self.config_at(step)) {
            Some(UncompressedReason::NoGain)
        } else {
            None
        }
    }

    /// Returns the rounds of step `step`, counted from 0: two for `powersgd`, otherwise one. They are equal on all
    /// ranks, and do not change after the warm-up.
    pub fn rounds(&self, bucket: &Bucket, world_size: usize, step: u64) -> Vec<Round> {
        match self.uncompressed_reason(bucket, world_size, step) {
            Some(_) => vec![Round::uncompressed(bucket.len())],
            None => self.rounds_of(self.config_at(step), bucket, step),
        }
    }

    /// Returns the size in bytes of one rank's messages in all rounds of a step. `docs/compression.md` has the
    /// formulas.
    pub fn encoded_bytes(&self, bucket: &Bucket, world_size: usize, step: u64) -> usize {
        self.rounds(bucket, world_size, step).into_iter().map(Round::num_bytes).sum()
    }

    /// Returns the steps, counted from 0, at which the rounds may change, beginning with step 0.
    pub(super) fn changing_steps(&self) -> Vec<u64> {
        let num_intervals = self.config.last_ratio().map_or(1, |last| warmup_ratios(last).count());
        let first = |interval| {
            let step =
                (interval as u128 * u128::from(self.warmup_steps)).div_ceil(num_intervals.max(1) as u128);
            u64::try_from(step).expect("an interval of the warm-up begins in it")
        };
        (0..=num_intervals).map(first).collect()
    }

    fn rounds_of(&self, method: CodecConfig, bucket: &Bucket, step: u64) -> Vec<Round> {
        let len = bucket.len();
        let num_kept = |ratio| num_selected(len, ratio_at(ratio, self.warmup_steps, step));
        match method {
            CodecConfig::None => vec![Round::uncompressed(len)],
            CodecConfig::F16 => vec![Round::AllReduce { dtype: DType::F16, len }],
            CodecConfig::Bf16 => vec![Round::AllReduce { dtype: DType::Bf16, len }],
            CodecConfig::Fp8(_) => vec![Round::AllGather { num_bytes: super::fp8::message_bytes(len) }],
            CodecConfig::Quantized { bits, block_len } => {
                vec![Round::AllGather { num_bytes: quantized::message_bytes(len, bits, block_len) }]
            }
            CodecConfig::OneBit { block_len } => {
                vec![Round::AllGather { num_bytes: one_bit::message_bytes(len, block_len) }]
            }
            CodecConfig::TopK { ratio, .. } => {
                vec![Round::AllGather { num_bytes: top_k::message_bytes(num_kept(ratio)) }]
            }
            CodecConfig::RandomK { ratio } => vec![Round::uncompressed(num_kept(ratio))],
            CodecConfig::LowRank { rank } => low_rank::Layout::new(bucket, rank).rounds().to_vec(),
        }
    }
}

/// Number of elements that a ratio selects from `len`: rounded to the nearest integer, and at least one unless `len` is
/// 0.
fn num_selected(len: usize, ratio: f64) -> usize {
    ((len as f64 * ratio).round() as usize).clamp(len.min(1), len)
}

/// The ratio at a step. It begins at 25 % and is divided by four in equal intervals of the warm-up; after the warm-up
/// it is `last`.
fn ratio_at(last: f64, warmup_steps: u64, step: u64) -> f64 {
    if step >= warmup_steps {
        return last;
    }
    let num_intervals = warmup_ratios(last).count();
    let interval = u128::from(step) * num_intervals as u128 / u128::from(warmup_steps);
    warmup_ratios(last).nth(interval as usize).unwrap_or(last)
}

fn warmup_ratios(last: f64) -> impl Iterator<Item = f64> {
    const FIRST: f64 = 0.25;
    std::iter::successors(Some(FIRST), |ratio| Some(ratio / 4.0)).take_while(move |&ratio| ratio > last)
}

impl CompressionOptions {
    fn check_option_support(&self) -> Result<()> {
        let given = [
            ("rank", self.rank.is_some()),
            ("ratio", self.ratio.is_some()),
            ("block_len", self.block_len.is_some()),
            ("momentum", self.momentum.is_some()),
            ("warmup_steps", self.warmup_steps.is_some()),
            ("warmup_codec", self.warmup_codec.is_some()),
            ("error_feedback", self.error_feedback.is_some()),
            ("normalize", self.normalize.is_some()),
        ];
        let codec = self.codec;
        let is_foreign = |&(option, is_given): &(&str, bool)| is_given && !codec.options().contains(&option);
        match given.into_iter().find(is_foreign) {
            Some((option, _)) => {
                let owners = comma_separated(&CodecName::codecs_with_option(option));
                Err(CompressionError::UnsupportedOption { codec, option, owners })
            }
            None => Ok(()),
        }
    }

    fn refuse(&self, option: &'static str, value: impl ToString, allowed: &'static str) -> CompressionError {
        CompressionError::Option { codec: self.codec, option, value: value.to_string(), allowed }
    }

    fn rank(&self) -> Result<usize> {
        let rank = self.rank.unwrap_or(4);
        let refused = || self.refuse("rank", rank, "from 1 to 1024");
        RANKS.contains(&rank).then_some(rank).ok_or_else(refused)
    }

    fn ratio(&self) -> Result<f64> {
        let ratio = self.ratio.unwrap_or(0.01);
        let refused = || self.refuse("ratio", ratio, "above 0 and at most 1");
        (ratio > 0.0 && ratio <= 1.0).then_some(ratio).ok_or_else(refused)
    }

    fn block_len(&self, default: usize) -> Result<usize> {
        let len = self.block_len.unwrap_or(default);
        let refused = || self.refuse("block_len", len, "a multiple of 64, from 64 to 1048576");
        let is_allowed =
            len.is_multiple_of(BLOCK_LEN_UNIT) && (BLOCK_LEN_UNIT..=BLOCK_LEN_MAX).contains(&len);
        is_allowed.then_some(len).ok_or_else(refused)
    }

    fn warmup_config(&self) -> Result<CodecConfig> {
        let codec = self.warmup_codec.unwrap_or(CodecName::None);
        let quantized = |bits| CodecConfig::Quantized { bits, block_len: 256 };
        match codec {
            CodecName::None => Ok(CodecConfig::None),
            CodecName::Bf16 => Ok(CodecConfig::Bf16),
            CodecName::Int8 => Ok(quantized(Bits::Eight)),
            CodecName::Int4 if self.codec != CodecName::Int4 => Ok(quantized(Bits::Four)),
            _ => Err(self.refuse(
                "warmup_codec",
                codec,
                "none, bf16, int8 or, with a codec other than int4, int4",
            )),
        }
    }

    fn normalize(&self) -> Result<Option<f32>> {
        let Some(decay) = self.normalize else { return Ok(None) };
        let refused = || self.refuse("normalize", decay, "from 0 to below 1");
        (0.0..1.0).contains(&decay).then_some(Some(decay)).ok_or_else(refused)
    }

    fn momentum(&self) -> Result<f32> {
        let momentum = self.momentum.unwrap_or(0.0);
        let refused = || self.refuse("momentum", momentum, "from 0 to below 1");
        (0.0..1.0).contains(&momentum).then_some(momentum).ok_or_else(refused)
    }
}

impl fmt::Display for Compression {
    /// Formats the codec and its options with the names of the config, such as `random_k (ratio = 0.01, …)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.codec)?;
        if self.config == CodecConfig::None {
            return Ok(());
        }
        f.write_str(" (")?;
        match self.config {
            CodecConfig::Quantized { block_len, .. } | CodecConfig::OneBit { block_len } => {
                write!(f, "block_len = {block_len}, ")?;
            }
            CodecConfig::TopK { ratio, momentum } => write!(f, "ratio = {ratio}, momentum = {momentum}, ")?,
            CodecConfig::RandomK { ratio } => write!(f, "ratio = {ratio}, ")?,
            CodecConfig::LowRank { rank } => write!(f, "rank = {rank}, ")?,
            CodecConfig::None | CodecConfig::F16 | CodecConfig::Bf16 | CodecConfig::Fp8(_) => {}
        }
        let normalizes = self.normalize.is_some();
        let Compression { warmup_steps, error_feedback, .. } = self;
        write!(f, "warmup_steps = {warmup_steps}, ")?;
        match self.warmup_config {
            CodecConfig::Bf16 => f.write_str("warmup_codec = bf16, ")?,
            CodecConfig::Quantized { bits: Bits::Eight, .. } => f.write_str("warmup_codec = int8, ")?,
            CodecConfig::Quantized { bits: Bits::Four, .. } => f.write_str("warmup_codec = int4, ")?,
            _ => {}
        }
        write!(f, "error_feedback = {error_feedback}, normalize = {normalizes})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratio_falls_by_four_in_equal_intervals() {
        let ratios = |last, warmup| (0..10).map(|step| ratio_at(last, warmup, step)).collect::<Vec<_>>();
        let expected = [0.25, 0.25, 0.0625, 0.0625, 0.015625, 0.015625, 0.00390625, 0.00390625, 0.001, 0.001];
        assert_eq!(ratios(0.001, 8), expected);
        assert_eq!(ratios(0.1, 3), [[0.25; 3].as_slice(), &[0.1; 7]].concat());
        assert_eq!(ratios(0.25, 5), [0.25; 10]);
        assert_eq!(ratios(1.0, 5), [1.0; 10]);
        assert_eq!(ratio_at(0.01, u64::MAX, u64::MAX - 1), 0.015625);
        // The list of warm-up ratios is finite even for the smallest ratio.
        assert_eq!(ratio_at(f64::MIN_POSITIVE, 2, 0), 0.25);
    }

    #[test]
    fn at_least_one_element_is_selected() {
        for (len, ratio, expected) in [
            (0, 0.5, 0),
            (1, 0.001, 1),
            (100, 0.07, 7),
            (10, 0.26, 3),
            (10, 1.0, 10),
            (3, f64::MIN_POSITIVE, 1),
        ] {
            assert_eq!(num_selected(len, ratio), expected, "{len} x {ratio}");
        }
    }
}
