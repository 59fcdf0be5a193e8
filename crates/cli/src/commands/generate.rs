//! `trireme generate`.

use anyhow::{Context, Result, bail};
use std::io::Write;
use std::path::PathBuf;
use trireme_checkpoint::ModelSource;
use trireme_data::Tokenizer;
use trireme_model::Sampling;
use trireme_tensor::{Device, DeviceOptions};
use trireme_train::{LoadedModel, SampleSettings, load_model, sample};

/// Generate text from a checkpoint, a run, or a Hugging Face directory.
///
/// The text appears as it is made. The same seed gives the same text on the same kind of machine.
#[derive(Debug, clap::Args)]
pub(crate) struct GenerateArgs {
    /// A run's folder (its newest checkpoint), a checkpoint, or a Hugging Face directory.
    path: PathBuf,
    /// Text to go on from.
    #[arg(long, default_value = "\n", hide_default_value = true)]
    prompt: String,
    /// Tokens to add at most.
    #[arg(long, value_name = "N", default_value_t = 256)]
    num_tokens: usize,
    /// Divides the logits: below 1 more likely, above 1 more varied text; 0 always takes the likeliest token.
    #[arg(long, default_value_t = 0.8)]
    temperature: f32,
    /// Choose among this many of the likeliest tokens; 0 means all.
    #[arg(long, value_name = "K", default_value_t = 0)]
    top_k: usize,
    /// Choose among the fewest tokens that together have this probability.
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    top_p: f32,
    /// Seed of the choice.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// `bytes`, or a tokenizer.json; without it the one stored with the model.
    #[arg(long)]
    tokenizer: Option<PathBuf>,
    /// Go on where the tokenizer says that a document ends.
    #[arg(long)]
    ignore_end: bool,
    /// Threads to compute with; all cores by default.
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    threads: usize,
}

/// Runs `trireme generate`.
pub(crate) fn run(args: &GenerateArgs) -> Result<()> {
    let is_rate = |rate: f32| rate.is_finite() && rate >= 0.0;
    if !is_rate(args.temperature) || !is_rate(args.top_p) || args.top_p > 1.0 || args.top_p == 0.0 {
        bail!("--temperature must be 0 or more, and --top-p above 0 and at most 1");
    }
    let device = Device::cpu(DeviceOptions { num_threads: args.threads })?;
    let LoadedModel { model, parameters, notices } = load_model(&args.path, &device)?;
    notices.iter().for_each(|notice| eprintln!("note: {notice}"));
    let tokenizer = tokenizer(args)?;
    let settings = SampleSettings {
        prompt: args.prompt.clone(),
        num_tokens: args.num_tokens,
        sampling: Sampling { temperature: args.temperature, top_k: args.top_k, top_p: args.top_p },
        seed: args.seed,
        stop_at_end: !args.ignore_end,
    };
    let mut output = std::io::stdout();
    let mut failure = None;
    let mut show = |piece: &str| {
        let written = output.write_all(piece.as_bytes()).and_then(|()| output.flush());
        failure = failure.take().or(written.err());
    };
    show(&settings.prompt);
    sample(&model, &parameters, &device, &tokenizer, &settings, &mut show)?;
    show("\n");
    match failure {
        // The reader, such as `head`, has seen enough.
        Some(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        Some(error) => Err(error).context("cannot write to standard output"),
        None => Ok(()),
    }
}

fn tokenizer(args: &GenerateArgs) -> Result<Tokenizer> {
    match &args.tokenizer {
        Some(name) if name.as_os_str() == "bytes" => Ok(Tokenizer::bytes()),
        Some(path) => Ok(Tokenizer::from_file(path)?),
        None => {
            let source = ModelSource::open(&args.path)?;
            Tokenizer::load(source.path()).with_context(|| {
                format!("{} has no tokenizer; name one with --tokenizer", source.path().display())
            })
        }
    }
}
