//! Parsing of records: lines of a JSON Lines file, or elements of a JSON array.

use super::report::ConvertedFormats;
use super::text_field::{Field, text_field};
use super::{InvalidUtf8, PrepareOptions};
use crate::chat::{AnnotatedText, ChatTemplate, ConversationDocuments};
use crate::messages::{from_alpaca, from_share_gpt, with_text_contents};
use serde_json::{Value, json};

/// The content of a record.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Record {
    /// A document in which all tokens count in the loss.
    Text(String),
    /// Documents in which only the answers count.
    WithAnswers(ConversationDocuments),
}

/// A reason why a record has no document.
#[derive(Debug)]
pub(super) enum RecordError {
    /// The record is not a JSON object.
    Json(serde_json::Error),
    /// The record has none of the known forms. Holds a description of the text field's value.
    Field(String),
    /// The conversation cannot be rendered as text.
    Conversation(String),
    /// The record is a conversation, but there is no chat template.
    NoTemplate,
    Question,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct RecordParser<'a> {
    /// Name of the field that contains the text.
    pub(super) field: &'a str,
    pub(super) template: Option<&'a ChatTemplate>,
    /// Whether lone surrogates are replaced or refused.
    pub(super) invalid_utf8: InvalidUtf8,
}

impl<'a> RecordParser<'a> {
    pub(super) fn new(options: &'a PrepareOptions) -> Self {
        let PrepareOptions { field, chat_template, invalid_utf8, .. } = options;
        RecordParser { field, template: chat_template.as_ref(), invalid_utf8: *invalid_utf8 }
    }

    /// Parses a record. Known forms are: an object with the text field; `messages` with roles and contents; a `prompt`
    /// with a `completion`, both strings or both lists of messages; and records of ShareGPT and Alpaca, which are
    /// counted in `converted_formats`.
    pub(super) fn parse(
        self,
        line: &str,
        converted_formats: &mut ConvertedFormats,
    ) -> Result<Record, RecordError> {
        let missing = match text_field(line, self.field).map_err(RecordError::Json)? {
            Field::Text(text) => return Ok(Record::Text(text)),
            Field::Unusable(found) => found,
        };
        let object: Value = serde_json::from_str(line).map_err(RecordError::Json)?;
        if let Some(messages) = object["messages"].as_array() {
            return self.conversation(messages, 0);
        }
        if let Some(turns) = object["conversations"].as_array() {
            if turns.first().is_some_and(|turn| turn["from"].is_null() && turn["role"].is_string()) {
                return self.conversation(turns, 0);
            }
            converted_formats.num_share_gpt += 1;
            let mut messages = from_share_gpt(turns).map_err(RecordError::Conversation)?;
            match &object["system"] {
                Value::Null => {}
                Value::String(system) if system.is_empty() => {}
                system => messages.insert(0, json!({ "role": "system", "content": system })),
            }
            return self.conversation(&messages, 0);
        }
        match (&object["prompt"], &object["completion"]) {
            (Value::String(prompt), Value::String(completion)) => {
                let text = format!("{prompt}{completion}");
                let answer = prompt.len()..text.len();
                let document = AnnotatedText {
                    text,
                    answers: vec![answer],
                    literal: Vec::new(),
                    adds_beginning: true,
                    adds_end: true,
                };
                Ok(Record::WithAnswers(ConversationDocuments { documents: vec![document], num_names: 0 }))
            }
            (Value::Array(prompt), Value::Array(completion)) => {
                self.conversation(&[&prompt[..], completion].concat(), prompt.len())
            }
            _ => match (&object["instruction"], &object["output"]) {
                (Value::String(instruction), Value::String(output)) => {
                    converted_formats.num_alpaca += 1;
                    let messages = from_alpaca(&object, instruction, output);
                    self.conversation(&messages.map_err(RecordError::Conversation)?, 0)
                }
                _ if !object["choices"].is_null() => Err(RecordError::Question),
                _ => Err(RecordError::Field(missing)),
            },
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
            // A message that calls a tool may have no content.
            if message["content"].is_null() && message["tool_calls"].is_null() {
                return refuse("`content`");
            }
        }
        let messages = with_text_contents(messages).map_err(RecordError::Conversation)?;
        let samples = template.samples(&messages, first).map_err(RecordError::Conversation)?;
        if samples.documents.iter().all(|document| document.answers.is_empty()) {
            Err(RecordError::Conversation(
                "it has no message with the role `assistant` to learn, or only such with the weight 0; leave it out".to_owned(),
            ))
        } else {
            Ok(Record::WithAnswers(samples))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_template(template: &ChatTemplate) -> RecordParser<'_> {
        RecordParser { field: "text", template: Some(template), invalid_utf8: InvalidUtf8::Replace }
    }

    fn read(line: &str) -> Result<Record, RecordError> {
        let template = ChatTemplate::chatml();
        with_template(&template).parse(line, &mut ConvertedFormats::default())
    }

    #[test]
    fn records_are_texts_conversations_or_completions() {
        assert_eq!(read(r#"{"text": "a", "messages": 1}"#).unwrap(), Record::Text("a".to_owned()));
        let answers = |line: &str| match read(line).unwrap() {
            Record::WithAnswers(ConversationDocuments { documents, .. }) => {
                let AnnotatedText { text, answers, .. } = &documents[0];
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
    fn records_of_share_gpt_and_alpaca_are_conversations() {
        let forms = &mut ConvertedFormats::default();
        let template = ChatTemplate::chatml();
        let mut read = |line: &str| with_template(&template).parse(line, forms).unwrap();
        let messages = r#"[{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]"#;
        let plain = read(&format!(r#"{{"messages": {messages}}}"#));
        let turns = r#"[{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]"#;
        assert_eq!(read(&format!(r#"{{"id": "a", "conversations": {turns}}}"#)), plain);
        assert_eq!(read(r#"{"instruction": "1+1?", "input": "", "output": "2"}"#), plain);
        assert_eq!(read(&format!(r#"{{"conversations": {messages}}}"#)), plain);
        let parts = messages
            .replace("\"1+1?\"", r#"[{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}]"#);
        assert_eq!(read(&format!(r#"{{"messages": {parts}}}"#)), plain);
        assert_eq!(*forms, ConvertedFormats { num_share_gpt: 1, num_alpaca: 1, num_arrays: 0 });
    }

    #[test]
    fn unknown_records_are_refused() {
        assert!(matches!(read("[]"), Err(RecordError::Json(_))));
        assert!(
            matches!(read(r#"{"prompt": "a"}"#), Err(RecordError::Field(found)) if found.contains("prompt"))
        );
        assert!(matches!(read(r#"{"context": "a", "choices": []}"#), Err(RecordError::Question)));
        let bare = RecordParser { field: "text", template: None, invalid_utf8: InvalidUtf8::Replace };
        let forms = &mut ConvertedFormats::default();
        assert!(matches!(bare.parse(r#"{"messages": []}"#, forms), Err(RecordError::NoTemplate)));
        for (line, reason) in [
            (r#"{"messages": [{"content": "a"}]}"#, "message 1 has no `role`"),
            (r#"{"messages": [{"role": "user", "text": "a"}]}"#, "message 1 has no `content`"),
            (r#"{"messages": [{"role": "user", "content": "a"}]}"#, "no message with the role `assistant`"),
            (
                r#"{"messages": [{"role": "user", "content": [{"type": "image"}]}]}"#,
                "message 1 has a part of type \"image\"",
            ),
            (r#"{"conversations": [{"from": "tool", "value": "a"}]}"#, "message 1 is from \"tool\""),
            (r#"{"conversations": []}"#, "no message with the role `assistant`"),
        ] {
            assert!(matches!(read(line), Err(RecordError::Conversation(found)) if found.contains(reason)));
        }
    }
}
