//! Checks that refuse tokenizer files that would make the tokenizer library panic or run without bound.

use base64::decode;
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use tokenizers::{NormalizedString, Normalizer};

/// Maximum factor by which a normalizer or decoder may lengthen a text. Known tokenizers reach a few dozen.
const GROWTH_MAX: usize = 1 << 14;

/// Maximum number of tokens or merges of a model: twice as many as in the largest model in use.
const ENTRIES_MAX: usize = 1 << 20;
/// Maximum number of added tokens: ten times as many as in the tokenizers in use. Every text is searched for all of
/// them.
const ADDED_TOKENS_MAX: usize = 1 << 16;

/// The parts of a `tokenizer.json` that are checked. Vocabulary entries are counted but not stored.
#[derive(Default, Deserialize)]
#[serde(default)]
struct CheckedParts {
    normalizer: Value,
    pre_tokenizer: Value,
    decoder: Value,
    added_tokens: NumEntries,
    model: ModelEntries,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ModelEntries {
    vocab: NumEntries,
    merges: NumEntries,
}

#[derive(Default)]
struct NumEntries(usize);

impl<'de> Deserialize<'de> for NumEntries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(EntryCounter)
    }
}

struct EntryCounter;

impl<'de> Visitor<'de> for EntryCounter {
    type Value = NumEntries;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list or an object")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<NumEntries, A::Error> {
        let mut count = 0;
        while entries.next_element::<IgnoredAny>()?.is_some() {
            count += 1;
        }
        Ok(NumEntries(count))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<NumEntries, A::Error> {
        let mut count = 0;
        while entries.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
            count += 1;
        }
        Ok(NumEntries(count))
    }

    fn visit_unit<E>(self) -> Result<NumEntries, E> {
        Ok(NumEntries(0))
    }
}

/// Checks a `tokenizer.json` before the library parses it.
pub(super) fn check(json: &[u8]) -> Result<(), tokenizers::Error> {
    if json.starts_with("\u{feff}".as_bytes()) {
        return Err("it begins with a byte order mark, which JSON must not have; save it without one".into());
    }
    let CheckedParts { normalizer, pre_tokenizer, decoder, added_tokens, model } =
        serde_json::from_slice(json)?;
    for (key, part) in [("normalizer", normalizer), ("pre_tokenizer", pre_tokenizer), ("decoder", decoder)] {
        let growth = growth(&part).map_err(|reason| format!("its {key} {reason}"))?;
        if growth > GROWTH_MAX {
            return Err(format!("its {key} can expand text by more than a factor of {GROWTH_MAX}").into());
        }
    }
    for (key, NumEntries(count), count_max) in [
        ("model.vocab", &model.vocab, ENTRIES_MAX),
        ("model.merges", &model.merges, ENTRIES_MAX),
        ("added_tokens", &added_tokens, ADDED_TOKENS_MAX),
    ] {
        if *count > count_max {
            return Err(format!("its {key} has {count} entries, more than {count_max}").into());
        }
    }
    if model.vocab.0 == 0 {
        return Err("its model.vocab is empty or missing, so it has no token for any text".into());
    }
    Ok(())
}

/// Refuses added tokens that the normalizer turns into empty text. The library would match them at every position,
/// without end.
pub(super) fn check_added_tokens(tokenizer: &tokenizers::Tokenizer) -> Result<(), tokenizers::Error> {
    let Some(normalizer) = tokenizer.get_normalizer() else { return Ok(()) };
    for token in tokenizer.get_added_tokens_decoder().values().filter(|token| token.normalized) {
        let mut text = NormalizedString::from(&token.content[..]);
        normalizer.normalize(&mut text)?;
        if text.get().is_empty() {
            return Err(format!("its normalizer erases the added token {:?}", token.content).into());
        }
    }
    Ok(())
}

/// Returns the maximum factor by which a part can lengthen a text, apart from a small constant.
fn growth(part: &Value) -> Result<usize, &'static str> {
    let (own, inner) = match part {
        Value::Array(parts) => (1, parts.iter().collect()),
        Value::Object(fields) => (growth_by_fields(fields)?, fields.values().collect()),
        _ => (1, Vec::new()),
    };
    inner.into_iter().try_fold(own, |product, part| Ok(product.saturating_mul(growth(part)?)))
}

fn growth_by_fields(fields: &Map<String, Value>) -> Result<usize, &'static str> {
    let kind = fields.get("type").and_then(Value::as_str).unwrap_or_default();
    if kind == "Precompiled" || fields.contains_key("precompiled_charsmap") {
        let map = fields.get("precompiled_charsmap").and_then(Value::as_str);
        return map.and_then(longest_replacement).ok_or("has a damaged precompiled_charsmap");
    }
    if kind == "FixedLength" && fields.get("length").is_some_and(|length| length == 0) {
        return Err("splits text into pieces of length 0");
    }
    let pattern = |kind| fields.get("pattern").and_then(|pattern| pattern.get(kind)).and_then(Value::as_str);
    let (literal, regex) = (pattern("String"), pattern("Regex"));
    if literal.or(regex) == Some("") {
        return Err("has an empty pattern, which matches everywhere");
    }
    let added = ["content", "prepend"].iter().find_map(|key| fields.get(*key)?.as_str());
    let added = added.map_or(0, str::len);
    Ok(match literal {
        Some(literal) => added.div_ceil(literal.len()).max(1),
        // A regular expression may match between any two characters.
        None => added + 1,
    })
}

/// Returns the length of the longest replacement in a character map of SentencePiece, given in base64; `None` if
/// following the map could read outside it.
///
/// The map consists of the size of a trie in bytes, the trie, and NUL-terminated texts. The trie is a double array of
/// 32-bit units (Yata, Oono, Morita, Fuketa, Sumitomo and Aoe, "A compact static double-array keeping character codes",
/// 2007). From a node, byte `b` leads to the unit at `node ^ b` if that unit has the label `b`. The next node is at
/// `node ^ b ^ offset`. If the unit is marked as having a leaf, that node's unit stores the offset of a text.
fn longest_replacement(base64: &str) -> Option<usize> {
    let map = decode(base64).ok()?;
    let (trie_bytes, rest) = map.split_first_chunk()?;
    let (trie, texts) = rest.split_at_checked(u32::from_le_bytes(*trie_bytes) as usize / 4 * 4)?;
    let units: Vec<u32> = trie.as_chunks().0.iter().map(|&unit| u32::from_le_bytes(unit)).collect();
    let texts = str::from_utf8(texts).ok()?;
    let offset = |unit: u32| ((unit >> 10) << ((unit & 1 << 9) >> 6)) as usize;
    // Any byte may follow a node, so all 256 positions must be inside.
    let is_node = |node: usize| node | 0xff < units.len();
    let leads_inside = |(index, &unit): (usize, &u32)| {
        let is_label = unit >> 31 == 0;
        let has_leaf = unit >> 8 & 1 == 1;
        let node = index ^ offset(unit);
        let is_text = || texts.is_char_boundary((units[node] & !(1 << 31)) as usize);
        !is_label || (is_node(node) && (!has_leaf || is_text()))
    };
    let is_whole = is_node(offset(*units.first()?)) && units.iter().enumerate().all(leads_inside);
    is_whole.then(|| texts.split('\0').map(str::len).max().unwrap_or(0).max(1))
}

/// Calls the tokenizer library, and turns a panic into an error. The library panics over some faults in a tokenizer,
/// such as merges that lack a required prefix, or a decoder that removes the end of an empty token. A panic poisons
/// only the library's own caches.
pub(super) fn catch_panic<T>(
    call: impl FnOnce() -> Result<T, tokenizers::Error>,
) -> Result<T, tokenizers::Error> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|payload| {
        let message = payload.downcast_ref::<String>().map(String::as_str);
        let message = message.or(payload.downcast_ref::<&str>().copied()).unwrap_or("without a message");
        Err(format!("the tokenizer library panicked: {message}").into())
    })
}
