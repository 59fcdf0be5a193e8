use super::format::{
    BLOCK_BYTES, CHECKSUM_ENTRY_BYTES, DOCUMENT_ENTRY_BYTES, HEADER_BYTES, Header, Layout,
    VOCABULARY_SIZE_MAX, u32_at, u64_at,
};
use crate::DataError;
use std::fs::{File, Metadata};
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use trireme_base::{DType, open_regular};

/// Maximum size of a token file that is completely verified when it is opened. Verifying more would take long without
/// any report of progress.
const VERIFY_AT_OPEN_BYTES_MAX: u64 = 256 << 20;
/// Size of the stack buffer through which tokens are read, in bytes.
const READ_BUFFER_BYTES: usize = 16 << 10;

/// An open token file.
///
/// Every read checks that ids are below [`vocabulary_size`](Self::vocabulary_size), even if the file is damaged or modified while it is
/// open. Each block of tokens is compared with its checksum before its first use, and again after the file has changed. If another file is
/// renamed over an open one, the old file is still read.
#[derive(Debug)]
pub struct TokenFile {
    path: PathBuf,
    file: File,
    file_bytes: u64,
    /// Modification time of the file to which `verified` refers, in nanoseconds.
    modified: AtomicI64,
    dtype: DType,
    vocabulary_size: usize,
    tokens: Range<u64>,
    /// Absent in a flat file.
    tables: Option<Tables>,
    /// One bit for each block: whether its checksum and its ids were verified.
    verified: Vec<AtomicU64>,
}

#[derive(Debug)]
struct Tables {
    documents: Range<u64>,
    checksums: Range<u64>,
    /// CRC-32 of both tables.
    checksum: u32,
}

impl TokenFile {
    /// Opens a token file written by [`TokenFileWriter`](super::TokenFileWriter).
    ///
    /// Costs one pass over the two tables and, for files up to 256 MiB, over the tokens. The blocks of a larger file
    /// are verified when they are first read.
    ///
    /// # Errors
    /// If the file cannot be read, is not a token file, is truncated, or has a wrong checksum in the parts that are
    /// verified.
    pub fn open(path: &Path) -> Result<Self, DataError> {
        Self::open_unverified(path)?.verified_if_small()
    }

    /// Opens a token file as [`open`](Self::open) does, but verifies every block only when it is first read, whatever
    /// the file's size.
    pub(crate) fn open_unverified(path: &Path) -> Result<Self, DataError> {
        let (file, metadata) = open_file(path)?;
        let mut start = [0; HEADER_BYTES];
        let start = &mut start[..metadata.len().min(HEADER_BYTES as u64) as usize];
        file.read_exact_at(start, 0).map_err(|source| DataError::Read { path: path.to_owned(), source })?;
        let (header, layout) = Header::parse(start, metadata.len(), path)?;
        let Layout { tokens, documents, checksums } = layout;
        let tables = Tables { documents, checksums, checksum: header.tables_checksum };
        let Header { dtype, vocabulary_size, .. } = header;
        let file = Self::new(path, file, &metadata, dtype, vocabulary_size, tokens, Some(tables));
        file.verify_tables()?;
        Ok(file)
    }

    /// Opens a flat file, which contains little-endian u16 ids and nothing else: no header, documents or checksums.
    ///
    /// # Errors
    /// If `vocabulary_size` is out of range, the file cannot be read, is empty, has an odd number of bytes, or contains
    /// an id that is not below `vocabulary_size`. Ids are checked when the file is opened if it has at most 256 MiB,
    /// otherwise when they are first read.
    pub fn open_flat_u16(path: &Path, vocabulary_size: usize) -> Result<Self, DataError> {
        if !(1..=VOCABULARY_SIZE_MAX).contains(&vocabulary_size) {
            return Err(DataError::VocabularySize { vocabulary_size });
        }
        let (file, metadata) = open_file(path)?;
        let actual_bytes = metadata.len();
        if actual_bytes == 0 || !actual_bytes.is_multiple_of(2) {
            return Err(DataError::FlatFileLength { path: path.to_owned(), actual_bytes });
        }
        Self::new(path, file, &metadata, DType::U16, vocabulary_size, 0..actual_bytes, None)
            .verified_if_small()
    }

    fn new(
        path: &Path,
        file: File,
        metadata: &Metadata,
        dtype: DType,
        vocabulary_size: usize,
        tokens: Range<u64>,
        tables: Option<Tables>,
    ) -> Self {
        let num_blocks = (tokens.end - tokens.start).div_ceil(BLOCK_BYTES as u64);
        let verified = (0..num_blocks.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        TokenFile {
            path: path.to_owned(),
            file,
            file_bytes: metadata.len(),
            modified: AtomicI64::new(modified(metadata)),
            dtype,
            vocabulary_size,
            tokens,
            tables,
            verified,
        }
    }

    fn verified_if_small(self) -> Result<Self, DataError> {
        let token_bytes = self.tokens.end - self.tokens.start;
        if token_bytes <= VERIFY_AT_OPEN_BYTES_MAX {
            (0..token_bytes.div_ceil(BLOCK_BYTES as u64)).try_for_each(|block| self.verify_block(block))?;
        }
        Ok(self)
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Number of tokens.
    pub fn num_tokens(&self) -> u64 {
        (self.tokens.end - self.tokens.start) / self.dtype.size() as u64
    }

    /// Number of documents; 0 for a flat file.
    pub fn num_documents(&self) -> u64 {
        let table = self.tables.as_ref().map_or(0..0, |tables| tables.documents.clone());
        (table.end - table.start) / DOCUMENT_ENTRY_BYTES
    }

    /// The vocabulary size: every id is below it.
    pub fn vocabulary_size(&self) -> usize {
        self.vocabulary_size
    }

    /// The dtype of the stored ids: u16 or u32.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns a checksum over the ends of documents and the checksums of all blocks. Files with the same stored ids
    /// and documents have the same fingerprint. `None` for a flat file.
    pub fn fingerprint(&self) -> Option<u32> {
        self.tables.as_ref().map(|tables| tables.checksum)
    }

    /// Returns the token range of document `index`.
    ///
    /// # Errors
    /// If the file cannot be read, or its document table has changed since it was opened.
    ///
    /// # Panics
    /// If `index` is not below [`num_documents`](Self::num_documents).
    pub fn document(&self, index: u64) -> Result<Range<u64>, DataError> {
        let num_documents = self.num_documents();
        assert!(index < num_documents, "document {index} does not exist among {num_documents}");
        let table = self.tables.as_ref().map_or(0, |tables| tables.documents.start);
        // The first document starts at 0, for which the table has no entry.
        let mut entries = [0; 2 * DOCUMENT_ENTRY_BYTES as usize];
        let (offset, skipped) = match index {
            0 => (table, DOCUMENT_ENTRY_BYTES as usize),
            _ => (table + (index - 1) * DOCUMENT_ENTRY_BYTES, 0),
        };
        self.read_at(offset, &mut entries[skipped..])?;
        let document = u64_at(&entries, 0)..u64_at(&entries, DOCUMENT_ENTRY_BYTES as usize);
        if document.is_empty() || document.end > self.num_tokens() {
            return Err(self.damaged(DOCUMENTS_OUT_OF_ORDER));
        }
        Ok(document)
    }

    /// Returns the index of the document that contains a token, or the number of documents if `token` is not below the
    /// number of tokens.
    ///
    /// # Errors
    /// As [`document`](Self::document).
    pub fn document_at(&self, token: u64) -> Result<u64, DataError> {
        let (mut low, mut high) = (0, self.num_documents());
        while low < high {
            let middle = low + (high - low) / 2;
            if self.document(middle)?.end <= token { low = middle + 1 } else { high = middle }
        }
        Ok(low)
    }

    /// For each of the `out.len()` tokens from index `start` on, writes the position of the first token of its
    /// document, as an offset from `start`. The offset is 0 for a document that begins before `start`.
    ///
    /// # Errors
    /// As [`document`](Self::document).
    ///
    /// # Panics
    /// If the tokens extend past the last document.
    pub fn document_starts(&self, start: u64, out: &mut [u32]) -> Result<(), DataError> {
        let mut index = self.document_at(start)?;
        let (mut position, mut document_start) = (0, 0);
        while position < out.len() {
            let end = ((self.document(index)?.end - start) as usize).min(out.len());
            out[position..end].fill(document_start);
            (position, document_start, index) = (end, end as u32, index + 1);
        }
        Ok(())
    }

    /// Returns the token range of each document in order; none for a flat file.
    pub fn documents(&self) -> impl Iterator<Item = Result<Range<u64>, DataError>> + '_ {
        (0..self.num_documents()).map(|index| self.document(index))
    }

    /// Copies `out.len()` tokens from index `start` on into `out`. Does not allocate.
    ///
    /// # Errors
    /// If the file cannot be read, is truncated, or contains an id outside the vocabulary, or if a block has a wrong
    /// checksum. A block is compared with its checksum when it is read for the first time, and again after the file has
    /// changed.
    ///
    /// # Panics
    /// If the window extends past the last token.
    pub fn read_window(&self, start: u64, out: &mut [u32]) -> Result<(), DataError> {
        let end = start.saturating_add(out.len() as u64);
        assert!(
            end <= self.num_tokens(),
            "tokens {start}..{end} lie past the end of {} tokens",
            self.num_tokens()
        );
        self.check_for_changes()?;
        let size = self.dtype.size();
        let window = start * size as u64..end * size as u64;
        let block_bytes = BLOCK_BYTES as u64;
        for block in window.start / block_bytes..window.end.div_ceil(block_bytes) {
            self.verify_block(block)?;
        }
        let mut bytes = [0; READ_BUFFER_BYTES];
        let mut offset = self.tokens.start + window.start;
        for part in out.chunks_mut(READ_BUFFER_BYTES / size) {
            let bytes = &mut bytes[..part.len() * size];
            self.read_at(offset, bytes)?;
            copy_ids(bytes, self.dtype, part);
            offset += bytes.len() as u64;
        }
        self.check_ids(start, out)
    }

    /// Detects a modification of the file since it was verified, and requires all blocks to be verified again.
    fn check_for_changes(&self) -> Result<(), DataError> {
        let metadata = self.file.metadata().map_err(|source| self.unreadable(source))?;
        if metadata.len() != self.file_bytes {
            return Err(self.wrong_length(metadata.len()));
        }
        let modified = modified(&metadata);
        // A thread that does not see the change yet may read a wrong token, just as if it had read before the change.
        if self.modified.load(Ordering::Relaxed) != modified {
            self.verify_tables()?;
            self.verified.iter().for_each(|word| word.store(0, Ordering::Relaxed));
            self.modified.store(modified, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Checks the order of the documents, and both tables against the checksum in the header.
    fn verify_tables(&self) -> Result<(), DataError> {
        let Some(Tables { documents, checksums, checksum }) = &self.tables else { return Ok(()) };
        let mut hasher = crc32fast::Hasher::new();
        let (mut last, mut is_ordered) = (0, true);
        self.for_each_chunk(documents, |part| {
            hasher.update(part);
            for entry in part.chunks_exact(DOCUMENT_ENTRY_BYTES as usize) {
                is_ordered &= u64_at(entry, 0) > last;
                last = u64_at(entry, 0);
            }
        })?;
        self.for_each_chunk(checksums, |part| hasher.update(part))?;
        if hasher.finalize() != *checksum {
            return Err(self.damaged("its tables do not match their checksum"));
        }
        if !is_ordered {
            return Err(self.damaged(DOCUMENTS_OUT_OF_ORDER));
        }
        if last != self.num_tokens() {
            return Err(self.damaged("its documents do not end where its tokens end"));
        }
        Ok(())
    }

    fn verify_block(&self, block: u64) -> Result<(), DataError> {
        let mask = 1 << (block % 64);
        let word = &self.verified[(block / 64) as usize];
        // Verifying a block twice is harmless, and the bit publishes no other memory, so relaxed ordering is enough.
        if word.load(Ordering::Relaxed) & mask != 0 {
            return Ok(());
        }
        let start = self.tokens.start + block * BLOCK_BYTES as u64;
        let mut bytes = [0; BLOCK_BYTES];
        let bytes = &mut bytes[..(self.tokens.end - start).min(BLOCK_BYTES as u64) as usize];
        self.read_at(start, bytes)?;
        let first = block * (BLOCK_BYTES / self.dtype.size()) as u64;
        let num_tokens = bytes.len() / self.dtype.size();
        if let Some(tables) = &self.tables {
            let mut stored = [0; CHECKSUM_ENTRY_BYTES as usize];
            self.read_at(tables.checksums.start + block * CHECKSUM_ENTRY_BYTES, &mut stored)?;
            if crc32fast::hash(bytes) != u32_at(&stored, 0) {
                let end = first + num_tokens as u64;
                return Err(self.damaged(format!("tokens {first}..{end} do not match their checksum")));
            }
        }
        if largest_id(bytes, self.dtype) as usize >= self.vocabulary_size {
            let mut ids = vec![0; num_tokens];
            copy_ids(bytes, self.dtype, &mut ids);
            self.check_ids(first, &ids)?;
        }
        word.fetch_or(mask, Ordering::Relaxed);
        Ok(())
    }

    fn check_ids(&self, start: u64, ids: &[u32]) -> Result<(), DataError> {
        let vocabulary_size = self.vocabulary_size;
        let Some((index, &id)) = (start..).zip(ids).find(|&(_, &id)| id as usize >= vocabulary_size) else {
            return Ok(());
        };
        let path = self.path.clone();
        Err(DataError::TokenOutsideVocabulary { path, index, id, vocabulary_size })
    }

    /// Calls `visit` with the bytes of `range`, in order, in parts of 64 KiB.
    fn for_each_chunk(&self, range: &Range<u64>, mut visit: impl FnMut(&[u8])) -> Result<(), DataError> {
        let mut bytes = [0; BLOCK_BYTES];
        for start in range.clone().step_by(BLOCK_BYTES) {
            let part = &mut bytes[..(range.end - start).min(BLOCK_BYTES as u64) as usize];
            self.read_at(start, part)?;
            visit(part);
        }
        Ok(())
    }

    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> Result<(), DataError> {
        self.file.read_exact_at(bytes, offset).map_err(|source| match source.kind() {
            io::ErrorKind::UnexpectedEof => {
                self.wrong_length(self.file.metadata().map_or(0, |file| file.len()))
            }
            _ => self.unreadable(source),
        })
    }

    fn unreadable(&self, source: io::Error) -> DataError {
        DataError::Read { path: self.path.clone(), source }
    }

    fn damaged(&self, what: impl Into<String>) -> DataError {
        DataError::TokenFileDamaged { path: self.path.clone(), what: what.into() }
    }

    fn wrong_length(&self, actual_bytes: u64) -> DataError {
        DataError::TokenFileLength { path: self.path.clone(), expected_bytes: self.file_bytes, actual_bytes }
    }
}

const DOCUMENTS_OUT_OF_ORDER: &str = "its documents are out of order";

fn open_file(path: &Path) -> Result<(File, Metadata), DataError> {
    let read = |source| DataError::Read { path: path.to_owned(), source };
    let file = open_regular(path).map_err(|error| match error.kind() {
        ErrorKind::InvalidInput => DataError::NotATokenFile { path: path.to_owned() },
        _ => read(error),
    })?;
    let metadata = file.metadata().map_err(read)?;
    Ok((file, metadata))
}

/// Returns the modification time in nanoseconds. It may wrap around, so it can only be compared for equality.
fn modified(metadata: &Metadata) -> i64 {
    metadata.mtime().wrapping_mul(1_000_000_000).wrapping_add(metadata.mtime_nsec())
}

fn largest_id(bytes: &[u8], dtype: DType) -> u32 {
    match dtype {
        DType::U16 => bytes.as_chunks().0.iter().map(|&id| u16::from_le_bytes(id)).max().unwrap_or(0).into(),
        _ => bytes.as_chunks().0.iter().map(|&id| u32::from_le_bytes(id)).max().unwrap_or(0),
    }
}

fn copy_ids(bytes: &[u8], dtype: DType, out: &mut [u32]) {
    match dtype {
        DType::U16 => {
            for (slot, &id) in out.iter_mut().zip(bytes.as_chunks().0) {
                *slot = u16::from_le_bytes(id).into();
            }
        }
        _ => {
            for (slot, &id) in out.iter_mut().zip(bytes.as_chunks().0) {
                *slot = u32::from_le_bytes(id);
            }
        }
    }
}
