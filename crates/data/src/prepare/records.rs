//! What a line of a JSON Lines file holds.

use super::json_lines::{Field, text_field};
use crate::chat::{Answered, ChatTemplate};
use serde_json::Value;

/// A document.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Record {
    /// All of it is to be learned.
    Text(String),
    /// Only its answers are.
    Answered(Answered),
}

/// Why a line holds no document.
#[derive(Debug)]
pub(super) enum RecordError {
    /// It is no JSON object.
    Json(serde_json::Error),
    /// It has not what was asked for; what it has instead.
    Field(String),
    /// It is a conversation that does not become a text.
    Conversation(String),
    /// It is a conversation, and nothing says how that becomes a text.
    NoTemplate,
}

/// Reads lines.
#[derive(Debug, Clone, Copy)]
pub(super) struct Records<'a> {
    /// The field with the text.
    pub(super) field: &'a str,
    pub(super) template: Option<&'a ChatTemplate>,
}

impl Records<'_> {
    /// The document of a line: the text of the field; `messages` with roles and contents; or a `prompt` and its `completion`, both texts or both
    /// messages.
    pub(super) fn read(self, line: &str) -> Result<Record, RecordError> {
        let missing = match text_field(line, self.field).map_err(RecordError::Json)? {
            Field::Text(text) => return Ok(Record::Text(text)),
            Field::Unusable(found) => found,
        };
        let object: Value = serde_json::from_str(line).map_err(RecordError::Json)?;
        if let Some(messages) = object["messages"].as_array() {
            return self.conversation(messages, 0);
        }
        match (&object["prompt"], &object["completion"]) {
            (Value::String(prompt), Value::String(completion)) => {
                let text = format!("{prompt}{completion}");
                let answer = prompt.len()..text.len();
                Ok(Record::Answered(Answered { text, answers: vec![answer] }))
            }
            (Value::Array(prompt), Value::Array(completion)) => {
                self.conversation(&[&prompt[..], completion].concat(), prompt.len())
            }
            _ => Err(RecordError::Field(missing)),
        }
    }

    fn conversation(self, messages: &[Value], first: usize) -> Result<Record, RecordError> {
        let template = self.template.ok_or(RecordError::NoTemplate)?;
        for (index, message) in messages.iter().enumerate() {
            let refuse =
                |what: &str| Err(RecordError::Conversation(format!("message {} has no {what}", index + 1)));
            if !message["role"].is_string() {
                return refuse("`role`");
            }
            // Who calls a tool need not say anything.
            if message["content"].is_null() && message["tool_calls"].is_null() {
                return refuse("`content`");
            }
        }
        let answered = template.answered(messages, first).map_err(RecordError::Conversation)?;
        match answered.answers.is_empty() {
            true => Err(RecordError::Conversation(
                "it has no message with the role `assistant` to learn".to_owned(),
            )),
            false => Ok(Record::Answered(answered)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Result<Record, RecordError> {
        let template = ChatTemplate::chatml();
        Records { field: "text", template: Some(&template) }.read(line)
    }

    #[test]
    fn records_are_texts_conversations_or_completions() {
        assert_eq!(read(r#"{"text": "a", "messages": 1}"#).unwrap(), Record::Text("a".to_owned()));
        let answers = |line: &str| match read(line).unwrap() {
            Record::Answered(Answered { text, answers }) => {
                answers.iter().map(|range| text[range.clone()].to_owned()).collect::<Vec<_>>()
            }
            other => panic!("{other:?}"),
        };
        let message = |role: &str, content: &str| format!(r#"{{"role": "{role}", "content": "{content}"}}"#);
        let (question, answer) = (message("user", "1+1?"), message("assistant", "2"));
        assert_eq!(answers(&format!(r#"{{"messages": [{question}, {answer}]}}"#)), ["2<|im_end|>"]);
        let prompt = format!("[{question}, {answer}, {question}]");
        assert_eq!(
            answers(&format!(r#"{{"prompt": {prompt}, "completion": [{}]}}"#, message("assistant", "two"))),
            ["two<|im_end|>"]
        );
        assert_eq!(answers(r#"{"prompt": "1+1=", "completion": "2"}"#), ["2"]);
    }

    #[test]
    fn others_are_refused() {
        assert!(matches!(read("[]"), Err(RecordError::Json(_))));
        assert!(
            matches!(read(r#"{"prompt": "a"}"#), Err(RecordError::Field(found)) if found.contains("prompt"))
        );
        let bare = Records { field: "text", template: None };
        assert!(matches!(bare.read(r#"{"messages": []}"#), Err(RecordError::NoTemplate)));
        for (line, reason) in [
            (r#"{"messages": [{"content": "a"}]}"#, "message 1 has no `role`"),
            (r#"{"messages": [{"role": "user", "text": "a"}]}"#, "message 1 has no `content`"),
            (r#"{"messages": [{"role": "user", "content": "a"}]}"#, "no message with the role `assistant`"),
        ] {
            assert!(matches!(read(line), Err(RecordError::Conversation(found)) if found.contains(reason)));
        }
    }
}
