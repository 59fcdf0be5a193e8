//! Marks in text that a template renders, in characters of the private use area. They are removed again.

use super::Answered;
use serde_json::Value;

/// Precedes text that the model should learn.
pub(super) const ANSWER_BEGINS: char = '\u{10fff0}';
/// Follows text that the model should learn.
pub(super) const ANSWER_ENDS: char = '\u{10fff1}';

/// Stands within a text that reads like the name of a special token, after its first character: the message contained that text, so it
/// is not the token.
const LITERAL: char = '\u{10fff2}';

/// Whether a string within a value contains a character that serves as a mark.
pub(super) fn has_mark(value: &Value) -> bool {
    match value {
        Value::String(text) => text.contains([ANSWER_BEGINS, ANSWER_ENDS, LITERAL]),
        Value::Array(values) => values.iter().any(has_mark),
        Value::Object(members) => members.values().any(has_mark),
        _ => false,
    }
}

/// Marks the names of special tokens in the strings of a value as text, and returns how many there were. A beginning of a name at the
/// end of a string is marked as well: the template may continue it.
pub(super) fn mark_literal(value: &mut Value, names: &[String]) -> u64 {
    match value {
        Value::String(text) => {
            let (marked, num_names) = mark_names(text, names);
            *text = marked;
            num_names
        }
        Value::Array(values) => values.iter_mut().map(|value| mark_literal(value, names)).sum(),
        Value::Object(members) => members.values_mut().map(|value| mark_literal(value, names)).sum(),
        _ => 0,
    }
}

fn mark_names(text: &str, names: &[String]) -> (String, u64) {
    let mut firsts: Vec<char> = names.iter().filter_map(|name| name.chars().next()).collect();
    firsts.sort_unstable();
    firsts.dedup();
    let (mut marked, mut num_names) = (String::with_capacity(text.len()), 0);
    for (start, c) in text.char_indices() {
        marked.push(c);
        if !firsts.contains(&c) {
            continue;
        }
        let rest = &text[start..];
        let is_named = names.iter().any(|name| rest.starts_with(name.as_str()));
        if is_named || names.iter().any(|name| name.starts_with(rest)) {
            marked.push(LITERAL);
            num_names += u64::from(is_named);
        }
    }
    (marked, num_names)
}

/// Removes the marks from a rendered text, and returns where they were.
pub(super) fn take_marks(rendered: &str) -> Answered {
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
    Answered { text, answers, literal, adds_beginning: false, adds_end: false }
}
