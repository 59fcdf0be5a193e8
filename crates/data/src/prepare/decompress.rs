//! Inputs that are compressed, as the bytes that they hold.

use flate2::read::MultiGzDecoder;
use ruzstd::decoding::StreamingDecoder;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
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
}

impl Compression {
    /// What the name of a file says, and the name without it.
    pub(super) fn of(path: &Path) -> (Self, &Path) {
        let compression = match path.extension().and_then(|extension| extension.to_str()) {
            Some("gz") => Compression::Gzip,
            Some("zst") => Compression::Zstandard,
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
        })
    }
}

type Frame = StreamingDecoder<BufReader<File>, ruzstd::decoding::FrameDecoder>;

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
                self.input = self.frame.take().map(StreamingDecoder::into_inner);
            }
            let Some(mut input) = self.input.take() else { return Ok(0) };
            if input.fill_buf()?.is_empty() {
                return Ok(0);
            }
            self.frame = Some(StreamingDecoder::new(input).map_err(io::Error::other)?);
        }
    }
}
