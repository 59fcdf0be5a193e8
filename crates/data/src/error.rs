use std::error::Error;
use std::io;
use std::path::PathBuf;
use trireme_base::quoted;

/// An error while preparing, opening or reading training data.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages explain the fields")]
pub enum DataError {
    #[error("cannot read {path}")]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot write {path}; check the free space and the permissions there")]
    Write { path: PathBuf, source: io::Error },

    #[error("no input; give at least one text file, folder or JSON Lines file")]
    NoInput,
    #[error("input {path} does not exist; paths are relative to the current directory")]
    InputMissing { path: PathBuf },
    #[error("input {path} is neither a file nor a folder; save its contents to a file first")]
    InputKind { path: PathBuf },
    #[error("input {path} is also the output folder, which is never read; choose another output folder")]
    InputIsOutput { path: PathBuf },
    #[error(
        "input {path} is binary (NUL byte at offset {offset}); provide UTF-8 text: convert UTF-16, and unpack archives"
    )]
    BinaryInput { path: PathBuf, offset: u64 },
    #[error("the inputs hold no text; entries skipped: {skipped}")]
    EmptyCorpus { skipped: String },
    #[error(
        "the tokenizer has no token for any of the text: it belongs to another kind of text, or is damaged; use another one, or train one on the \
         text"
    )]
    NoTokens,
    #[error(
        "{path} is not valid UTF-8 at byte {offset}; convert it, or replace invalid sequences with U+FFFD (invalid \
         UTF-8: replace)"
    )]
    InvalidUtf8 {
        path: PathBuf,
        /// Byte offset of the first invalid sequence in the file.
        offset: u64,
    },
    #[error(
        "{path}, line {line}, column {column}: {reason}; records are JSON objects, one per line or in one array"
    )]
    JsonLine { path: PathBuf, line: u64, column: usize, reason: String },
    #[error(
        "{path}, line {line}: {reason}; the file begins with `[`, so it is read as one JSON array of records"
    )]
    JsonArray { path: PathBuf, line: u64, reason: &'static str },
    #[error(
        "{path}, line {line}: field '{field}' {found}; a record has a text in that field, or `messages` with \
         `role` and `content`, or `prompt` and `completion`, or ShareGPT's `conversations` with `from` and `value`, or Alpaca's `instruction` \
         and `output`"
    )]
    JsonField { path: PathBuf, line: u64, field: String, found: String },
    #[error("{path}, line {line}: the conversation cannot be used: {reason}")]
    Conversation { path: PathBuf, line: u64, reason: String },
    #[error(
        "{path}, line {line} is a conversation, but there is no chat template; use the tokenizer of a model that has one, or name a template"
    )]
    NoChatTemplate { path: PathBuf, line: u64 },
    #[error(
        "{path}, line {line} is a question with `choices`; `trireme eval` reads questions from a JSON Lines file that begins with one, given alone: put \
         them in a separate file"
    )]
    QuestionAmongTexts { path: PathBuf, line: u64 },
    #[error(
        "{path}, line {line}: {reason}; expected an object with `context` or `messages`, `choices` (two or more) and `answer` (from 0)"
    )]
    Question { path: PathBuf, line: u64, reason: String },
    #[error(
        "{path}, line {line}: the record is longer than {bytes_max} bytes; split the document, or check that the file is JSON \
         Lines or one JSON array of records"
    )]
    JsonLineLength { path: PathBuf, line: u64, bytes_max: usize },

    #[error("validation fraction {fraction} is not in 0..1; 0.05 holds out a twentieth, 0 nothing")]
    ValidationFraction { fraction: f64 },
    #[error("input {input} has a weight, but no tokens to train on; leave it out, or hold out less")]
    EmptySource { input: String },
    #[error(
        "there are texts to validate on, so nothing needs to be held out; set the validation fraction, {fraction}, to 0"
    )]
    ConflictingValidation { fraction: f64 },
    #[error("texts to validate on cannot come from the standard input; name files or folders")]
    StdinValidation,
    #[error("{mistake}")]
    Weights { mistake: String },
    #[error("a question has neither a context nor a choice with tokens; its choice is {choice:?}")]
    EmptyChoice { choice: String },
    #[error(
        "{path}, line {line} has an answer, but the file begins with plain text; put conversations and completions in a separate file"
    )]
    MixedRecords { path: PathBuf, line: u64 },
    #[error("{num_threads} tokenizer threads exceed the maximum of {num_threads_max}")]
    TooManyThreads { num_threads: usize, num_threads_max: usize },
    /// A thread that tokenizes or reads cannot be started.
    #[error("cannot tokenize")]
    Spawn { source: io::Error },
    #[error(
        "a BPE vocabulary of {vocabulary_size} is not in {smallest}..={largest}: the 256 bytes and <|endoftext|> \
         alone take {smallest}"
    )]
    BpeVocabulary { vocabulary_size: usize, smallest: usize, largest: usize },
    #[error("another process is preparing a corpus into {folder}; wait for it, or choose another folder")]
    Busy { folder: PathBuf },
    #[error(
        "{path} exists, but was not created by `trireme prepare`; move it away, or choose another folder"
    )]
    Occupied { path: PathBuf },
    #[error("the output {path} is a file; name a folder, which need not exist")]
    OutputIsFile { path: PathBuf },
    #[error(
        "{folder} contains no prepared corpus (no prepare.json); run `trireme prepare INPUT… --out {}`",
        quoted(&folder.to_string_lossy())
    )]
    NotPrepared { folder: PathBuf },
    #[error("{path} is damaged, or from another version of Trireme; prepare the corpus again")]
    Report { path: PathBuf, source: serde_json::Error },

    #[error("cannot load the tokenizer {path}; expected a Hugging Face tokenizer.json")]
    LoadTokenizer { path: PathBuf, source: Box<dyn Error + Send + Sync> },
    #[error(
        "{path} is damaged: it is not the tokenizer that the corpus was prepared with; prepare the corpus again"
    )]
    TokenizerDamaged { path: PathBuf },
    #[error("{folder} contains {found}; expected either tokenizer.json or tokenizer.bytes.json")]
    TokenizerFolder { folder: PathBuf, found: &'static str },
    #[error(
        "{path} is not valid JSON; download it again, or remove it to use the tokenizer without its settings"
    )]
    TokenizerConfig { path: PathBuf, source: serde_json::Error },
    #[error("the chat template of {path} is not valid")]
    ChatTemplate { path: PathBuf, source: Box<dyn Error + Send + Sync> },
    #[error("cannot describe the tokenizer")]
    DescribeTokenizer { source: Box<dyn Error + Send + Sync> },
    #[error("cannot train a BPE tokenizer")]
    TrainTokenizer { source: Box<dyn Error + Send + Sync> },
    #[error("the tokenizer cannot encode {text_bytes} bytes of text")]
    Encode { text_bytes: usize, source: Box<dyn Error + Send + Sync> },
    #[error("the tokenizer cannot decode {num_tokens} tokens")]
    Decode { num_tokens: usize, source: Box<dyn Error + Send + Sync> },

    #[error("a vocabulary of {vocabulary_size} is not in 1..={}", crate::VOCABULARY_SIZE_MAX)]
    VocabularySize { vocabulary_size: usize },
    #[error("{path} is not a token file; create token files from text with `trireme prepare`")]
    NotATokenFile { path: PathBuf },
    #[error(
        "{path} is a token file of version {version}, but this version of Trireme reads version 1; the file is newer \
         or damaged: prepare the corpus again"
    )]
    TokenFileVersion { path: PathBuf, version: u32 },
    /// The length of a token file differs from the length in its header, or from its length when it was opened.
    #[error(
        "{path} has {actual_bytes} bytes instead of {expected_bytes}: it was truncated or overwritten; \
         prepare the corpus again"
    )]
    TokenFileLength { path: PathBuf, expected_bytes: u64, actual_bytes: u64 },
    #[error("{path} is damaged: {what}; prepare the corpus again")]
    TokenFileDamaged { path: PathBuf, what: String },
    #[error("{path} has {actual_bytes} bytes; a flat token file contains at least one u16 and nothing else")]
    FlatFileLength { path: PathBuf, actual_bytes: u64 },
    #[error(
        "{path}: token {index} has the id {id}, outside the vocabulary of {vocabulary_size}; the file was created \
         with another tokenizer, or overwritten"
    )]
    TokenOutsideVocabulary { path: PathBuf, index: u64, id: u32, vocabulary_size: usize },
    #[error(
        "{num_tokens} tokens are too few for one sequence of {seq_len} and the token after it; use more text or a \
         smaller seq_len"
    )]
    TooFewTokens { num_tokens: u64, seq_len: usize },
}
