use std::error::Error;
use std::io;
use std::path::PathBuf;
use trireme_base::quoted;

/// What can go wrong between a text on disk and a batch of tokens.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// A file or folder could not be read.
    #[error("cannot read {path}")]
    Read {
        /// What was to be read.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// A file or folder could not be written.
    #[error("cannot write {path}; check the free space and the permissions there")]
    Write {
        /// What was to be written.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },

    /// The list of inputs is empty.
    #[error("no input; give at least one text file, folder or JSON Lines file")]
    NoInput,
    /// An input that does not exist.
    #[error("input {path} does not exist; paths are relative to the current directory")]
    InputMissing {
        /// The input as it was given.
        path: PathBuf,
    },
    /// A named input that is a device, a pipe or the like.
    #[error("input {path} is neither a file nor a folder; save its contents to a file first")]
    InputKind {
        /// The input as it was given.
        path: PathBuf,
    },
    /// An input that is the output folder, too.
    #[error("input {path} is also the output folder, which is never read; choose another output folder")]
    InputIsOutput {
        /// The input as it was given.
        path: PathBuf,
    },
    /// A named input that holds NUL bytes.
    #[error(
        "input {path} is binary (NUL byte at offset {offset}); provide UTF-8 text: convert UTF-16, and unpack archives"
    )]
    BinaryInput {
        /// The input as it was given.
        path: PathBuf,
        /// Where the first NUL byte lies.
        offset: u64,
    },
    /// The inputs hold no text at all.
    #[error("the inputs hold no text; entries skipped: {skipped}")]
    EmptyCorpus {
        /// How many were skipped and why, in words.
        skipped: String,
    },
    /// A tokenizer that has no token for any of the text.
    #[error(
        "the tokenizer has no token for any of the text: it belongs to another kind of text, or is damaged; use another one, or train one on the \
         text ([data] train_bpe, --train-bpe)"
    )]
    NoTokens,
    /// Bytes that are no UTF-8, where they are to be refused.
    #[error(
        "{path} is not valid UTF-8 at byte {offset}; convert it, or replace invalid sequences with U+FFFD (invalid \
         UTF-8: replace)"
    )]
    InvalidUtf8 {
        /// The file.
        path: PathBuf,
        /// Where the first invalid sequence starts, in bytes from the start of the file.
        offset: u64,
    },
    /// A record that is not a JSON object.
    #[error(
        "{path}, line {line}, column {column}: {reason}; records are JSON objects, one per line or in one array"
    )]
    JsonLine {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u64,
        /// The column, from 1.
        column: usize,
        /// What is wrong there.
        reason: String,
    },
    /// A file that begins as a JSON array and does not go on as one.
    #[error(
        "{path}, line {line}: {reason}; the file begins with `[`, so it is read as one JSON array of records"
    )]
    JsonArray {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u64,
        /// The mistake, in words.
        reason: &'static str,
    },
    /// A JSON object without the text field.
    #[error(
        "{path}, line {line}: field '{field}' {found}; a record has a text, in a field that [data] field or --field names, or `messages` with \
         `role` and `content`, or `prompt` and `completion`, or ShareGPT's `conversations` with `from` and `value`, or Alpaca's `instruction` \
         and `output`"
    )]
    JsonField {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u64,
        /// The field that was to hold the text.
        field: String,
        /// What was found instead.
        found: String,
    },
    /// A conversation that does not become a text.
    #[error("{path}, line {line}: the conversation cannot be used: {reason}")]
    Conversation {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u64,
        /// Why.
        reason: String,
    },
    /// A conversation, and nothing that makes a text of it.
    #[error(
        "{path}, line {line} is a conversation, but there is no chat template; use the tokenizer of a model that has one, or name a template: \
         `chatml`, or a file ([data] chat_template, --chat-template)"
    )]
    NoChatTemplate {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u64,
    },
    /// A question with choices where texts are read.
    #[error(
        "{path}, line {line} is a question with `choices`; `trireme eval` reads questions from a JSON Lines file that begins with one, given alone: put \
         them in a separate file"
    )]
    QuestionAmongTexts {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u64,
    },
    /// A line that is no question with choices.
    #[error(
        "{path}, line {line}: {reason}; expected an object with `context` or `messages`, `choices` (two or more) and `answer` (from 0)"
    )]
    Question {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u64,
        /// What is wrong.
        reason: String,
    },
    /// A record too long to be held in memory.
    #[error(
        "{path}, line {line}: the record is longer than {bytes_max} bytes; split the document, or check that the file is JSON \
         Lines or one JSON array of records"
    )]
    JsonLineLength {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u64,
        /// The longest line that is read.
        bytes_max: usize,
    },

    /// A share for validation that is no share.
    #[error("validation fraction {fraction} is not in 0..1; 0.05 holds out a twentieth, 0 nothing")]
    ValidationFraction {
        /// The fraction asked for.
        fraction: f64,
    },
    /// An input with a weight and nothing to train on.
    #[error("input {input} has a weight, but no tokens to train on; leave it out, or hold out less")]
    EmptySource {
        /// The input.
        input: String,
    },
    /// Texts to validate on, and a fraction to hold out as well.
    #[error(
        "there are texts to validate on, so nothing needs to be held out; set the validation fraction, {fraction}, to 0"
    )]
    TwoValidations {
        /// The fraction asked for.
        fraction: f64,
    },
    /// Texts to validate on that can be read only once.
    #[error("texts to validate on cannot come from the standard input; name files or folders")]
    StdinValidation,
    /// Weights that do not belong to the inputs.
    #[error("{mistake}")]
    Weights {
        /// The mistake, in words.
        mistake: String,
    },
    /// A choice without tokens.
    #[error("a question has neither a context nor a choice with tokens; its choice is {choice:?}")]
    EmptyChoice {
        /// The choice.
        choice: String,
    },
    /// Records with answers in a file that began with plain texts.
    #[error(
        "{path}, line {line} has an answer, but the file begins with plain text; put conversations and completions in a separate file"
    )]
    MixedRecords {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u64,
    },
    /// More tokenizing threads than can be fed.
    #[error("{num_threads} tokenizer threads exceed the maximum of {num_threads_max}")]
    TooManyThreads {
        /// The threads asked for.
        num_threads: usize,
        /// The most there may be.
        num_threads_max: usize,
    },
    /// A thread that tokenizes or reads cannot be started.
    #[error("cannot tokenize")]
    Spawn {
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// A vocabulary for training a BPE tokenizer that is too small or too large.
    #[error(
        "a BPE vocabulary of {vocabulary_size} is not in {smallest}..={largest}: the 256 bytes and <|endoftext|> \
         alone take {smallest}"
    )]
    BpeVocabulary {
        /// The size asked for.
        vocabulary_size: usize,
        /// The smallest size there can be.
        smallest: usize,
        /// The largest size there can be.
        largest: usize,
    },
    /// Another process prepares into the same folder.
    #[error("another process is preparing a corpus into {folder}; wait for it, or choose another folder")]
    Busy {
        /// The output folder.
        folder: PathBuf,
    },
    /// The output folder has a file of its own under a name that is needed.
    #[error(
        "{path} exists, but was not created by `trireme prepare`; move it away, or choose another folder"
    )]
    Occupied {
        /// The file.
        path: PathBuf,
    },
    /// An output folder that is a file.
    #[error("the output {path} is a file; name a folder, which need not exist")]
    OutputIsFile {
        /// The file.
        path: PathBuf,
    },
    /// A folder without a complete prepared corpus.
    #[error(
        "{folder} contains no prepared corpus (no prepare.json); run `trireme prepare INPUT… --out {}`",
        quoted(&folder.to_string_lossy())
    )]
    NotPrepared {
        /// The folder.
        folder: PathBuf,
    },
    /// A report of an earlier preparation that cannot be understood.
    #[error("{path} is damaged, or from another version of Trireme; prepare the corpus again")]
    Report {
        /// The report file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: serde_json::Error,
    },

    /// A tokenizer that cannot be loaded.
    #[error("cannot load the tokenizer {path}; expected a Hugging Face tokenizer.json")]
    LoadTokenizer {
        /// The tokenizer's file.
        path: PathBuf,
        /// The tokenizer library's reason.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// The tokenizer of a corpus is not the one that was written.
    #[error(
        "{path} is damaged: it is not the tokenizer that the corpus was prepared with; prepare the corpus again"
    )]
    TokenizerDamaged {
        /// The tokenizer's file.
        path: PathBuf,
    },
    /// A folder with no tokenizer, or with two.
    #[error("{folder} contains {found}; expected either tokenizer.json or tokenizer.bytes.json")]
    TokenizerFolder {
        /// The folder.
        folder: PathBuf,
        /// What was found instead.
        found: &'static str,
    },
    /// A `tokenizer_config.json` that is not JSON.
    #[error(
        "{path} is not valid JSON; download it again, or remove it to use the tokenizer without its settings"
    )]
    TokenizerConfig {
        /// The file.
        path: PathBuf,
        /// The mistake.
        source: serde_json::Error,
    },
    /// A chat template that is not valid.
    #[error("the chat template of {path} is not valid")]
    ChatTemplate {
        /// The file, or the folder of the model.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// A tokenizer cannot be written down.
    #[error("cannot describe the tokenizer")]
    DescribeTokenizer {
        /// The tokenizer library's reason.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// Training a tokenizer failed.
    #[error("cannot train a BPE tokenizer")]
    TrainTokenizer {
        /// The tokenizer library's reason.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// The tokenizer refused a text.
    #[error("the tokenizer cannot encode {text_bytes} bytes of text")]
    Encode {
        /// The size of the text.
        text_bytes: usize,
        /// The tokenizer library's reason.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// The tokenizer refused a sequence of tokens.
    #[error("the tokenizer cannot decode {num_tokens} tokens")]
    Decode {
        /// The number of tokens.
        num_tokens: usize,
        /// The tokenizer library's reason.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },

    /// A vocabulary size that no token file can have.
    #[error("a vocabulary of {vocabulary_size} is not in 1..={}", crate::VOCABULARY_SIZE_MAX)]
    VocabularySize {
        /// The size asked for.
        vocabulary_size: usize,
    },
    /// A file that is something else than a token file.
    #[error("{path} is not a token file; create token files from text with `trireme prepare`")]
    NotATokenFile {
        /// The file.
        path: PathBuf,
    },
    /// A token file of another version.
    #[error(
        "{path} is a token file of version {version}, but this version of Trireme reads version 1; the file is newer \
         or damaged: prepare the corpus again"
    )]
    TokenFileVersion {
        /// The file.
        path: PathBuf,
        /// The version that it claims.
        version: u32,
    },
    /// A token file that is shorter or longer than its header says, or than it was when it was opened.
    #[error(
        "{path} has {actual_bytes} bytes instead of {expected_bytes}: it was truncated or overwritten; \
         prepare the corpus again"
    )]
    TokenFileLength {
        /// The file.
        path: PathBuf,
        /// The size that it should have.
        expected_bytes: u64,
        /// The size that it has.
        actual_bytes: u64,
    },
    /// A token file whose bytes are not those that were written.
    #[error("{path} is damaged: {what}; prepare the corpus again")]
    TokenFileDamaged {
        /// The file.
        path: PathBuf,
        /// Which part is wrong.
        what: String,
    },
    /// A flat token file of an impossible size.
    #[error("{path} has {actual_bytes} bytes; a flat token file contains at least one u16 and nothing else")]
    FlatFileLength {
        /// The file.
        path: PathBuf,
        /// Its size.
        actual_bytes: u64,
    },
    /// A token outside the vocabulary.
    #[error(
        "{path}: token {index} has the id {id}, outside the vocabulary of {vocabulary_size}; the file was created \
         with another tokenizer, or overwritten"
    )]
    TokenOutsideVocabulary {
        /// The token file.
        path: PathBuf,
        /// The token's index in the file.
        index: u64,
        /// Its id.
        id: u32,
        /// Every id must lie below this.
        vocabulary_size: usize,
    },
    /// A corpus too small to cut one window from.
    #[error(
        "{num_tokens} tokens are too few for one sequence of {seq_len} and the token after it; use more text or a \
         smaller seq_len"
    )]
    TooFewTokens {
        /// The tokens there are.
        num_tokens: u64,
        /// The sequence length asked for.
        seq_len: usize,
    },
}
