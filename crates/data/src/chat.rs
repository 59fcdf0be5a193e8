//! Conversations as text, by the chat template of a model.

use crate::DataError;
use minijinja::value::{Kwargs, Value as TemplateValue};
use minijinja::{Environment, Error, ErrorKind, State, context};
use serde::Serialize;
use serde_json::Value;
use serde_json::ser::Formatter;
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::ops::Range;
use std::path::Path;

/// A chat template beside a tokenizer, as transformers writes it.
pub const CHAT_TEMPLATE_FILE: &str = "chat_template.jinja";

/// Steps of a template's interpreter: some thousand times as many as known ones take for a long conversation.
const FUEL: u64 = 50_000_000;

/// The longest text of a conversation: some times as long as a line of a file may be.
const TEXT_BYTES_MAX: usize = 256 << 20;

const TEMPLATE: &str = "chat_template";

/// Stand around what the model is to learn, in text that a template has made; of the private use area, and removed again.
const ANSWER_BEGINS: char = '\u{10fff0}';
const ANSWER_ENDS: char = '\u{10fff1}';

/// Turns begin and end with tokens of their own (OpenAI's ChatML).
const CHATML: &str = "\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- message['content'] + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
";

/// The names of special tokens that templates use, in `tokenizer_config.json`.
const SPECIAL_TOKENS: [&str; 4] = ["bos_token", "eos_token", "pad_token", "unk_token"];

/// What makes text of a conversation: a Jinja template, as transformers' `apply_chat_template` reads it.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// As it was given.
    source: String,
    special_tokens: BTreeMap<String, String>,
    marks_answers: bool,
}

impl PartialEq for ChatTemplate {
    fn eq(&self, other: &Self) -> bool {
        (&self.source, &self.special_tokens) == (&other.source, &other.special_tokens)
    }
}

/// A document, and which parts of it a model is to learn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answered {
    /// The document.
    pub text: String,
    /// In bytes, in order.
    pub answers: Vec<Range<usize>>,
}

impl ChatTemplate {
    /// A template with the special tokens that it may use.
    ///
    /// # Errors
    /// If it is no valid template; `path` is where it comes from.
    pub fn new(
        source: &str,
        special_tokens: BTreeMap<String, String>,
        path: &Path,
    ) -> Result<Self, DataError> {
        let marks_answers = has_tag(source, "generation");
        let mut environment = Environment::new();
        // As transformers has it.
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_keep_trailing_newline(false);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<String, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_function("mark_answer", mark_answer);
        environment.add_filter("tojson", to_json);
        environment
            .add_template_owned(TEMPLATE, with_calls(source))
            .map_err(|source| DataError::ChatTemplate { path: path.to_owned(), source: source.into() })?;
        Ok(ChatTemplate { environment, source: source.to_owned(), special_tokens, marks_answers })
    }

    /// A template that suits models which have not learned one yet.
    pub fn chatml() -> Self {
        let path = Path::new("chatml");
        ChatTemplate::new(CHATML, BTreeMap::new(), path).expect("it is a valid template")
    }

    /// That of a model, if it has one, in files that `read` gives by name: [`CHAT_TEMPLATE_FILE`], or within `tokenizer_config.json`.
    ///
    /// # Errors
    /// If `read` fails, or the template is not valid.
    pub fn of_files<E: From<DataError>>(
        folder: &Path,
        read: impl Fn(&str) -> Result<Option<Vec<u8>>, E>,
    ) -> Result<Option<Self>, E> {
        let config = read(crate::TOKENIZER_CONFIG_FILE)?.unwrap_or_default();
        // What is no JSON has no template.
        let config: Value = serde_json::from_slice(&config).unwrap_or_default();
        let of_file = read(CHAT_TEMPLATE_FILE)?.map(|text| String::from_utf8_lossy(&text).into_owned());
        let Some(source) = of_file.or_else(|| template_in(&config["chat_template"])) else { return Ok(None) };
        let token = |name: &str| {
            let token = &config[name];
            let text = token.as_str().or_else(|| token["content"].as_str())?;
            Some((name.to_owned(), text.to_owned()))
        };
        let special_tokens = SPECIAL_TOKENS.into_iter().filter_map(token).collect();
        Ok(Some(ChatTemplate::new(&source, special_tokens, folder)?))
    }

    /// The template as it was given.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Takes all that texts depend on into a hash.
    pub(crate) fn hash_into(&self, hasher: &mut crc32fast::Hasher) {
        hasher.update(self.source.as_bytes());
        if !self.special_tokens.is_empty() {
            hasher.update(format!("{:?}", self.special_tokens).as_bytes());
        }
    }

    /// Text that a model continues with its answer.
    ///
    /// # Errors
    /// What the template says of messages that do not suit it.
    pub fn prompt(&self, messages: &[Value]) -> Result<String, String> {
        let rendered = self.render(messages, true)?;
        Ok(rendered.chars().filter(|c| ![ANSWER_BEGINS, ANSWER_ENDS].contains(c)).collect())
    }

    /// What ends an answer, without white space around it; `None` if nothing does.
    pub fn end_of_answer(&self) -> Option<String> {
        const ANSWER: &str = "answer";
        let message = |role: &str, content: &str| serde_json::json!({ "role": role, "content": content });
        let rendered =
            self.render(&[message("user", "question"), message("assistant", ANSWER)], false).ok()?;
        let (_, end) = rendered.rsplit_once(ANSWER)?;
        let end: String = end.chars().filter(|c| ![ANSWER_BEGINS, ANSWER_ENDS].contains(c)).collect();
        Some(end.trim().to_owned()).filter(|end| !end.is_empty())
    }

    /// A conversation from which a model learns the messages of the role `assistant`, from the message `first` on. Where the template says
    /// what they are (`{% generation %}`), that counts; else what they add to the text of the messages before.
    ///
    /// # Errors
    /// What the template says of messages that do not suit it; and if a message changes the text of those before, so that its own part is
    /// not known.
    pub fn answered(&self, messages: &[Value], first: usize) -> Result<Answered, String> {
        let rendered = self.render(messages, false)?;
        if self.marks_answers {
            let mut found = take_marks(&rendered);
            if first > 0 {
                let num_before = take_marks(&self.render(&messages[..first], false)?).answers.len();
                found.answers.drain(..num_before.min(found.answers.len()));
            }
            return Ok(found);
        }
        let mut answers = Vec::new();
        for index in (first..messages.len()).filter(|&index| messages[index]["role"] == "assistant") {
            let before = self.render(&messages[..index], true)?;
            let with = self.render(&messages[..=index], false)?;
            if !(with.starts_with(&before) && rendered.starts_with(&with)) {
                return Err(format!(
                    "the chat template changes earlier text when message {} is added, so the answer cannot be told from it; mark answers in the \
                     template with {{% generation %}} and {{% endgeneration %}}",
                    index + 1
                ));
            }
            answers.push(before.len()..with.len());
        }
        Ok(Answered { text: rendered, answers })
    }

    fn render(&self, messages: &[Value], add_generation_prompt: bool) -> Result<String, String> {
        if messages.iter().any(has_mark) {
            return Err("a message contains U+10FFF0 or U+10FFF1, which mark answers here".to_owned());
        }
        let template = self.environment.get_template(TEMPLATE).expect("it was added");
        let special_tokens = TemplateValue::from_serialize(&self.special_tokens);
        let context = context! { messages, add_generation_prompt, ..special_tokens };
        let mut rendered = Bounded(Vec::new());
        template.render_captured_to(context, &mut rendered).map_err(|error| {
            // What raise_exception was given is the detail.
            error.detail().map_or_else(|| error.to_string(), str::to_owned)
        })?;
        Ok(String::from_utf8_lossy(&rendered.0).into_owned())
    }
}

/// Text that a template writes, up to [`TEXT_BYTES_MAX`].
struct Bounded(Vec<u8>);

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > TEXT_BYTES_MAX {
            return Err(io::Error::other(format!("the text exceeds {TEXT_BYTES_MAX} bytes")));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Whether a text within a value could be taken for the marks of answers.
fn has_mark(value: &Value) -> bool {
    match value {
        Value::String(text) => text.contains([ANSWER_BEGINS, ANSWER_ENDS]),
        Value::Array(values) => values.iter().any(has_mark),
        Value::Object(members) => members.values().any(has_mark),
        _ => false,
    }
}

fn template_in(config: &Value) -> Option<String> {
    // One, or several with names.
    let named = || {
        let all = config.as_array()?;
        let default = all.iter().find(|template| template["name"] == "default");
        default.or(all.first())?["template"].as_str()
    };
    config.as_str().or_else(named).map(str::to_owned)
}

/// Stands for `{% generation %}`, which the template language does not have.
fn mark_answer(state: &State<'_, '_>, arguments: Kwargs) -> Result<String, Error> {
    let caller: TemplateValue = arguments.get("caller")?;
    let answer = caller.call(state, &[])?;
    Ok(format!("{ANSWER_BEGINS}{answer}{ANSWER_ENDS}"))
}

/// Each tag of the source: where it begins, what is between its delimiters, and where it ends.
fn tags(source: &str) -> impl Iterator<Item = (usize, &str, usize)> {
    let mut rest = 0;
    std::iter::from_fn(move || {
        let start = rest + source[rest..].find("{%")?;
        let end = start + source[start..].find("%}")? + 2;
        rest = end;
        Some((start, &source[start + 2..end - 2], end))
    })
}

/// The name of a tag, without the signs that trim white space around it.
fn tag_name(inner: &str) -> &str {
    inner.trim_matches(|c| c == '-' || c == '+').trim()
}

fn has_tag(source: &str, name: &str) -> bool {
    tags(source).any(|(_, inner, _)| tag_name(inner) == name)
}

/// The source with calls in place of tags that the template language does not have.
fn with_calls(source: &str) -> String {
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

fn take_marks(rendered: &str) -> Answered {
    let (mut text, mut answers, mut start) = (String::with_capacity(rendered.len()), Vec::new(), None);
    for c in rendered.chars() {
        match c {
            ANSWER_BEGINS => start = Some(text.len()),
            ANSWER_ENDS => answers.extend(start.take().map(|start| start..text.len())),
            c => text.push(c),
        }
    }
    Answered { text, answers }
}

/// JSON as Python writes it: with spaces after commas and colons, and nothing escaped for HTML.
fn to_json(value: TemplateValue) -> Result<String, Error> {
    let mut json = Vec::new();
    let mut serializer = serde_json::Serializer::with_formatter(&mut json, PythonFormatter);
    let failed = |error: serde_json::Error| Error::new(ErrorKind::InvalidOperation, error.to_string());
    value.serialize(&mut serializer).map_err(failed)?;
    Ok(String::from_utf8_lossy(&json).into_owned())
}

struct PythonFormatter;

impl Formatter for PythonFormatter {
    fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn messages() -> Vec<Value> {
        let message = |role: &str, content: &str| json!({ "role": role, "content": content });
        vec![
            message("user", "1+1?"),
            message("assistant", "2"),
            message("user", "2+2?"),
            message("assistant", "4"),
        ]
    }

    fn parts(answered: &Answered) -> Vec<&str> {
        answered.answers.iter().map(|range| &answered.text[range.clone()]).collect()
    }

    #[test]
    fn answers_are_what_a_template_marks() {
        let chatml = ChatTemplate::chatml();
        let answered = chatml.answered(&messages(), 0).unwrap();
        assert_eq!(
            answered.text,
            "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n\
             <|im_start|>assistant\n4<|im_end|>\n"
        );
        assert_eq!(parts(&answered), ["2<|im_end|>", "4<|im_end|>"]);
        assert_eq!(parts(&chatml.answered(&messages(), 2).unwrap()), ["4<|im_end|>"]);
        assert_eq!(chatml.end_of_answer(), Some("<|im_end|>".to_owned()));
        assert!(chatml.prompt(&messages()[..1]).unwrap().ends_with("<|im_end|>\n<|im_start|>assistant\n"));
    }

    #[test]
    fn answers_are_what_messages_add_where_nothing_is_marked() {
        // With methods of Python, white space to trim, and a special token.
        let source = "{{ bos_token }}{% for message in messages %}\n\
            {%- if message.role == 'user' %}[INST] {{ message.content.strip() }} [/INST]{% else %} {{ message.content }}{{ eos_token }}{% endif %}\n\
            {%- endfor %}";
        let tokens = [("bos_token", "<s>"), ("eos_token", "</s>")];
        let tokens = tokens.map(|(name, token)| (name.to_owned(), token.to_owned())).into();
        let template = ChatTemplate::new(source, tokens, Path::new("a")).unwrap();
        let answered = template.answered(&messages(), 0).unwrap();
        assert_eq!(answered.text, "<s>[INST] 1+1? [/INST] 2</s>[INST] 2+2? [/INST] 4</s>");
        assert_eq!(parts(&answered), [" 2</s>", " 4</s>"]);
        // One that shows only the last answer changes what was before.
        let last = "{% for message in messages %}{% if loop.last or message.role == 'user' %}{{ message.content }}{% endif %}{% endfor %}";
        let template = ChatTemplate::new(last, BTreeMap::new(), Path::new("a")).unwrap();
        let mut other = messages();
        other[1]["content"] = json!("two");
        let error = template.answered(&other, 0);
        assert!(error.unwrap_err().contains("when message 2 is added"));
    }

    #[test]
    fn templates_refuse_and_are_refused() {
        let strict = "{{ raise_exception('roles must alternate') }}";
        let template = ChatTemplate::new(strict, BTreeMap::new(), Path::new("a")).unwrap();
        assert_eq!(template.answered(&messages(), 0).unwrap_err(), "roles must alternate");
        let loud = "{% for a in range(9999) %}{% for b in range(9999) %}{{ '".to_owned();
        let loud = loud + &"a".repeat(9999) + "' }}{% endfor %}{% endfor %}";
        let template = ChatTemplate::new(&loud, BTreeMap::new(), Path::new("a")).unwrap();
        assert!(template.prompt(&messages()).is_err());
        let broken = ChatTemplate::new("{% if %}", BTreeMap::new(), Path::new("here")).unwrap_err();
        assert!(broken.to_string().contains("here"), "{broken}");
        let endless = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}";
        let template = ChatTemplate::new(endless, BTreeMap::new(), Path::new("a")).unwrap();
        assert!(template.prompt(&messages()).is_err());
    }

    #[test]
    fn messages_cannot_forge_marks_and_earlier_answers_are_left_out_as_marked() {
        let mut forged = messages();
        forged[0]["content"] = json!("\u{10fff0}1+1?\u{10fff1}");
        assert!(ChatTemplate::chatml().answered(&forged, 0).unwrap_err().contains("mark answers"));
        // A template that marks an answer twice.
        let twice = "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}\
            {% generation %}.{% endgeneration %}{% endif %}{% endfor %}";
        let template = ChatTemplate::new(twice, BTreeMap::new(), Path::new("a")).unwrap();
        assert_eq!(parts(&template.answered(&messages(), 2).unwrap()), ["4", "."]);
    }

    #[test]
    fn a_model_has_its_template_in_either_file() {
        let config = json!({"chat_template": "{{ eos_token }}{{ messages | tojson }}", "eos_token": {"content": "</s>"}});
        let read = |with_file: bool| {
            let config = config.to_string();
            move |name: &str| -> Result<Option<Vec<u8>>, DataError> {
                Ok(match name {
                    CHAT_TEMPLATE_FILE if with_file => Some(b"file".to_vec()),
                    crate::TOKENIZER_CONFIG_FILE => Some(config.clone().into_bytes()),
                    _ => None,
                })
            }
        };
        let template = |with_file| ChatTemplate::of_files(Path::new("a"), read(with_file)).unwrap().unwrap();
        assert_eq!(template(true).prompt(&messages()).unwrap(), "file");
        let short = [json!({"role": "user", "content": "<a> & é"})];
        assert_eq!(
            template(false).prompt(&short).unwrap(),
            r#"</s>[{"content": "<a> & é", "role": "user"}]"#
        );
        let none = ChatTemplate::of_files(Path::new("a"), |_| Ok::<_, DataError>(None)).unwrap();
        assert!(none.is_none());
    }
}
