//! Multiple-choice questions, for which a model should give the correct choice the highest likelihood.

use crate::prepare::text_field::message_without_position;
use crate::{ChatTemplate, DataError, Prompt, Tokenizer, with_text_contents};
use serde::Deserialize;
use serde_json::Value;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use trireme_base::without_byte_order_mark;

/// Maximum length of a line in bytes, without its end.
const LINE_BYTES_MAX: usize = 1 << 20;

/// The reason to refuse a longer line.
const TOO_LONG: &str = "it is longer than 1 MiB";

/// The default text between context and choice, as in most tasks of lm-evaluation-harness.
const DELIMITER: &str = " ";

/// A multiple-choice question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// The text before each choice.
    pub context: Prompt,
    /// The text between the context and each choice.
    pub delimiter: String,
    /// The possible answers.
    pub choices: Vec<String>,
    /// Index of the correct choice.
    pub answer: usize,
}

/// A line of a question file, as JSON.
#[derive(Debug, Deserialize)]
struct QuestionLine {
    context: Option<String>,
    messages: Option<Vec<Value>>,
    delimiter: Option<String>,
    choices: Vec<String>,
    answer: usize,
}

impl QuestionLine {
    /// Converts the line to a question, or returns the reason why it is not one.
    fn into_question(self, template: Option<&ChatTemplate>) -> Result<Question, String> {
        let QuestionLine { choices, answer, .. } = self;
        if choices.len() < 2 {
            return Err(format!(
                "it has {} of the two choices that a question needs at least",
                choices.len()
            ));
        }
        if answer >= choices.len() {
            return Err(format!("the answer is choice {answer}, and there are {}", choices.len()));
        }
        let (context, usual) = match (self.context, self.messages) {
            (Some(context), None) => (context.into(), DELIMITER),
            (None, Some(messages)) => {
                let template = template
                    .ok_or("it has messages, but there is no chat template; name one with --chat-template")?;
                // The answer follows a chat prompt without a space, as in lm-evaluation-harness with
                // `--apply_chat_template`.
                (template.prompt(&with_text_contents(&messages)?)?, "")
            }
            _ => return Err("it needs either `context` or `messages`".to_owned()),
        };
        let delimiter = self.delimiter.unwrap_or_else(|| usual.to_owned());
        Ok(Question { context, delimiter, choices, answer })
    }
}

/// Appends a line with its end to `line`, or the beginning of a line that is too long. Returns the number of bytes; 0 at the end of the
/// file.
fn read_line(reader: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<usize> {
    reader.take(LINE_BYTES_MAX as u64 + 2).read_until(b'\n', line)
}

fn is_too_long(line: &[u8]) -> bool {
    let text = line.strip_suffix(b"\n").unwrap_or(line);
    text.strip_suffix(b"\r").unwrap_or(text).len() > LINE_BYTES_MAX
}

/// Whether the beginning of a line is an object that contains `"choices"`. A line that is cut off cannot be parsed.
fn contains_choices(line: &[u8]) -> bool {
    const KEY: &[u8] = b"\"choices\"";
    let is_object = without_byte_order_mark(line).trim_ascii_start().starts_with(b"{");
    is_object && line.windows(KEY.len()).any(|bytes| bytes == KEY)
}

/// Whether a record has `choices`, and therefore is meant as a question, even if it is malformed.
fn has_choices(record: &Value) -> bool {
    record.get("choices").is_some()
}

/// The tokens of a question's context and one of its choices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChoiceTokens {
    /// The tokens of the context, followed by those of the choice.
    pub tokens: Vec<u32>,
    /// Number of context tokens, at least 1.
    pub num_context: usize,
}

impl Question {
    /// Whether the first record of a JSON Lines file is an object with `choices`, and therefore meant as a question,
    /// even if it is malformed.
    ///
    /// # Errors
    /// If the file cannot be read, or its first line contains `"choices"` and is longer than 1 MiB.
    pub fn is_question_file(path: &Path) -> Result<bool, DataError> {
        let read = |source| DataError::Read { path: path.to_owned(), source };
        let mut line = Vec::new();
        read_line(&mut BufReader::new(File::open(path).map_err(read)?), &mut line).map_err(read)?;
        if is_too_long(&line) && contains_choices(&line) {
            let reason = TOO_LONG.to_owned();
            return Err(DataError::Question { path: path.to_owned(), line: 1, reason });
        }
        Ok(serde_json::from_slice(without_byte_order_mark(&line)).is_ok_and(|line| has_choices(&line)))
    }

    /// Reads the questions of a JSON Lines file. Each line is an object with `context` or `messages`, with `choices`
    /// and `answer`, and optionally with the `delimiter` before each choice. `template` formats `messages` as a
    /// context.
    ///
    /// # Errors
    /// If the file cannot be read, a line is not a question, an `answer` is not the index of a choice, or there are
    /// `messages` but no template.
    pub fn read_all(path: &Path, template: Option<&ChatTemplate>) -> Result<Vec<Self>, DataError> {
        let read = |source| DataError::Read { path: path.to_owned(), source };
        let mut reader = BufReader::new(File::open(path).map_err(read)?);
        let (mut questions, mut text) = (Vec::new(), Vec::new());
        for line in 1.. {
            text.clear();
            if read_line(&mut reader, &mut text).map_err(read)? == 0 {
                break;
            }
            let refuse = |reason: String| DataError::Question { path: path.to_owned(), line, reason };
            if is_too_long(&text) {
                return Err(refuse(TOO_LONG.to_owned()));
            }
            if text.trim_ascii().is_empty() {
                continue;
            }
            let malformed = |error: serde_json::Error| refuse(message_without_position(&error));
            let record: Value = serde_json::from_slice(without_byte_order_mark(&text)).map_err(malformed)?;
            if !has_choices(&record) {
                let reason =
                    "it has no `choices`, but the file begins with a question; put texts in a separate file";
                return Err(refuse(reason.to_owned()));
            }
            let question: QuestionLine = serde_json::from_value(record).map_err(malformed)?;
            questions.push(question.into_question(template).map_err(refuse)?);
        }
        Ok(questions)
    }

    /// Returns the tokens of the context with each choice, as lm-evaluation-harness makes them. Context and choice are
    /// encoded together. The number of context tokens is the length of the context encoded alone, without trailing
    /// spaces; the remaining tokens belong to the choice. The tokenizer's beginning tokens precede a context that is not
    /// a conversation. If the context has no tokens, the end-of-document token precedes the choice, or token 0 if the
    /// tokenizer has none.
    ///
    /// # Errors
    /// If the tokenizer fails, as in [`Tokenizer::encode`], or neither the context nor the choice has tokens.
    pub fn tokens(&self, tokenizer: &Tokenizer) -> Result<Vec<ChoiceTokens>, DataError> {
        let encode = |text: &str| {
            let mut tokens = Vec::new();
            let prompt = Prompt { text: text.to_owned(), ..self.context.clone() };
            tokenizer.encode_prompt(&prompt, &mut tokens).map(|()| tokens)
        };
        let delimiter = &self.delimiter;
        let context = self.context.text.trim_end();
        let spaces = &self.context.text[context.len()..];
        let choice = |choice: &String| {
            let mut tokens = encode(&format!("{context}{spaces}{delimiter}{choice}"))?;
            let mut num_given = encode(context)?.len();
            // The end-of-document token is also needed if the choice adds no token to a context of one token.
            if num_given == 0 || tokens.len() < 2 {
                tokens.insert(0, tokenizer.end_of_document().unwrap_or(0));
                num_given = 1;
            }
            if tokens.len() < 2 {
                return Err(DataError::EmptyChoice { choice: choice.clone() });
            }
            Ok(ChoiceTokens { num_context: num_given.min(tokens.len() - 1), tokens })
        };
        self.choices.iter().map(choice).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_follow_their_context() {
        let question = |context: &str| Question {
            context: context.to_owned().into(),
            delimiter: DELIMITER.to_owned(),
            choices: vec!["b".to_owned(), "cd".to_owned()],
            answer: 0,
        };
        let bytes = |text: &str| text.bytes().map(u32::from).collect::<Vec<_>>();
        let tokens = |context: &str| question(context).tokens(&Tokenizer::bytes()).unwrap();
        assert_eq!(tokens("a")[1], ChoiceTokens { tokens: bytes("a cd"), num_context: 1 });
        assert_eq!(tokens("a ")[0], ChoiceTokens { tokens: bytes("a  b"), num_context: 1 });
        assert_eq!(tokens("")[0], ChoiceTokens { tokens: [vec![256], bytes(" b")].concat(), num_context: 1 });
    }

    #[test]
    fn a_choice_without_tokens_of_its_own_follows_the_end_of_a_document() {
        let question = |context: &str, choice: &str| Question {
            context: context.to_owned().into(),
            delimiter: DELIMITER.to_owned(),
            choices: vec![choice.to_owned(), "b".to_owned()],
            answer: 0,
        };
        let words = r#"{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "b"},
            "pre_tokenizer": {"type": "WhitespaceSplit"}, "added_tokens": [], "normalizer": null, "post_processor": null, "decoder": null,
            "truncation": null, "padding": null}"#;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        std::fs::write(&path, words).unwrap();
        let tokenizer = Tokenizer::from_file(&path).unwrap();
        let found = question("a", "").tokens(&tokenizer).unwrap();
        assert_eq!((found[0].tokens.len(), found[0].num_context), (2, 1));
        assert!(matches!(question("", "").tokens(&tokenizer), Err(DataError::EmptyChoice { .. })));
    }

    #[test]
    fn files_of_questions_are_read_or_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("questions.jsonl");
        let good = r#"{"context": "a", "choices": ["b", "c"], "answer": 1, "id": 7}"#;
        std::fs::write(&path, format!("{good}\n\n{good}\n")).unwrap();
        assert!(Question::is_question_file(&path).unwrap());
        assert_eq!(Question::read_all(&path, None).unwrap().len(), 2);
        std::fs::write(&path, format!("{good}\n{}\n", good.replace("1,", "2,"))).unwrap();
        let error = Question::read_all(&path, None).unwrap_err().to_string();
        assert!(error.contains("line 2: the answer is choice 2, and there are 2"), "{error}");
        for (wrong, fact) in [
            (good.replace(", \"c\"", "").replace("1,", "0,"), "line 2: it has 1 of the two choices"),
            (
                r#"{"text": "a"}"#.to_owned(),
                "line 2: it has no `choices`, but the file begins with a question",
            ),
            (good.replace("1,", "true,"), "line 2: invalid type: boolean `true`, expected usize; "),
        ] {
            std::fs::write(&path, format!("\u{feff}{good}\n{wrong}\n")).unwrap();
            assert!(Question::is_question_file(&path).unwrap());
            let error = Question::read_all(&path, None).unwrap_err().to_string();
            assert!(error.contains(fact), "{error}");
        }
        let padded = |len: usize| good.replace("\"a\"", &format!("\"{}\"", "a".repeat(len - good.len() + 1)));
        for end in ["", "\n"] {
            std::fs::write(&path, padded(LINE_BYTES_MAX) + end).unwrap();
            assert!(Question::is_question_file(&path).unwrap());
            assert_eq!(Question::read_all(&path, None).unwrap().len(), 1);
        }
        std::fs::write(&path, padded(LINE_BYTES_MAX + 1)).unwrap();
        assert!(Question::is_question_file(&path).unwrap_err().to_string().contains(TOO_LONG));
        std::fs::write(&path, format!("{good}\n{}\n{good}\n", " ".repeat(LINE_BYTES_MAX + 1))).unwrap();
        let error = Question::read_all(&path, None).unwrap_err().to_string();
        assert!(error.contains(&format!("line 2: {TOO_LONG}")), "{error}");
        std::fs::write(&path, "{\"text\": \"a\"}\n").unwrap();
        assert!(!Question::is_question_file(&path).unwrap() && Question::read_all(&path, None).is_err());
        std::fs::write(&path, good.replace("1,", "\"c\",")).unwrap();
        assert!(Question::is_question_file(&path).unwrap() && Question::read_all(&path, None).is_err());
    }

    #[test]
    fn the_answer_of_a_conversation_follows_its_prompt_without_a_space() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("questions.jsonl");
        let messages = r#"[{"role": "user", "content": "1+1?"}]"#;
        std::fs::write(&path, format!(r#"{{"messages": {messages}, "choices": ["2", "3"], "answer": 0}}"#))
            .unwrap();
        let questions = Question::read_all(&path, Some(&ChatTemplate::chatml())).unwrap();
        assert!(questions[0].context.text.ends_with("assistant\n"), "{questions:?}");
        assert_eq!(questions[0].delimiter, "");
        let error = Question::read_all(&path, None).unwrap_err().to_string();
        assert!(error.contains("no chat template"), "{error}");
        let both =
            format!(r#"{{"context": "a", "messages": {messages}, "choices": ["2", "3"], "answer": 0}}"#);
        std::fs::write(&path, both).unwrap();
        assert!(Question::read_all(&path, Some(&ChatTemplate::chatml())).is_err());
        let own = r#"{"context": "a:\n", "delimiter": "", "choices": ["2", "3"], "answer": 0}"#;
        std::fs::write(&path, own).unwrap();
        assert_eq!(Question::read_all(&path, None).unwrap()[0].delimiter, "");
    }
}
