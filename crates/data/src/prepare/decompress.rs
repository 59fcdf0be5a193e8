//! Inputs that are compressed, as the bytes that they hold.

use flate2::read::MultiGzDecoder;
use ruzstd::decoding::StreamingDecoder;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Chain, Cursor, Read};
use std::path::Path;

/// How a file is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Compression {
    /// Not at all.
    None,
    /// By gzip, in one or several members.
    Gzip,
    /// By Zstandard, in one or several frames.
    Zstandard,
    /// In the columns of Apache Parquet. Its rows are read as JSON Lines.
    Parquet,
}

impl Compression {
    /// What the name of a file says, and the name without it.
    pub(super) fn of(path: &Path) -> (Self, &Path) {
        let compression = match path.extension().and_then(|extension| extension.to_str()) {
            Some("gz") => Compression::Gzip,
            Some("zst") => Compression::Zstandard,
            Some("parquet") => return (Compression::Parquet, path),
            _ => return (Compression::None, path),
        };
        (compression, path.file_stem().map_or(path, Path::new))
    }

    /// What the file holds.
    pub(super) fn open(self, path: &Path) -> io::Result<Box<dyn Read + Send>> {
        let file = File::open(path)?;
        Ok(match self {
            Compression::None => Box::new(file),
            Compression::Gzip => Box::new(MultiGzDecoder::new(file)),
            Compression::Zstandard => Box::new(Frames { input: Some(BufReader::new(file)), frame: None }),
            Compression::Parquet => open_parquet(file)?,
        })
    }
}

#[cfg(feature = "parquet")]
fn open_parquet(file: File) -> io::Result<Box<dyn Read + Send>> {
    Ok(Box::new(super::parquet_rows::Rows::open(file)?))
}

#[cfg(not(feature = "parquet"))]
fn open_parquet(_: File) -> io::Result<Box<dyn Read + Send>> {
    let missing = "this build does not read Parquet: build it with `--features parquet`, or convert the file to JSON Lines";
    Err(io::Error::new(io::ErrorKind::Unsupported, missing))
}

type Frame = StreamingDecoder<Chain<Cursor<[u8; 4]>, BufReader<File>>, ruzstd::decoding::FrameDecoder>;

/// Magic numbers of frames without content (RFC 8878, section 3.1.2).
const SKIPPABLE: std::ops::RangeInclusive<u32> = 0x184d_2a50..=0x184d_2a5f;

/// Frames of Zstandard, one after another.
struct Frames {
    /// What follows the frame that was read last.
    input: Option<BufReader<File>>,
    frame: Option<Frame>,
}

impl Read for Frames {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        loop {
            if let Some(frame) = &mut self.frame {
                let read = frame.read(out)?;
                if read > 0 || out.is_empty() {
                    return Ok(read);
                }
                self.input = self.frame.take().map(|frame| frame.into_inner().into_inner().1);
            }
            let Some(mut input) = self.input.take() else { return Ok(0) };
            if input.fill_buf()?.is_empty() {
                return Ok(0);
            }
            let mut magic = [0; 4];
            input.read_exact(&mut magic)?;
            if SKIPPABLE.contains(&u32::from_le_bytes(magic)) {
                let mut length = [0; 4];
                input.read_exact(&mut length)?;
                let length = u64::from(u32::from_le_bytes(length));
                if io::copy(&mut input.by_ref().take(length), &mut io::sink())? < length {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                self.input = Some(input);
                continue;
            }
            let frame = StreamingDecoder::new(Cursor::new(magic).chain(input)).map_err(io::Error::other)?;
            self.frame = Some(frame);
        }
    }
}
