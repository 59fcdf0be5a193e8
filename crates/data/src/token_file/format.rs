use crate::DataError;
use std::ops::Range;
use std::path::Path;
use trireme_base::DType;

/// The maximum vocabulary size of a token file or a tokenizer: 16 Mi ids.
///
/// No vocabulary in use is as large. The limit bounds the memory of tables with one entry for each id, whatever a file
/// claims.
pub const VOCABULARY_SIZE_MAX: usize = 1 << 24;

pub(super) const HEADER_BYTES: usize = 64;
/// Size of a checksummed block of tokens. It is divisible by the size of every dtype, so no id spans two blocks.
pub(super) const BLOCK_BYTES: usize = 64 << 10;
pub(super) const DOCUMENT_ENTRY_BYTES: u64 = 8;
pub(super) const CHECKSUM_ENTRY_BYTES: u64 = 4;

const MAGIC: [u8; 8] = *b"TRITOKEN";
const VERSION: u32 = 1;

/// The fields of a header. The layout of the file follows from them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) dtype: DType,
    pub(super) vocabulary_size: usize,
    pub(super) num_tokens: u64,
    pub(super) num_documents: u64,
    /// CRC-32 over the document table and the checksum table.
    pub(super) tables_checksum: u32,
}

/// The byte ranges of the parts of a token file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) tokens: Range<u64>,
    pub(super) documents: Range<u64>,
    pub(super) checksums: Range<u64>,
}

/// Returns the smallest dtype that can store every id below `vocabulary_size`.
pub(super) fn dtype_for(vocabulary_size: usize) -> DType {
    if vocabulary_size <= 1 << 16 { DType::U16 } else { DType::U32 }
}

impl Header {
    /// Returns the layout, or `None` if the offsets do not fit into 64 bits.
    pub(super) fn layout(&self) -> Option<Layout> {
        let tokens_end = part_end(HEADER_BYTES as u64, self.num_tokens, self.dtype.size() as u64)?;
        let documents_end = part_end(tokens_end, self.num_documents, DOCUMENT_ENTRY_BYTES)?;
        let num_blocks = (tokens_end - HEADER_BYTES as u64).div_ceil(BLOCK_BYTES as u64);
        let checksums_end = part_end(documents_end, num_blocks, CHECKSUM_ENTRY_BYTES)?;
        Some(Layout {
            tokens: HEADER_BYTES as u64..tokens_end,
            documents: tokens_end..documents_end,
            checksums: documents_end..checksums_end,
        })
    }

    /// Serializes the header with its checksum.
    ///
    /// # Panics
    /// If the offsets do not fit into 64 bits, which is impossible for a file that was written.
    pub(super) fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let layout = self.layout().expect("the parts were written, so their offsets fit");
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&(self.dtype.size() as u32).to_le_bytes());
        bytes[16..24].copy_from_slice(&(self.vocabulary_size as u64).to_le_bytes());
        bytes[24..32].copy_from_slice(&self.num_tokens.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.num_documents.to_le_bytes());
        bytes[40..48].copy_from_slice(&layout.documents.start.to_le_bytes());
        bytes[48..56].copy_from_slice(&layout.checksums.start.to_le_bytes());
        bytes[56..60].copy_from_slice(&self.tables_checksum.to_le_bytes());
        let checksum = crc32fast::hash(&bytes[..60]);
        bytes[60..64].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Parses and checks the header of a file of `file_bytes` bytes. `file` holds the first [`HEADER_BYTES`] of the
    /// file, or all of a shorter one. If this succeeds, all offsets are within the file.
    pub(super) fn parse(file: &[u8], file_bytes: u64, path: &Path) -> Result<(Header, Layout), DataError> {
        let damaged =
            |what: &str| DataError::TokenFileDamaged { path: path.to_owned(), what: what.to_owned() };
        let wrong_length = |expected_bytes| DataError::TokenFileLength {
            path: path.to_owned(),
            expected_bytes,
            actual_bytes: file_bytes,
        };
        if !file.starts_with(&MAGIC) {
            return Err(DataError::NotATokenFile { path: path.to_owned() });
        }
        if file.len() < HEADER_BYTES {
            return Err(wrong_length(HEADER_BYTES as u64));
        }
        let version = u32_at(file, 8);
        if version != VERSION {
            return Err(DataError::TokenFileVersion { path: path.to_owned(), version });
        }
        if u32_at(file, 60) != crc32fast::hash(&file[..60]) {
            return Err(damaged("its header does not match the header's checksum"));
        }
        let vocabulary_size = usize::try_from(u64_at(file, 16)).unwrap_or(usize::MAX);
        if !(1..=VOCABULARY_SIZE_MAX).contains(&vocabulary_size) {
            return Err(damaged("its vocabulary size is out of range"));
        }
        let dtype = dtype_for(vocabulary_size);
        if u32_at(file, 12) as usize != dtype.size() {
            return Err(damaged("its token size does not match its vocabulary size"));
        }
        let header = Header {
            dtype,
            vocabulary_size,
            num_tokens: u64_at(file, 24),
            num_documents: u64_at(file, 32),
            tables_checksum: u32_at(file, 56),
        };
        let layout = header.layout().ok_or_else(|| damaged("its counts are out of range"))?;
        if u64_at(file, 40) != layout.documents.start || u64_at(file, 48) != layout.checksums.start {
            return Err(damaged("its tables are not where its counts place them"));
        }
        if file_bytes != layout.checksums.end {
            return Err(wrong_length(layout.checksums.end));
        }
        Ok((header, layout))
    }
}

fn part_end(start: u64, count: u64, entry_bytes: u64) -> Option<u64> {
    count.checked_mul(entry_bytes)?.checked_add(start)
}

/// Reads a little-endian u32.
///
/// # Panics
/// If `bytes` ends before the number does.
pub(super) fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes(bytes[offset..offset + 4].try_into().expect("four bytes were taken"))
}

/// Reads a little-endian u64.
///
/// # Panics
/// If `bytes` ends before the number does.
pub(super) fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    u64::from_le_bytes(bytes[offset..offset + 8].try_into().expect("eight bytes were taken"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        Header {
            dtype: DType::U16,
            vocabulary_size: 257,
            num_tokens: 0,
            num_documents: 0,
            tables_checksum: 7,
        }
    }

    fn parse(file: &[u8]) -> Result<(Header, Layout), DataError> {
        Header::parse(file, file.len() as u64, Path::new("a"))
    }

    fn with_checksum(mut bytes: [u8; HEADER_BYTES]) -> [u8; HEADER_BYTES] {
        let checksum = crc32fast::hash(&bytes[..60]);
        bytes[60..64].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    #[test]
    fn a_header_round_trips() {
        let (read, layout) = parse(&header().to_bytes()).unwrap();
        assert_eq!(read, header());
        assert_eq!(layout.checksums.end, HEADER_BYTES as u64);
    }

    #[test]
    fn every_flipped_bit_is_refused() {
        for bit in 0..HEADER_BYTES * 8 {
            let mut bytes = header().to_bytes();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(parse(&bytes).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn impossible_fields_under_a_valid_checksum_are_refused() {
        let forged = [
            (12, 4, "token size"),
            (16, 0, "vocabulary size"),
            (16, u64::MAX, "vocabulary size"),
            (24, u64::MAX, "counts are out of range"),
            (24, u64::MAX / 2 - 64, "counts are out of range"),
            (32, u64::MAX, "counts are out of range"),
            (32, u64::MAX / 8 - 100, "not where"),
            (24, 1 << 40, "not where"),
            (40, 1 << 40, "not where"),
            (48, 0, "not where"),
        ];
        for (offset, value, expected) in forged {
            let mut bytes = header().to_bytes();
            let field: &mut [u8] =
                if offset == 12 { &mut bytes[12..16] } else { &mut bytes[offset..offset + 8] };
            let length = field.len();
            field.copy_from_slice(&value.to_le_bytes()[..length]);
            let error = parse(&with_checksum(bytes)).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn counts_beyond_the_file_are_refused_by_its_length() {
        let huge = Header { num_tokens: 1 << 40, num_documents: 1 << 40, ..header() };
        let error = parse(&huge.to_bytes()).unwrap_err();
        assert!(matches!(error, DataError::TokenFileLength { actual_bytes: 64, .. }), "{error}");
    }
}
