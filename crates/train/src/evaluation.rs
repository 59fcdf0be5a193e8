//! Evaluation of texts by a model: losses and log-likelihoods.

use crate::error::TrainError;
use crate::language::SequenceFormat;
use crate::weights::{ModelWeights, evaluating_executor};
use std::path::Path;
use trireme_base::DType;
use trireme_data::{MaskedTokens, Packing, Sampler, TokenFile, Window};
use trireme_model::{
    DOCUMENT_STARTS, HostBatch, LOSS_WEIGHTS, ModelConfig, TARGETS, TOKEN_WEIGHTS, TOKENS, TensorSpec,
};
use trireme_parallel::Executor;
use trireme_tensor::Device;

const BATCH_SIZE: usize = 8;

/// A model that evaluates texts.
pub struct Evaluator {
    executor: Executor,
    device: Device,
    config: ModelConfig,
    seq_len: usize,
    /// The index of the next-token loss among the [reports](trireme_model::ModelProfile::reports).
    loss_report: usize,
    notices: Vec<String>,
}

/// The result of the evaluation of a text.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Evaluation {
    /// The sum of the losses of the counted tokens, in nats.
    pub nats: f64,
    /// Number of counted tokens: all except the first token of each sequence, or of each document if whole documents are packed. If the
    /// text has answers, only their tokens count.
    pub num_tokens: u64,
    /// Number of bytes of the counted tokens' text.
    pub num_bytes: u64,
}

impl Evaluation {
    /// Returns the mean loss, in nats per token.
    pub fn loss(&self) -> f64 {
        self.nats / self.num_tokens as f64
    }

    /// Returns the exponential of the mean loss.
    pub fn perplexity(&self) -> f64 {
        self.loss().exp()
    }

    /// Returns the number of bits that the model needs per byte of text, which does not depend on the tokenizer. `None` if the counted
    /// tokens have no text; an end-of-document token has none, for example.
    pub fn bits_per_byte(&self) -> Option<f64> {
        (self.num_bytes > 0).then(|| self.nats / std::f64::consts::LN_2 / self.num_bytes as f64)
    }
}

impl Evaluator {
    /// Loads the model of a checkpoint, of a run's newest checkpoint, or of a Hugging Face directory, for sequences of at most `seq_len`
    /// tokens. `None` stands for the longest sequence that the model supports, but at most 1024 tokens.
    ///
    /// # Errors
    /// The errors of [`load_model`](crate::load_model), or [`TrainError::SequenceTooLong`].
    #[expect(clippy::missing_panics_doc, reason = "the last unit of a language model reports a loss")]
    pub fn load(
        path: &Path,
        allow_non_finite: bool,
        seq_len: Option<usize>,
        device: &Device,
    ) -> Result<Self, TrainError> {
        let weights = ModelWeights::open(path)?;
        let max_position_embeddings = weights.config.max_positions();
        let seq_len = seq_len.unwrap_or(weights.config.max_position_embeddings.min(1024));
        if seq_len > max_position_embeddings {
            return Err(TrainError::SequenceTooLong { seq_len, max_position_embeddings });
        }
        let (config, notices) = (weights.config.clone(), weights.notices.clone());
        let (model, parameters) = weights.load(seq_len, allow_non_finite, device)?;
        let executor = evaluating_executor(&config, model, parameters, &specs(BATCH_SIZE, seq_len), device)?;
        let profile = executor.profile();
        let is_prediction = |(_, (unit, report)): &(usize, (usize, trireme_model::MeanReport))| {
            report.metric.is_none() && *unit + 1 == executor.model().num_units()
        };
        let report = profile.reports().enumerate().find(is_prediction);
        let (report, _) = report.expect("the last unit of a language model predicts");
        Ok(Evaluator { executor, device: device.clone(), config, seq_len, loss_report: report, notices })
    }

    /// Returns notices about the model's files for the user.
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// Returns the config of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns the maximum number of tokens in a sequence.
    pub fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// Evaluates all of `tokens`. Sequences follow each other without a gap, and the last one may be shorter. With `whole_documents`, whole
    /// documents are packed into sequences instead. `num_bytes` returns the length in bytes of the text of the given tokens. `progress` is
    /// called with the number of evaluated sequences and their total number.
    ///
    /// # Errors
    /// If tokens cannot be read, if one is not in the model's vocabulary, or if none counts.
    pub fn evaluate_corpus(
        &mut self,
        tokens: &MaskedTokens,
        whole_documents: bool,
        num_bytes: impl Fn(&[u32]) -> Result<u64, TrainError>,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<Evaluation, TrainError> {
        self.check_vocabulary(tokens.tokens.vocabulary_size())?;
        let windows = windows(&tokens.tokens, self.seq_len, whole_documents)?;
        let mut found = Evaluation::default();
        let num_windows = windows.len() as u64;
        let mut done = 0;
        for windows in windows.chunks(BATCH_SIZE) {
            let sequences = windows.iter().map(|window| Sequence::read(*window, tokens, whole_documents));
            let sequences = sequences.collect::<Result<Vec<_>, _>>()?;
            found.nats += self.sum_of_losses(&sequences)?;
            for sequence in &sequences {
                let counted: Vec<u32> = sequence.counted_tokens().collect();
                found.num_tokens += counted.len() as u64;
                found.num_bytes += num_bytes(&counted)?;
            }
            done += windows.len() as u64;
            progress(done, num_windows);
        }
        match found.num_tokens {
            0 => Err(TrainError::NothingToEvaluate { seq_len: self.seq_len }),
            _ => Ok(found),
        }
    }

    /// Returns the log-likelihood of the tokens after the first `num_given`, in nats. If there are more tokens than the model supports, the
    /// first ones are left out.
    ///
    /// # Errors
    /// If a token is not in the model's vocabulary.
    ///
    /// # Panics
    /// If no token is given, or no token follows.
    pub fn log_likelihood(&mut self, tokens: &[u32], num_given: usize) -> Result<f64, TrainError> {
        assert!((1..tokens.len()).contains(&num_given), "{num_given} of {} tokens are given", tokens.len());
        let largest = tokens.iter().max().expect("there are tokens");
        self.check_vocabulary(*largest as usize + 1)?;
        let left_out = tokens.len().saturating_sub(self.seq_len + 1);
        let tokens = &tokens[left_out..];
        let num_given = num_given.saturating_sub(left_out).max(1);
        let counted = (0..tokens.len()).map(|place| u32::from(place >= num_given)).collect();
        let sequence = Sequence { tokens: tokens.to_vec(), counted, starts: vec![0; tokens.len()] };
        Ok(-self.sum_of_losses(&[sequence])?)
    }

    fn check_vocabulary(&self, vocabulary_size: usize) -> Result<(), TrainError> {
        let vocab_size = self.config.vocab_size;
        if vocabulary_size > vocab_size {
            Err(TrainError::TokenOutsideVocabulary { token: vocabulary_size as u32 - 1, vocab_size })
        } else {
            Ok(())
        }
    }

    /// Returns the sum of the losses of the counted tokens of `sequences`.
    fn sum_of_losses(&mut self, sequences: &[Sequence]) -> Result<f64, TrainError> {
        // A batch of short sequences takes less time.
        let seq_len = sequences.iter().map(|sequence| sequence.tokens.len() - 1).max().unwrap_or(0);
        let mut batch = HostBatch::new(&specs(sequences.len(), seq_len));
        for (row, Sequence { tokens, counted, starts }) in sequences.iter().enumerate() {
            let len = tokens.len() - 1;
            let mut put = |name, values: &[u32], padding: u32| {
                let sample: &mut [u32] = bytemuck::cast_slice_mut(batch.sample_mut(name, row, DType::U32));
                sample[..len].copy_from_slice(values);
                sample[len..].fill(padding);
            };
            put(TOKENS, &tokens[..len], 0);
            put(TARGETS, &tokens[1..], 0);
            put(DOCUMENT_STARTS, &starts[..len], len as u32);
            let weights: &mut [f32] =
                bytemuck::cast_slice_mut(batch.sample_mut(LOSS_WEIGHTS, row, DType::F32));
            weights.fill(0.0);
            let counted = weights.iter_mut().zip(&counted[1..]);
            counted.for_each(|(weight, &counted)| *weight = counted as f32);
            let of_tokens: &mut [f32] =
                bytemuck::cast_slice_mut(batch.sample_mut(TOKEN_WEIGHTS, row, DType::F32));
            of_tokens[..len].fill(1.0);
            of_tokens[len..].fill(0.0);
        }
        let batch = batch.upload(&self.device)?;
        Ok(self.executor.evaluate_sequences(batch)?[self.loss_report].sum)
    }
}

/// Consecutive tokens, with 1 in `counted` for those whose loss counts. The first token is only context.
struct Sequence {
    tokens: Vec<u32>,
    counted: Vec<u32>,
    starts: Vec<u32>,
}

impl Sequence {
    fn read(
        Window { start, len, .. }: Window,
        tokens: &MaskedTokens,
        whole_documents: bool,
    ) -> Result<Self, TrainError> {
        let mut sequence = Sequence { tokens: vec![0; len], counted: vec![1; len], starts: vec![0; len] };
        tokens.tokens.read_window(start, &mut sequence.tokens)?;
        if whole_documents {
            tokens.tokens.document_starts(start, &mut sequence.starts)?;
        }
        let starts = whole_documents.then_some(&sequence.starts[..]);
        tokens.read_loss_mask(start, starts, &mut sequence.counted)?;
        Ok(sequence)
    }

    fn counted_tokens(&self) -> impl Iterator<Item = u32> {
        let targets = self.tokens.iter().zip(&self.counted).skip(1);
        targets.filter(|(_, counted)| **counted == 1).map(|(token, _)| *token)
    }
}

fn windows(tokens: &TokenFile, seq_len: usize, whole_documents: bool) -> Result<Vec<Window>, TrainError> {
    if whole_documents {
        let sampler = Sampler::new(tokens, &[], seq_len, Packing::Documents, None)?;
        let windows = (0..sampler.num_windows()).map(|index| sampler.window(index));
        return Ok(windows.filter(|window| window.len > 1).collect());
    }
    let num_targets = tokens.num_tokens().saturating_sub(1);
    let window =
        |start: u64| Window { epoch: 0, start, len: (num_targets - start).min(seq_len as u64) as usize + 1 };
    Ok((0..num_targets).step_by(seq_len).map(window).collect())
}

fn specs(num_samples: usize, seq_len: usize) -> Vec<TensorSpec> {
    SequenceFormat::weighted(seq_len).sample().into_iter().map(|spec| spec.in_batch(num_samples)).collect()
}
