use super::format::{BLOCK_BYTES, HEADER_BYTES, Header, VOCABULARY_SIZE_MAX, dtype_for};
use crate::DataError;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use trireme_base::DType;

/// Number of bytes between two syncs. A single sync of gigabytes at the end would block for minutes without any
/// progress.
const SYNC_BYTES: u64 = 64 << 20;

/// Writes a token file sequentially. Its memory does not grow with the number of tokens, except for the checksum table
/// of 4 bytes for each 64 KiB of tokens.
///
/// [`finish`](Self::finish) writes the header last, so an incomplete file is refused when it is opened. Dropping an
/// unfinished writer deletes the file.
#[derive(Debug)]
pub struct TokenFileWriter {
    path: PathBuf,
    file: File,
    finished: bool,
    /// Number of bytes written since the last sync.
    unsynced: u64,
    header: Header,
    /// The tokens of the current block in their stored form.
    block: Vec<u8>,
    checksums: Vec<u32>,
    /// The document table so far, in an unlinked file, which disappears with the writer.
    document_ends: BufWriter<File>,
    last_document_end: u64,
}

impl TokenFileWriter {
    /// Creates a token file at `path` for ids below `vocabulary_size`.
    ///
    /// # Errors
    /// If the vocabulary is empty or larger than [`VOCABULARY_SIZE_MAX`], or if `path` already exists or cannot be
    /// written.
    pub fn create(path: &Path, vocabulary_size: usize) -> Result<Self, DataError> {
        if !(1..=VOCABULARY_SIZE_MAX).contains(&vocabulary_size) {
            return Err(DataError::VocabularySize { vocabulary_size });
        }
        let document_ends = unnamed_file_next_to(path).map_err(|source| write_error(path, source))?;
        let file = create_new(path).map_err(|source| write_error(path, source))?;
        let mut writer = TokenFileWriter {
            path: path.to_owned(),
            file,
            finished: false,
            unsynced: 0,
            header: Header {
                dtype: dtype_for(vocabulary_size),
                vocabulary_size,
                num_tokens: 0,
                num_documents: 0,
                tables_checksum: 0,
            },
            block: Vec::with_capacity(BLOCK_BYTES),
            checksums: Vec::new(),
            document_ends: BufWriter::new(document_ends),
            last_document_end: 0,
        };
        writer.file.write_all(&[0; HEADER_BYTES]).map_err(|source| write_error(path, source))?;
        Ok(writer)
    }

    /// Number of tokens pushed so far.
    pub fn num_tokens(&self) -> u64 {
        self.header.num_tokens
    }

    /// Number of documents ended so far.
    pub fn num_documents(&self) -> u64 {
        self.header.num_documents
    }

    /// Appends tokens to the current document.
    ///
    /// # Errors
    /// If an id is not below the vocabulary size, or writing fails.
    pub fn push(&mut self, tokens: &[u32]) -> Result<(), DataError> {
        let vocabulary_size = self.header.vocabulary_size;
        let mut indexed = (self.header.num_tokens..).zip(tokens);
        if let Some((index, &id)) = indexed.find(|&(_, &id)| id as usize >= vocabulary_size) {
            let path = self.path.clone();
            return Err(DataError::TokenOutsideVocabulary { path, index, id, vocabulary_size });
        }
        let mut rest = tokens;
        while !rest.is_empty() {
            let room = (BLOCK_BYTES - self.block.len()) / self.header.dtype.size();
            let (now, later) = rest.split_at(room.min(rest.len()));
            append_ids(now, self.header.dtype, &mut self.block);
            if self.block.len() == BLOCK_BYTES {
                self.write_block()?;
            }
            rest = later;
        }
        self.header.num_tokens += tokens.len() as u64;
        Ok(())
    }

    /// Ends the current document. A document without tokens is ignored.
    ///
    /// # Errors
    /// If writing fails.
    pub fn end_document(&mut self) -> Result<(), DataError> {
        if self.header.num_tokens > self.last_document_end {
            self.last_document_end = self.header.num_tokens;
            self.header.num_documents += 1;
            let entry = self.last_document_end.to_le_bytes();
            self.document_ends.write_all(&entry).map_err(|source| write_error(&self.path, source))?;
        }
        Ok(())
    }

    /// Ends the last document, writes the tables and the header, and syncs the file to disk.
    ///
    /// # Errors
    /// If writing fails.
    pub fn finish(mut self) -> Result<(), DataError> {
        self.end_document()?;
        if !self.block.is_empty() {
            self.write_block()?;
        }
        let tables_checksum = self.append_tables().map_err(|source| write_error(&self.path, source))?;
        let header = Header { tables_checksum, ..self.header };
        self.file
            .seek(SeekFrom::Start(0))
            .and_then(|_| self.file.write_all(&header.to_bytes()))
            .and_then(|()| self.file.sync_all())
            .map_err(|source| write_error(&self.path, source))?;
        self.finished = true;
        Ok(())
    }

    fn write_block(&mut self) -> Result<(), DataError> {
        self.checksums.push(crc32fast::hash(&self.block));
        self.file.write_all(&self.block).map_err(|source| write_error(&self.path, source))?;
        self.unsynced += self.block.len() as u64;
        if self.unsynced >= SYNC_BYTES {
            self.unsynced = 0;
            self.file.sync_data().map_err(|source| write_error(&self.path, source))?;
        }
        self.block.clear();
        Ok(())
    }

    /// Appends the document table and the checksum table to the tokens, and returns the CRC-32 of both.
    fn append_tables(&mut self) -> io::Result<u32> {
        self.document_ends.seek(SeekFrom::Start(0))?;
        let mut documents = BufReader::new(self.document_ends.get_ref());
        let mut checksum = crc32fast::Hasher::new();
        let mut buffer = vec![0; BLOCK_BYTES];
        loop {
            let length = documents.read(&mut buffer)?;
            if length == 0 {
                break;
            }
            checksum.update(&buffer[..length]);
            self.file.write_all(&buffer[..length])?;
        }
        let checksums: Vec<u8> = self.checksums.iter().flat_map(|checksum| checksum.to_le_bytes()).collect();
        checksum.update(&checksums);
        self.file.write_all(&checksums)?;
        Ok(checksum.finalize())
    }
}

impl Drop for TokenFileWriter {
    fn drop(&mut self) {
        if !self.finished {
            // An error cannot be reported from here. Without its header, the file is refused anyway.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Appends ids in their stored form. They must fit into `dtype`.
fn append_ids(ids: &[u32], dtype: DType, block: &mut Vec<u8>) {
    let start = block.len();
    block.resize(start + ids.len() * dtype.size(), 0);
    let added = &mut block[start..];
    match dtype {
        DType::U16 => {
            for (slot, &id) in added.as_chunks_mut().0.iter_mut().zip(ids) {
                *slot = (id as u16).to_le_bytes();
            }
        }
        _ => {
            for (slot, &id) in added.as_chunks_mut().0.iter_mut().zip(ids) {
                *slot = id.to_le_bytes();
            }
        }
    }
}

fn create_new(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create_new(true).open(path)
}

fn unnamed_file_next_to(path: &Path) -> io::Result<File> {
    let temporary = path.with_extension("documents");
    let file = create_new(&temporary)?;
    fs::remove_file(&temporary)?;
    Ok(file)
}

fn write_error(path: &Path, source: io::Error) -> DataError {
    DataError::Write { path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_is_synced_at_regular_intervals() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = TokenFileWriter::create(&folder.path().join("tokens"), 2).unwrap();
        let block = vec![1; BLOCK_BYTES / 2];
        for num_blocks in 1..=SYNC_BYTES / BLOCK_BYTES as u64 + 1 {
            writer.push(&block).unwrap();
            assert_eq!(writer.unsynced, num_blocks * BLOCK_BYTES as u64 % SYNC_BYTES);
        }
    }
}
