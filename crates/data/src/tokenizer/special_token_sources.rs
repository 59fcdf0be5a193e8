//! Special tokens that the post-processor and `tokenizer_config.json` define.

use serde_json::Value;
use tokenizers::{Encoding, PostProcessor, Token};

/// Maximum number of tokens that a post-processor may add to a text. Known ones add one or two.
const PREFIX_AND_SUFFIX_TOKENS_MAX: usize = 16;

/// Returns the special tokens that the post-processor of a tokenizer puts before and after a text.
/// Fails if it adds too many or unknown tokens, or changes the text itself.
pub(super) fn prefix_and_suffix(
    tokenizer: &tokenizers::Tokenizer,
    vocabulary_size: usize,
) -> Result<(Vec<u32>, Vec<u32>), tokenizers::Error> {
    let Some(processor) = tokenizer.get_post_processor() else { return Ok((Vec::new(), Vec::new())) };
    let num_added = processor.added_tokens(false);
    if num_added > PREFIX_AND_SUFFIX_TOKENS_MAX {
        return Err(format!(
            "its post_processor adds {num_added} tokens, more than {PREFIX_AND_SUFFIX_TOKENS_MAX}"
        )
        .into());
    }
    let text = Encoding::from_tokens(vec![Token::new(0, "a".to_owned(), (0, 1))], 0);
    let processed = processor.process(text, None, true)?;
    let (ids, is_special) = (processed.get_ids(), processed.get_special_tokens_mask());
    let is_text = |&index: &usize| is_special[index] == 0;
    let [place] = (0..ids.len()).filter(is_text).collect::<Vec<_>>()[..] else {
        return Err("its post_processor repeats or removes the text".into());
    };
    let (before, after) = (ids[..place].to_vec(), ids[place + 1..].to_vec());
    match before.iter().chain(&after).find(|&&id| id as usize >= vocabulary_size) {
        Some(id) => Err(format!("its post_processor adds the token {id}, which it does not have").into()),
        None => Ok((before, after)),
    }
}

/// Returns the text of a special token such as `eos_token` in a `tokenizer_config.json`.
pub(crate) fn named_token<'a>(config: &'a Value, name: &str) -> Option<&'a str> {
    let token = &config[name];
    token.as_str().or_else(|| token["content"].as_str())
}

/// Returns the name of the end-of-document token in a `tokenizer_config.json`.
pub(super) fn eos_name_in(config: &[u8]) -> Option<String> {
    // A file that is not JSON is treated as empty.
    let config = trireme_base::parse_json(config).unwrap_or_default();
    named_token(&config, "eos_token").map(str::to_owned)
}
