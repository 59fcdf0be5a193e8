use serde_json::Value;

/// First character of strings that stand for numbers which JSON cannot represent. It is a Unicode noncharacter, which is not meant to occur
/// in text.
const MARK: char = '\u{fdd0}';

/// Numbers that Python's `json` module writes although they are not valid JSON.
const NON_FINITE: [&str; 3] = ["-Infinity", "Infinity", "NaN"];

/// Strips a leading UTF-8 byte order mark, if there is one.
pub fn without_byte_order_mark(text: &[u8]) -> &[u8] {
    text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text)
}

/// Parses JSON as Python writes it: a leading byte order mark is skipped, and `Infinity`, `-Infinity` and `NaN` are accepted as numbers.
/// These numbers are stored as marked strings, which [`json_text`] converts back.
///
/// # Errors
/// If the text is not valid JSON apart from these numbers.
pub fn parse_json(text: &[u8]) -> Result<Value, serde_json::Error> {
    let text = without_byte_order_mark(text);
    serde_json::from_slice(text).or_else(|error| match mark_non_finite(text) {
        Some(marked) => serde_json::from_slice(&marked),
        None => Err(error),
    })
}

/// Formats a value as indented JSON. Non-finite numbers that [`parse_json`] read are written as Python writes them.
pub fn json_text(value: &Value) -> String {
    NON_FINITE
        .iter()
        .fold(format!("{value:#}"), |text, number| text.replace(&format!("\"{MARK}{number}\""), number))
}

/// Replaces each non-finite number with a marked string. Returns `None` if the text has no such number.
fn mark_non_finite(text: &[u8]) -> Option<Vec<u8>> {
    let mut marked = Vec::with_capacity(text.len());
    let (mut rest, mut is_in_string, mut has_any) = (text, false, false);
    while let Some(&byte) = rest.first() {
        let number = NON_FINITE.iter().find(|number| !is_in_string && rest.starts_with(number.as_bytes()));
        if let Some(number) = number {
            marked.extend(format!("\"{MARK}{number}\"").bytes());
            rest = &rest[number.len()..];
            has_any = true;
            continue;
        }
        let len = if is_in_string && byte == b'\\' { rest.len().min(2) } else { 1 };
        is_in_string ^= byte == b'"';
        marked.extend(&rest[..len]);
        rest = &rest[len..];
    }
    has_any.then_some(marked)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_json_does_not_have_are_kept() {
        let text = "{\n  \"limits\": [\n    0.0,\n    Infinity,\n    -Infinity\n  ],\n  \"mean\": NaN,\n  \
                    \"note\": \"to Infinity, \\\"NaN\\\" \\\\\"\n}";
        let value = parse_json(text.as_bytes()).unwrap();
        assert_eq!(value["note"], "to Infinity, \"NaN\" \\");
        assert_eq!(json_text(&value), text);
    }

    #[test]
    fn a_byte_order_mark_is_skipped() {
        assert_eq!(parse_json("\u{feff}{\"a\": 1}".as_bytes()).unwrap()["a"], 1);
    }

    #[test]
    fn invalid_json_is_refused_with_its_location() {
        for (text, place) in
            [("{\"a\": Infinit}", "column 7"), ("{\"a\": +Infinity}", "line 1"), ("\"\\", "line 1")]
        {
            let error = parse_json(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(place), "{text}: {error}");
        }
    }
}
