//! An interpreter that renders chat templates in the current process.

use super::marks::{ANSWER_BEGINS, ANSWER_ENDS, remove_marks};
use super::python_json::to_json;
use super::text::AnnotatedText;
use chrono::DateTime;
use minijinja::value::{Kwargs, Value as TemplateValue};
use minijinja::{Environment, Error, ErrorKind, State, context};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, Write};

/// Maximum number of interpreter steps for each rendered text. Published templates take about a thousandth of it for a
/// long conversation.
const FUEL: u64 = 50_000_000;

/// Maximum length of a rendered text in bytes: a few times the maximum length of an input record.
const TEXT_BYTES_MAX: usize = 256 << 20;

const TEMPLATE: &str = "chat_template";

/// A chat template and the values that it may read in addition to messages.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct TemplateSpec<'a> {
    pub(super) source: Cow<'a, str>,
    pub(super) special_tokens: Cow<'a, BTreeMap<String, String>>,
    /// The time that `strftime_now` formats, in seconds since the Unix epoch.
    pub(super) now: i64,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct RenderRequest<'a> {
    pub(super) messages: Cow<'a, [Value]>,
    pub(super) output: RenderOutput,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum RenderOutput {
    /// The conversation as one text.
    Text { add_generation_prompt: bool },
    /// The training samples of a conversation. Only answers in messages from index `first` on are learned.
    Samples { first: usize },
}

#[derive(Debug)]
pub(super) struct Interpreter {
    environment: Environment<'static>,
    special_tokens: BTreeMap<String, String>,
    marks_answers: bool,
}

impl Interpreter {
    /// Compiles a template. Fails if it is not valid.
    pub(super) fn new(spec: &TemplateSpec<'_>) -> Result<Self, String> {
        let mut environment = Environment::new();
        // The same settings as in transformers.
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_keep_trailing_newline(false);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<String, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        let now = DateTime::from_timestamp(spec.now, 0).unwrap_or_default();
        environment.add_function("strftime_now", move |format: &str| -> Result<String, Error> {
            let mut text = String::new();
            let refuse = |_| {
                Error::new(ErrorKind::InvalidOperation, format!("{format:?} is not a format of strftime"))
            };
            write!(text, "{}", now.format(format)).map_err(refuse)?;
            Ok(text)
        });
        environment.add_function("mark_answer", mark_answer);
        environment.add_filter("tojson", to_json);
        environment
            .add_template_owned(TEMPLATE, replace_unsupported_tags(&spec.source))
            .map_err(|error| error.to_string())?;
        Ok(Interpreter {
            environment,
            special_tokens: spec.special_tokens.clone().into_owned(),
            marks_answers: has_tag(&spec.source, "generation"),
        })
    }

    /// Renders the texts that a request asks for.
    ///
    /// # Errors
    /// If the template rejects the messages, or the answers cannot be located in the text.
    pub(super) fn run(&self, request: &RenderRequest<'_>) -> Result<Vec<AnnotatedText>, String> {
        let messages = &request.messages[..];
        match request.output {
            RenderOutput::Text { add_generation_prompt } => {
                Ok(vec![self.render(messages, add_generation_prompt)?])
            }
            RenderOutput::Samples { first } => self.samples(messages, first),
        }
    }

    /// Renders the training samples of a conversation. Only answers in messages from index `first` on are learned.
    fn samples(&self, messages: &[Value], first: usize) -> Result<Vec<AnnotatedText>, String> {
        let mut all = self.render(messages, false)?;
        if self.marks_answers {
            if first > 0 {
                let num_before = self.render(&messages[..first], false)?.answers.len();
                all.answers.drain(..num_before.min(all.answers.len()));
            }
            let assistant_messages: Vec<&Value> =
                messages[first..].iter().filter(|message| is_of_assistant(message)).collect();
            if !assistant_messages.iter().all(|message| is_learned(message)) {
                if assistant_messages.len() != all.answers.len() {
                    return Err(format!(
                        "the chat template marks {} answers, but the conversation has {} messages of the assistant, so those with the weight 0 cannot \
                         be told from the others",
                        all.answers.len(),
                        assistant_messages.len()
                    ));
                }
                let mut assistant_messages = assistant_messages.into_iter();
                all.answers.retain(|_| assistant_messages.next().is_some_and(is_learned));
            }
            return Ok(vec![all]);
        }
        let is_answer = |index: &usize| is_of_assistant(&messages[*index]) && is_learned(&messages[*index]);
        let answers = (first..messages.len()).filter(is_answer);
        all.answers.clear();
        for index in answers.clone() {
            let answered = self.up_to_answer(messages, index)?;
            if !all.text.starts_with(&answered.text) {
                return self.one_sample_per_answer(messages, answers);
            }
            all.answers.extend(answered.answers);
        }
        Ok(vec![all])
    }

    /// Renders one sample for each answer.
    fn one_sample_per_answer(
        &self,
        messages: &[Value],
        answers: impl Iterator<Item = usize>,
    ) -> Result<Vec<AnnotatedText>, String> {
        let (mut samples, mut num_bytes) = (Vec::new(), 0);
        for index in answers {
            let answered = self.up_to_answer(messages, index)?;
            num_bytes += answered.text.len();
            if num_bytes > TEXT_BYTES_MAX {
                return Err(format!(
                    "the chat template changes earlier text when answers follow, and one text for each answer exceeds {TEXT_BYTES_MAX} bytes"
                ));
            }
            samples.push(answered);
        }
        Ok(samples)
    }

    /// Renders the conversation up to and including an answer. The answer begins where a model would continue the text
    /// of the earlier messages.
    fn up_to_answer(&self, messages: &[Value], index: usize) -> Result<AnnotatedText, String> {
        let prompt = self.render(&messages[..index], true)?.text;
        let with = self.render(&messages[..=index], false)?;
        let start = if with.text.starts_with(&prompt) {
            prompt.len()
        } else {
            // The generation prompt may contain text that this answer lacks, such as the beginning of a thought.
            let before = self.render(&messages[..index], false)?.text;
            if !(with.text.starts_with(&before) && prompt.starts_with(&before)) {
                return Err(format!(
                    "the chat template changes the text right before message {0} when message {0} is added, so the answer cannot be told from \
                     it; mark answers in the template with {{% generation %}} and {{% endgeneration %}}",
                    index + 1
                ));
            }
            let pairs = with.text.char_indices().zip(prompt.chars());
            pairs
                .take_while(|((_, a), b)| a == b)
                .map(|((start, c), _)| start + c.len_utf8())
                .last()
                .unwrap_or(0)
        };
        let answer = start..with.text.len();
        Ok(AnnotatedText { answers: vec![answer], ..with })
    }

    /// Renders messages. The returned answers are those that the template marks.
    fn render(&self, messages: &[Value], add_generation_prompt: bool) -> Result<AnnotatedText, String> {
        let template = self.environment.get_template(TEMPLATE).expect("it was added");
        let special_tokens = TemplateValue::from_serialize(&self.special_tokens);
        // Like transformers, pass None for the optional arguments.
        let none = TemplateValue::from(());
        let context =
            context! { messages, add_generation_prompt, tools => none, documents => none, ..special_tokens };
        let mut rendered = Bounded(Vec::new());
        template.render_captured_to(context, &mut rendered).map_err(|error| {
            if error.kind() == ErrorKind::OutOfFuel {
                return format!("the chat template takes more than {FUEL} steps");
            }
            // The detail is the argument of `raise_exception`.
            error.detail().map_or_else(|| error.to_string(), str::to_owned)
        })?;
        Ok(remove_marks(&String::from_utf8_lossy(&rendered.0)))
    }
}

fn is_of_assistant(message: &Value) -> bool {
    message["role"] == "assistant"
}

/// Whether an answer is learned. In OpenAI's format of fine-tuning data, an answer with the weight 0 is only context.
fn is_learned(message: &Value) -> bool {
    message["weight"].as_f64() != Some(0.0)
}

/// A buffer for the rendered text that is limited to [`TEXT_BYTES_MAX`].
struct Bounded(Vec<u8>);

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > TEXT_BYTES_MAX {
            return Err(io::Error::other(format!(
                "the chat template writes more than {TEXT_BYTES_MAX} bytes"
            )));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Implements `{% generation %}`, which the template language does not have.
fn mark_answer(state: &State<'_, '_>, arguments: Kwargs) -> Result<String, Error> {
    let caller: TemplateValue = arguments.get("caller")?;
    let answer = caller.call(state, &[])?;
    Ok(format!("{ANSWER_BEGINS}{answer}{ANSWER_ENDS}"))
}

fn has_tag(source: &str, name: &str) -> bool {
    tags(source).any(|(_, inner, _)| tag_name(inner) == name)
}

/// Returns for each tag of the source its start, the text between its delimiters, and its end.
fn tags(source: &str) -> impl Iterator<Item = (usize, &str, usize)> {
    let mut rest = 0;
    std::iter::from_fn(move || {
        let start = rest + source[rest..].find("{%")?;
        let end = start + source[start..].find("%}")? + 2;
        rest = end;
        Some((start, &source[start + 2..end - 2], end))
    })
}

/// Returns the name of a tag, without the signs that control whitespace.
fn tag_name(inner: &str) -> &str {
    inner.trim_matches(|c| c == '-' || c == '+').trim()
}

/// Replaces the tags `generation` and `endgeneration`, which the template language lacks, by a call of `mark_answer`.
fn replace_unsupported_tags(source: &str) -> String {
    let (mut text, mut rest) = (String::with_capacity(source.len()), 0);
    for (start, inner, end) in tags(source) {
        let call = match tag_name(inner) {
            "generation" => "call mark_answer()",
            "endgeneration" => "endcall",
            _ => continue,
        };
        text += &source[rest..start];
        text += &format!("{{%{}%}}", inner.replace(tag_name(inner), &format!(" {call} ")));
        rest = end;
    }
    text + &source[rest..]
}
