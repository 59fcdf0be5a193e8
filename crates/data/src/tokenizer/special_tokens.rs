//! Special tokens of a tokenizer: the tokens before and after a text, and the names of special tokens within a text.

use super::checks::catch_panic;
use super::special_token_sources::eos_name_in;
use super::{HuggingFace, Kind, Tokenizer};
use crate::DataError;
use std::ops::Range;
use tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::metaspace::PrependScheme;

impl HuggingFace {
    /// Returns a tokenizer that encodes names of special tokens as plain text. It is either for the beginning of a text
    /// or for a later part of one.
    fn literal_tokenizer(&self, is_beginning: bool) -> &tokenizers::Tokenizer {
        let [of_beginning, of_later_part] = &self.literal_tokenizers;
        let tokenizer = if is_beginning { of_beginning } else { of_later_part };
        tokenizer.get_or_init(|| {
            let mut tokenizer = self.tokenizer.clone();
            tokenizer.set_encode_special_tokens(true);
            if !is_beginning && let Some(mut pre_tokenizer) = tokenizer.get_pre_tokenizer().cloned() {
                omit_first_space(&mut pre_tokenizer);
                tokenizer.with_pre_tokenizer(Some(pre_tokenizer));
            }
            Box::new(tokenizer)
        })
    }
}

/// Disables the space before the first word of a text, if the pre-tokenizer adds a space only there.
fn omit_first_space(pre_tokenizer: &mut PreTokenizerWrapper) {
    match pre_tokenizer {
        PreTokenizerWrapper::Metaspace(metaspace) if metaspace.prepend_scheme == PrependScheme::First => {
            metaspace.prepend_scheme = PrependScheme::Never;
        }
        PreTokenizerWrapper::Sequence(steps) => steps.as_mut().iter_mut().for_each(omit_first_space),
        _ => {}
    }
}

impl Tokenizer {
    /// The special tokens that begin a text, according to the post-processor: often none or one.
    pub fn prefix_tokens(&self) -> &[u32] {
        self.hugging_face().map_or(&[], |inner| &inner.prefix_tokens)
    }

    /// Returns the tokens that [`prepare`](crate::prepare) puts after a document: the post-processor's, followed by
    /// [`end_of_document`](Self::end_of_document) unless they already end with it.
    pub(crate) fn suffix_tokens(&self) -> Vec<u32> {
        let after: &[u32] = self.hugging_face().map_or(&[], |inner| &inner.post_processor_suffix);
        let end = self.end_of_document().filter(|end| after.last() != Some(end));
        after.iter().copied().chain(end).collect()
    }

    /// Returns the ids and names of the special tokens whose name is not empty.
    fn special_tokens(&self) -> impl Iterator<Item = (u32, &str)> {
        let inner = self.hugging_face().into_iter();
        let added = inner.flat_map(|inner| inner.tokenizer.get_added_vocabulary().get_added_tokens_decoder());
        let special = added.filter(|(_, token)| token.special && !token.content.is_empty());
        special.map(|(&id, token)| (id, &*token.content))
    }

    pub(crate) fn special_token_names(&self) -> Vec<String> {
        self.special_tokens().map(|(_, name)| name.to_owned()).collect()
    }

    /// Encodes as [`encode_with_offsets`](Self::encode_with_offsets) does, but encodes special-token names from messages as
    /// plain text. A name is from a message if one of the positions `literal` is inside the name or at its end. It is
    /// encoded together with the text around it, up to the next special tokens.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub(crate) fn encode_with_literal(
        &self,
        text: &str,
        literal: &[usize],
        out: &mut Vec<u32>,
        offsets: &mut Vec<Range<usize>>,
    ) -> Result<(), DataError> {
        let Some(inner) = self.hugging_face().filter(|_| !literal.is_empty()) else {
            return self.encode_with_offsets(text, out, offsets);
        };
        let (mut ids, mut spans) = (Vec::new(), Vec::new());
        self.encode_with_offsets(text, &mut ids, &mut spans)?;
        let is_special = |token: usize| self.special_token_name(ids[token]).is_some();
        let is_literal = |token: usize| {
            let first_after = literal.partition_point(|&position| position <= spans[token].start);
            literal.get(first_after).is_some_and(|&position| position <= spans[token].end)
        };
        let mut start = 0;
        while start < ids.len() {
            if is_special(start) && !is_literal(start) {
                out.push(ids[start]);
                offsets.push(spans[start].clone());
                start += 1;
                continue;
            }
            let end = (start..ids.len()).find(|&token| is_special(token) && !is_literal(token));
            let stretch = start..end.unwrap_or(ids.len());
            if stretch.clone().any(is_special) {
                let from = start.checked_sub(1).map_or(0, |before| spans[before].end);
                let to = end.map_or(text.len(), |end| spans[end].start);
                let encoding =
                    catch_panic(|| inner.literal_tokenizer(from == 0).encode(&text[from..to], false))
                        .map_err(|source| DataError::Encode { text_bytes: to - from, source })?;
                out.extend_from_slice(encoding.get_ids());
                offsets.extend(encoding.get_offsets().iter().map(|&(start, end)| from + start..from + end));
            } else {
                out.extend_from_slice(&ids[stretch.clone()]);
                offsets.extend_from_slice(&spans[stretch.clone()]);
            }
            start = stretch.end;
        }
        Ok(())
    }

    /// Returns the ids of the special tokens whose names occur in a text, in ascending order.
    pub fn special_tokens_in(&self, text: &str) -> Vec<u32> {
        let named = self.special_tokens().filter(|(_, name)| text.contains(name));
        let mut ids: Vec<u32> = named.map(|(id, _)| id).collect();
        ids.sort_unstable();
        ids
    }

    /// Returns the id of the special token with this name.
    pub fn special_token_id(&self, name: &str) -> Option<u32> {
        self.special_tokens().find(|(_, other)| *other == name).map(|(id, _)| id)
    }

    /// Replaces the end-of-document token. An id outside the vocabulary is ignored.
    pub(super) fn set_end_of_document(&mut self, end: Option<u32>) {
        if let Kind::HuggingFace(inner) = &mut self.kind
            && end.is_none_or(|end| (end as usize) < inner.vocabulary_size)
        {
            inner.end_of_document = end;
        }
    }

    /// Replaces the end-of-document token by the `eos_token` of a `tokenizer_config.json`, if the file names one and
    /// the tokenizer has it.
    pub(super) fn with_config(mut self, config: &[u8]) -> Self {
        if let Kind::HuggingFace(inner) = &mut self.kind
            && let Some(name) = eos_name_in(config)
        {
            match inner.tokenizer.token_to_id(&name) {
                Some(end) => self.set_end_of_document(Some(end)),
                None => inner.unknown_end_of_document = Some(name),
            }
        }
        self
    }

    /// The `eos_token` of the `tokenizer_config.json`, if the tokenizer does not have it.
    pub(crate) fn unknown_end_of_document(&self) -> Option<&str> {
        self.hugging_face()?.unknown_end_of_document.as_deref()
    }
}
