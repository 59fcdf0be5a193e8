//! How likely a model finds texts, without training.

use crate::error::TrainError;
use crate::language::Sequences;
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

/// A model that tells how likely it finds texts.
pub struct Evaluator {
    executor: Executor,
    device: Device,
    config: ModelConfig,
    seq_len: usize,
    /// Which of the [reports](trireme_model::Rehearsal::reports) is the loss of the predictions.
    report: usize,
    notices: Vec<String>,
}

/// What was found of a text.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Evaluation {
    /// The sum of the losses of the tokens that count.
    pub nats: f64,
    /// Tokens that count: each that follows another one in its sequence, and of documents with answers only those.
    pub num_tokens: u64,
    /// Bytes of their text.
    pub num_bytes: u64,
}

impl Evaluation {
    /// The mean loss, in nats a token.
    pub fn loss(&self) -> f64 {
        self.nats / self.num_tokens as f64
    }

    /// The exponential of the mean loss.
    pub fn perplexity(&self) -> f64 {
        self.loss().exp()
    }

    /// Bits that the model needs for a byte of the text: a measure that does not depend on the tokenizer. `None` if the tokens that count
    /// have no text, as the end of a document has none.
    pub fn bits_per_byte(&self) -> Option<f64> {
        (self.num_bytes > 0).then(|| self.nats / std::f64::consts::LN_2 / self.num_bytes as f64)
    }
}

impl Evaluator {
    /// Loads the model of a checkpoint, of a run's newest checkpoint, or of a Hugging Face directory, for sequences of at most `seq_len`
    /// tokens; `None` for as many as it supports, up to 1024.
    ///
    /// # Errors
    /// As [`load_model`](crate::load_model); and if the model does not support sequences of this length.
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
        let rehearsal = executor.rehearsal();
        let is_prediction = |(_, (unit, report)): &(usize, (usize, trireme_model::Report))| {
            report.metric.is_none() && *unit + 1 == executor.model().num_units()
        };
        let report = rehearsal.reports().enumerate().find(is_prediction);
        let (report, _) = report.expect("the last unit of a language model predicts");
        Ok(Evaluator { executor, device: device.clone(), config, seq_len, report, notices })
    }

    /// What the user should know of the model's files.
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// The model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Tokens of the longest sequence.
    pub fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// Evaluates a corpus: all of what was held out, or of what is to be trained on. Sequences follow each other, the last one shorter, unless
    /// `whole_documents` are packed. `progress` hears of how many sequences some are done.
    ///
    /// # Errors
    /// If tokens cannot be read, the model does not know one, or none counts.
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
            found.nats += self.nats(&sequences)?;
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

    /// The log-likelihood of what follows the first `num_given` tokens, in nats. Of too many tokens the first are left out.
    ///
    /// # Errors
    /// If the model does not know a token.
    ///
    /// # Panics
    /// If no token is given, or none follows.
    pub fn log_likelihood(&mut self, tokens: &[u32], num_given: usize) -> Result<f64, TrainError> {
        assert!((1..tokens.len()).contains(&num_given), "{num_given} of {} tokens are given", tokens.len());
        let largest = tokens.iter().max().expect("there are tokens");
        self.check_vocabulary(*largest as usize + 1)?;
        let left_out = tokens.len().saturating_sub(self.seq_len + 1);
        let tokens = &tokens[left_out..];
        let num_given = num_given.saturating_sub(left_out).max(1);
        let counted = (0..tokens.len()).map(|place| u32::from(place >= num_given)).collect();
        let sequence = Sequence { tokens: tokens.to_vec(), counted, starts: vec![0; tokens.len()] };
        Ok(-self.nats(&[sequence])?)
    }

    fn check_vocabulary(&self, vocabulary_size: usize) -> Result<(), TrainError> {
        let vocab_size = self.config.vocab_size;
        match vocabulary_size > vocab_size {
            true => Err(TrainError::ForeignToken { token: vocabulary_size as u32 - 1, vocab_size }),
            false => Ok(()),
        }
    }

    /// The sum of the losses of the tokens of some sequences that count.
    fn nats(&mut self, sequences: &[Sequence]) -> Result<f64, TrainError> {
        // One that is shorter takes less time where it is alone.
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
        Ok(self.executor.evaluate_sequences(batch)?[self.report].sum)
    }
}

/// Tokens in a row, and which of them count; the first one only tells of the others.
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
        tokens.read_counted(start, starts, &mut sequence.counted)?;
        Ok(sequence)
    }

    fn counted_tokens(&self) -> impl Iterator<Item = u32> {
        let targets = self.tokens.iter().zip(&self.counted).skip(1);
        targets.filter(|(_, counted)| **counted == 1).map(|(token, _)| *token)
    }
}

fn windows(tokens: &TokenFile, seq_len: usize, whole_documents: bool) -> Result<Vec<Window>, TrainError> {
    if whole_documents {
        let sampler = Sampler::new(tokens, &[], (seq_len, Packing::Documents), None)?;
        let windows = (0..sampler.num_windows()).map(|index| sampler.window(index));
        return Ok(windows.filter(|window| window.len > 1).collect());
    }
    let num_targets = tokens.num_tokens().saturating_sub(1);
    let window =
        |start: u64| Window { epoch: 0, start, len: (num_targets - start).min(seq_len as u64) as usize + 1 };
    Ok((0..num_targets).step_by(seq_len).map(window).collect())
}

fn specs(num_samples: usize, seq_len: usize) -> Vec<TensorSpec> {
    Sequences::weighted(seq_len).sample().into_iter().map(|spec| spec.in_batch(num_samples)).collect()
}
