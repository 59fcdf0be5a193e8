//! Decompression of input files.

use flate2::bufread::GzDecoder;
use ruzstd::decoding::errors::FrameDecoderError;
use ruzstd::decoding::{DEFAULT_MAX_WINDOW_SIZE, StreamingDecoder};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Chain, Cursor, Read, Seek};
use std::path::{Path, PathBuf};
use trireme_base::{Bytes, quoted};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FileCompression {
    None,
    /// gzip, with one or several members.
    Gzip,
    /// Zstandard, with one or several frames.
    Zstandard,
    /// Apache Parquet. Rows are read as JSON Lines.
    Parquet,
}

impl FileCompression {
    /// Returns the compression that the extension of a file's name indicates, and the name without that extension.
    pub(super) fn of(path: &Path) -> (Self, &Path) {
        let compression = match path.extension().and_then(|extension| extension.to_str()) {
            Some("gz") => FileCompression::Gzip,
            Some("zst") => FileCompression::Zstandard,
            Some("parquet") => return (FileCompression::Parquet, path),
            _ => return (FileCompression::None, path),
        };
        (compression, path.file_stem().map_or(path, Path::new))
    }

    /// Opens a file and decompresses it.
    pub(super) fn open(self, path: &Path) -> io::Result<Box<dyn Read + Send>> {
        let file = File::open(path)?;
        Ok(match self {
            FileCompression::None => Box::new(file),
            FileCompression::Gzip => {
                let member = Some(GzDecoder::new(BufReader::new(file)));
                Box::new(Members { path: path.to_owned(), member })
            }
            FileCompression::Zstandard => {
                let input = Some(BufReader::new(file));
                Box::new(Frames { path: path.to_owned(), input, frame: None })
            }
            FileCompression::Parquet => open_parquet(file)?,
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

/// A reader of concatenated gzip members. Zeros after a member are skipped: copies to tapes and block devices are
/// padded with them.
struct Members {
    path: PathBuf,
    member: Option<GzDecoder<BufReader<File>>>,
}

impl Members {
    /// Returns the member that begins after the last one, if there is one.
    fn next(&self, mut input: BufReader<File>) -> io::Result<Option<GzDecoder<BufReader<File>>>> {
        loop {
            let bytes = input.fill_buf()?;
            let num_zeros = bytes.iter().take_while(|&&byte| byte == 0).count();
            let next = bytes.get(num_zeros).copied();
            input.consume(num_zeros);
            match next {
                Some(0x1f) => return Ok(Some(GzDecoder::new(input))),
                Some(_) => return Err(self.trailing_bytes(input.stream_position()?)),
                None if num_zeros == 0 => return Ok(None),
                None => {}
            }
        }
    }

    fn trailing_bytes(&self, position: u64) -> io::Error {
        let path = quoted(&self.path.to_string_lossy());
        io::Error::other(format!(
            "the bytes from {position} on are not gzip; the file is damaged, or something was appended to it: to read what comes before them, use \
             `gzip -dc {path} | trireme prepare - …`"
        ))
    }
}

impl Read for Members {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while let Some(member) = &mut self.member {
            let read = member.read(out)?;
            if read > 0 || out.is_empty() {
                return Ok(read);
            }
            let rest = self.member.take().map(GzDecoder::into_inner);
            self.member = rest.map_or(Ok(None), |input| self.next(input))?;
        }
        Ok(0)
    }
}

type Frame = StreamingDecoder<Chain<Cursor<[u8; 4]>, BufReader<File>>, ruzstd::decoding::FrameDecoder>;

/// Magic numbers of skippable frames (RFC 8878, section 3.1.2).
const SKIPPABLE: std::ops::RangeInclusive<u32> = 0x184d_2a50..=0x184d_2a5f;

/// A reader of concatenated Zstandard frames.
struct Frames {
    path: PathBuf,
    /// The input after the last frame.
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
            let frame = StreamingDecoder::new(Cursor::new(magic).chain(input));
            self.frame = Some(frame.map_err(|error| frame_error(error, &self.path))?);
        }
    }
}

fn frame_error(error: FrameDecoderError, path: &Path) -> io::Error {
    let FrameDecoderError::WindowSizeTooBig { requested, .. } = error else { return io::Error::other(error) };
    let (window, window_max) = (Bytes(requested), Bytes(DEFAULT_MAX_WINDOW_SIZE));
    let path = quoted(&path.to_string_lossy());
    io::Error::other(format!(
        "it was compressed with a window of {window}, and at most {window_max} are kept in memory; decompress it with `zstd -dc --long=31 {path} | \
         trireme prepare - …`, or into a file"
    ))
}
