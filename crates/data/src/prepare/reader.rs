use super::PrepareOptions;
use super::batch::{Batch, DocumentText};
use super::decompress::Compression;
use super::inputs::{Format, InputFile, Inputs};
use super::records::{Record, RecordError, Records};
use super::utf8::{InvalidAt, Utf8Decoder};
use crate::DataError;
use crate::chat::Answered;
use crate::tokenizer::SpaceAtCut;
use std::io::{self, BufRead, BufReader, Chain, Cursor, Read};

const READ_BYTES: usize = 64 << 10;
/// A file with a NUL byte among its first bytes, so many of them, is binary.
const HEAD_BYTES: usize = 64 << 10;
/// A JSON document has to be in memory as a whole.
const LINE_BYTES_MAX: usize = 64 << 20;
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// What was read and what was not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct ReadCounts {
    pub(super) num_files: u64,
    pub(super) num_replaced: u64,
    pub(super) num_binary: u64,
    pub(super) num_empty: u64,
}

/// Reads the inputs front to back, in batches whose bounds depend on the inputs alone.
pub(super) struct CorpusReader<'a> {
    options: &'a PrepareOptions,
    space_at_cut: SpaceAtCut,
    /// Whether documents may have parts that do not count in the loss.
    takes_answers: bool,
    files: std::slice::Iter<'a, InputFile>,
    open: Option<OpenFile<'a>>,
    counts: ReadCounts,
    bytes_read: u64,
}

/// The bytes that were looked at to tell text from binary, and then the rest.
type Input = BufReader<Chain<Cursor<Vec<u8>>, Box<dyn Read + Send>>>;

struct OpenFile<'a> {
    file: &'a InputFile,
    input: Input,
    decoder: Utf8Decoder,
    document: DocumentText,
    /// A document that is not cut, if one was read.
    answered: Option<Answered>,
    /// Lines read so far of JSON-lines.
    num_lines: u64,
    at_end: bool,
}

impl<'a> CorpusReader<'a> {
    pub(super) fn new(
        options: &'a PrepareOptions,
        inputs: &'a Inputs,
        space_at_cut: SpaceAtCut,
        takes_answers: bool,
    ) -> Self {
        let files = inputs.files.iter();
        CorpusReader {
            options,
            space_at_cut,
            takes_answers,
            files,
            open: None,
            counts: ReadCounts::default(),
            bytes_read: 0,
        }
    }

    pub(super) fn into_counts(self) -> ReadCounts {
        self.counts
    }

    /// Whether the first record of any file has answers.
    pub(super) fn begins_with_answers(options: &PrepareOptions, inputs: &Inputs) -> Result<bool, DataError> {
        let records = Records { field: &options.field, template: options.chat_template.as_ref() };
        let mut reader = CorpusReader::new(options, inputs, SpaceAtCut::Keep, true);
        for file in inputs.files.iter().filter(|file| file.format == Format::JsonLines) {
            let Some(mut open) = reader.open_file(file)? else { continue };
            open.read_more(records, &mut ReadCounts::default())?;
            if open.answered.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The next batch; `None` at the end of the last file.
    pub(super) fn next_batch(&mut self) -> Result<Option<Batch>, DataError> {
        let mut batch = Batch::default();
        while !batch.is_full() {
            let Some(mut open) = self.open.take() else {
                let Some(file) = self.files.next() else { break };
                self.open = self.open_file(file)?;
                continue;
            };
            let records =
                Records { field: &self.options.field, template: self.options.chat_template.as_ref() };
            let bytes_read = open.read_more(records, &mut self.counts)?;
            // Progress is counted in bytes of files.
            let is_plain = open.file.compression == Compression::None;
            self.bytes_read += if is_plain { bytes_read } else { 0 };
            let source = open.file.source;
            if let Some(answered) = open.answered.take() {
                if !self.takes_answers {
                    let (path, line) = (open.file.path.clone(), open.num_lines);
                    return Err(DataError::MixedRecords { path, line });
                }
                batch.push_answered(answered, source);
            } else if open.has_piece() {
                open.document.move_piece(&mut batch, source, self.space_at_cut);
            }
            if open.at_end && open.document.is_empty() {
                self.counts.num_files += 1;
                self.bytes_read += if is_plain { 0 } else { open.file.bytes };
                self.counts.num_replaced += open.decoder.num_replaced();
            } else {
                self.open = Some(open);
            }
        }
        batch.input_bytes_read = self.bytes_read;
        Ok(if batch.is_empty() { None } else { Some(batch) })
    }

    /// `None` for a file in a folder that turns out to hold no text.
    fn open_file(&mut self, file: &'a InputFile) -> Result<Option<OpenFile<'a>>, DataError> {
        let read = |source| DataError::Read { path: file.path.clone(), source };
        let mut rest = file.compression.open(&file.path).map_err(read)?;
        let mut head = Vec::new();
        rest.by_ref().take(HEAD_BYTES as u64).read_to_end(&mut head).map_err(read)?;
        if let Some(offset) = head.iter().position(|&byte| byte == 0) {
            if file.named {
                return Err(DataError::BinaryInput { path: file.path.clone(), offset: offset as u64 });
            }
            self.counts.num_binary += 1;
            self.bytes_read += file.bytes;
            return Ok(None);
        }
        if head.is_empty() {
            self.counts.num_empty += 1;
            return Ok(None);
        }
        let mark_bytes = if head.starts_with(BYTE_ORDER_MARK) { BYTE_ORDER_MARK.len() } else { 0 };
        let mut head = Cursor::new(head);
        head.set_position(mark_bytes as u64);
        self.bytes_read += mark_bytes as u64;
        Ok(Some(OpenFile {
            file,
            input: BufReader::with_capacity(READ_BYTES, head.chain(rest)),
            decoder: Utf8Decoder::new(self.options.invalid_utf8, mark_bytes as u64),
            document: DocumentText::default(),
            answered: None,
            num_lines: 0,
            at_end: false,
        }))
    }
}

impl OpenFile<'_> {
    /// Whether the document is complete, or long enough to cut a piece off it.
    fn has_piece(&self) -> bool {
        let complete = self.at_end || self.file.format == Format::JsonLines;
        self.answered.is_some() || self.document.exceeds_piece() || (complete && !self.document.is_empty())
    }

    /// Reads on, unless a piece is there already; returns the bytes of input taken.
    fn read_more(&mut self, records: Records<'_>, counts: &mut ReadCounts) -> Result<u64, DataError> {
        let mut bytes_read = 0;
        while !self.at_end && !self.has_piece() {
            bytes_read += match self.file.format {
                Format::Text => self.read_text()?,
                Format::JsonLines => self.read_line(records, counts)?,
            };
        }
        Ok(bytes_read)
    }

    fn read_text(&mut self) -> Result<u64, DataError> {
        let bytes = self.input.fill_buf().map_err(|source| read_error(self.file, source))?;
        let length = bytes.len();
        self.at_end = length == 0;
        let decoded = self.decoder.push(bytes, self.at_end, self.document.buffer());
        decoded.map_err(|at| invalid_utf8(self.file, &at))?;
        self.input.consume(length);
        Ok(length as u64)
    }

    fn read_line(&mut self, records: Records<'_>, counts: &mut ReadCounts) -> Result<u64, DataError> {
        let mut line = Vec::new();
        let mut bounded = self.input.by_ref().take(LINE_BYTES_MAX as u64 + 1);
        let length = bounded.read_until(b'\n', &mut line).map_err(|source| read_error(self.file, source))?;
        self.num_lines += 1;
        self.at_end = length == 0;
        if length > LINE_BYTES_MAX {
            return Err(DataError::JsonLineLength {
                path: self.file.path.clone(),
                line: self.num_lines,
                bytes_max: LINE_BYTES_MAX,
            });
        }
        let mut text = String::with_capacity(length);
        self.decoder.push(&line, true, &mut text).map_err(|at| invalid_utf8(self.file, &at))?;
        let object = text.trim_ascii_end();
        if object.is_empty() {
            return Ok(length as u64);
        }
        match records.read(object).map_err(|error| self.record_error(error, records.field))? {
            Record::Text(text) | Record::Answered(Answered { text, .. }) if text.is_empty() => {
                counts.num_empty += 1;
            }
            Record::Text(text) => *self.document.buffer() = text,
            Record::Answered(answered) => self.answered = Some(answered),
        }
        Ok(length as u64)
    }

    fn record_error(&self, error: RecordError, field: &str) -> DataError {
        let (path, line) = (self.file.path.clone(), self.num_lines);
        match error {
            RecordError::Json(error) => self.json_error(&error),
            RecordError::Field(found) => DataError::JsonField { path, line, field: field.to_owned(), found },
            RecordError::Conversation(reason) => DataError::Conversation { path, line, reason },
            RecordError::NoTemplate => DataError::NoChatTemplate { path, line },
        }
    }

    fn json_error(&self, error: &serde_json::Error) -> DataError {
        let words = error.to_string();
        // The library counts from the start of the one line that it sees.
        let reason = words.split(" at line ").next().unwrap_or(&words).to_owned();
        let (path, line, column) = (self.file.path.clone(), self.num_lines, error.column().max(1));
        DataError::JsonLine { path, line, column, reason }
    }
}

fn read_error(file: &InputFile, source: io::Error) -> DataError {
    DataError::Read { path: file.path.clone(), source }
}

fn invalid_utf8(file: &InputFile, at: &InvalidAt) -> DataError {
    DataError::InvalidUtf8 { path: file.path.clone(), offset: at.0 }
}
