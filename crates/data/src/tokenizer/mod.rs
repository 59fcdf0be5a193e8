//! Tokenizers, which convert between text and token ids.

mod checks;
mod export;
mod special_token_sources;
mod special_tokens;
mod stream;
mod train;

pub(crate) use special_token_sources::named_token;
pub use stream::StreamDecoder;
pub(crate) use train::BPE_VOCABULARY_SIZE_MIN;

use crate::{DataError, PrepareReport, Prompt, VOCABULARY_SIZE_MAX};
use checks::catch_panic;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use tokenizers::{DecoderWrapper, ModelWrapper, PostProcessorWrapper};
use trireme_base::read_at_most;

/// Name of the file of a Hugging Face tokenizer in the folder of a prepared corpus or of a model.
pub const TOKENIZER_FILE: &str = "tokenizer.json";
/// Name of the file that transformers reads next to [`TOKENIZER_FILE`]: it contains the tokenizer class, and the tokens
/// that begin and end a text.
pub const TOKENIZER_CONFIG_FILE: &str = "tokenizer_config.json";
/// Name of the file that stands for the bytes tokenizer in the folder of a prepared corpus or of a model.
pub const BYTES_TOKENIZER_FILE: &str = "tokenizer.bytes.json";

const BYTES_TOKENIZER: &str =
    "{\"tokenizer\": \"bytes\", \"vocabulary_size\": 257, \"end_of_document\": 256}\n";
const BYTES_END_OF_DOCUMENT: u32 = 256;
/// Maximum size of a tokenizer file, several times the size of the largest file in use.
const TOKENIZER_BYTES_MAX: u64 = 256 << 20;
/// The names that known tokenizers give to the end-of-document token. The first name that a tokenizer has is used if no
/// [`TOKENIZER_CONFIG_FILE`] names another token.
const END_OF_DOCUMENT_NAMES: [&str; 5] = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>"];

/// A tokenizer, which converts between text and token ids.
///
/// Encoding depends only on the text: padding, truncation and dropout of a `tokenizer.json` are ignored.
/// [`encode`](Self::encode) adds no tokens; the tokens that the post-processor puts before a text are
/// [`prefix_tokens`](Self::prefix_tokens). The name of a special token within a text is encoded as that token, as in the
/// Hugging Face library.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    kind: Kind,
}

#[derive(Debug, Clone)]
enum Kind {
    Bytes,
    HuggingFace(Box<HuggingFace>),
}

#[derive(Debug, Clone)]
struct HuggingFace {
    tokenizer: tokenizers::Tokenizer,
    /// The content of the file, which is saved unchanged.
    json: Vec<u8>,
    vocabulary_size: usize,
    /// Special tokens that the post-processor puts before a text.
    prefix_tokens: Vec<u32>,
    /// Special tokens that the post-processor puts after a text.
    post_processor_suffix: Vec<u32>,
    end_of_document: Option<u32>,
    /// The configured name of the end-of-document token, if the tokenizer has no token of that name.
    unknown_end_of_document: Option<String>,
    /// Tokenizers that encode names of special tokens as plain text, created when first needed: for the beginning of a
    /// text, and for a later part of one.
    literal_tokenizers: [OnceLock<Box<tokenizers::Tokenizer>>; 2],
}

impl PartialEq for Tokenizer {
    fn eq(&self, other: &Self) -> bool {
        (self.file(), self.end_of_document()) == (other.file(), other.end_of_document())
    }
}

impl Eq for Tokenizer {}

/// The treatment of the space at which a long text is split into pieces, so that the pieces have the same tokens as the
/// whole text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SpaceAtSplit {
    /// The space begins the next piece. Tokenizers such as GPT-2's have tokens such as `Ġword`.
    Keep,
    /// The space is dropped. Tokenizers such as SentencePiece put a space before every text.
    Drop,
}

impl Tokenizer {
    /// Returns the bytes tokenizer: the bytes of a text are the ids 0 to 255, and 256 is the end-of-document token. It
    /// needs no file and can encode every text.
    pub fn bytes() -> Self {
        Tokenizer { kind: Kind::Bytes }
    }

    /// Reads a Hugging Face `tokenizer.json`. If a [`TOKENIZER_CONFIG_FILE`] next to it names an `eos_token` that the
    /// tokenizer has, that is the end-of-document token.
    ///
    /// # Errors
    /// If a file cannot be read or is larger than 256 MiB, or the file is not a valid tokenizer.
    pub fn from_file(path: &Path) -> Result<Self, DataError> {
        let tokenizer = Self::from_json(read(path)?)
            .map_err(|source| DataError::LoadTokenizer { path: path.to_owned(), source })?;
        Ok(tokenizer.with_config(&config_in(path.parent().unwrap_or(Path::new("")))?))
    }

    /// Loads the tokenizer of a prepared corpus or a model from [`TOKENIZER_FILE`] or [`BYTES_TOKENIZER_FILE`].
    ///
    /// # Errors
    /// If the folder contains neither file or both, the file is not a valid tokenizer, or it is not the tokenizer that
    /// the corpus was prepared with.
    pub fn load(folder: &Path) -> Result<Self, DataError> {
        let (name, content) = Self::stored_file(folder)?;
        let mut tokenizer = Self::from_stored(folder, name, content)?.with_config(&config_in(folder)?);
        // The end-of-document token of a corpus is stored only in its report.
        if let Ok(report) = PrepareReport::read(folder) {
            tokenizer.set_end_of_document(report.end_of_document);
        }
        Ok(tokenizer)
    }

    /// Returns the name and content of the tokenizer's file in the folder of a corpus or a model. The file of a corpus
    /// is compared with the checksum in the report.
    pub(crate) fn stored_file(folder: &Path) -> Result<(&'static str, Vec<u8>), DataError> {
        let file = single_tokenizer_file(folder, |name| {
            let path = folder.join(name);
            if path.exists() { read(&path).map(Some) } else { Ok(None) }
        })?;
        // The checksum is absent for models, and in reports of earlier versions.
        let written = PrepareReport::read(folder).ok().and_then(|report| report.tokenizer_crc32);
        if written.is_some_and(|written| crc32fast::hash(&file.1) != written) {
            return Err(DataError::TokenizerDamaged { path: folder.join(file.0) });
        }
        Ok(file)
    }

    /// Loads a tokenizer as [`load`](Self::load) does, but from files that `read` returns by name. `read` returns
    /// `None` if a file does not exist. `folder` names the origin in errors.
    ///
    /// # Errors
    /// If there is neither file or both, the file is not a valid tokenizer, or `read` fails.
    pub fn from_files<E: From<DataError>>(
        folder: &Path,
        read: impl Fn(&'static str) -> Result<Option<Vec<u8>>, E>,
    ) -> Result<Self, E> {
        let (name, content) = single_tokenizer_file(folder, &read)?;
        let config = read(TOKENIZER_CONFIG_FILE)?.unwrap_or_default();
        Ok(Self::from_stored(folder, name, content)?.with_config(&config))
    }

    /// Appends the tokens of a prompt to `out`, with the beginning tokens if the prompt needs them.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_prompt(&self, prompt: &Prompt, out: &mut Vec<u32>) -> Result<(), DataError> {
        if prompt.adds_beginning {
            out.extend_from_slice(self.prefix_tokens());
        }
        self.encode_with_literal(&prompt.text, &prompt.literal, out, &mut Vec::new())
    }

    fn from_stored(folder: &Path, name: &str, content: Vec<u8>) -> Result<Self, DataError> {
        match name {
            BYTES_TOKENIZER_FILE => Ok(Self::bytes()),
            _ => Self::from_json(content)
                .map_err(|source| DataError::LoadTokenizer { path: folder.join(name), source }),
        }
    }

    /// Writes the tokenizer into `folder` so that [`load`](Self::load) can read it, and returns the path of the file. A
    /// loaded `tokenizer.json` is written back unchanged.
    ///
    /// # Errors
    /// If the file cannot be written. An existing file is then unchanged.
    pub fn save(&self, folder: &Path) -> Result<PathBuf, DataError> {
        let (name, content) = self.file();
        let path = folder.join(name);
        crate::files::replace(&path, content)?;
        Ok(path)
    }

    /// Returns the name and content of the file that [`save`](Self::save) writes.
    pub fn file(&self) -> (&'static str, &[u8]) {
        match &self.kind {
            Kind::Bytes => (BYTES_TOKENIZER_FILE, BYTES_TOKENIZER.as_bytes()),
            Kind::HuggingFace(inner) => (TOKENIZER_FILE, &inner.json[..]),
        }
    }

    fn hugging_face(&self) -> Option<&HuggingFace> {
        match &self.kind {
            Kind::Bytes => None,
            Kind::HuggingFace(inner) => Some(inner),
        }
    }

    /// The vocabulary size: the largest id plus one.
    pub fn vocabulary_size(&self) -> usize {
        self.hugging_face().map_or(BYTES_END_OF_DOCUMENT as usize + 1, |inner| inner.vocabulary_size)
    }

    /// The id of the end-of-document token, if the tokenizer has one. [`prepare`](crate::prepare) puts it after each
    /// document.
    pub fn end_of_document(&self) -> Option<u32> {
        self.hugging_face().map_or(Some(BYTES_END_OF_DOCUMENT), |inner| inner.end_of_document)
    }

    /// Appends the tokens of `text` to `out`.
    ///
    /// # Errors
    /// If the tokenizer has no token for a part of the text. The bytes tokenizer never fails.
    pub fn encode(&self, text: &str, out: &mut Vec<u32>) -> Result<(), DataError> {
        match &self.kind {
            Kind::Bytes => out.extend(text.bytes().map(u32::from)),
            Kind::HuggingFace(inner) => {
                let encoding = catch_panic(|| inner.tokenizer.encode_fast(text, false))
                    .map_err(|source| DataError::Encode { text_bytes: text.len(), source })?;
                out.extend_from_slice(encoding.get_ids());
            }
        }
        Ok(())
    }

    /// Appends the tokens of `text` to `out`, and the byte range of each token in the text to `offsets`.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_with_offsets(
        &self,
        text: &str,
        out: &mut Vec<u32>,
        offsets: &mut Vec<Range<usize>>,
    ) -> Result<(), DataError> {
        match &self.kind {
            Kind::Bytes => {
                out.extend(text.bytes().map(u32::from));
                offsets.extend((0..text.len()).map(|byte| byte..byte + 1));
            }
            Kind::HuggingFace(inner) => {
                let encoding = catch_panic(|| inner.tokenizer.encode(text, false))
                    .map_err(|source| DataError::Encode { text_bytes: text.len(), source })?;
                out.extend_from_slice(encoding.get_ids());
                offsets.extend(encoding.get_offsets().iter().map(|&(start, end)| start..end));
            }
        }
        Ok(())
    }

    /// Returns the text of `ids`. Special tokens, and ids without a token, are left out. Bytes that are not valid UTF-8
    /// become U+FFFD.
    ///
    /// # Errors
    /// If the tokenizer cannot join the tokens. The bytes tokenizer never fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String, DataError> {
        match &self.kind {
            Kind::Bytes => {
                let bytes: Vec<u8> = ids.iter().filter_map(|&id| u8::try_from(id).ok()).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            // The library subtracts one from the number of tokens.
            Kind::HuggingFace(_) if ids.is_empty() => Ok(String::new()),
            Kind::HuggingFace(inner) => catch_panic(|| inner.tokenizer.decode(ids, true))
                .map_err(|source| DataError::Decode { num_tokens: ids.len(), source }),
        }
    }

    /// Returns the name of a special token, which [`decode`](Self::decode) leaves out; `None` for the id of an ordinary
    /// token.
    pub fn special_token_name(&self, id: u32) -> Option<&str> {
        match &self.kind {
            Kind::Bytes => (id == BYTES_END_OF_DOCUMENT).then_some(END_OF_DOCUMENT_NAMES[0]),
            Kind::HuggingFace(inner) => {
                let token = inner.tokenizer.get_added_vocabulary().get_added_tokens_decoder().get(&id)?;
                token.special.then_some(&token.content)
            }
        }
    }

    /// Returns the length in bytes of the text of `ids`, without special tokens. The ids may begin or end within a character. A part of a
    /// character counts as its bytes with a byte-level decoder, and as the 3 bytes of U+FFFD with others.
    ///
    /// # Errors
    /// As [`decode`](Self::decode).
    pub fn num_bytes(&self, ids: &[u32]) -> Result<u64, DataError> {
        match &self.kind {
            Kind::Bytes => Ok(ids.iter().filter(|&&id| u8::try_from(id).is_ok()).count() as u64),
            Kind::HuggingFace(inner) => {
                let tokenizer = &inner.tokenizer;
                if !matches!(tokenizer.get_decoder(), Some(DecoderWrapper::ByteLevel(_))) {
                    return Ok(self.decode(ids)?.len() as u64);
                }
                let added = tokenizer.get_added_tokens_decoder();
                let token_bytes = |id: &u32| match added.get(id) {
                    Some(token) if token.special => 0,
                    Some(token) => token.content.len(),
                    // Each character of a byte-level token represents one byte.
                    None => tokenizer.id_to_token(*id).map_or(0, |text| text.chars().count()),
                };
                Ok(ids.iter().map(|id| token_bytes(id) as u64).sum())
            }
        }
    }

    /// Determines the treatment of spaces by encoding two words with and without a split.
    pub(crate) fn space_at_split(&self) -> Result<SpaceAtSplit, DataError> {
        let ids = |texts: &[&str]| -> Result<Vec<u32>, DataError> {
            let mut ids = Vec::new();
            texts.iter().try_for_each(|text| self.encode(text, &mut ids))?;
            Ok(ids)
        };
        let whole = ids(&["one two"])?;
        let dropping = ids(&["one", " two"])? != whole && ids(&["one", "two"])? == whole;
        Ok(if dropping { SpaceAtSplit::Drop } else { SpaceAtSplit::Keep })
    }

    fn from_json(json: Vec<u8>) -> Result<Self, tokenizers::Error> {
        checks::check(&json)?;
        let mut tokenizer = catch_panic(|| {
            let tokenizer = tokenizers::Tokenizer::from_bytes(&json)?;
            checks::check_added_tokens(&tokenizer)?;
            Ok(tokenizer)
        })?;
        tokenizer.with_truncation(None)?.with_padding(None);
        if let ModelWrapper::BPE(model) = tokenizer.get_model()
            && model.dropout.is_some()
        {
            let mut model = model.clone();
            model.dropout = None;
            tokenizer.with_model(model);
        }
        let largest = tokenizer.get_vocab(true).into_values().max().ok_or("it has no tokens")?;
        let vocabulary_size = largest as usize + 1;
        if vocabulary_size > VOCABULARY_SIZE_MAX {
            return Err(format!("its largest id is {largest}, above {}", VOCABULARY_SIZE_MAX - 1).into());
        }
        let (prefix_tokens, ending) =
            catch_panic(|| special_token_sources::prefix_and_suffix(&tokenizer, vocabulary_size))?;
        tokenizer.with_post_processor(None::<PostProcessorWrapper>);
        let end_of_document = END_OF_DOCUMENT_NAMES.iter().find_map(|name| tokenizer.token_to_id(name));
        let inner = HuggingFace {
            tokenizer,
            json,
            vocabulary_size,
            prefix_tokens,
            post_processor_suffix: ending,
            end_of_document,
            unknown_end_of_document: None,
            literal_tokenizers: Default::default(),
        };
        Ok(Tokenizer { kind: Kind::HuggingFace(Box::new(inner)) })
    }
}

/// Returns the name of the end-of-document token in the [`TOKENIZER_CONFIG_FILE`] next to a tokenizer's file.
pub(crate) fn eos_name_next_to(tokenizer: &Path) -> Result<Option<String>, DataError> {
    let config = config_in(tokenizer.parent().unwrap_or(Path::new("")))?;
    Ok(special_token_sources::eos_name_in(&config))
}

/// Reads the [`TOKENIZER_CONFIG_FILE`] of a folder; empty if there is none.
fn config_in(folder: &Path) -> Result<Vec<u8>, DataError> {
    let path = folder.join(TOKENIZER_CONFIG_FILE);
    if path.is_file() { read(&path) } else { Ok(Vec::new()) }
}

fn single_tokenizer_file<E: From<DataError>>(
    folder: &Path,
    read: impl Fn(&'static str) -> Result<Option<Vec<u8>>, E>,
) -> Result<(&'static str, Vec<u8>), E> {
    let refuse = |found| Err(DataError::TokenizerFolder { folder: folder.to_owned(), found }.into());
    match (read(TOKENIZER_FILE)?, read(BYTES_TOKENIZER_FILE)?) {
        (Some(_), Some(_)) => refuse("two tokenizers"),
        (Some(json), None) => Ok((TOKENIZER_FILE, json)),
        (None, Some(mark)) => Ok((BYTES_TOKENIZER_FILE, mark)),
        (None, None) => refuse("no tokenizer"),
    }
}

/// Reads a tokenizer's file. Fails if the file is too large for a tokenizer.
fn read(path: &Path) -> Result<Vec<u8>, DataError> {
    read_at_most(path, TOKENIZER_BYTES_MAX)
        .map_err(|source| DataError::Read { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests;
