//! Questions with several answers, of which a model should find the right one likeliest.

use crate::{DataError, Tokenizer};
use serde::Deserialize;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

/// The longest line that is read.
const LINE_BYTES_MAX: u64 = 1 << 20;

/// What stands between a context and a choice, as in most tasks of lm-evaluation-harness.
const DELIMITER: &str = " ";

/// A question.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Question {
    /// What comes before each choice.
    pub context: String,
    /// What may follow.
    pub choices: Vec<String>,
    /// Which choice is right, from 0.
    pub answer: usize,
}

/// The tokens of a question with one of its choices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChoiceTokens {
    /// Those of the context, then those of the choice.
    pub tokens: Vec<u32>,
    /// How many are of the context, at least 1.
    pub num_given: usize,
}

impl Question {
    /// Whether a JSON Lines file begins with a question.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn is_first_of(path: &Path) -> Result<bool, DataError> {
        let read = |source| DataError::Read { path: path.to_owned(), source };
        let mut line = Vec::new();
        let file = BufReader::new(File::open(path).map_err(read)?);
        file.take(LINE_BYTES_MAX).read_until(b'\n', &mut line).map_err(read)?;
        Ok(serde_json::from_slice::<Question>(&line).is_ok())
    }

    /// Reads a JSON Lines file: in each line an object with `context`, `choices` and `answer`.
    ///
    /// # Errors
    /// If it cannot be read; lines that are no question, or whose answer is none of the choices.
    pub fn read_all(path: &Path) -> Result<Vec<Self>, DataError> {
        let read = |source| DataError::Read { path: path.to_owned(), source };
        let mut reader = BufReader::new(File::open(path).map_err(read)?);
        let (mut questions, mut text) = (Vec::new(), Vec::new());
        for line in 1.. {
            text.clear();
            let length = (&mut reader).take(LINE_BYTES_MAX).read_until(b'\n', &mut text).map_err(read)?;
            if length == 0 {
                break;
            }
            if text.trim_ascii().is_empty() {
                continue;
            }
            let refuse = |reason: String| DataError::Question { path: path.to_owned(), line, reason };
            let question: Question =
                serde_json::from_slice(&text).map_err(|error| refuse(error.to_string()))?;
            let num_choices = question.choices.len();
            if num_choices < 2 || question.answer >= num_choices {
                return Err(refuse(format!(
                    "the answer is choice {}, and there are {num_choices}",
                    question.answer
                )));
            }
            questions.push(question);
        }
        Ok(questions)
    }

    /// The tokens of each choice after the context, as lm-evaluation-harness makes them: those of both together, from as many on as the
    /// context alone has; spaces at its end belong to the choice. Without a context, or if both together are one token, the end of a document
    /// comes before.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn tokens(&self, tokenizer: &Tokenizer) -> Result<Vec<ChoiceTokens>, DataError> {
        let encode = |text: &str| {
            let mut tokens = Vec::new();
            tokenizer.encode(text, &mut tokens).map(|()| tokens)
        };
        let context = self.context.trim_end();
        let spaces = &self.context[context.len()..];
        let choice = |choice: &String| {
            let mut tokens = encode(&format!("{context}{spaces}{DELIMITER}{choice}"))?;
            let mut num_given = encode(context)?.len();
            // Also where the choice adds nothing that a token tells of.
            if num_given == 0 || tokens.len() < 2 {
                tokens.insert(0, tokenizer.end_of_document().unwrap_or(0));
                num_given = 1;
            }
            if tokens.len() < 2 {
                return Err(DataError::EmptyChoice { choice: choice.clone() });
            }
            Ok(ChoiceTokens { num_given: num_given.min(tokens.len() - 1), tokens })
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
            context: context.to_owned(),
            choices: vec!["b".to_owned(), "cd".to_owned()],
            answer: 0,
        };
        let bytes = |text: &str| text.bytes().map(u32::from).collect::<Vec<_>>();
        let tokens = |context: &str| question(context).tokens(&Tokenizer::bytes()).unwrap();
        assert_eq!(tokens("a")[1], ChoiceTokens { tokens: bytes("a cd"), num_given: 1 });
        assert_eq!(tokens("a ")[0], ChoiceTokens { tokens: bytes("a  b"), num_given: 1 });
        assert_eq!(tokens("")[0], ChoiceTokens { tokens: [vec![256], bytes(" b")].concat(), num_given: 1 });
    }

    #[test]
    fn a_choice_without_tokens_of_its_own_follows_the_end_of_a_document() {
        let question = |context: &str, choice: &str| Question {
            context: context.to_owned(),
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
        assert_eq!((found[0].tokens.len(), found[0].num_given), (2, 1));
        assert!(matches!(question("", "").tokens(&tokenizer), Err(DataError::EmptyChoice { .. })));
    }

    #[test]
    fn files_of_questions_are_read_or_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("questions.jsonl");
        let good = r#"{"context": "a", "choices": ["b", "c"], "answer": 1, "id": 7}"#;
        std::fs::write(&path, format!("{good}\n\n{good}\n")).unwrap();
        assert!(Question::is_first_of(&path).unwrap());
        assert_eq!(Question::read_all(&path).unwrap().len(), 2);
        std::fs::write(&path, format!("{good}\n{}\n", good.replace("1,", "2,"))).unwrap();
        let error = Question::read_all(&path).unwrap_err().to_string();
        assert!(error.contains("line 2: the answer is choice 2, and there are 2"), "{error}");
        std::fs::write(&path, "{\"text\": \"a\"}\n").unwrap();
        assert!(!Question::is_first_of(&path).unwrap() && Question::read_all(&path).is_err());
    }
}
