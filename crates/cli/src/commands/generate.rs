//! `trireme generate`.

use super::read_file;
use crate::console::Output;
use crate::diagnostics::print_diagnostic;
use crate::simd::device_options;
use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::io::Write;
use std::path::PathBuf;
use trireme_base::parse_json;
use trireme_checkpoint::ModelSource;
use trireme_data::{ChatTemplate, Prompt, Tokenizer, with_text_contents};
use trireme_model::{ModelConfig, Sampling};
use trireme_parallel::Executor;
use trireme_tensor::Device;
use trireme_train::{
    FinishReason, GenerationSettings, LoadedModel, chat_template_for, generate_text, load_model,
    model_tokenizer,
};

const EXAMPLES: &str = "\
Examples:
  trireme generate runs/book --prompt \"Once\" --stop \"\\n\"
      A text that ends with its first line.
  trireme generate model --chat --prompt \"What is a ring all-reduce?\"
      An answer, by the chat template of the model.
  trireme generate model --prompt-file prompts.jsonl --json
      A text for each line, which has a `prompt` or `messages`.";

/// Generate text from a checkpoint, a run, or a Hugging Face model directory.
///
/// Prints the text as it is generated, and reports if it reaches the model's maximum length. The same seed gives the same text on the same
/// kind of machine.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct GenerateArgs {
    /// The folder of a run (its newest checkpoint), a checkpoint, or a Hugging Face model directory.
    path: PathBuf,
    /// Text to continue; can be given several times.
    #[arg(long, value_name = "TEXT")]
    prompt: Vec<String>,
    /// File with a text to continue. In a .jsonl file, each line is an object with a `prompt` or `messages`.
    #[arg(long, value_name = "FILE")]
    prompt_file: Option<PathBuf>,
    /// Treat each prompt as a user message and format it with the chat template.
    #[arg(long)]
    chat: bool,
    /// System message before each user message.
    #[arg(long, value_name = "TEXT", requires = "chat")]
    system: Option<String>,
    /// Jinja template that formats messages as text: a file, or `chatml`. Defaults to the model's own.
    #[arg(long, value_name = "TEMPLATE")]
    chat_template: Option<PathBuf>,
    /// Stop before this text, or at the special token with this name. \n and \t are escapes. Can be given several times.
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Print one JSON object for each prompt, with the reason why its text ends.
    #[arg(long)]
    json: bool,
    /// Maximum number of tokens to generate.
    #[arg(long, value_name = "N", default_value_t = 256)]
    num_tokens: usize,
    /// Divides the logits: below 1 gives more likely text, above 1 more varied text; 0 always chooses the likeliest token.
    #[arg(long, default_value_t = 0.8, allow_negative_numbers = true)]
    temperature: f32,
    /// Choose only among this many of the likeliest tokens; 0 means all.
    #[arg(long, value_name = "K", default_value_t = 0)]
    top_k: usize,
    /// Choose only among the fewest tokens whose total probability reaches this value.
    #[arg(long, value_name = "P", default_value_t = 1.0, allow_negative_numbers = true)]
    top_p: f32,
    /// Choose only among tokens that are at least this fraction as likely as the likeliest; 0 means all.
    #[arg(long, value_name = "FRACTION", default_value_t = 0.0, allow_negative_numbers = true)]
    min_p: f32,
    /// Seed for sampling.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// `bytes`, or a tokenizer.json. By default, the tokenizer stored with the model.
    #[arg(long)]
    tokenizer: Option<PathBuf>,
    /// Continue past the token that ends a document.
    #[arg(long)]
    ignore_end: bool,
    /// Load the weights even if they contain NaN or infinity.
    #[arg(long)]
    allow_non_finite: bool,
    /// Number of threads; all cores by default.
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    threads: usize,
}

pub(crate) fn run(args: &GenerateArgs) -> Result<()> {
    if !(args.temperature.is_finite() && args.temperature >= 0.0) {
        bail!("--temperature is {}; it must be 0 or more", args.temperature);
    }
    if !(args.top_p > 0.0 && args.top_p <= 1.0) {
        bail!("--top-p is {}; it must be above 0 and at most 1", args.top_p);
    }
    if !(args.min_p >= 0.0 && args.min_p <= 1.0) {
        bail!("--min-p is {}; it must be from 0 to 1", args.min_p);
    }
    if args.stop.iter().any(String::is_empty) {
        bail!("--stop is empty, so no text could be generated before it; give a text, or leave it out");
    }
    let device = Device::cpu(device_options(args.threads)?)?;
    let LoadedModel { mut executor, config, notices } =
        load_model(&args.path, args.allow_non_finite, &device)?;
    notices.iter().for_each(|notice| print_diagnostic(&format!("note: {notice}")));
    let source = ModelSource::open(&args.path)?;
    let tokenizer = tokenizer(args, &source)?;
    let template = chat_template_for(args.chat_template.as_deref(), &source)?;
    let template = template.map(|template| template.with_special_tokens_as_text(&tokenizer));
    let prompts = prompts(args, template.as_ref())?;
    let mut stop: Vec<String> =
        args.stop.iter().map(|stop| stop.replace("\\n", "\n").replace("\\t", "\t")).collect();
    // Decoded text leaves special tokens out, so a stop text cannot match one.
    let stop_tokens: Vec<u32> =
        stop.iter().filter_map(|stop| tokenizer.special_token_id(stop.trim())).collect();
    let (mut end_tokens, warnings) = end_tokens(&source, config.vocab_size)?;
    let end_of_answer = template.as_ref().filter(|_| args.chat).and_then(ChatTemplate::end_of_answer);
    if let Some(end) = end_of_answer.filter(|_| !args.ignore_end) {
        end_tokens.extend(tokenizer.special_tokens_in(end));
        stop.push(end.to_owned());
    }
    warnings.iter().for_each(|warning| print_diagnostic(&format!("warning: {warning}")));
    for (index, prompt) in prompts.iter().enumerate() {
        let settings = GenerationSettings {
            prompt: prompt.clone(),
            num_tokens: args.num_tokens,
            sampling: Sampling {
                temperature: args.temperature,
                top_k: args.top_k,
                top_p: args.top_p,
                min_p: args.min_p,
            },
            seed: args.seed,
            stop_at_end: !args.ignore_end,
            stop: stop.clone(),
            end_tokens: end_tokens.clone(),
            stop_tokens: stop_tokens.clone(),
        };
        if prompts.len() > 1 && !args.json {
            writeln!(Output, "--- {} of {} ---", index + 1, prompts.len())?;
        }
        let ended = generate(args, &settings, &mut executor, &config, &tokenizer)?;
        if ended == FinishReason::PositionLimit && !args.json {
            let positions = config.max_positions();
            print_diagnostic(&format!("note: the text ends because the model has {positions} positions"));
        }
    }
    Ok(())
}

/// Generates one text and prints it as it grows, or at once as JSON. Returns why the text ended.
fn generate(
    args: &GenerateArgs,
    settings: &GenerationSettings,
    executor: &mut Executor,
    config: &ModelConfig,
    tokenizer: &Tokenizer,
) -> Result<FinishReason> {
    let mut written = Ok(());
    let mut all = String::new();
    let mut show = |piece: &str| {
        if args.json {
            all.push_str(piece);
        } else if written.is_ok() {
            written = Output.write_all(piece.as_bytes()).and_then(|()| Output.flush());
        }
    };
    // In a chat, the user knows the question.
    let repeats_prompt = !(args.chat || args.json);
    if repeats_prompt {
        show(&settings.prompt.text);
    }
    let ended = generate_text(executor, config, tokenizer, settings, &mut show)?;
    if args.json {
        let ended = match ended {
            FinishReason::TokenLimit => "num_tokens",
            FinishReason::EndOfDocument => "end",
            FinishReason::StopSequence => "stop",
            FinishReason::PositionLimit => "model_length",
        };
        written =
            writeln!(Output, "{}", json!({ "prompt": settings.prompt.text, "text": all, "ended": ended }));
    } else {
        show("\n");
    }
    written?;
    Ok(ended)
}

/// Returns the tokens that end a text according to the model's files, and a warning for each file that cannot be parsed or has an entry
/// that is no token of the model.
fn end_tokens(source: &ModelSource, vocab_size: usize) -> Result<(Vec<u32>, Vec<String>)> {
    let (mut found, mut warnings) = (BTreeSet::new(), Vec::new());
    for name in ["generation_config.json", "config.json"] {
        let path = source.path().join(name);
        let Some(text) = source.read_file(name)? else { continue };
        let mut config = match parse_json(&text) {
            Ok(config) => config,
            Err(error) => {
                warnings
                    .push(format!("{} is not read: {error}; its eos_token_id is missing", path.display()));
                continue;
            }
        };
        let ids = match config.get_mut("eos_token_id").map(Value::take) {
            None | Some(Value::Null) => continue,
            Some(Value::Array(ids)) => ids,
            Some(id) => vec![id],
        };
        let is_token = |id: &u64| *id < vocab_size as u64;
        let (known, unknown): (Vec<_>, Vec<_>) =
            ids.iter().partition(|id| id.as_u64().as_ref().is_some_and(is_token));
        found.extend(known.into_iter().filter_map(|id| u32::try_from(id.as_u64()?).ok()));
        if let Some(first) = unknown.first() {
            let shown: String = first.to_string().chars().take(40).collect();
            warnings.push(format!(
                "{}: eos_token_id has {shown}, which is not one of the {vocab_size} tokens of the model and is ignored",
                path.display()
            ));
        }
    }
    Ok((found.into_iter().collect(), warnings))
}

fn prompts(args: &GenerateArgs, template: Option<&ChatTemplate>) -> Result<Vec<Prompt>> {
    let rendered = |messages: &[Value]| {
        let missing = || {
            let path = args.path.display();
            anyhow!(
                "{path} has no chat template; name one with --chat-template: a file, or `chatml` if the model was trained with that"
            )
        };
        let template = template.ok_or_else(missing)?;
        let messages = with_text_contents(messages).map_err(|reason| anyhow!("{reason}"))?;
        template.prompt(&messages).map_err(|reason| anyhow!("{reason}"))
    };
    let prompt = |text: &str| {
        if args.chat {
            let message = |role: &str, content: &str| json!({ "role": role, "content": content });
            let system = args.system.as_ref().map(|system| message("system", system));
            rendered(&system.into_iter().chain([message("user", text)]).collect::<Vec<_>>())
        } else {
            Ok(text.to_owned().into())
        }
    };
    let mut prompts = args.prompt.iter().map(|text| prompt(text)).collect::<Result<Vec<_>>>()?;
    if let Some(path) = &args.prompt_file {
        let text = read_file(path)?;
        let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
        if path.extension().is_some_and(|extension| extension == "jsonl") {
            let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
            for (index, line) in lines {
                let place = || format!("line {} of {}", index + 1, path.display());
                let record: Value = serde_json::from_str(line).with_context(place)?;
                prompts.push(match (record["prompt"].as_str(), record["messages"].as_array()) {
                    (Some(text), _) => prompt(text)?,
                    (None, Some(messages)) => rendered(messages).with_context(place)?,
                    (None, None) => bail!("{} has neither a `prompt` nor `messages`", place()),
                });
            }
        } else {
            prompts.push(prompt(text)?);
        }
    }
    if prompts.is_empty() && args.chat {
        bail!("--chat needs something to answer; pass --prompt TEXT or --prompt-file FILE");
    }
    if prompts.is_empty() {
        prompts.push(prompt("\n")?);
    }
    Ok(prompts)
}

fn tokenizer(args: &GenerateArgs, source: &ModelSource) -> Result<Tokenizer> {
    match &args.tokenizer {
        Some(name) if name.as_os_str() == "bytes" => Ok(Tokenizer::bytes()),
        Some(path) => Ok(Tokenizer::from_file(path)?),
        None => {
            let missing = || anyhow!("{} has no tokenizer; pass one with --tokenizer", args.path.display());
            model_tokenizer(source)?.ok_or_else(missing)
        }
    }
}
