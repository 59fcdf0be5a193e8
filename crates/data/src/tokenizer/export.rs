//! Writing tokenizers in the formats of other programs.

use super::{
    BYTES_END_OF_DOCUMENT, BYTES_TOKENIZER_FILE, END_OF_DOCUMENT_NAMES, Kind, TOKENIZER_FILE, Tokenizer,
};
use crate::DataError;
use serde_json::json;
use sha2::{Digest, Sha256};
use std::fmt::Write;
use tokenizers::AddedToken;
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

impl Tokenizer {
    /// Returns the SHA-256 of the parts that convert between text and ids, in hexadecimal. It does not depend on how a
    /// file is formatted, nor on settings that [are ignored](Tokenizer).
    ///
    /// # Errors
    /// If the tokenizer library cannot serialize the tokenizer.
    pub fn sha256(&self) -> Result<String, DataError> {
        let parts = self.parts().map_err(|source| DataError::DescribeTokenizer { source })?;
        let digest = Sha256::digest(parts.as_bytes());
        Ok(digest.iter().fold(String::with_capacity(2 * digest.len()), |mut text, byte| {
            write!(text, "{byte:02x}").expect("a string takes everything");
            text
        }))
    }

    /// Returns a `tokenizer.json` of the parts that are used.
    fn parts(&self) -> Result<String, tokenizers::Error> {
        match &self.kind {
            Kind::Bytes => byte_level_bpe()?.to_string(false),
            Kind::HuggingFace(inner) => inner.tokenizer.to_string(false),
        }
    }

    /// Returns a [`TOKENIZER_CONFIG_FILE`](crate::TOKENIZER_CONFIG_FILE) for a model that was trained with this
    /// tokenizer. transformers' `AutoTokenizer` reads it together with the [`TOKENIZER_FILE`]. The end-of-document
    /// token is also the `bos_token`, unless the post-processor puts another token before a text.
    pub fn config_json(&self, max_tokens: usize) -> String {
        let name = |id| match &self.kind {
            Kind::Bytes => Some(END_OF_DOCUMENT_NAMES[0].to_owned()),
            Kind::HuggingFace(inner) => inner.tokenizer.id_to_token(id),
        };
        let end = self.end_of_document().and_then(name);
        let beginning = self.prefix_tokens().first().copied().and_then(name);
        let config = json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": max_tokens,
            "clean_up_tokenization_spaces": false,
            "bos_token": beginning.as_ref().or(end.as_ref()),
            "eos_token": end,
        });
        format!("{config:#}\n")
    }

    /// Returns the name and content of the tokenizer's file in the Hugging Face format. [`BYTES_TOKENIZER_FILE`]
    /// becomes a byte-level BPE without merges, with the same ids.
    ///
    /// # Errors
    /// If the tokenizer library cannot serialize the tokenizer.
    pub fn hugging_face_file(&self) -> Result<(&'static str, Vec<u8>), DataError> {
        match self.file() {
            (BYTES_TOKENIZER_FILE, _) => {
                let json = byte_level_bpe().and_then(|tokenizer| tokenizer.to_string(true));
                let json = json.map_err(|source| DataError::DescribeTokenizer { source })?;
                Ok((TOKENIZER_FILE, json.into_bytes()))
            }
            (name, content) => Ok((name, content.to_vec())),
        }
    }
}

/// Creates a byte-level BPE in which each byte's id is its value.
fn byte_level_bpe() -> Result<tokenizers::Tokenizer, tokenizers::Error> {
    let vocabulary: [_; 256] =
        std::array::from_fn(|byte| (byte_character(byte as u8).to_string(), byte as u32));
    let model = BPE::builder().vocab_and_merges(vocabulary, Vec::new()).build()?;
    let byte_level = ByteLevel::default().add_prefix_space(false).use_regex(false);
    let mut tokenizer = tokenizers::Tokenizer::new(model);
    tokenizer.with_pre_tokenizer(Some(byte_level)).with_decoder(Some(byte_level));
    tokenizer.add_special_tokens([AddedToken::from(END_OF_DOCUMENT_NAMES[0], true)])?;
    debug_assert_eq!(tokenizer.token_to_id(END_OF_DOCUMENT_NAMES[0]), Some(BYTES_END_OF_DOCUMENT));
    Ok(tokenizer)
}

/// Returns the character that represents a byte in byte-level BPE: the byte's own character if it is printable,
/// otherwise one of the characters from U+0100 on, in the order of the bytes (Radford et al., "Language models are
/// unsupervised multitask learners", 2019, and the code published with it).
fn byte_character(byte: u8) -> char {
    let is_printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if is_printable(byte) {
        return char::from(byte);
    }
    let num_before = (0..byte).filter(|&byte| !is_printable(byte)).count() as u32;
    char::from_u32(0x100 + num_before).expect("these are characters")
}
