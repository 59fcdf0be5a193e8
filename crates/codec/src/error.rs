use super::CodecName;
use trireme_base::Rank;

pub(crate) type Result<T, E = CompressionError> = std::result::Result<T, E>;

/// Why options, a bucket, a result or a saved state cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "messages explain the fields")]
pub enum CompressionError {
    #[error("compression {codec} has no option {option}; {owners} has it")]
    UnsupportedOption { codec: CodecName, option: &'static str, owners: String },
    #[error("compression {codec}: {option} is {value}, but must be {allowed}")]
    Option { codec: CodecName, option: &'static str, value: String, allowed: &'static str },
    #[error(
        "the matrix of {rows} x {cols} at element {offset} does not fit into a bucket of {len} elements, or overlaps \
         the matrix before it"
    )]
    Matrix { offset: usize, rows: usize, cols: usize, len: usize },
    #[error(
        "compression {codec} addresses elements with 32 bits, but a bucket has {len}; make the units smaller"
    )]
    BucketTooLong { codec: CodecName, len: usize },
    #[error("the result of round {round} of compression {codec} has {found} bytes instead of {expected}")]
    ResultLength { codec: CodecName, round: usize, found: usize, expected: usize },
    #[error(
        "rank {rank} sent a message that {codec} does not produce: {what}; do all ranks run the same version?"
    )]
    Message { rank: Rank, codec: CodecName, what: String },
    #[error(
        "the saved state does not match compression {codec}: {what}; start without it, or with the options that \
         created it"
    )]
    State { codec: CodecName, what: String },
}
