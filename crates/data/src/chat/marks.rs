//! Private-use characters that mark positions in rendered text. They are removed after rendering.

use super::text::AnnotatedText;
use aho_corasick::{AhoCorasick, MatchKind};
use serde_json::Value;

pub(super) const ANSWER_BEGINS: char = '\u{10fff0}';
pub(super) const ANSWER_ENDS: char = '\u{10fff1}';

/// Inserted after the first character of each special-token name in a message, so that the name is not encoded as the special token.
const LITERAL: char = '\u{10fff2}';

pub(super) const MARKS: [char; 3] = [ANSWER_BEGINS, ANSWER_ENDS, LITERAL];

/// Whether a string or key within a value contains a character that is used as a mark.
pub(super) fn has_mark(value: &Value) -> bool {
    match value {
        Value::String(text) => text.contains(MARKS),
        Value::Array(values) => values.iter().any(has_mark),
        Value::Object(members) => members.iter().any(|(key, value)| key.contains(MARKS) || has_mark(value)),
        _ => false,
    }
}

/// Maximum length of a special-token name in bytes. Longer names are not marked; only a maliciously crafted tokenizer
/// has them.
const NAME_BYTES_MAX: usize = 128;

/// Names of special tokens that are treated as plain text where they occur in messages.
#[derive(Debug, Clone)]
pub(super) struct LiteralNames {
    sorted: Vec<String>,
    matcher: AhoCorasick,
}

impl PartialEq for LiteralNames {
    fn eq(&self, other: &Self) -> bool {
        self.sorted == other.sorted
    }
}

impl LiteralNames {
    pub(super) fn new(mut names: Vec<String>) -> Self {
        names.retain(|name| (1..=NAME_BYTES_MAX).contains(&name.len()));
        names.sort_unstable();
        names.dedup();
        let matcher = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(&names);
        LiteralNames { sorted: names, matcher: matcher.expect("the names are few and short") }
    }

    /// Marks the names in a message, and returns their number. The role is not changed, because templates compare it.
    pub(super) fn mark_message(&self, message: &mut Value) -> u64 {
        let Value::Object(fields) = message else { return self.mark(message) };
        fields.iter_mut().filter(|(name, _)| *name != "role").map(|(_, value)| self.mark(value)).sum()
    }

    /// Whether a key within a value contains a name. Keys cannot be marked, because templates look them up.
    pub(super) fn is_in_key(&self, value: &Value) -> bool {
        match value {
            Value::Array(values) => values.iter().any(|value| self.is_in_key(value)),
            Value::Object(members) => {
                members.iter().any(|(key, value)| self.matcher.is_match(key) || self.is_in_key(value))
            }
            _ => false,
        }
    }

    /// Marks the names in the strings of a value, and returns their number. If a string ends with a prefix of a name, the
    /// prefix is marked as well, because the template may complete the name.
    fn mark(&self, value: &mut Value) -> u64 {
        match value {
            Value::String(text) => {
                let (marked, num_names) = self.marked(text);
                *text = marked;
                num_names
            }
            Value::Array(values) => values.iter_mut().map(|value| self.mark(value)).sum(),
            Value::Object(members) => members.values_mut().map(|value| self.mark(value)).sum(),
            _ => 0,
        }
    }

    fn marked(&self, text: &str) -> (String, u64) {
        let mut starts: Vec<usize> = self.matcher.find_iter(text).map(|name| name.start()).collect();
        let num_names = starts.len() as u64;
        let is_beginning = |rest: &str| {
            let first = self.sorted.partition_point(|name| name.as_str() < rest);
            self.sorted.get(first).is_some_and(|name| name.starts_with(rest))
        };
        let last = (text.len().saturating_sub(NAME_BYTES_MAX)..text.len())
            .filter(|&start| text.is_char_boundary(start));
        starts.extend(last.filter(|&start| is_beginning(&text[start..])));
        starts.sort_unstable();
        starts.dedup();
        let (mut marked, mut rest) = (String::with_capacity(text.len()), 0);
        for start in starts {
            let after = start + text[start..].chars().next().map_or(0, char::len_utf8);
            marked.push_str(&text[rest..after]);
            marked.push(LITERAL);
            rest = after;
        }
        (marked + &text[rest..], num_names)
    }
}

/// Removes the marks from a rendered text, and returns the positions where they were.
pub(super) fn remove_marks(rendered: &str) -> AnnotatedText {
    let (mut text, mut answers, mut start) = (String::with_capacity(rendered.len()), Vec::new(), None);
    let mut literal = Vec::new();
    for c in rendered.chars() {
        match c {
            ANSWER_BEGINS => start = Some(text.len()),
            ANSWER_ENDS => answers.extend(start.take().map(|start| start..text.len())),
            LITERAL => literal.push(text.len()),
            c => text.push(c),
        }
    }
    AnnotatedText { text, answers, literal, adds_beginning: false, adds_end: false }
}
