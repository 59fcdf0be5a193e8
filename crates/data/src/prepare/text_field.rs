use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;
use std::borrow::Cow;
use std::fmt;

const NAMES_SHOWN_MAX: usize = 8;

/// The value of the text field of a record.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Field {
    Text(String),
    /// The field is missing or is not a string. Holds a description of the value found.
    Unusable(String),
}

/// Returns the message of a JSON error without its position, which is relative to the start of the record.
pub(crate) fn message_without_position(error: &serde_json::Error) -> String {
    let words = error.to_string();
    words.split(" at line ").next().unwrap_or(&words).to_owned()
}

/// Reads one text field of a JSON object, and skips the other fields without storing them.
pub(super) fn text_field(line: &str, field: &str) -> Result<Field, serde_json::Error> {
    let mut deserializer = serde_json::Deserializer::from_str(line);
    let found = FieldSeed(field).deserialize(&mut deserializer)?;
    deserializer.end()?;
    Ok(found)
}

struct FieldSeed<'a>(&'a str);

impl<'de> DeserializeSeed<'de> for FieldSeed<'_> {
    type Value = Field;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Field, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for FieldSeed<'_> {
    type Value = Field;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Field, A::Error> {
        let mut found = None;
        let mut others = Vec::new();
        while let Some(name) = map.next_key::<Cow<'_, str>>()? {
            if name == self.0 {
                found = Some(match map.next_value()? {
                    Value::String(text) => Field::Text(text),
                    other => Field::Unusable(format!("is {}, not a string", kind(&other))),
                });
            } else {
                map.next_value::<IgnoredAny>()?;
                if others.len() < NAMES_SHOWN_MAX {
                    others.push(name.chars().take(40).collect::<String>());
                }
            }
        }
        Ok(found.unwrap_or_else(|| Field::Unusable(missing(&others))))
    }
}

fn missing(others: &[String]) -> String {
    if others.is_empty() {
        return "is missing: the object is empty".to_owned();
    }
    format!("is missing; the object has the fields {}", others.join(", "))
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_field_is_read_among_other_fields() {
        let line = r#"{"id": [1, {"text": 2}], "text": "a\n\u00e9", "more": null}"#;
        assert_eq!(text_field(line, "text").unwrap(), Field::Text("a\né".to_owned()));
    }

    #[test]
    fn an_unusable_field_is_described() {
        let said = |line| match text_field(line, "text").unwrap() {
            Field::Unusable(words) => words,
            Field::Text(text) => panic!("{text}"),
        };
        assert_eq!(said(r#"{"text": 3}"#), "is a number, not a string");
        assert_eq!(said(r#"{"body": "x", "id": 1}"#), "is missing; the object has the fields body, id");
        assert_eq!(said("{}"), "is missing: the object is empty");
    }

    #[test]
    fn a_record_that_is_not_an_object_is_refused() {
        for line in
            ["", "[1]", "\"text\"", "{\"text\": \"a\"", "{\"text\": \"a\"} {}", "{\"text\": \"\u{1}\"}"]
        {
            assert!(text_field(line, "text").is_err(), "{line}");
        }
    }
}
