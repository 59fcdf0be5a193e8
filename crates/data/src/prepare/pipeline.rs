use super::batch::Batch;
use super::reader::{CorpusReader, ReadCounts};
use crate::{DataError, TokenFileWriter, Tokenizer};
use std::num::NonZeroUsize;
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use trireme_base::spawn_scoped_thread;

/// Maximum number of batches in the queue before each tokenizing thread, and in the queue after it.
const WAITING_BATCHES_MAX: usize = 2;

/// The writers of the token file and, if only some tokens count in the loss, of the loss mask.
pub(super) struct Writers {
    pub(super) tokens: TokenFileWriter,
    pub(super) loss_mask: Option<TokenFileWriter>,
    /// Number of documents up to the end of each input. Trailing inputs without documents may have no entry.
    pub(super) cumulative_documents: Vec<u64>,
}

impl Writers {
    fn push(&mut self, batch: &TokenBatch, start: usize, end: usize) -> Result<(), DataError> {
        self.tokens.push(&batch.tokens[start..end])?;
        if let Some(loss_mask) = &mut self.loss_mask {
            loss_mask.push(&batch.loss_mask[start..end])?;
        }
        Ok(())
    }

    fn end_document(&mut self, source: usize) -> Result<(), DataError> {
        self.tokens.end_document()?;
        self.loss_mask.as_mut().map_or(Ok(()), TokenFileWriter::end_document)?;
        let before = self.cumulative_documents.last().copied().unwrap_or(0);
        self.cumulative_documents.resize(source + 1, before);
        self.cumulative_documents[source] = self.tokens.num_documents();
        Ok(())
    }

    pub(super) fn finish(self) -> Result<(), DataError> {
        self.tokens.finish()?;
        self.loss_mask.map_or(Ok(()), TokenFileWriter::finish)
    }
}

#[derive(Default)]
struct TokenBatch {
    tokens: Vec<u32>,
    /// For each token, 1 if it counts in the loss and 0 otherwise.
    loss_mask: Vec<u32>,
    /// For each document that ends in the batch, its end in tokens and the index of its input.
    document_ends: Vec<(usize, usize)>,
    input_bytes_read: u64,
}

/// Tokenizes the whole corpus and writes it in order. Calls `on_progress` with the number of input bytes that are done.
///
/// One thread reads, `num_threads` threads tokenize, and the calling thread writes. Batches are distributed to the
/// threads round-robin and collected in the same order, so the output does not depend on the number of threads, and at
/// most five batches per thread are in memory.
pub(super) fn tokenize(
    mut reader: CorpusReader<'_>,
    tokenizer: &Tokenizer,
    num_threads: NonZeroUsize,
    writers: &mut Writers,
    mut on_progress: impl FnMut(u64),
) -> Result<ReadCounts, DataError> {
    let failed = |source| DataError::Spawn { source };
    thread::scope(|scope| {
        let mut batches = Vec::new();
        let mut results = Vec::new();
        for index in 0..num_threads.get() {
            let (batch_sender, batch_receiver) = sync_channel(WAITING_BATCHES_MAX);
            let (result_sender, result_receiver) = sync_channel(WAITING_BATCHES_MAX);
            batches.push(batch_sender);
            results.push(result_receiver);
            let work = move || tokenize_batches(tokenizer, &batch_receiver, &result_sender);
            spawn_scoped_thread(scope, &format!("tokenizer-{index}"), work).map_err(failed)?;
        }
        let read = move || distribute(&mut reader, &batches).map(|()| reader.counts);
        let reading = spawn_scoped_thread(scope, "reader", read).map_err(failed)?;
        let written = write_in_order(&results, writers, &mut on_progress);
        // If writing failed, this stops the other threads, because their channels are closed.
        drop(results);
        let counts = reading.join().unwrap_or_else(|panic| resume_unwind(panic));
        written.and(counts)
    })
}

/// Sends the batches to the threads round-robin, until the last batch or until a thread has ended.
fn distribute(reader: &mut CorpusReader<'_>, threads: &[SyncSender<Batch>]) -> Result<(), DataError> {
    for thread in threads.iter().cycle() {
        let Some(batch) = reader.next_batch()? else { break };
        if thread.send(batch).is_err() {
            break;
        }
    }
    Ok(())
}

fn tokenize_batches(
    tokenizer: &Tokenizer,
    batches: &Receiver<Batch>,
    results: &SyncSender<Result<TokenBatch, DataError>>,
) {
    for batch in batches {
        if results.send(tokenize_batch(tokenizer, &batch)).is_err() {
            break;
        }
    }
}

fn tokenize_batch(tokenizer: &Tokenizer, batch: &Batch) -> Result<TokenBatch, DataError> {
    let mut output = TokenBatch { input_bytes_read: batch.input_bytes_read, ..TokenBatch::default() };
    let ending = tokenizer.suffix_tokens();
    for (text, piece) in batch.pieces() {
        let start = output.tokens.len();
        if piece.adds_beginning {
            output.tokens.extend_from_slice(tokenizer.prefix_tokens());
            output.loss_mask.resize(output.tokens.len(), u32::from(piece.answers.is_none()));
        }
        let is_end_counted = match &piece.answers {
            None => {
                tokenizer.encode(text, &mut output.tokens)?;
                true
            }
            Some(answers) => push_answered(tokenizer, text, &piece.literal, answers, &mut output)?,
        };
        output.loss_mask.resize(output.tokens.len(), 1);
        // The record's text may already contain the ending tokens.
        let is_ended = piece.answers.is_some() && output.tokens[start..].ends_with(&ending);
        if piece.adds_end && !is_ended {
            output.tokens.extend_from_slice(&ending);
            output.loss_mask.resize(output.tokens.len(), u32::from(is_end_counted));
        }
        if piece.ends_document {
            output.document_ends.push((output.tokens.len(), piece.source));
        }
    }
    Ok(output)
}

/// Tokenizes a document with answers. A token counts in the loss if any of its bytes belongs to an answer. Returns
/// whether the document ends with an answer.
fn push_answered(
    tokenizer: &Tokenizer,
    text: &str,
    literal: &[usize],
    answers: &[Range<usize>],
    output: &mut TokenBatch,
) -> Result<bool, DataError> {
    let mut offsets = Vec::new();
    tokenizer.encode_with_literal(text, literal, &mut output.tokens, &mut offsets)?;
    let mut next = 0;
    for range in offsets {
        while answers.get(next).is_some_and(|answer| answer.end <= range.start) {
            next += 1;
        }
        let is_answer = answers.get(next).is_some_and(|answer| answer.start < range.end);
        output.loss_mask.push(u32::from(is_answer));
    }
    Ok(answers.last().is_some_and(|answer| answer.end == text.len()))
}

/// Writes the results in the order of the batches. The first thread without another result marks the end.
fn write_in_order(
    threads: &[Receiver<Result<TokenBatch, DataError>>],
    writers: &mut Writers,
    on_progress: &mut impl FnMut(u64),
) -> Result<(), DataError> {
    for thread in threads.iter().cycle() {
        let Ok(result) = thread.recv() else { break };
        let batch = result?;
        let mut start = 0;
        for &(end, source) in &batch.document_ends {
            writers.push(&batch, start, end)?;
            writers.end_document(source)?;
            start = end;
        }
        writers.push(&batch, start, batch.tokens.len())?;
        on_progress(batch.input_bytes_read);
    }
    Ok(())
}
