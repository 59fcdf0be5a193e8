use super::batch::Batch;
use super::reader::{CorpusReader, ReadCounts};
use crate::{DataError, TokenFileWriter, Tokenizer};
use std::num::NonZeroUsize;
use std::panic::resume_unwind;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

/// Batches that may wait before and behind each tokenizing thread.
const WAITING_BATCHES_MAX: usize = 2;

/// The tokens of one batch.
struct TokenBatch {
    tokens: Vec<u32>,
    /// Where documents end, in tokens of the batch.
    document_ends: Vec<usize>,
    input_bytes_read: u64,
}

/// Tokenizes all that `reader` gives and writes it in order; `on_progress` hears the bytes of input done.
///
/// One thread reads, `num_threads` tokenize, the caller's writes. Batch `i` goes to thread `i` modulo their
/// number and is taken back in the same order, so that the output does not depend on the number of threads
/// and at most five batches a thread are in memory.
pub(super) fn tokenize(
    mut reader: CorpusReader<'_>,
    tokenizer: &Tokenizer,
    num_threads: NonZeroUsize,
    writer: &mut TokenFileWriter,
    mut on_progress: impl FnMut(u64),
) -> Result<ReadCounts, DataError> {
    thread::scope(|scope| {
        let mut batches = Vec::new();
        let mut results = Vec::new();
        for _ in 0..num_threads.get() {
            let (batch_sender, batch_receiver) = sync_channel(WAITING_BATCHES_MAX);
            let (result_sender, result_receiver) = sync_channel(WAITING_BATCHES_MAX);
            batches.push(batch_sender);
            results.push(result_receiver);
            scope.spawn(move || tokenize_batches(tokenizer, &batch_receiver, &result_sender));
        }
        let reading = scope.spawn(move || deal(&mut reader, &batches).map(|()| reader.counts()));
        let written = write_in_order(&results, writer, &mut on_progress);
        // Stops the other threads where writing failed: they find nobody to take their results.
        drop(results);
        let counts = reading.join().unwrap_or_else(|panic| resume_unwind(panic));
        written.and(counts)
    })
}

/// Deals the batches out in turn, until the last or until a thread is gone.
fn deal(reader: &mut CorpusReader<'_>, threads: &[SyncSender<Batch>]) -> Result<(), DataError> {
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
    let mut tokens = Vec::new();
    let mut document_ends = Vec::new();
    for (text, ends_document) in batch.pieces() {
        tokenizer.encode(text, &mut tokens)?;
        if ends_document {
            tokens.extend(tokenizer.end_of_document());
            document_ends.push(tokens.len());
        }
    }
    Ok(TokenBatch { tokens, document_ends, input_bytes_read: batch.input_bytes_read })
}

/// Takes the results in the order in which the batches were dealt; the first thread without one marks the
/// end.
fn write_in_order(
    threads: &[Receiver<Result<TokenBatch, DataError>>],
    writer: &mut TokenFileWriter,
    on_progress: &mut impl FnMut(u64),
) -> Result<(), DataError> {
    for thread in threads.iter().cycle() {
        let Ok(result) = thread.recv() else { break };
        let batch = result?;
        let mut start = 0;
        for end in batch.document_ends {
            writer.push(&batch.tokens[start..end])?;
            writer.end_document()?;
            start = end;
        }
        writer.push(&batch.tokens[start..])?;
        on_progress(batch.input_bytes_read);
    }
    Ok(())
}
