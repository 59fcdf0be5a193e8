use super::cast::{Rounded, Uncompressed};
use super::compression::Method;
use super::fp8::Fp8;
use super::low_rank::LowRank;
use super::normalizer::Normalizer;
use super::numbers::settle;
use super::one_bit::OneBit;
use super::quantized::Quantized;
use super::random_k::RandomK;
use super::top_k::TopK;
use super::{Bucket, Codec, Compression, CompressionError, Round, Turn, UncompressedReason};
use trireme_base::{Bf16, F16, RandomKey, Rank};

/// Compresses the reductions of one bucket, step after step.
///
/// A step is, for each of its [`rounds`](Compressor::rounds) in order: [`write`](Compressor::write) a message, exchange it as the
/// round says, [`read`](Compressor::read) the result. After the last round the gradient is the sum over all ranks of what they
/// sent, with equal bits on all of them. All ranks must be made with the same compression, bucket, world size and key.
///
/// Messages lie in the caller's memory. A step allocates nothing, but for those of the warm-up that change the rounds.
#[derive(Debug)]
pub struct Compressor {
    compression: Compression,
    bucket: Bucket,
    rank: usize,
    world_size: usize,
    key: RandomKey,
    pub(super) codec: Box<dyn Codec>,
    /// Compresses the steps of the warm-up, if that is asked for.
    warmup_codec: Box<dyn Codec>,
    pub(super) state: State,
    rounds: Vec<Round>,
    uncompressed_reason: Option<UncompressedReason>,
    next: Next,
    statistics: CompressionStatistics,
}

/// What is kept from step to step, beside what the codec keeps.
#[derive(Debug)]
pub(super) struct State {
    pub(super) step: u64,
    /// What was not sent; only with error feedback.
    pub(super) residual: Option<Vec<f32>>,
    pub(super) normalizer: Option<Normalizer>,
}

/// What the caller has to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    Write { round: usize },
    Read { round: usize },
}

/// What the last step of a bucket did on this rank.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct CompressionStatistics {
    /// Euclidean norm of what this rank's messages left out, of the gradient and the residual before it. Elements that
    /// are not finite do not count. Of gradients that are normalized, it has no unit.
    pub error_norm: f32,
    /// Bytes sent, by [`Round::bytes_sent`].
    pub bytes_sent: u64,
    /// Bytes that an all-reduce of the gradient in f32 sends.
    pub bytes_uncompressed: u64,
}

impl CompressionStatistics {
    /// Of a gradient of `len` elements that is sent as it is.
    pub fn uncompressed(len: usize, world_size: usize) -> Self {
        let bytes = Round::uncompressed(len).bytes_sent(world_size);
        CompressionStatistics { error_norm: 0.0, bytes_sent: bytes, bytes_uncompressed: bytes }
    }
}

impl Compressor {
    /// A compressor before the first step, for `bucket` of `rank`. `key` gives the codec's random numbers, and is
    /// best made of the run's seed and the bucket's name.
    ///
    /// # Errors
    /// [`CompressionError::BucketTooLong`] with `top_k` and `random_k`, from 2^32 elements on.
    ///
    /// # Panics
    /// If the world has no such rank.
    pub fn new(
        compression: &Compression,
        bucket: &Bucket,
        rank: Rank,
        world_size: usize,
        key: RandomKey,
    ) -> Result<Self, CompressionError> {
        assert!(rank.0 < world_size, "rank {rank} in a world of {world_size}");
        check_len(compression, bucket)?;
        let (codec, keeps_residual): (Box<dyn Codec>, bool) = match compression.has_codec(bucket, world_size)
        {
            true => (codec_of(compression.method, compression, bucket), compression.error_feedback()),
            false => (Box::new(Uncompressed), false),
        };
        let warmup_codec = codec_of(compression.warmup_method, compression, bucket);
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
            next: Next::Write { round: 0 },
            statistics: CompressionStatistics::default(),
        };
        compressor.begin_step();
        Ok(compressor)
    }

    /// The rounds of the step under way, or of the next one.
    pub fn rounds(&self) -> &[Round] {
        &self.rounds
    }

    /// Why that step goes uncompressed, if it does.
    pub fn uncompressed_reason(&self) -> Option<UncompressedReason> {
        self.uncompressed_reason
    }

    /// The compression it was made with.
    pub fn compression(&self) -> &Compression {
        &self.compression
    }

    /// Steps that were finished.
    pub fn step(&self) -> u64 {
        self.state.step
    }

    /// What the last finished step did.
    pub fn statistics(&self) -> CompressionStatistics {
        self.statistics
    }

    /// Bytes of the vectors that are kept from step to step: residual, velocity, factors, second moment.
    pub fn num_bytes(&self) -> usize {
        let residual_len = self.state.residual.as_ref().map_or(0, Vec::len);
        let kept_len = self.codec.kept().map_or(0, |(_, values)| values.len());
        let moment_len =
            self.state.normalizer.as_ref().map_or(0, |normalizer| normalizer.second_moment.len());
        (residual_len + kept_len + moment_len) * size_of::<f32>()
    }

    /// Writes this rank's message of the next round. `gradient` is this rank's in all rounds of a step; in between, its
    /// elements are the compressor's to change.
    ///
    /// Time: a few passes over the gradient; with `powersgd` `4 * rank` multiplications an element and step.
    ///
    /// # Panics
    /// If it is time to [`read`](Compressor::read), or the round's message has another length or is not aligned to its dtype, or the bucket
    /// has another length.
    pub fn write(&mut self, gradient: &mut [f32], message: &mut [u8]) {
        let Next::Write { round } = self.next else {
            panic!("expected {:?} before the next message", self.next)
        };
        assert_eq!(gradient.len(), self.bucket.len(), "the gradient belongs to another bucket");
        assert_eq!(message.len(), self.rounds[round].num_bytes(), "a message of {:?}", self.rounds[round]);
        self.next = Next::Read { round };
        let turn = self.turn(round);
        if let (0, Some(normalizer)) = (round, &mut self.state.normalizer) {
            normalizer.divide(turn.step, gradient);
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
            Uncompressed.encode(&turn, values, message);
            self.statistics.error_norm = 0.0;
        } else {
            let is_by_warmup_codec = self.compression.is_by_warmup_codec(turn.step);
            let codec = if is_by_warmup_codec { &mut self.warmup_codec } else { &mut self.codec };
            codec.encode(&turn, values, message);
            if round + 1 == self.rounds.len() {
                self.statistics.error_norm = settle(values);
            }
        }
    }

    /// Reads the result of the round: the sum of all messages, or all messages in rank order. After the last round
    /// `gradient` is the sum over all ranks.
    ///
    /// Time: a pass over the gradient for each message of the result.
    ///
    /// # Errors
    /// [`CompressionError::ResultLength`]; [`CompressionError::Message`] if a rank sent what its codec does not make. The
    /// step is lost then, and with it the compressor.
    ///
    /// # Panics
    /// If it is time to [`write`](Compressor::write), or the result is not aligned to the dtype of the round, or the bucket has another length.
    pub fn read(&mut self, gradient: &mut [f32], result: &[u8]) -> Result<(), CompressionError> {
        let Next::Read { round } = self.next else { panic!("expected {:?} before a result", self.next) };
        assert_eq!(gradient.len(), self.bucket.len(), "the gradient belongs to another bucket");
        let expected = match self.rounds[round] {
            Round::AllReduce { .. } => self.rounds[round].num_bytes(),
            Round::AllGather { num_bytes } => num_bytes * self.world_size,
        };
        if result.len() != expected {
            let codec = self.compression.codec();
            return Err(CompressionError::ResultLength { codec, round, found: result.len(), expected });
        }
        let turn = self.turn(round);
        match self.uncompressed_reason {
            Some(_) => Uncompressed.decode(&turn, result, gradient)?,
            None if self.compression.is_by_warmup_codec(turn.step) => {
                self.warmup_codec.decode(&turn, result, gradient)?;
            }
            None => self.codec.decode(&turn, result, gradient)?,
        }
        self.next = Next::Write { round: round + 1 };
        if round + 1 == self.rounds.len() {
            self.end_step();
        }
        Ok(())
    }

    /// Gradients will be `factor` times larger from the next step on, because a loss scale has changed: what is kept of
    /// earlier ones is scaled likewise. A power of two changes no digit.
    pub fn rescale(&mut self, factor: f32) {
        if let Some(normalizer) = &mut self.state.normalizer {
            // All else is kept of gradients that were divided, and have no scale.
            return normalizer.rescale(factor);
        }
        self.codec.rescale(factor);
        self.state.residual.iter_mut().flatten().for_each(|value| *value *= factor);
    }

    fn turn(&self, round: usize) -> Turn {
        let Compressor { rank, world_size, key, .. } = *self;
        Turn { step: self.state.step, round, rank, world_size, key }
    }

    fn end_step(&mut self) {
        self.statistics.bytes_sent = self.rounds.iter().map(|round| round.bytes_sent(self.world_size)).sum();
        self.statistics.bytes_uncompressed =
            Round::uncompressed(self.bucket.len()).bytes_sent(self.world_size);
        self.state.step += 1;
        if self.state.step <= self.compression.warmup_steps() {
            self.begin_step();
        }
        self.next = Next::Write { round: 0 };
    }

    /// Finds the rounds of the step to come.
    pub(super) fn begin_step(&mut self) {
        let (bucket, step) = (&self.bucket, self.state.step);
        self.rounds = self.compression.rounds(bucket, self.world_size, step);
        self.uncompressed_reason = self.compression.uncompressed_reason(bucket, self.world_size, step);
        self.next = Next::Write { round: 0 };
    }
}

/// Refuses a bucket whose elements have no indices of 32 bits, if the codec needs such.
fn check_len(compression: &Compression, bucket: &Bucket) -> Result<(), CompressionError> {
    let has_indices = matches!(compression.method, Method::TopK { .. } | Method::RandomK { .. });
    if has_indices && u32::try_from(bucket.len()).is_err() {
        let codec = compression.codec();
        return Err(CompressionError::BucketTooLong { codec, len: bucket.len() });
    }
    Ok(())
}

fn codec_of(method: Method, compression: &Compression, bucket: &Bucket) -> Box<dyn Codec> {
    let len = bucket.len();
    match method {
        Method::None => Box::new(Uncompressed),
        Method::F16 => Box::new(Rounded::<F16>::new()),
        Method::Bf16 => Box::new(Rounded::<Bf16>::new()),
        Method::Fp8(format) => Box::new(Fp8 { format }),
        Method::Quantized { bits, block_len } => Box::new(Quantized { bits, block_len }),
        Method::OneBit { block_len } => Box::new(OneBit { block_len }),
        Method::TopK { momentum, .. } => Box::new(TopK::new(len, momentum)),
        Method::RandomK { .. } => Box::new(RandomK::new(len, !compression.error_feedback())),
        Method::LowRank { rank } => Box::new(LowRank::new(bucket, rank)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CodecName, CompressionOptions};

    #[test]
    fn a_bucket_whose_elements_32_bits_cannot_number_is_refused() {
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
    fn a_compressor_asks_before_it_allocates() {
        let options = CompressionOptions { codec: CodecName::TopK, ..CompressionOptions::default() };
        let compression = Compression::new(&options).unwrap();
        // So much memory nobody has: without the refusal this panics.
        let bucket = Bucket::flat(usize::MAX);
        let found = Compressor::new(&compression, &bucket, Rank(0), 2, RandomKey::new(0, "")).map(drop);
        assert!(matches!(found, Err(CompressionError::BucketTooLong { .. })), "{found:?}");
    }
}
