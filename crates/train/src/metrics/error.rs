//! Errors of metrics.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

/// A failure to write metrics, or to continue the metrics of an earlier run.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages explain the fields")]
pub enum MetricsError {
    #[error("cannot open the metrics file {}", path.display())]
    Open { path: PathBuf, source: io::Error },
    #[error(
        "the model reports {found} metrics, but a run has at most {most}; report several units under one name"
    )]
    TooMany { found: usize, most: usize },
    #[error(
        "a unit reports the metric {name:?}; use 1 to {most} letters, digits, '_', '-', '.' and '/', other than \"loss\", and \
         not beginning with \"validation_\""
    )]
    Name { name: &'static str, most: usize },
    /// A record cannot be written, for example because the disk is full.
    #[error("cannot write to the metrics file {}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("cannot serve metrics on {address}; choose another [metrics] prometheus_port")]
    Listen { address: SocketAddr, source: io::Error },
    /// A record is longer than readers accept.
    #[error(
        "a record for {} would have {found} bytes, but at most {most} are read; set [metrics] hash_interval = 0, as the model has too many tensors",
        path.display()
    )]
    TooLong { path: PathBuf, found: usize, most: usize },
    #[error("line {line} of {} is not a step record; move the file away to continue without it", path.display())]
    Damaged { path: PathBuf, line: usize },
}
