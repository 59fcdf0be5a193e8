//! Token files: the tokens of a corpus on disk, with random access to any window.
//!
//! The file has these parts, in order and without gaps. All numbers are little-endian.
//!
//! | part | bytes | content |
//! |---|---|---|
//! | header | 64 | magic, version, sizes, the offsets of the two tables, checksums |
//! | tokens | `num_tokens` × 2 or 4 | token ids: u16 where the vocabulary fits, else u32 |
//! | document table | `num_documents` × 8 | for each document the index one past its last token |
//! | checksum table | 4 per block | CRC-32 of each 64 KiB block of tokens |
//!
//! There is a checksum for each block, so a file of any size can be opened at once: a block is verified when it is
//! first read.

mod format;
mod reader;
mod writer;

pub use format::VOCABULARY_SIZE_MAX;
pub use reader::TokenFile;
pub use writer::TokenFileWriter;
