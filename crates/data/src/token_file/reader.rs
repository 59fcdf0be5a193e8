use super::format::{BLOCK_BYTES, DOCUMENT_ENTRY_BYTES, Header, Layout, VOCABULARY_SIZE_MAX, u32_at, u64_at};
use crate::DataError;
use crate::mapping::Mapping;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use trireme_base::DType;

/// Files up to this size are verified in full when they are opened.
const VERIFY_AT_OPEN_BYTES_MAX: usize = 1 << 30;

/// The tokens of a corpus, mapped into memory.
///
/// Whatever the file holds, the ids that come out lie below [`vocabulary_size`](Self::vocabulary_size) and
/// are those that were written: every block of tokens is compared with its checksum before it is first used.
/// The file must not be changed while it is open; replacing it by renaming another over it is fine.
#[derive(Debug)]
pub struct TokenFile {
    path: PathBuf,
    bytes: Mapping,
    dtype: DType,
    vocabulary_size: usize,
    tokens: Range<usize>,
    /// Absent in a flat file.
    tables: Option<Tables>,
    /// One bit a block: whether it was compared with its checksum and with the vocabulary.
    verified: Vec<AtomicU64>,
}

#[derive(Debug)]
struct Tables {
    documents: Range<usize>,
    checksums: Range<usize>,
    /// CRC-32 over both.
    checksum: u32,
}

impl TokenFile {
    /// Opens a token file written by [`TokenFileWriter`](super::TokenFileWriter).
    ///
    /// Costs one pass over the two tables and, for files up to 1 GiB, over the tokens; the blocks of a larger
    /// file are verified when they are first read.
    ///
    /// # Errors
    /// If the file cannot be read, is no token file, is cut short, or any verified byte differs from what
    /// was written.
    pub fn open(path: &Path) -> Result<Self, DataError> {
        Self::open_unverified(path)?.verified_if_small()
    }

    /// Like [`open`](Self::open), but verifies every block only when it is first read, however small the
    /// file.
    pub(crate) fn open_unverified(path: &Path) -> Result<Self, DataError> {
        let bytes = map(path)?;
        let (header, layout) = Header::parse(&bytes, path)?;
        verify_tables(&bytes, &header, &layout, path)?;
        let tables = Tables {
            documents: in_memory(&layout.documents),
            checksums: in_memory(&layout.checksums),
            checksum: header.tables_checksum,
        };
        let tokens = in_memory(&layout.tokens);
        Ok(Self::new(path, bytes, header.dtype, header.vocabulary_size, tokens, Some(tables)))
    }

    /// Opens a flat file: nothing but u16 little-endian ids, without header, documents or checksums.
    ///
    /// # Errors
    /// If the file cannot be read, is empty, has an odd number of bytes, or (found at once up to 1 GiB, else
    /// when first read) holds an id that is not below `vocabulary_size`.
    pub fn open_flat_u16(path: &Path, vocabulary_size: usize) -> Result<Self, DataError> {
        if !(1..=VOCABULARY_SIZE_MAX).contains(&vocabulary_size) {
            return Err(DataError::VocabularySize { vocabulary_size });
        }
        let bytes = map(path)?;
        if bytes.is_empty() || bytes.len() % 2 != 0 {
            return Err(DataError::FlatFileLength {
                path: path.to_owned(),
                actual_bytes: bytes.len() as u64,
            });
        }
        let tokens = 0..bytes.len();
        Self::new(path, bytes, DType::U16, vocabulary_size, tokens, None).verified_if_small()
    }

    fn new(
        path: &Path,
        bytes: Mapping,
        dtype: DType,
        vocabulary_size: usize,
        tokens: Range<usize>,
        tables: Option<Tables>,
    ) -> Self {
        let num_blocks = tokens.len().div_ceil(BLOCK_BYTES);
        let verified = (0..num_blocks.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        TokenFile { path: path.to_owned(), bytes, dtype, vocabulary_size, tokens, tables, verified }
    }

    fn verified_if_small(self) -> Result<Self, DataError> {
        if self.tokens.len() <= VERIFY_AT_OPEN_BYTES_MAX {
            let num_blocks = self.tokens.len().div_ceil(BLOCK_BYTES);
            (0..num_blocks).try_for_each(|block| self.verify_block(block))?;
        }
        Ok(self)
    }

    /// Where the file lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The number of tokens.
    pub fn num_tokens(&self) -> u64 {
        (self.tokens.len() / self.dtype.size()) as u64
    }

    /// The number of documents; 0 for a flat file.
    pub fn num_documents(&self) -> u64 {
        self.tables.as_ref().map_or(0, |tables| tables.documents.len() as u64 / DOCUMENT_ENTRY_BYTES)
    }

    /// Every id lies below this.
    pub fn vocabulary_size(&self) -> usize {
        self.vocabulary_size
    }

    /// How the ids are stored: u16 or u32.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Tells files with other tokens or documents apart, wherever and whenever they were made: a checksum over the
    /// checksums of all blocks. A flat file has none.
    pub fn fingerprint(&self) -> Option<u32> {
        self.tables.as_ref().map(|tables| tables.checksum)
    }

    /// The token range of document `index`.
    ///
    /// # Panics
    /// If there is no such document; a flat file has none.
    pub fn document(&self, index: u64) -> Range<u64> {
        let num_documents = self.num_documents();
        assert!(index < num_documents, "document {index} does not exist among {num_documents}");
        let table = self.tables.as_ref().map_or(&[][..], |tables| &self.bytes[tables.documents.clone()]);
        let end_of = |index: u64| u64_at(table, (index * DOCUMENT_ENTRY_BYTES) as usize);
        let start = index.checked_sub(1).map_or(0, end_of);
        start..end_of(index)
    }

    /// The token range of each document, in order; none for a flat file.
    pub fn documents(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        (0..self.num_documents()).map(|index| self.document(index))
    }

    /// Copies the tokens from index `start` on into `out`, all of it. Allocates nothing.
    ///
    /// # Errors
    /// If a block that was not read before differs from its checksum, or holds an id outside the vocabulary.
    ///
    /// # Panics
    /// If the window reaches past the last token.
    pub fn read_window(&self, start: u64, out: &mut [u32]) -> Result<(), DataError> {
        let end = start.saturating_add(out.len() as u64);
        assert!(end <= self.num_tokens(), "tokens {start}..{end} lie past the {} tokens", self.num_tokens());
        let window = start as usize * self.dtype.size()..end as usize * self.dtype.size();
        for block in window.start / BLOCK_BYTES..window.end.div_ceil(BLOCK_BYTES) {
            self.verify_block(block)?;
        }
        let bytes = &self.bytes[self.tokens.clone()][window];
        copy_ids(bytes, self.dtype, out);
        Ok(())
    }

    /// Gives the memory of tokens that will not be read again soon back to the system.
    pub(crate) fn release(&self, tokens: Range<u64>) {
        let size = self.dtype.size();
        let first = self.tokens.start;
        self.bytes.release(first + tokens.start as usize * size..first + tokens.end as usize * size);
    }

    fn verify_block(&self, block: usize) -> Result<(), DataError> {
        let mask = 1 << (block % 64);
        let word = &self.verified[block / 64];
        // Verifying twice is harmless, and nothing else is published by the bit: relaxed order is enough.
        if word.load(Ordering::Relaxed) & mask != 0 {
            return Ok(());
        }
        let tokens = &self.bytes[self.tokens.clone()];
        let start = block * BLOCK_BYTES;
        let bytes = &tokens[start..tokens.len().min(start + BLOCK_BYTES)];
        if let Some(tables) = &self.tables {
            let stored = u32_at(&self.bytes[tables.checksums.clone()], block * 4);
            if crc32fast::hash(bytes) != stored {
                let what = "a block of its tokens does not match the block's checksum";
                return Err(DataError::TokenFileDamaged { path: self.path.clone(), what });
            }
        }
        let largest = largest_id(bytes, self.dtype);
        if largest as usize >= self.vocabulary_size {
            return Err(DataError::TokenOutsideVocabulary {
                path: self.path.clone(),
                id: largest,
                vocabulary_size: self.vocabulary_size,
            });
        }
        word.fetch_or(mask, Ordering::Relaxed);
        Ok(())
    }
}

fn map(path: &Path) -> Result<Mapping, DataError> {
    let read = |source| DataError::Read { path: path.to_owned(), source };
    let file = File::open(path).map_err(read)?;
    if !file.metadata().map_err(read)?.is_file() {
        return Err(DataError::NotATokenFile { path: path.to_owned() });
    }
    Mapping::new(&file).map_err(read)
}

/// A checked part of a mapped file: it lies in memory, so its offsets fit.
fn in_memory(part: &Range<u64>) -> Range<usize> {
    part.start as usize..part.end as usize
}

fn verify_tables(bytes: &[u8], header: &Header, layout: &Layout, path: &Path) -> Result<(), DataError> {
    let damaged = |what| Err(DataError::TokenFileDamaged { path: path.to_owned(), what });
    let tables = layout.documents.start as usize..layout.checksums.end as usize;
    if crc32fast::hash(&bytes[tables]) != header.tables_checksum {
        return damaged("its tables do not match their checksum");
    }
    let mut last = 0;
    for entry in bytes[in_memory(&layout.documents)].chunks_exact(DOCUMENT_ENTRY_BYTES as usize) {
        let end = u64_at(entry, 0);
        if end <= last {
            return damaged("its documents are out of order");
        }
        last = end;
    }
    if last != header.num_tokens {
        return damaged("its documents do not end with its tokens");
    }
    Ok(())
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
