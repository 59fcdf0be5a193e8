use super::cast::{Rounded, Uncompressed};
use super::compression::CodecConfig;
use super::error::Result;
use super::fp8::Fp8;
use super::low_rank::LowRank;
use super::normalizer::Normalizer;
use super::one_bit::OneBit;
use super::quantized::Quantized;
use super::random_k::RandomK;
use super::top_k::TopK;
use super::vector_ops::zero_non_finite;
use super::{Bucket, Codec, Compression, CompressionError, Round, RoundContext, UncompressedReason};
use trireme_base::{Bf16, F16, RandomKey, Rank};

/// Compresses the gradient reductions of one bucket on one rank, and holds the state that is carried from step to step.
///
/// In each step the caller processes the [`rounds`](Compressor::rounds) in order. For each round it calls
/// [`encode`](Compressor::encode) to get this rank's message, performs the collective that the round names, and passes
/// the result to [`decode`](Compressor::decode). After the last round, the gradient is the sum of the ranks' decoded
/// messages, bit-identical on all ranks. All ranks must create the compressor with the same compression, bucket, world
/// size and key.
///
/// The caller owns the memory of the messages. Steps after the warm-up do not allocate.
#[derive(Debug)]
pub struct Compressor {
    compression: Compression,
    bucket: Bucket,
    rank: usize,
    world_size: usize,
    key: RandomKey,
    pub(super) codec: Box<dyn Codec>,
    /// Compresses the warm-up steps. Not used if these are sent uncompressed, or if the warm-up raises the ratio of
    /// `codec` instead.
    warmup_codec: Box<dyn Codec>,
    pub(super) state: State,
    rounds: Vec<Round>,
    uncompressed_reason: Option<UncompressedReason>,
    expected_call: ExpectedCall,
    statistics: CompressionStatistics,
}

/// The state that is carried from step to step, except the codec's own.
#[derive(Debug)]
pub(super) struct State {
    pub(super) step: u64,
    /// The accumulated compression error; `None` without error feedback.
    pub(super) residual: Option<Vec<f32>>,
    pub(super) normalizer: Option<Normalizer>,
}

/// The call that the compressor expects next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ExpectedCall {
    Encode { round: usize },
    Decode { round: usize },
}

/// Statistics of one step of a bucket on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct CompressionStatistics {
    /// Euclidean norm of this rank's compression error: gradient plus previous residual, minus the values that its
    /// messages encode. Elements that are not finite are excluded. Dimensionless if gradients are normalized.
    pub error_norm: f32,
    /// Bytes that this rank sends, as defined by [`Round::bytes_sent`].
    pub bytes_sent: u64,
    /// Bytes that this rank would send in an all-reduce of the gradient in f32.
    pub bytes_uncompressed: u64,
}

impl CompressionStatistics {
    /// Returns the statistics of a step that sends `len` elements uncompressed.
    pub fn uncompressed(len: usize, world_size: usize) -> Self {
        let bytes = Round::uncompressed(len).bytes_sent(world_size);
        CompressionStatistics { error_norm: 0.0, bytes_sent: bytes, bytes_uncompressed: bytes }
    }
}

impl Compressor {
    /// Creates the compressor of `bucket` on `rank`, before its first step. `key` determines the codec's random
    /// numbers; derive it from the run's seed and the bucket's name.
    ///
    /// # Errors
    /// [`CompressionError::BucketTooLong`] if `top_k` or `random_k` get a bucket of 2^32 or more elements.
    ///
    /// # Panics
    /// If `rank` is not below `world_size`.
    pub fn new(
        compression: &Compression,
        bucket: &Bucket,
        rank: Rank,
        world_size: usize,
        key: RandomKey,
    ) -> Result<Self> {
        assert!(rank.0 < world_size, "rank {rank} in a world of {world_size}");
        check_len(compression, bucket)?;
        let (codec, keeps_residual): (Box<dyn Codec>, bool) = if compression.needs_codec(bucket, world_size) {
            (codec_of(compression.config, compression, bucket), compression.error_feedback())
        } else {
            (Box::new(Uncompressed), false)
        };
        let warmup_codec = codec_of(compression.warmup_config, compression, bucket);
        let residual = keeps_residual.then(|| vec![0.0; bucket.len()]);
        let normalizer = compression.normalize().map(|decay| Normalizer::new(decay, bucket.len()));
        let mut compressor = Compressor {
            compression: *compression,
            bucket: bucket.clone(),
            rank: rank.0,
            world_size,
            key,
            codec,
            warmup_codec,
            state: State { step: 0, residual, normalizer },
            rounds: Vec::new(),
            uncompressed_reason: None,
            expected_call: ExpectedCall::Encode { round: 0 },
            statistics: CompressionStatistics::default(),
        };
        compressor.begin_step();
        Ok(compressor)
    }

    /// The rounds of the step in progress, or of the next step if none is in progress.
    pub fn rounds(&self) -> &[Round] {
        &self.rounds
    }

    /// Why the step of [`rounds`](Compressor::rounds) is sent uncompressed; `None` if it is compressed.
    pub fn uncompressed_reason(&self) -> Option<UncompressedReason> {
        self.uncompressed_reason
    }

    /// The compression that this compressor was created with.
    pub fn compression(&self) -> &Compression {
        &self.compression
    }

    /// Number of finished steps.
    pub fn step(&self) -> u64 {
        self.state.step
    }

    /// Statistics of the last finished step.
    pub fn statistics(&self) -> CompressionStatistics {
        self.statistics
    }

    /// Bytes of the vectors that are carried from step to step: residual, velocity, factors, second moment.
    pub fn num_bytes(&self) -> usize {
        let residual_len = self.state.residual.as_ref().map_or(0, Vec::len);
        let codec_state_len = self.codec.own_state().map_or(0, |(_, values)| values.len());
        let moment_len =
            self.state.normalizer.as_ref().map_or(0, |normalizer| normalizer.second_moment.len());
        (residual_len + codec_state_len + moment_len) * size_of::<f32>()
    }

    /// Writes this rank's message of the next round into `message`. The caller passes the same `gradient` in all rounds
    /// of a step and does not use its elements in between: the compressor may overwrite them.
    ///
    /// Time: a few passes over the gradient. `powersgd` takes `4 * rank` multiplications for each element and step.
    ///
    /// # Panics
    /// If a call of [`decode`](Compressor::decode) is expected instead, the message has another length than the round's or
    /// is not aligned to its dtype, or the gradient does not have the bucket's length.
    pub fn encode(&mut self, gradient: &mut [f32], message: &mut [u8]) {
        let ExpectedCall::Encode { round } = self.expected_call else {
            panic!("expected {:?} before the next message", self.expected_call)
        };
        assert_eq!(gradient.len(), self.bucket.len(), "the gradient belongs to another bucket");
        assert_eq!(message.len(), self.rounds[round].num_bytes(), "a message of {:?}", self.rounds[round]);
        self.expected_call = ExpectedCall::Decode { round };
        let context = self.context(round);
        if let (0, Some(normalizer)) = (round, &mut self.state.normalizer) {
            normalizer.divide(context.step, gradient);
        }
        let values = match &mut self.state.residual {
            Some(residual) => {
                if round == 0 {
                    self.codec.accumulate(residual, gradient);
                }
                residual
            }
            None => gradient,
        };
        if self.uncompressed_reason.is_some() {
            Uncompressed.encode(&context, values, message);
            self.statistics.error_norm = 0.0;
        } else {
            let is_by_warmup_codec = self.compression.uses_warmup_codec(context.step);
            let codec = if is_by_warmup_codec { &mut self.warmup_codec } else { &mut self.codec };
            codec.encode(&context, values, message);
            if round + 1 == self.rounds.len() {
                self.statistics.error_norm = zero_non_finite(values);
            }
        }
    }

    /// Decodes the result of the collective: the sum of all messages, or all messages in rank order. After the last
    /// round, `gradient` holds the sum over all ranks.
    ///
    /// Time: one pass over the gradient for each message in the result.
    ///
    /// # Errors
    /// [`CompressionError::ResultLength`] if the result has another length. [`CompressionError::Message`] if a rank
    /// sent a message that the codec cannot have produced. After an error, this step cannot be completed, and the
    /// compressor must not be used again.
    ///
    /// # Panics
    /// If a call of [`encode`](Compressor::encode) is expected instead, the result is not aligned to the round's dtype,
    /// or the gradient does not have the bucket's length.
    pub fn decode(&mut self, gradient: &mut [f32], result: &[u8]) -> Result<()> {
        let ExpectedCall::Decode { round } = self.expected_call else {
            panic!("expected {:?} before a result", self.expected_call)
        };
        assert_eq!(gradient.len(), self.bucket.len(), "the gradient belongs to another bucket");
        let expected = match self.rounds[round] {
            Round::AllReduce { .. } => self.rounds[round].num_bytes(),
            Round::AllGather { num_bytes } => num_bytes * self.world_size,
        };
        if result.len() != expected {
            let codec = self.compression.codec();
            return Err(CompressionError::ResultLength { codec, round, found: result.len(), expected });
        }
        let context = self.context(round);
        match self.uncompressed_reason {
            Some(_) => Uncompressed.decode(&context, result, gradient)?,
            None if self.compression.uses_warmup_codec(context.step) => {
                self.warmup_codec.decode(&context, result, gradient)?;
            }
            None => self.codec.decode(&context, result, gradient)?,
        }
        self.expected_call = ExpectedCall::Encode { round: round + 1 };
        if round + 1 == self.rounds.len() {
            self.end_step();
        }
        Ok(())
    }

    /// Adapts the state to gradients that are `factor` times larger from the next step on, because the loss scale
    /// changed. If `factor` is a power of two, the mantissas of the state do not change.
    pub fn rescale(&mut self, factor: f32) {
        if let Some(normalizer) = &mut self.state.normalizer {
            // Residual and velocity are made of normalized gradients, which the loss scale does not affect.
            return normalizer.rescale(factor);
        }
        self.codec.rescale(factor);
        self.state.residual.iter_mut().flatten().for_each(|value| *value *= factor);
    }

    fn context(&self, round: usize) -> RoundContext {
        let Compressor { rank, world_size, key, .. } = *self;
        RoundContext { step: self.state.step, round, rank, world_size, key }
    }

    fn end_step(&mut self) {
        self.statistics.bytes_sent = self.rounds.iter().map(|round| round.bytes_sent(self.world_size)).sum();
        self.statistics.bytes_uncompressed =
            Round::uncompressed(self.bucket.len()).bytes_sent(self.world_size);
        self.state.step += 1;
        if self.state.step <= self.compression.warmup_steps() {
            self.begin_step();
        }
        self.expected_call = ExpectedCall::Encode { round: 0 };
    }

    /// Determines the rounds of the next step.
    pub(super) fn begin_step(&mut self) {
        let (bucket, step) = (&self.bucket, self.state.step);
        self.rounds = self.compression.rounds(bucket, self.world_size, step);
        self.uncompressed_reason = self.compression.uncompressed_reason(bucket, self.world_size, step);
        self.expected_call = ExpectedCall::Encode { round: 0 };
    }
}

/// Refuses a bucket whose elements cannot be indexed with 32 bits, if the codec sends or draws such indices.
fn check_len(compression: &Compression, bucket: &Bucket) -> Result<()> {
    let has_indices = matches!(compression.config, CodecConfig::TopK { .. } | CodecConfig::RandomK { .. });
    if has_indices && u32::try_from(bucket.len()).is_err() {
        let codec = compression.codec();
        return Err(CompressionError::BucketTooLong { codec, len: bucket.len() });
    }
    Ok(())
}

fn codec_of(method: CodecConfig, compression: &Compression, bucket: &Bucket) -> Box<dyn Codec> {
    let len = bucket.len();
    match method {
        CodecConfig::None => Box::new(Uncompressed),
        CodecConfig::F16 => Box::new(Rounded::<F16>::new()),
        CodecConfig::Bf16 => Box::new(Rounded::<Bf16>::new()),
        CodecConfig::Fp8(format) => Box::new(Fp8 { format }),
        CodecConfig::Quantized { bits, block_len } => Box::new(Quantized { bits, block_len }),
        CodecConfig::OneBit { block_len } => Box::new(OneBit { block_len }),
        CodecConfig::TopK { momentum, .. } => Box::new(TopK::new(len, momentum)),
        CodecConfig::RandomK { .. } => Box::new(RandomK::new(len, !compression.error_feedback())),
        CodecConfig::LowRank { rank } => Box::new(LowRank::new(bucket, rank)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CodecName, CompressionOptions};

    #[test]
    fn a_bucket_with_more_elements_than_32_bit_indices_is_refused() {
        let found = |codec, len| {
            let options = CompressionOptions { codec, ..CompressionOptions::default() };
            check_len(&Compression::new(&options).unwrap(), &Bucket::flat(len))
        };
        for codec in [CodecName::TopK, CodecName::RandomK] {
            assert_eq!(found(codec, u32::MAX as usize), Ok(()));
            for len in [1 << 32, (1 << 32) + 1, usize::MAX] {
                assert_eq!(found(codec, len), Err(CompressionError::BucketTooLong { codec, len }));
            }
        }
        for codec in [CodecName::OneBit, CodecName::Int8, CodecName::PowerSgd] {
            assert_eq!(found(codec, usize::MAX), Ok(()));
        }
    }

    #[test]
    fn a_bucket_that_is_too_long_is_refused_before_allocation() {
        let options = CompressionOptions { codec: CodecName::TopK, ..CompressionOptions::default() };
        let compression = Compression::new(&options).unwrap();
        // No machine has this much memory, so the allocation would panic if it were not refused before.
        let bucket = Bucket::flat(usize::MAX);
        let found = Compressor::new(&compression, &bucket, Rank(0), 2, RandomKey::new(0, "")).map(drop);
        assert!(matches!(found, Err(CompressionError::BucketTooLong { .. })), "{found:?}");
    }
}
