use super::PrepareOptions;
use super::batch::{Batch, DocumentText};
use super::decompress::FileCompression;
use super::inputs::{Format, InputFile, Inputs};
use super::json_array::{ArrayError, JsonArray};
use super::records::{Record, RecordError, RecordParser};
use super::report::ConvertedFormats;
use super::surrogates::replace_lone_surrogates;
use super::text_field::message_without_position;
use super::utf8::{InvalidUtf8, Utf8Decoder};
use crate::DataError;
use crate::chat::{AnnotatedText, ConversationDocuments};
use crate::tokenizer::SpaceAtSplit;
use std::io::{self, BufRead, BufReader, Chain, Cursor, Read};
use std::path::PathBuf;

const READ_BYTES: usize = 64 << 10;
/// Number of bytes at the beginning of a file that are checked. A file with a NUL byte among them is binary.
const HEAD_BYTES: usize = 64 << 10;
/// Maximum length of a record in bytes. Records must fit in memory.
const RECORD_BYTES_MAX: usize = 64 << 20;
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Counts of what was read and skipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct ReadCounts {
    pub(super) num_files: u64,
    pub(super) num_replaced: u64,
    pub(super) num_binary: u64,
    pub(super) num_empty: u64,
    pub(super) converted_formats: ConvertedFormats,
    /// Names of special tokens in messages that were encoded as plain text.
    pub(super) num_literal_names: u64,
    /// Conversations that became one document for each answer.
    pub(super) num_split_conversations: u64,
}

impl ReadCounts {
    /// Adds the content counts of other inputs. Counts of files are not added.
    pub(super) fn add_contents(&mut self, other: &ReadCounts) {
        self.num_replaced += other.num_replaced;
        self.converted_formats.add(other.converted_formats);
        self.num_literal_names += other.num_literal_names;
        self.num_split_conversations += other.num_split_conversations;
    }
}

/// Reads the inputs in order, in batches. The bounds of the batches depend only on the inputs.
pub(super) struct CorpusReader<'a> {
    options: &'a PrepareOptions,
    space_at_split: SpaceAtSplit,
    /// Whether documents are allowed in which only the answers count in the loss.
    allows_answers: bool,
    files: std::slice::Iter<'a, InputFile>,
    open: Option<OpenFile<'a>>,
    pub(super) counts: ReadCounts,
    bytes_read: u64,
}

/// The bytes that were checked for NUL, followed by the rest of the file.
type Input = BufReader<Chain<Cursor<Vec<u8>>, Box<dyn Read + Send>>>;

struct OpenFile<'a> {
    file: &'a InputFile,
    input: Input,
    decoder: Utf8Decoder,
    document: DocumentText,
    /// The last record's documents with answers; empty if it has none.
    answered: Vec<AnnotatedText>,
    /// The parser state if the file is one JSON array.
    array: Option<JsonArray>,
    /// Number of complete lines of JSON read.
    num_lines: u64,
    /// Number of bytes read of the current, incomplete line.
    num_line_bytes: usize,
    /// Line number of the last record, from 1.
    record_line: u64,
    /// Number of bytes before the last record in its line.
    record_column: usize,
    /// Number of records read from the array, including the last one.
    num_records: u64,
    at_end: bool,
}

impl<'a> CorpusReader<'a> {
    pub(super) fn new(
        options: &'a PrepareOptions,
        inputs: &'a Inputs,
        space_at_split: SpaceAtSplit,
        allows_answers: bool,
    ) -> Self {
        CorpusReader {
            options,
            space_at_split,
            allows_answers,
            files: inputs.files.iter(),
            open: None,
            counts: ReadCounts::default(),
            bytes_read: 0,
        }
    }

    /// Whether the first record of any file has answers.
    pub(super) fn begins_with_answers(options: &PrepareOptions, inputs: &Inputs) -> Result<bool, DataError> {
        let records = RecordParser::new(options);
        let mut reader = CorpusReader::new(options, inputs, SpaceAtSplit::Keep, true);
        for file in inputs.files.iter().filter(|file| file.format == Format::JsonLines) {
            let Some(mut open) = reader.open_file(file)? else { continue };
            open.read_more(records, &mut ReadCounts::default())?;
            if !open.answered.is_empty() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns the next batch; `None` at the end of the last file.
    pub(super) fn next_batch(&mut self) -> Result<Option<Batch>, DataError> {
        let mut batch = Batch::default();
        while !batch.is_full() {
            let Some(mut open) = self.open.take() else {
                let Some(file) = self.files.next() else { break };
                self.open = self.open_file(file)?;
                continue;
            };
            let bytes_read = open.read_more(RecordParser::new(self.options), &mut self.counts)?;
            // Progress is measured in bytes of files, so a compressed file counts only when it is completely read.
            let is_plain = open.file.compression == FileCompression::None;
            self.bytes_read += if is_plain { bytes_read } else { 0 };
            let source = open.file.source;
            if !open.answered.is_empty() {
                if !self.allows_answers {
                    let (path, line) = (open.error_path(), open.record_line);
                    return Err(DataError::MixedRecords { path, line });
                }
                for answered in open.answered.drain(..) {
                    batch.push_with_answers(answered, source);
                }
            } else if open.has_piece() {
                open.document.move_piece(&mut batch, source, self.space_at_split);
            }
            if open.at_end && open.document.is_empty() {
                self.counts.num_files += 1;
                self.bytes_read += if is_plain { 0 } else { open.file.bytes };
                self.counts.num_replaced += open.decoder.num_replaced;
                self.counts.converted_formats.num_arrays += u64::from(open.array.is_some());
            } else {
                self.open = Some(open);
            }
        }
        batch.input_bytes_read = self.bytes_read;
        Ok(if batch.is_empty() { None } else { Some(batch) })
    }

    /// Opens a file. Returns `None` for an empty file, and for a binary file in a folder.
    fn open_file(&mut self, file: &'a InputFile) -> Result<Option<OpenFile<'a>>, DataError> {
        let read = |source| DataError::Read { path: file.display_path.clone(), source };
        let mut rest = file.compression.open(&file.path).map_err(read)?;
        let mut head = Vec::new();
        rest.by_ref().take(HEAD_BYTES as u64).read_to_end(&mut head).map_err(read)?;
        if let Some(offset) = head.iter().position(|&byte| byte == 0) {
            if file.is_explicit {
                return Err(DataError::BinaryInput {
                    path: file.display_path.clone(),
                    offset: offset as u64,
                });
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
        let is_array =
            file.format == Format::JsonLines && head[mark_bytes..].trim_ascii_start().starts_with(b"[");
        let mut head = Cursor::new(head);
        head.set_position(mark_bytes as u64);
        self.bytes_read += mark_bytes as u64;
        Ok(Some(OpenFile {
            file,
            input: BufReader::with_capacity(READ_BYTES, head.chain(rest)),
            decoder: Utf8Decoder::new(self.options.invalid_utf8, mark_bytes as u64),
            document: DocumentText::default(),
            answered: Vec::new(),
            array: is_array.then(JsonArray::default),
            num_lines: 0,
            num_line_bytes: 0,
            record_line: 1,
            record_column: 0,
            num_records: 0,
            at_end: false,
        }))
    }
}

/// Whether a text begins with a JSON object, or with an array of objects.
pub(super) fn begins_with_record(text: &mut impl Read) -> io::Result<bool> {
    let mut head = Vec::new();
    text.take(HEAD_BYTES as u64).read_to_end(&mut head)?;
    let head = head.strip_prefix(BYTE_ORDER_MARK).unwrap_or(&head).trim_ascii_start();
    let first = head.strip_prefix(b"[").map_or(head, <[u8]>::trim_ascii_start);
    Ok(first.starts_with(b"{"))
}

impl OpenFile<'_> {
    /// Whether the document is complete, or long enough to split off a piece.
    fn has_piece(&self) -> bool {
        let complete = self.at_end || self.file.format == Format::JsonLines;
        !self.answered.is_empty() || self.document.exceeds_piece() || (complete && !self.document.is_empty())
    }

    /// Reads until a piece is available. Returns the number of input bytes consumed.
    fn read_more(&mut self, records: RecordParser<'_>, counts: &mut ReadCounts) -> Result<u64, DataError> {
        let mut bytes_read = 0;
        while !self.at_end && !self.has_piece() {
            bytes_read += match self.file.format {
                Format::Text => self.read_text()?,
                Format::JsonLines => self.read_record(records, counts)?,
            };
        }
        Ok(bytes_read)
    }

    fn read_text(&mut self) -> Result<u64, DataError> {
        let bytes = self.input.fill_buf().map_err(|source| read_error(self.file, source))?;
        let length = bytes.len();
        self.at_end = length == 0;
        let decoded = self.decoder.push(bytes, self.at_end, self.document.buffer());
        decoded.map_err(|offset| invalid_utf8(self.file, offset))?;
        self.input.consume(length);
        Ok(length as u64)
    }

    fn read_record(&mut self, records: RecordParser<'_>, counts: &mut ReadCounts) -> Result<u64, DataError> {
        let mut raw = Vec::new();
        let start =
            if self.array.is_some() { self.read_element(&mut raw)? } else { self.read_line(&mut raw)? };
        let mut text = String::with_capacity(raw.len());
        self.decoder.push(&raw, true, &mut text).map_err(|offset| invalid_utf8(self.file, offset))?;
        // In concatenated files, a line may begin with a byte order mark.
        let object = text[start..].trim_ascii_end().trim_start_matches('\u{feff}');
        if object.is_empty() {
            return Ok(raw.len() as u64);
        }
        let object = match records.invalid_utf8 {
            InvalidUtf8::Replace => replace_lone_surrogates(object, &mut counts.num_replaced),
            InvalidUtf8::Refuse => object.into(),
        };
        let record = records.parse(&object, &mut counts.converted_formats);
        match record.map_err(|error| self.record_error(error, records.field))? {
            Record::Text(text) if text.is_empty() => counts.num_empty += 1,
            Record::WithAnswers(ConversationDocuments { documents, .. })
                if documents.iter().all(|document| document.text.is_empty()) =>
            {
                counts.num_empty += 1;
            }
            Record::Text(text) => *self.document.buffer() = text,
            Record::WithAnswers(ConversationDocuments { documents, num_names }) => {
                counts.num_literal_names += num_names;
                counts.num_split_conversations += u64::from(documents.len() > 1);
                self.answered = documents;
            }
        }
        Ok(raw.len() as u64)
    }

    /// Reads a line, and returns the start of its record in `raw`.
    fn read_line(&mut self, raw: &mut Vec<u8>) -> Result<usize, DataError> {
        let mut bounded = self.input.by_ref().take(RECORD_BYTES_MAX as u64 + 1);
        let length = bounded.read_until(b'\n', raw).map_err(|source| read_error(self.file, source))?;
        self.num_lines += 1;
        self.record_line = self.num_lines;
        self.at_end = length == 0;
        if length > RECORD_BYTES_MAX { Err(self.too_long()) } else { Ok(0) }
    }

    /// Reads an element of the array and the separators before it, and returns the start of the element in `raw`.
    fn read_element(&mut self, raw: &mut Vec<u8>) -> Result<usize, DataError> {
        let array = self.array.as_mut().expect("the file is an array");
        let read = array.read_element(&mut self.input, raw, RECORD_BYTES_MAX);
        let read = read.map_err(|source| read_error(self.file, source))?;
        let start = *read.as_ref().ok().and_then(Option::as_ref).unwrap_or(&raw.len());
        self.count_lines(&raw[..start]);
        self.record_line = self.num_lines + 1;
        self.record_column = self.num_line_bytes;
        self.num_records += 1;
        self.count_lines(&raw[start..]);
        match read {
            Ok(Some(start)) => Ok(start),
            Ok(None) => {
                self.at_end = true;
                Ok(raw.len())
            }
            Err(ArrayError::TooLong) => Err(self.too_long()),
            Err(ArrayError::Malformed(reason)) => {
                Err(DataError::JsonArray { path: self.error_path(), line: self.record_line, reason })
            }
        }
    }

    fn count_lines(&mut self, bytes: &[u8]) {
        self.num_lines += bytes.iter().filter(|&&byte| byte == b'\n').count() as u64;
        self.num_line_bytes = match bytes.iter().rposition(|&byte| byte == b'\n') {
            Some(last) => bytes.len() - last - 1,
            None => self.num_line_bytes + bytes.len(),
        };
    }

    /// Returns the path of the file. For an array, it includes the number of the record, because all records may be in
    /// one line.
    fn error_path(&self) -> PathBuf {
        match &self.array {
            Some(_) => format!("{}, record {}", self.file.display_path.display(), self.num_records).into(),
            None => self.file.display_path.clone(),
        }
    }

    fn too_long(&self) -> DataError {
        let (path, line) = (self.error_path(), self.record_line);
        DataError::JsonLineLength { path, line, bytes_max: RECORD_BYTES_MAX }
    }

    fn record_error(&self, error: RecordError, field: &str) -> DataError {
        let (path, line) = (self.error_path(), self.record_line);
        match error {
            RecordError::Json(error) => self.json_error(&error),
            RecordError::Field(found) => DataError::JsonField { path, line, field: field.to_owned(), found },
            RecordError::Conversation(reason) => DataError::Conversation { path, line, reason },
            RecordError::NoTemplate => DataError::NoChatTemplate { path, line },
            RecordError::Question => DataError::QuestionAmongTexts { path, line },
        }
    }

    fn json_error(&self, error: &serde_json::Error) -> DataError {
        // Line and column of the library's error are relative to the record.
        let lines_before = (error.line() as u64).saturating_sub(1);
        let line = self.record_line + lines_before;
        let columns_before = if lines_before == 0 { self.record_column } else { 0 };
        let (path, column) = (self.error_path(), columns_before + error.column().max(1));
        DataError::JsonLine { path, line, column, reason: message_without_position(error) }
    }
}

fn read_error(file: &InputFile, source: io::Error) -> DataError {
    DataError::Read { path: file.display_path.clone(), source }
}

fn invalid_utf8(file: &InputFile, offset: u64) -> DataError {
    DataError::InvalidUtf8 { path: file.display_path.clone(), offset }
}
