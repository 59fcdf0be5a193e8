use super::format::{BLOCK_BYTES, HEADER_BYTES, Header, VOCABULARY_SIZE_MAX, dtype_for};
use crate::DataError;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use trireme_base::DType;

/// Number of bytes between two syncs. A single sync after gigabytes would show no progress for minutes.
const SYNC_BYTES: u64 = 64 << 20;

/// Writes a token file front to back, in memory that does not grow with the number of tokens; the checksum
/// table takes 4 bytes for every 64 KiB of them.
///
/// The header is written last, by [`finish`](Self::finish): a file that was cut off before is refused when it
/// is opened, and dropping an unfinished writer removes it.
#[derive(Debug)]
pub struct TokenFileWriter {
    path: PathBuf,
    file: File,
    finished: bool,
    /// Bytes since the disk was last waited for.
    unsynced: u64,
    header: Header,
    /// Tokens of the current block, as they will be stored.
    block: Vec<u8>,
    checksums: Vec<u32>,
    /// The document table as it grows, in a file without a name, so that it vanishes with the writer.
    document_ends: BufWriter<File>,
    last_document_end: u64,
}

impl TokenFileWriter {
    /// Starts a new file at `path` for ids below `vocabulary_size`.
    ///
    /// # Errors
    /// If the vocabulary is empty or larger than [`VOCABULARY_SIZE_MAX`], or if `path` exists already or
    /// cannot be written.
    pub fn create(path: &Path, vocabulary_size: usize) -> Result<Self, DataError> {
        if !(1..=VOCABULARY_SIZE_MAX).contains(&vocabulary_size) {
            return Err(DataError::VocabularySize { vocabulary_size });
        }
        let document_ends = unnamed_file_beside(path).map_err(|source| write_error(path, source))?;
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

    /// The number of tokens pushed so far.
    pub fn num_tokens(&self) -> u64 {
        self.header.num_tokens
    }

    /// The number of documents ended so far.
    pub fn num_documents(&self) -> u64 {
        self.header.num_documents
    }

    /// Appends tokens to the current document.
    ///
    /// # Errors
    /// If an id is not below the vocabulary size, or the disk refuses the bytes.
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

    /// Ends the current document; a document without tokens leaves no trace.
    ///
    /// # Errors
    /// If the disk refuses the bytes.
    pub fn end_document(&mut self) -> Result<(), DataError> {
        if self.header.num_tokens > self.last_document_end {
            self.last_document_end = self.header.num_tokens;
            self.header.num_documents += 1;
            let entry = self.last_document_end.to_le_bytes();
            self.document_ends.write_all(&entry).map_err(|source| write_error(&self.path, source))?;
        }
        Ok(())
    }

    /// Ends the last document, writes the tables and the header, and waits until all is on the disk.
    ///
    /// # Errors
    /// If the disk refuses the bytes.
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

    /// Copies the document table behind the tokens and adds the checksum table; returns the CRC-32 of both.
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
            // Nobody is left to tell; without its header the file is refused anyway.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// The ids must fit into `dtype`.
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

fn unnamed_file_beside(path: &Path) -> io::Result<File> {
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
    fn the_disk_is_waited_for_long_before_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = TokenFileWriter::create(&folder.path().join("tokens"), 2).unwrap();
        let block = vec![1; BLOCK_BYTES / 2];
        for num_blocks in 1..=SYNC_BYTES / BLOCK_BYTES as u64 + 1 {
            writer.push(&block).unwrap();
            assert_eq!(writer.unsynced, num_blocks * BLOCK_BYTES as u64 % SYNC_BYTES);
        }
    }
}
