//! Marks in text that a template renders, in characters of the private use area. They are removed again.

use super::Answered;
use serde_json::Value;

/// Precedes text that the model should learn.
pub(super) const ANSWER_BEGINS: char = '\u{10fff0}';
/// Follows text that the model should learn.
pub(super) const ANSWER_ENDS: char = '\u{10fff1}';

/// Whether a string within a value contains a character that serves as a mark.
pub(super) fn has_mark(value: &Value) -> bool {
    match value {
        Value::String(text) => text.contains([ANSWER_BEGINS, ANSWER_ENDS]),
        Value::Array(values) => values.iter().any(has_mark),
        Value::Object(members) => members.values().any(has_mark),
        _ => false,
    }
}

/// Removes the marks from a rendered text, and returns which parts they surrounded.
pub(super) fn take_marks(rendered: &str) -> Answered {
    let (mut text, mut answers, mut start) = (String::with_capacity(rendered.len()), Vec::new(), None);
    for c in rendered.chars() {
        match c {
            ANSWER_BEGINS => start = Some(text.len()),
            ANSWER_ENDS => answers.extend(start.take().map(|start| start..text.len())),
            c => text.push(c),
        }
    }
    Answered { text, answers, adds_beginning: false, adds_end: false }
}
