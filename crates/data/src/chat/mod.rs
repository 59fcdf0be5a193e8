//! Conversations as text, by the chat template of a model.

mod interpreter;
mod marks;
mod process;
mod python_json;

pub use process::{isolate_chat_templates, serve_chat_template};

use crate::DataError;
use crate::tokenizer::named_token;
use interpreter::{Interpreter, Output, Program, Task};
use marks::has_mark;
use process::Process;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::UNIX_EPOCH;

/// A chat template beside a tokenizer, as transformers writes it.
pub const CHAT_TEMPLATE_FILE: &str = "chat_template.jinja";

/// Maximum length of a template's source. The longest published ones have a few dozen KiB.
pub const CHAT_TEMPLATE_BYTES_MAX: usize = 1 << 20;

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

/// A Jinja template that formats a conversation as text, as transformers' `apply_chat_template` does.
///
/// A template from a file is a program that others wrote. It runs in a child process with limits on its memory, stack and
/// processor time if the program has called [`isolate_chat_templates`].
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    source: String,
    /// The file, or the folder of the model.
    path: PathBuf,
    special_tokens: BTreeMap<String, String>,
    /// Shared by clones.
    runner: Arc<Mutex<Runner>>,
    /// What ends an answer, once it was looked for.
    end_of_answer: OnceLock<Option<String>>,
}

/// Where a template runs.
#[derive(Debug)]
enum Runner {
    Here(Interpreter),
    Child(Process),
}

impl Runner {
    fn start(program: &Program<'_>, is_trusted: bool) -> Result<Self, String> {
        match is_trusted || !process::is_available() {
            true => Interpreter::new(program).map(Runner::Here),
            false => Process::start(program).map(Runner::Child),
        }
    }
}

impl PartialEq for ChatTemplate {
    fn eq(&self, other: &Self) -> bool {
        (&self.source, &self.special_tokens) == (&other.source, &other.special_tokens)
    }
}

/// A document, and which parts of it a model is to learn.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answered {
    /// The document.
    pub text: String,
    /// In bytes, in order.
    pub answers: Vec<Range<usize>>,
    /// Whether the tokenizer's special tokens begin it, because the text has none of its own.
    pub adds_beginning: bool,
    /// Whether the tokenizer's special tokens end it, because the text has none of its own.
    pub adds_end: bool,
}

/// Text for a model to continue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// The text.
    pub text: String,
    /// Whether the tokenizer's special tokens begin it. A chat template writes its own.
    pub adds_beginning: bool,
}

impl From<String> for Prompt {
    fn from(text: String) -> Self {
        Prompt { text, adds_beginning: true }
    }
}

impl ChatTemplate {
    /// A template with the special tokens that it may use.
    ///
    /// # Errors
    /// If it is not a valid template, is too long, or exceeds a limit; `path` is where it comes from.
    pub fn new(
        source: &str,
        special_tokens: BTreeMap<String, String>,
        path: &Path,
    ) -> Result<Self, DataError> {
        Self::start(source, special_tokens, path, false)
    }

    fn start(
        source: &str,
        special_tokens: BTreeMap<String, String>,
        path: &Path,
        is_trusted: bool,
    ) -> Result<Self, DataError> {
        let refuse =
            |reason: String| DataError::ChatTemplate { path: path.to_owned(), source: reason.into() };
        if source.len() > CHAT_TEMPLATE_BYTES_MAX {
            let bytes = source.len();
            return Err(refuse(format!("it has {bytes} bytes, more than {CHAT_TEMPLATE_BYTES_MAX}")));
        }
        let runner = Runner::start(&program(source, &special_tokens), is_trusted).map_err(refuse)?;
        Ok(ChatTemplate {
            source: source.to_owned(),
            path: path.to_owned(),
            special_tokens,
            runner: Arc::new(Mutex::new(runner)),
            end_of_answer: OnceLock::new(),
        })
    }

    /// A template that suits models which have not learned one yet.
    pub fn chatml() -> Self {
        let path = Path::new("chatml");
        Self::start(CHATML, BTreeMap::new(), path, true).expect("it is a valid template")
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
        Ok(Some(ChatTemplate::new(&source, special_tokens_in(&config), folder)?))
    }

    /// A template in a file, with the special tokens that the `tokenizer_config.json` of a tokenizer names.
    ///
    /// # Errors
    /// If the file cannot be read, or the template is not valid.
    pub fn from_file(path: &Path, tokenizer_config: &[u8]) -> Result<Self, DataError> {
        let read = |source| DataError::Read { path: path.to_owned(), source };
        let mut source = String::new();
        let file = File::open(path).map_err(read)?;
        file.take(CHAT_TEMPLATE_BYTES_MAX as u64 + 1).read_to_string(&mut source).map_err(read)?;
        let config: Value = serde_json::from_slice(tokenizer_config).unwrap_or_default();
        ChatTemplate::new(&source, special_tokens_in(&config), path)
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
    /// What the template says of messages that do not suit it; and if it exceeds a limit.
    pub fn prompt(&self, messages: &[Value]) -> Result<Prompt, String> {
        Ok(Prompt { text: self.text(messages, true)?, adds_beginning: false })
    }

    /// What ends an answer, without white space around it; `None` if nothing does.
    pub fn end_of_answer(&self) -> Option<&str> {
        self.end_of_answer.get_or_init(|| self.find_end_of_answer()).as_deref()
    }

    fn find_end_of_answer(&self) -> Option<String> {
        const ANSWER: &str = "answer";
        let message = |role: &str, content: &str| serde_json::json!({ "role": role, "content": content });
        let rendered = self.text(&[message("user", "question"), message("assistant", ANSWER)], false).ok()?;
        let (_, end) = rendered.rsplit_once(ANSWER)?;
        Some(end.trim().to_owned()).filter(|end| !end.is_empty())
    }

    /// A conversation from which a model learns the messages of the role `assistant`, from the message `first` on. Where the template says
    /// what they are (`{% generation %}`), that counts; else what they add to the text of the messages before.
    ///
    /// # Errors
    /// What the template says of messages that do not suit it; if a message changes the text of those before, so that its own part is
    /// not known; and if the template exceeds a limit.
    pub fn answered(&self, messages: &[Value], first: usize) -> Result<Answered, String> {
        let answered = self.run(messages, Output::Samples { first })?;
        Ok(Answered { adds_end: self.end_of_answer().is_none(), ..answered })
    }

    fn text(&self, messages: &[Value], add_generation_prompt: bool) -> Result<String, String> {
        Ok(self.run(messages, Output::Text { add_generation_prompt })?.text)
    }

    fn run(&self, messages: &[Value], output: Output) -> Result<Answered, String> {
        if messages.iter().any(has_mark) {
            return Err("a message contains U+10FFF0 or U+10FFF1, which mark answers here".to_owned());
        }
        let task = Task { messages: Cow::Borrowed(messages), output };
        let mut runner = self.runner.lock().unwrap_or_else(PoisonError::into_inner);
        let process = match &mut *runner {
            Runner::Here(interpreter) => return interpreter.run(&task),
            Runner::Child(process) => process,
        };
        let of_template = |reason| format!("the chat template of {}: {reason}", self.path.display());
        if !process.is_running() {
            *process = Process::start(&program(&self.source, &self.special_tokens)).map_err(of_template)?;
        }
        // The process still runs if the template itself refused the messages.
        process.run(&task).map_err(|reason| if process.is_running() { reason } else { of_template(reason) })
    }
}

fn program<'a>(source: &'a str, special_tokens: &'a BTreeMap<String, String>) -> Program<'a> {
    let now = UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs());
    Program {
        source: Cow::Borrowed(source),
        special_tokens: Cow::Borrowed(special_tokens),
        now: now.try_into().unwrap_or(0),
    }
}

/// The special tokens that a `tokenizer_config.json` names.
fn special_tokens_in(config: &Value) -> BTreeMap<String, String> {
    let token = |name: &str| Some((name.to_owned(), named_token(config, name)?.to_owned()));
    SPECIAL_TOKENS.into_iter().filter_map(token).collect()
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
        assert_eq!(chatml.end_of_answer(), Some("<|im_end|>"));
        assert!(
            chatml.prompt(&messages()[..1]).unwrap().text.ends_with("<|im_end|>\n<|im_start|>assistant\n")
        );
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
    fn functions_and_variables_are_those_of_transformers() {
        let rendered = |source: &str| {
            let template = ChatTemplate::new(source, BTreeMap::new(), Path::new("a")).unwrap();
            template.prompt(&[json!({"a": [], "role": "user", "é": [1, {}]})]).unwrap().text
        };
        // Printed by jinja2 with transformers' tojson.
        assert_eq!(
            rendered("{{ messages | tojson(indent=4) }}"),
            "[\n    {\n        \"a\": [],\n        \"role\": \"user\",\n        \"é\": [\n            1,\n            {}\n        ]\n    }\n]"
        );
        assert_eq!(
            rendered("{{ messages | tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true) }}"),
            r#"[{"a":[],"role":"user","\u00e9":[1,{}]}]"#
        );
        assert_eq!(rendered("{{ tools is none and documents is none and tools is defined }}"), "True");
        assert!(rendered("{{ strftime_now('%Y-%m-%d') }}").starts_with("20"));
        let refused = "{{ strftime_now('%!') }}";
        let template = ChatTemplate::new(refused, BTreeMap::new(), Path::new("a")).unwrap();
        assert_eq!(template.prompt(&[]).unwrap_err(), "\"%!\" is not a format of strftime");
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
        assert_eq!(template(true).prompt(&messages()).unwrap().text, "file");
        let short = [json!({"role": "user", "content": "<a> & é"})];
        assert_eq!(
            template(false).prompt(&short).unwrap().text,
            r#"</s>[{"content": "<a> & é", "role": "user"}]"#
        );
        let none = ChatTemplate::of_files(Path::new("a"), |_| Ok::<_, DataError>(None)).unwrap();
        assert!(none.is_none());
    }
}
