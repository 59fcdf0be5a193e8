//! Chat templates, which format conversations as text.

mod interpreter;
mod marks;
mod process;
mod python_json;
mod text;

pub use process::{isolate_chat_templates, serve_chat_template};
pub use text::{AnnotatedText, ConversationDocuments, Prompt};

use crate::tokenizer::named_token;
use crate::{DataError, TOKENIZER_CONFIG_FILE, Tokenizer};
use interpreter::{Interpreter, RenderOutput, RenderRequest, TemplateSpec};
use marks::{LiteralNames, has_mark};
use process::Process;
use serde_json::Value;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::UNIX_EPOCH;
use trireme_base::{open_regular, parse_json};

/// Name of the chat template's file in the folder of a tokenizer, as transformers writes it.
pub const CHAT_TEMPLATE_FILE: &str = "chat_template.jinja";

/// Maximum length of a template's source in bytes. The longest published ones have a few dozen KiB.
pub const CHAT_TEMPLATE_BYTES_MAX: usize = 1 << 20;

/// OpenAI's ChatML format, in which special tokens begin and end each message.
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

/// The keys of `tokenizer_config.json` whose special tokens templates may use.
const SPECIAL_TOKENS: [&str; 4] = ["bos_token", "eos_token", "pad_token", "unk_token"];

/// A Jinja template that formats a conversation as text, as transformers' `apply_chat_template` does.
///
/// A template from a file is untrusted code. It runs in a child process with limits on its memory, stack and processor
/// time if the program has called [`isolate_chat_templates`].
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    source: String,
    /// The template's file, or the folder of the model.
    path: PathBuf,
    special_tokens: BTreeMap<String, String>,
    /// Names of special tokens that stay plain text in messages.
    literal_names: Option<Arc<LiteralNames>>,
    /// Started when the template is first used. Shared by clones.
    runner: Arc<Mutex<Option<Runner>>>,
    /// The text that ends an answer, computed when it is first needed. An error if the template cannot render the
    /// messages from which the text is determined.
    end_of_answer: OnceLock<Result<Option<String>, ()>>,
}

#[derive(Debug)]
enum Runner {
    InProcess(Box<Interpreter>),
    Child(Process),
}

impl Runner {
    fn start(spec: &TemplateSpec<'_>) -> Result<Self, String> {
        if process::is_isolation_enabled() {
            Process::start(spec).map(Runner::Child)
        } else {
            Self::in_process(spec)
        }
    }

    fn in_process(spec: &TemplateSpec<'_>) -> Result<Self, String> {
        Interpreter::new(spec).map(Box::new).map(Runner::InProcess)
    }

    fn is_running(&mut self) -> bool {
        match self {
            Runner::InProcess(_) => true,
            Runner::Child(process) => process.is_running(),
        }
    }
}

impl PartialEq for ChatTemplate {
    fn eq(&self, other: &Self) -> bool {
        (&self.source, &self.special_tokens, &self.literal_names)
            == (&other.source, &other.special_tokens, &other.literal_names)
    }
}

impl ChatTemplate {
    /// Creates a template with the special tokens that it may use. `path` names its origin in errors. The template is
    /// compiled when it is first used, so a model with an invalid template can be used without it.
    ///
    /// # Errors
    /// If the source is longer than [`CHAT_TEMPLATE_BYTES_MAX`].
    pub fn new(
        source: &str,
        special_tokens: BTreeMap<String, String>,
        path: &Path,
    ) -> Result<Self, DataError> {
        if source.len() > CHAT_TEMPLATE_BYTES_MAX {
            let bytes = source.len();
            return Err(refused(path, format!("it has {bytes} bytes, more than {CHAT_TEMPLATE_BYTES_MAX}")));
        }
        Ok(ChatTemplate {
            source: source.to_owned(),
            path: path.to_owned(),
            special_tokens,
            literal_names: None,
            runner: Arc::new(Mutex::new(None)),
            end_of_answer: OnceLock::new(),
        })
    }

    /// Returns a ChatML template, which suits models that have not been trained with another template.
    #[expect(clippy::missing_panics_doc, reason = "the template is short and valid")]
    pub fn chatml() -> Self {
        let template = Self::new(CHATML, BTreeMap::new(), Path::new("chatml")).expect("it is short");
        let runner = Runner::in_process(&template.template_spec()).expect("it is a valid template");
        template.with_runner(runner)
    }

    /// Returns the template of a model, if it has one: from the file [`CHAT_TEMPLATE_FILE`], or from
    /// `tokenizer_config.json`. `read` returns the content of a file by name, `None` if it does not exist. `folder`
    /// names the model in errors.
    ///
    /// # Errors
    /// If `read` fails, `tokenizer_config.json` is not JSON, or the template is too long.
    pub fn from_files<E: From<DataError>>(
        folder: &Path,
        read: impl Fn(&str) -> Result<Option<Vec<u8>>, E>,
    ) -> Result<Option<Self>, E> {
        let config = match read(TOKENIZER_CONFIG_FILE)? {
            Some(text) => parse_json(&text).map_err(|source| DataError::TokenizerConfig {
                path: folder.join(TOKENIZER_CONFIG_FILE),
                source,
            })?,
            None => Value::Null,
        };
        let of_file = read(CHAT_TEMPLATE_FILE)?.map(|text| String::from_utf8_lossy(&text).into_owned());
        let Some(source) = of_file.or_else(|| template_in(&config["chat_template"])) else { return Ok(None) };
        Ok(Some(ChatTemplate::new(&source, special_tokens_in(&config), folder)?))
    }

    /// Reads a template from a file. `tokenizer_config` is the content of the `tokenizer_config.json` that names the
    /// special tokens.
    ///
    /// # Errors
    /// If the file cannot be read, or the template is not valid, is too long, or exceeds a limit.
    pub fn from_file(path: &Path, tokenizer_config: &[u8]) -> Result<Self, DataError> {
        let read = |source| DataError::Read { path: path.to_owned(), source };
        let mut source = String::new();
        let file = open_regular(path).map_err(read)?;
        file.take(CHAT_TEMPLATE_BYTES_MAX as u64 + 1).read_to_string(&mut source).map_err(read)?;
        let config = parse_json(tokenizer_config).unwrap_or_default();
        let template = ChatTemplate::new(&source, special_tokens_in(&config), path)?;
        let runner = Runner::start(&template.template_spec()).map_err(|reason| refused(path, reason))?;
        Ok(template.with_runner(runner))
    }

    fn with_runner(self, runner: Runner) -> Self {
        ChatTemplate { runner: Arc::new(Mutex::new(Some(runner))), ..self }
    }

    /// Treats the names of a tokenizer's special tokens as plain text where they occur in messages.
    pub fn with_special_tokens_as_text(self, tokenizer: &Tokenizer) -> Self {
        self.with_literal_names(tokenizer.special_token_names())
    }

    /// Treats these names of special tokens as plain text where they occur in messages.
    fn with_literal_names(self, names: Vec<String>) -> Self {
        ChatTemplate { literal_names: Some(Arc::new(LiteralNames::new(names))), ..self }
    }

    /// The source of the template.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Adds the source and the special tokens to a hash. The messages, the literal names and the current time, on which rendered texts also
    /// depend, are not included.
    pub(crate) fn hash_into(&self, hasher: &mut crc32fast::Hasher) {
        hasher.update(self.source.as_bytes());
        if !self.special_tokens.is_empty() {
            hasher.update(format!("{:?}", self.special_tokens).as_bytes());
        }
    }

    /// Renders a conversation as a prompt that a model continues with its answer.
    ///
    /// # Errors
    /// If the template rejects the messages or exceeds a limit.
    pub fn prompt(&self, messages: &[Value]) -> Result<Prompt, String> {
        let AnnotatedText { text, literal, .. } = self.text(messages, true)?;
        Ok(Prompt { text, literal, adds_beginning: false })
    }

    /// Returns the text that ends an answer, without surrounding whitespace. `None` if the template adds no such text,
    /// or it cannot be determined.
    pub fn end_of_answer(&self) -> Option<&str> {
        self.cached_end_of_answer().as_ref().ok()?.as_deref()
    }

    fn cached_end_of_answer(&self) -> &Result<Option<String>, ()> {
        self.end_of_answer.get_or_init(|| self.find_end_of_answer())
    }

    fn find_end_of_answer(&self) -> Result<Option<String>, ()> {
        const ANSWER: &str = "answer";
        let message = |role: &str, content: &str| serde_json::json!({ "role": role, "content": content });
        let turns = [message("user", "question"), message("assistant", ANSWER)];
        let with_system = [&[message("system", "instruction")][..], &turns].concat();
        // Some templates require a system message.
        let rendered = self.text(&turns, false).or_else(|_| self.text(&with_system, false)).map_err(drop)?;
        let (_, end) = rendered.text.rsplit_once(ANSWER).ok_or(())?;
        Ok(Some(end.trim().to_owned()).filter(|end| !end.is_empty()))
    }

    /// Renders the documents from which a model learns the messages of the role `assistant`, from message index `first`
    /// on. If the template marks answers (`{% generation %}`), these are learned. Otherwise an answer is the text that
    /// its message adds to the text of the earlier messages.
    ///
    /// # Errors
    /// If the template rejects the messages, if a message changes the text right before it, so that its answer cannot
    /// be located, or if the template exceeds a limit.
    pub fn samples(&self, messages: &[Value], first: usize) -> Result<ConversationDocuments, String> {
        let (mut documents, num_names) = self.run(messages, RenderOutput::Samples { first })?;
        // If a conversation ends with a question, the ending tokens are added, but do not count in the loss.
        let ends_with_question = messages.last().is_some_and(|message| message["role"] != "assistant");
        for document in &mut documents {
            document.adds_end = ends_with_question || *self.cached_end_of_answer() == Ok(None);
        }
        Ok(ConversationDocuments { documents, num_names })
    }

    fn text(&self, messages: &[Value], add_generation_prompt: bool) -> Result<AnnotatedText, String> {
        let (rendered, _) = self.run(messages, RenderOutput::Text { add_generation_prompt })?;
        rendered.into_iter().next().ok_or_else(|| "the template gives no text".to_owned())
    }

    /// Renders messages, and returns the number of special-token names in them.
    fn run(&self, messages: &[Value], output: RenderOutput) -> Result<(Vec<AnnotatedText>, u64), String> {
        if messages.iter().any(has_mark) {
            return Err("a message contains a character from U+10FFF0 to U+10FFF2, which mark answers here"
                .to_owned());
        }
        let mut messages = Cow::Borrowed(messages);
        let mut num_names = 0;
        if let Some(names) = &self.literal_names {
            if messages.iter().any(|message| names.is_in_key(message)) {
                return Err("a key within a message contains the name of a special token".to_owned());
            }
            num_names = messages.to_mut().iter_mut().map(|message| names.mark_message(message)).sum();
        }
        Ok((self.render(&RenderRequest { messages, output })?, num_names))
    }

    fn render(&self, request: &RenderRequest<'_>) -> Result<Vec<AnnotatedText>, String> {
        let mut runner = self.runner.lock().unwrap_or_else(PoisonError::into_inner);
        let of_template = |reason| format!("the chat template of {}: {reason}", self.path.display());
        // A process that has ended cannot serve another request.
        let _ = runner.take_if(|runner| !runner.is_running());
        if runner.is_none() {
            *runner = Some(Runner::start(&self.template_spec()).map_err(of_template)?);
        }
        match runner.as_mut().expect("it was started") {
            Runner::InProcess(interpreter) => interpreter.run(request),
            // The process is still running if the template itself rejected the messages.
            Runner::Child(process) => process
                .exchange(request)
                .map_err(|reason| if process.is_running() { reason } else { of_template(reason) }),
        }
    }

    fn template_spec(&self) -> TemplateSpec<'_> {
        let now = UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs());
        TemplateSpec {
            source: Cow::Borrowed(&self.source),
            special_tokens: Cow::Borrowed(&self.special_tokens),
            now: now.try_into().unwrap_or(0),
        }
    }
}

fn refused(path: &Path, reason: String) -> DataError {
    DataError::ChatTemplate { path: path.to_owned(), source: reason.into() }
}

fn special_tokens_in(config: &Value) -> BTreeMap<String, String> {
    let token = |name: &str| Some((name.to_owned(), named_token(config, name)?.to_owned()));
    SPECIAL_TOKENS.into_iter().filter_map(token).collect()
}

fn template_in(config: &Value) -> Option<String> {
    // The config has one template, or a list of named ones.
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

    fn one(template: &ChatTemplate, messages: &[Value], first: usize) -> AnnotatedText {
        let [document] = <[_; 1]>::try_from(template.samples(messages, first).unwrap().documents).unwrap();
        document
    }

    fn parts(answered: &AnnotatedText) -> Vec<&str> {
        answered.answers.iter().map(|range| &answered.text[range.clone()]).collect()
    }

    #[test]
    fn answers_are_what_a_template_marks() {
        let chatml = ChatTemplate::chatml();
        let answered = one(&chatml, &messages(), 0);
        assert_eq!(
            answered.text,
            "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n\
             <|im_start|>assistant\n4<|im_end|>\n"
        );
        assert_eq!(parts(&answered), ["2<|im_end|>", "4<|im_end|>"]);
        assert_eq!(parts(&one(&chatml, &messages(), 2)), ["4<|im_end|>"]);
        assert_eq!(chatml.end_of_answer(), Some("<|im_end|>"));
        assert!(
            chatml.prompt(&messages()[..1]).unwrap().text.ends_with("<|im_end|>\n<|im_start|>assistant\n")
        );
    }

    #[test]
    fn answers_of_weight_0_are_not_learned() {
        let mut weighted = messages();
        weighted[1]["weight"] = 0.into();
        weighted[3]["weight"] = 1.into();
        let unmarked =
            "{% for message in messages %}{{ message.role[0] ~ message.content ~ '\n' }}{% endfor %}";
        let unmarked = ChatTemplate::new(unmarked, BTreeMap::new(), Path::new("a")).unwrap();
        for (template, expected) in [(ChatTemplate::chatml(), "4<|im_end|>"), (unmarked, "a4\n")] {
            let answered = one(&template, &weighted, 0);
            assert_eq!(parts(&answered), [expected]);
            assert!(answered.text.contains('2'), "it stays in the text");
        }
        let once = "{% generation %}{{ messages[1].content }}{% endgeneration %}";
        let once = ChatTemplate::new(once, BTreeMap::new(), Path::new("a")).unwrap();
        let refused = once.samples(&weighted, 0).unwrap_err();
        assert!(
            refused.starts_with("the chat template marks 1 answers, but the conversation has 2 messages"),
            "{refused}"
        );
    }

    #[test]
    fn unmarked_answers_are_the_text_that_messages_add() {
        // With Python methods, whitespace to trim, and a special token.
        let source = "{{ bos_token }}{% for message in messages %}\n\
            {%- if message.role == 'user' %}[INST] {{ message.content.strip() }} [/INST]{% else %} {{ message.content }}{{ eos_token }}{% endif %}\n\
            {%- endfor %}";
        let tokens = [("bos_token", "<s>"), ("eos_token", "</s>")];
        let tokens = tokens.map(|(name, token)| (name.to_owned(), token.to_owned())).into();
        let template = ChatTemplate::new(source, tokens, Path::new("a")).unwrap();
        let answered = one(&template, &messages(), 0);
        assert_eq!(answered.text, "<s>[INST] 1+1? [/INST] 2</s>[INST] 2+2? [/INST] 4</s>");
        assert_eq!(parts(&answered), [" 2</s>", " 4</s>"]);
        // A template in which each message changes the text right before it.
        let reversed = "{% for message in messages | reverse %}{{ message.content }}{% endfor %}";
        let template = ChatTemplate::new(reversed, BTreeMap::new(), Path::new("a")).unwrap();
        let error = template.samples(&messages(), 0).unwrap_err();
        assert!(error.contains("when message 2 is added"), "{error}");
    }

    fn template(source: &str) -> ChatTemplate {
        ChatTemplate::new(source, BTreeMap::new(), Path::new("a")).unwrap()
    }

    #[test]
    fn each_answer_is_a_sample_where_a_template_rewrites_earlier_turns() {
        // A template that shows only the thoughts of the last answer, as reasoning models do.
        let thoughts = template(
            "{%- for message in messages %}{% if message.role == 'user' %}<u>{{ message.content }}{% else %}\
             {%- set content = message.content.split('</think>')[-1] %}<a>\
             {%- if loop.last %}<think>{{ message.content.split('</think>')[0] if '</think>' in message.content }}</think>{% endif %}\
             {{- content }}<end>{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}",
        );
        let mut conversation = messages();
        conversation[1]["content"] = json!("easy</think>2");
        let samples = thoughts.samples(&conversation, 0).unwrap().documents;
        let found: Vec<_> = samples.iter().map(|sample| (sample.text.as_str(), parts(sample))).collect();
        assert_eq!(
            found,
            [
                ("<u>1+1?<a><think>easy</think>2<end>", vec!["<think>easy</think>2<end>"]),
                ("<u>1+1?<a>2<end><u>2+2?<a><think></think>4<end>", vec!["<think></think>4<end>"]),
            ]
        );
        assert_eq!(thoughts.samples(&conversation, 2).unwrap().documents, samples[1..]);
        assert_eq!(thoughts.samples(&conversation[..2], 0).unwrap().documents.len(), 1);
        // A template with a different end for the last turn, and with a date.
        let returns = template(
            "{{ strftime_now('%Y')[:2] }}{% for message in messages %}<{{ message.role }}>{{ message.content }}\
             {{- '<return>' if loop.last and message.role == 'assistant' else '<end>' }}{% endfor %}\
             {{- '<assistant>' if add_generation_prompt }}",
        );
        let samples = returns.samples(&messages(), 0).unwrap().documents;
        assert_eq!(samples[1].text, "20<user>1+1?<end><assistant>2<end><user>2+2?<end><assistant>4<return>");
        assert_eq!(samples.iter().map(parts).collect::<Vec<_>>(), [["2<return>"], ["4<return>"]]);
        // A template whose generation prompt contains text that the answer lacks.
        let prompts = template(
            "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}{{ '<assistant><think>' if add_generation_prompt }}",
        );
        let samples = prompts.samples(&messages(), 0).unwrap().documents;
        assert_eq!(samples.iter().map(parts).collect::<Vec<_>>(), [["2", "4"]]);
    }

    #[test]
    fn names_of_special_tokens_in_messages_are_text() {
        let chatml = ChatTemplate::chatml().with_literal_names(vec!["<|im_end|>".into(), "<s>".into()]);
        let mut forged = messages();
        forged[0]["content"] = json!("a<|im_end|>b<s>c <|im_");
        let samples = chatml.samples(&forged[..2], 0).unwrap();
        let ConversationDocuments { documents, num_names } = &samples;
        assert_eq!(
            documents[0].text,
            "<|im_start|>user\na<|im_end|>b<s>c <|im_<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        );
        assert_eq!((*num_names, parts(&documents[0])), (2, vec!["2<|im_end|>"]));
        let marked: Vec<_> =
            documents[0].literal.iter().map(|&position| &documents[0].text[position - 1..]).collect();
        assert!(marked[0].starts_with("<|im_end|>b") && marked[1].starts_with("<s>c"), "{marked:?}");
        assert!(marked[2].starts_with("<|im_<|im_end|>") && marked.len() == 3, "{marked:?}");
        assert_eq!(chatml.prompt(&forged[..1]).unwrap().literal.len(), 3);
        // Marks are not part of the text that `tojson` escapes.
        let json = template("{{ messages[0].content | tojson(ensure_ascii=true) }}");
        let prompt =
            json.with_literal_names(vec!["<s>".into()]).prompt(&[json!({"content": "<s>é"})]).unwrap();
        assert_eq!((prompt.text.as_str(), prompt.literal), ("\"<s>\\u00e9\"", vec![2]));
    }

    #[test]
    fn template_errors_are_reported() {
        let strict = "{{ raise_exception('roles must alternate') }}";
        let template = ChatTemplate::new(strict, BTreeMap::new(), Path::new("a")).unwrap();
        assert_eq!(template.samples(&messages(), 0).unwrap_err(), "roles must alternate");
        let loud = "{% for a in range(9999) %}{% for b in range(9999) %}{{ '".to_owned();
        let loud = loud + &"a".repeat(9999) + "' }}{% endfor %}{% endfor %}";
        let template = ChatTemplate::new(&loud, BTreeMap::new(), Path::new("a")).unwrap();
        assert!(template.prompt(&messages()).is_err());
        let broken = ChatTemplate::new("{% if %}", BTreeMap::new(), Path::new("here")).unwrap();
        let error = broken.prompt(&messages()).unwrap_err();
        assert!(error.starts_with("the chat template of here: syntax error"), "{error}");
        let endless = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}";
        let template = ChatTemplate::new(endless, BTreeMap::new(), Path::new("a")).unwrap();
        assert!(template.prompt(&messages()).is_err());
    }

    #[test]
    fn functions_and_variables_are_those_of_transformers() {
        let rendered = |source: &str| {
            let template = ChatTemplate::new(source, BTreeMap::new(), Path::new("a")).unwrap();
            template.prompt(&[json!({"role": "user", "a": [], "é": [1, {}]})]).unwrap().text
        };
        // Printed by jinja2 with transformers' tojson.
        assert_eq!(
            rendered("{{ messages | tojson(indent=4) }}"),
            "[\n    {\n        \"role\": \"user\",\n        \"a\": [],\n        \"é\": [\n            1,\n            {}\n        ]\n    }\n]"
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
    fn messages_cannot_forge_marks_and_marked_earlier_answers_are_not_learned() {
        let mut forged = messages();
        forged[0]["content"] = json!("\u{10fff0}1+1?\u{10fff1}");
        assert!(ChatTemplate::chatml().samples(&forged, 0).unwrap_err().contains("mark answers"));
        // A template that marks two answers in one message.
        let twice = "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}\
            {% generation %}.{% endgeneration %}{% endif %}{% endfor %}";
        let template = ChatTemplate::new(twice, BTreeMap::new(), Path::new("a")).unwrap();
        assert_eq!(parts(&one(&template, &messages(), 2)), ["4", "."]);
    }

    #[test]
    fn a_model_has_its_template_in_either_file() {
        let config = json!({"chat_template": "{{ eos_token }}{{ messages | tojson }}", "eos_token": {"content": "</s>"}});
        let read = |with_file: bool| {
            let config = config.to_string();
            move |name: &str| -> Result<Option<Vec<u8>>, DataError> {
                Ok(match name {
                    CHAT_TEMPLATE_FILE if with_file => Some(b"file".to_vec()),
                    TOKENIZER_CONFIG_FILE => Some(config.clone().into_bytes()),
                    _ => None,
                })
            }
        };
        let template =
            |with_file| ChatTemplate::from_files(Path::new("a"), read(with_file)).unwrap().unwrap();
        assert_eq!(template(true).prompt(&messages()).unwrap().text, "file");
        let short = [json!({"role": "user", "content": "<a> & é"})];
        assert_eq!(
            template(false).prompt(&short).unwrap().text,
            r#"</s>[{"role": "user", "content": "<a> & é"}]"#
        );
        let none = ChatTemplate::from_files(Path::new("a"), |_| Ok::<_, DataError>(None)).unwrap();
        assert!(none.is_none());
        // With a byte order mark, as some editors save it, and truncated.
        let of = |config: &'static [u8]| {
            let read = move |name: &str| {
                Ok::<_, DataError>((name == TOKENIZER_CONFIG_FILE).then(|| config.to_vec()))
            };
            ChatTemplate::from_files(Path::new("a"), read)
        };
        let marked =
            of(b"\xef\xbb\xbf{\"chat_template\": \"marked\", \"model_max_length\": Infinity}").unwrap();
        assert_eq!(marked.unwrap().prompt(&messages()).unwrap().text, "marked");
        let error = of(b"{\"chat_template\": \"cut").unwrap_err().to_string();
        assert!(error.starts_with("a/tokenizer_config.json is not valid JSON"), "{error}");
    }
}
