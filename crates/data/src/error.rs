use std::error::Error;
use std::io;
use std::path::PathBuf;
use trireme_base::quoted;

/// What can go wrong between a text on disk and a batch of tokens.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages explain the fields")]
pub enum DataError {
    /// A file or folder could not be read.
    #[error("cannot read {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// A file or folder could not be written.
    #[error("cannot write {path}; check the free space and the permissions there")]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },

    /// The list of inputs is empty.
    #[error("no input; give at least one text file, folder or JSON Lines file")]
    NoInput,
    /// An input that does not exist.
    #[error("input {path} does not exist; paths are relative to the current directory")]
    InputMissing { path: PathBuf },
    /// A named input that is a device, a pipe or the like.
    #[error("input {path} is neither a file nor a folder; save its contents to a file first")]
    InputKind { path: PathBuf },
    /// An input that is the output folder, too.
    #[error("input {path} is also the output folder, which is never read; choose another output folder")]
    InputIsOutput { path: PathBuf },
    /// A named input that holds NUL bytes.
    #[error(
        "input {path} is binary (NUL byte at offset {offset}); provide UTF-8 text: convert UTF-16, and unpack archives"
    )]
    BinaryInput { path: PathBuf, offset: u64 },
    /// The inputs hold no text at all.
    #[error("the inputs hold no text; entries skipped: {skipped}")]
    EmptyCorpus { skipped: String },
    /// A tokenizer that has no token for any of the text.
    #[error(
        "the tokenizer has no token for any of the text: it belongs to another kind of text, or is damaged; use another one, or train one on the \
         text"
    )]
    NoTokens,
    /// Bytes that are no UTF-8, where they are to be refused.
    #[error(
        "{path} is not valid UTF-8 at byte {offset}; convert it, or replace invalid sequences with U+FFFD (invalid \
         UTF-8: replace)"
    )]
    InvalidUtf8 {
        path: PathBuf,
        /// Where the first invalid sequence starts, in bytes from the start of the file.
        offset: u64,
    },
    /// A record that is not a JSON object.
    #[error(
        "{path}, line {line}, column {column}: {reason}; records are JSON objects, one per line or in one array"
    )]
    JsonLine { path: PathBuf, line: u64, column: usize, reason: String },
    /// A file that begins as a JSON array and does not go on as one.
    #[error(
        "{path}, line {line}: {reason}; the file begins with `[`, so it is read as one JSON array of records"
    )]
    JsonArray { path: PathBuf, line: u64, reason: &'static str },
    /// A JSON object without the text field.
    #[error(
        "{path}, line {line}: field '{field}' {found}; a record has a text in that field, or `messages` with \
         `role` and `content`, or `prompt` and `completion`, or ShareGPT's `conversations` with `from` and `value`, or Alpaca's `instruction` \
         and `output`"
    )]
    JsonField { path: PathBuf, line: u64, field: String, found: String },
    /// A conversation that does not become a text.
    #[error("{path}, line {line}: the conversation cannot be used: {reason}")]
    Conversation { path: PathBuf, line: u64, reason: String },
    /// A conversation, and nothing that makes a text of it.
    #[error(
        "{path}, line {line} is a conversation, but there is no chat template; use the tokenizer of a model that has one, or name a template"
    )]
    NoChatTemplate { path: PathBuf, line: u64 },
    /// A question with choices where texts are read.
    #[error(
        "{path}, line {line} is a question with `choices`; `trireme eval` reads questions from a JSON Lines file that begins with one, given alone: put \
         them in a separate file"
    )]
    QuestionAmongTexts { path: PathBuf, line: u64 },
    /// A line that is no question with choices.
    #[error(
        "{path}, line {line}: {reason}; expected an object with `context` or `messages`, `choices` (two or more) and `answer` (from 0)"
    )]
    Question { path: PathBuf, line: u64, reason: String },
    /// A record too long to be held in memory.
    #[error(
        "{path}, line {line}: the record is longer than {bytes_max} bytes; split the document, or check that the file is JSON \
         Lines or one JSON array of records"
    )]
    JsonLineLength { path: PathBuf, line: u64, bytes_max: usize },

    /// A share for validation that is no share.
    #[error("validation fraction {fraction} is not in 0..1; 0.05 holds out a twentieth, 0 nothing")]
    ValidationFraction { fraction: f64 },
    /// An input with a weight and nothing to train on.
    #[error("input {input} has a weight, but no tokens to train on; leave it out, or hold out less")]
    EmptySource { input: String },
    /// Texts to validate on, and a fraction to hold out as well.
    #[error(
        "there are texts to validate on, so nothing needs to be held out; set the validation fraction, {fraction}, to 0"
    )]
    TwoValidations { fraction: f64 },
    /// Texts to validate on that can be read only once.
    #[error("texts to validate on cannot come from the standard input; name files or folders")]
    StdinValidation,
    /// Weights that do not belong to the inputs.
    #[error("{mistake}")]
    Weights { mistake: String },
    /// A choice without tokens.
    #[error("a question has neither a context nor a choice with tokens; its choice is {choice:?}")]
    EmptyChoice { choice: String },
    /// Records with answers in a file that began with plain texts.
    #[error(
        "{path}, line {line} has an answer, but the file begins with plain text; put conversations and completions in a separate file"
    )]
    MixedRecords { path: PathBuf, line: u64 },
    /// More tokenizing threads than can be fed.
    #[error("{num_threads} tokenizer threads exceed the maximum of {num_threads_max}")]
    TooManyThreads { num_threads: usize, num_threads_max: usize },
    /// A thread that tokenizes or reads cannot be started.
    #[error("cannot tokenize")]
    Spawn {
        #[source]
        source: io::Error,
    },
    /// A vocabulary for training a BPE tokenizer that is too small or too large.
    #[error(
        "a BPE vocabulary of {vocabulary_size} is not in {smallest}..={largest}: the 256 bytes and <|endoftext|> \
         alone take {smallest}"
    )]
    BpeVocabulary { vocabulary_size: usize, smallest: usize, largest: usize },
    /// Another process prepares into the same folder.
    #[error("another process is preparing a corpus into {folder}; wait for it, or choose another folder")]
    Busy { folder: PathBuf },
    /// The output folder has a file of its own under a name that is needed.
    #[error(
        "{path} exists, but was not created by `trireme prepare`; move it away, or choose another folder"
    )]
    Occupied { path: PathBuf },
    /// An output folder that is a file.
    #[error("the output {path} is a file; name a folder, which need not exist")]
    OutputIsFile { path: PathBuf },
    /// A folder without a complete prepared corpus.
    #[error(
        "{folder} contains no prepared corpus (no prepare.json); run `trireme prepare INPUT… --out {}`",
        quoted(&folder.to_string_lossy())
    )]
    NotPrepared { folder: PathBuf },
    /// A report of an earlier preparation that cannot be understood.
    #[error("{path} is damaged, or from another version of Trireme; prepare the corpus again")]
    Report {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },

    /// A tokenizer that cannot be loaded.
    #[error("cannot load the tokenizer {path}; expected a Hugging Face tokenizer.json")]
    LoadTokenizer {
        path: PathBuf,
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// The tokenizer of a corpus is not the one that was written.
    #[error(
        "{path} is damaged: it is not the tokenizer that the corpus was prepared with; prepare the corpus again"
    )]
    TokenizerDamaged { path: PathBuf },
    /// A folder with no tokenizer, or with two.
    #[error("{folder} contains {found}; expected either tokenizer.json or tokenizer.bytes.json")]
    TokenizerFolder { folder: PathBuf, found: &'static str },
    /// A `tokenizer_config.json` that is not JSON.
    #[error(
        "{path} is not valid JSON; download it again, or remove it to use the tokenizer without its settings"
    )]
    TokenizerConfig { path: PathBuf, source: serde_json::Error },
    /// A chat template that is not valid.
    #[error("the chat template of {path} is not valid")]
    ChatTemplate {
        path: PathBuf,
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// A tokenizer cannot be written down.
    #[error("cannot describe the tokenizer")]
    DescribeTokenizer {
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// Training a tokenizer failed.
    #[error("cannot train a BPE tokenizer")]
    TrainTokenizer {
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// The tokenizer refused a text.
    #[error("the tokenizer cannot encode {text_bytes} bytes of text")]
    Encode {
        text_bytes: usize,
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// The tokenizer refused a sequence of tokens.
    #[error("the tokenizer cannot decode {num_tokens} tokens")]
    Decode {
        num_tokens: usize,
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },

    /// A vocabulary size that no token file can have.
    #[error("a vocabulary of {vocabulary_size} is not in 1..={}", crate::VOCABULARY_SIZE_MAX)]
    VocabularySize { vocabulary_size: usize },
    /// A file that is something else than a token file.
    #[error("{path} is not a token file; create token files from text with `trireme prepare`")]
    NotATokenFile { path: PathBuf },
    /// A token file of another version.
    #[error(
        "{path} is a token file of version {version}, but this version of Trireme reads version 1; the file is newer \
         or damaged: prepare the corpus again"
    )]
    TokenFileVersion { path: PathBuf, version: u32 },
    /// A token file that is shorter or longer than its header says, or than it was when it was opened.
    #[error(
        "{path} has {actual_bytes} bytes instead of {expected_bytes}: it was truncated or overwritten; \
         prepare the corpus again"
    )]
    TokenFileLength { path: PathBuf, expected_bytes: u64, actual_bytes: u64 },
    /// A token file whose bytes are not those that were written.
    #[error("{path} is damaged: {what}; prepare the corpus again")]
    TokenFileDamaged { path: PathBuf, what: String },
    /// A flat token file of an impossible size.
    #[error("{path} has {actual_bytes} bytes; a flat token file contains at least one u16 and nothing else")]
    FlatFileLength { path: PathBuf, actual_bytes: u64 },
    /// A token outside the vocabulary.
    #[error(
        "{path}: token {index} has the id {id}, outside the vocabulary of {vocabulary_size}; the file was created \
         with another tokenizer, or overwritten"
    )]
    TokenOutsideVocabulary { path: PathBuf, index: u64, id: u32, vocabulary_size: usize },
    /// A corpus too small to cut one window from.
    #[error(
        "{num_tokens} tokens are too few for one sequence of {seq_len} and the token after it; use more text or a \
         smaller seq_len"
    )]
    TooFewTokens { num_tokens: u64, seq_len: usize },
}
