use super::CodecName;
use trireme_base::Rank;

/// Why a compression is refused, or what came back cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CompressionError {
    /// An option of another codec.
    #[error("compression {codec} has no option {option}; {owners} has it")]
    ForeignOption {
        /// The codec that was chosen.
        codec: CodecName,
        /// The option it does not have.
        option: &'static str,
        /// The codecs that have it.
        owners: String,
    },
    /// An option that cannot be.
    #[error("compression {codec}: {option} is {value}, but must be {allowed}")]
    Option {
        /// The codec that was chosen.
        codec: CodecName,
        /// The option.
        option: &'static str,
        /// What it is.
        value: String,
        /// What it may be.
        allowed: &'static str,
    },
    /// Matrices that do not lie in their bucket one after another.
    #[error(
        "the matrix of {rows} x {cols} at element {offset} does not fit into a bucket of {len} elements, or overlaps \
         the matrix before it"
    )]
    Matrix {
        /// First element.
        offset: usize,
        /// Rows.
        rows: usize,
        /// Columns.
        cols: usize,
        /// Elements of the bucket.
        len: usize,
    },
    /// More elements than a codec can number.
    #[error(
        "compression {codec} addresses elements with 32 bits, but a bucket has {len}; make the units smaller"
    )]
    BucketTooLong {
        /// The codec that was chosen.
        codec: CodecName,
        /// Elements of the bucket.
        len: usize,
    },
    /// A round's result has the wrong length.
    #[error("the result of round {round} of compression {codec} has {found} bytes instead of {expected}")]
    ResultLength {
        /// The codec.
        codec: CodecName,
        /// Of the step, from 0.
        round: usize,
        /// Its length, in bytes.
        found: usize,
        /// What it must be.
        expected: usize,
    },
    /// A rank's message is none that the codec makes.
    #[error(
        "rank {rank} sent a message that {codec} does not produce: {what}; do all ranks run the same version?"
    )]
    Message {
        /// Whose message.
        rank: Rank,
        /// The codec.
        codec: CodecName,
        /// What is wrong with it.
        what: String,
    },
    /// A kept state belongs to another compression, or is damaged.
    #[error(
        "the saved state does not match compression {codec}: {what}; start without it, or with the options that \
         created it"
    )]
    State {
        /// The codec.
        codec: CodecName,
        /// What is wrong with it.
        what: String,
    },
}
