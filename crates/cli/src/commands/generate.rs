//! `trireme generate`.

use crate::console::{Output, remark};
use crate::simd::{Proof, Simd};
use anyhow::{Result, anyhow, bail};
use std::io::Write;
use std::path::PathBuf;
use trireme_checkpoint::ModelSource;
use trireme_data::Tokenizer;
use trireme_model::Sampling;
use trireme_tensor::{Device, DeviceOptions};
use trireme_train::{LoadedModel, SampleSettings, load_model, model_tokenizer, sample};

/// Generate text from a checkpoint, a run, or a Hugging Face model directory.
///
/// Prints the text as it is generated. The same seed gives the same text on the same kind of machine.
#[derive(Debug, clap::Args)]
pub(crate) struct GenerateArgs {
    /// The folder of a run (its newest checkpoint), a checkpoint, or a Hugging Face model directory.
    path: PathBuf,
    /// Text to continue.
    #[arg(long, default_value = "\n", hide_default_value = true)]
    prompt: String,
    /// Maximum number of tokens to generate.
    #[arg(long, value_name = "N", default_value_t = 256)]
    num_tokens: usize,
    /// Divides the logits: below 1 gives more likely text, above 1 more varied text; 0 always chooses the likeliest
    /// token.
    #[arg(long, default_value_t = 0.8, allow_negative_numbers = true)]
    temperature: f32,
    /// Choose only among this many of the likeliest tokens; 0 means all.
    #[arg(long, value_name = "K", default_value_t = 0)]
    top_k: usize,
    /// Choose only among the fewest tokens whose total probability reaches this value.
    #[arg(long, value_name = "P", default_value_t = 1.0, allow_negative_numbers = true)]
    top_p: f32,
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

/// Runs `trireme generate`.
pub(crate) fn run(args: &GenerateArgs) -> Result<()> {
    if !(args.temperature.is_finite() && args.temperature >= 0.0) {
        bail!("--temperature is {}; it must be 0 or more", args.temperature);
    }
    if !(args.top_p > 0.0 && args.top_p <= 1.0) {
        bail!("--top-p is {}; it must be above 0 and at most 1", args.top_p);
    }
    let simd = Simd::choose(Proof::Cached)?;
    simd.warn();
    let (num_threads, features_max) = (args.threads, Some(simd.level));
    let device = Device::cpu(DeviceOptions { num_threads, features_max, ..DeviceOptions::default() })?;
    let LoadedModel { mut executor, config, notices } =
        load_model(&args.path, args.allow_non_finite, &device)?;
    notices.iter().for_each(|notice| remark(&format!("note: {notice}")));
    let tokenizer = tokenizer(args)?;
    let settings = SampleSettings {
        prompt: args.prompt.clone(),
        num_tokens: args.num_tokens,
        sampling: Sampling { temperature: args.temperature, top_k: args.top_k, top_p: args.top_p },
        seed: args.seed,
        stop_at_end: !args.ignore_end,
    };
    let mut written = Ok(());
    let mut show = |piece: &str| {
        if written.is_ok() {
            written = Output.write_all(piece.as_bytes()).and_then(|()| Output.flush());
        }
    };
    show(&settings.prompt);
    sample(&mut executor, &config, &tokenizer, &settings, &mut show)?;
    show("\n");
    Ok(written?)
}

fn tokenizer(args: &GenerateArgs) -> Result<Tokenizer> {
    match &args.tokenizer {
        Some(name) if name.as_os_str() == "bytes" => Ok(Tokenizer::bytes()),
        Some(path) => Ok(Tokenizer::from_file(path)?),
        None => {
            let missing = || anyhow!("{} has no tokenizer; pass one with --tokenizer", args.path.display());
            model_tokenizer(&ModelSource::open(&args.path)?)?.ok_or_else(missing)
        }
    }
}
