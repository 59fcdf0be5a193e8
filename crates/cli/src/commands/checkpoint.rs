//! `trireme checkpoint`: inspects checkpoints and model directories, and exports models.

use crate::console::Output;
use crate::diagnostics::print_diagnostic;
use anyhow::{Context, bail};
use clap::Subcommand;
use serde::Serialize;
use std::fmt;
use std::io::Write;
use std::path::{Path, PathBuf};
use trireme_base::{Bytes, DType, printable, with_sources};
use trireme_checkpoint::{
    Checkpoint, ExtraFile, ModelExport, ModelSource, OPTIMIZER_PREFIX, StoredTensors, best_step,
    checkpoints_folder, export, list_checkpoints,
};
use trireme_data::BYTES_TOKENIZER_FILE;
use trireme_model::{ModelConfig, canonical_names};
use trireme_tensor::{Device, DeviceOptions, Precision};
use trireme_train::{TOKENIZER_NOTE, model_tokenizer};

#[derive(Debug, Subcommand)]
pub(crate) enum CheckpointCommand {
    /// Show the contents of a checkpoint or model directory.
    Inspect {
        /// A checkpoint, the folder of a run (its newest checkpoint), or a Hugging Face model directory.
        path: PathBuf,
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
        /// Read every file and verify its checksum.
        #[arg(long)]
        verify: bool,
    },
    /// Write the weights as a Hugging Face model directory.
    Export {
        /// A checkpoint, the folder of a run (its newest checkpoint), or a Hugging Face model directory.
        path: PathBuf,
        /// Directory to write.
        out: PathBuf,
        /// Split the weights into several files of at most this size, such as 5GiB.
        #[arg(long, value_name = "SIZE", default_value = "5GiB")]
        max_shard_size: Bytes,
        /// Write the weights in this dtype (f32, bf16 or f16) instead of the one that they are stored in.
        #[arg(long)]
        dtype: Option<Precision>,
        /// Replace an earlier export. Nothing else is ever replaced.
        #[arg(long)]
        force: bool,
    },
    /// List the checkpoints of a run.
    List {
        /// The folder of a run, or its checkpoints folder.
        run_folder: PathBuf,
    },
}

pub(crate) fn run(command: &CheckpointCommand) -> anyhow::Result<()> {
    let mut out = Output;
    match command {
        CheckpointCommand::Inspect { path, json, verify } => inspect(path, *json, *verify, &mut out),
        CheckpointCommand::Export { path, out: target, max_shard_size, dtype, force } => {
            write_model(path, target, *max_shard_size, dtype.map(Precision::dtype), *force, &mut out)
        }
        CheckpointCommand::List { run_folder } => list(run_folder, &mut out),
    }
}

fn inspect(path: &Path, json: bool, verify: bool, out: &mut impl Write) -> anyhow::Result<()> {
    let source = open(path)?;
    let report = Report::new(&source);
    if json {
        serde_json::to_writer_pretty(&mut *out, &report)?;
        writeln!(out)?;
    } else {
        write!(out, "{}", printable(&report.to_string()))?;
    }
    if verify {
        verify_source(&source)?;
        if !json {
            writeln!(out, "all checksums match")?;
        }
    }
    Ok(())
}

/// Opens a checkpoint, run or model directory. Warns of each unusable checkpoint that was skipped.
fn open(path: &Path) -> anyhow::Result<ModelSource> {
    let source = ModelSource::open(path)?;
    if let ModelSource::Checkpoint { skipped, .. } = &source {
        for skipped in skipped {
            let reason = with_sources(&skipped.reason);
            print_diagnostic(&format!("warning: skipped {}: {reason}", skipped.path.display()));
        }
    }
    Ok(source)
}

fn verify_source(source: &ModelSource) -> anyhow::Result<()> {
    let ModelSource::Checkpoint { checkpoint, .. } = source else {
        bail!(
            "{} is a Hugging Face model directory, which has no checksums to verify",
            source.path().display()
        );
    };
    let failures = checkpoint.verify();
    if failures.is_empty() {
        return Ok(());
    }
    let lines: String = failures.iter().map(|failure| format!("\n  {}", with_sources(failure))).collect();
    bail!("{} is damaged:{lines}", checkpoint.path().display());
}

fn write_model(
    path: &Path,
    target: &Path,
    Bytes(shard_bytes_max): Bytes,
    dtype: Option<DType>,
    force: bool,
    out: &mut impl Write,
) -> anyhow::Result<()> {
    let source = open(path)?;
    let mut files = source.model_files()?;
    if !files.iter().any(|(name, _)| *name == trireme_checkpoint::CONFIG_FILE) {
        bail!("{} has no config.json, so the exported model could not be loaded", source.path().display());
    }
    let tokenizer = model_tokenizer(&source)?;
    if let (Some(tokenizer), Some(mark)) =
        (&tokenizer, files.iter_mut().find(|file| file.0 == BYTES_TOKENIZER_FILE))
    {
        // The export has the tokenizer in Hugging Face's format, which other programs can read.
        *mark = tokenizer.hugging_face_file()?;
    }
    let sha256 = tokenizer.map(|tokenizer| tokenizer.sha256()).transpose()?;
    let files: Vec<ExtraFile<'_>> =
        files.iter().map(|(name, contents)| ExtraFile { name, contents }).collect();
    let tensors = exported_weights(&source, &files)?;
    let notes: Vec<_> = sha256.iter().map(|sha256| (TOKENIZER_NOTE, &sha256[..])).collect();
    let model =
        ModelExport { tensors: &tensors, files: &files, dtype, notes: &notes, shard_bytes_max, force };
    export(&model, target).with_context(|| format!("exporting {}", source.path().display()))?;
    let written = open(target)?;
    let totals = Totals::new(&written.weights(), |_| true);
    let line = format!("{} -> {}: {totals}", source.path().display(), target.display());
    Ok(writeln!(out, "{}", printable(&line))?)
}

/// Returns the weights to export. A tensor that the index names but no file holds is left out if the model does not need it, such as a tied
/// output layer.
fn exported_weights(source: &ModelSource, files: &[ExtraFile<'_>]) -> anyhow::Result<StoredTensors> {
    let weights = source.weights();
    let config = files.iter().find(|file| file.name == trireme_checkpoint::CONFIG_FILE);
    let config = config.and_then(|file| std::str::from_utf8(file.contents).ok());
    // A model that cannot be trained here can still be exported.
    let Some(Ok(config)) = config.map(ModelConfig::from_json) else { return Ok(weights) };
    let canonical = canonical_names(config.build(0, &Device::counting(DeviceOptions::default())?)?.table());
    let is_kept = |name: &str| weights.get(name).is_some() || canonical(name).is_some();
    Ok(weights.renamed(|name| is_kept(name).then(|| name.to_owned()))?)
}

fn list(run_folder: &Path, out: &mut impl Write) -> anyhow::Result<()> {
    let folder = checkpoints_folder(run_folder);
    let checkpoints = list_checkpoints(&folder)?;
    if checkpoints.is_empty() {
        bail!("{} contains no checkpoints", folder.display());
    }
    let best = best_step(&folder);
    for (step, path) in checkpoints {
        let line = match Checkpoint::open(&path) {
            Ok(checkpoint) => {
                let totals = Totals::new(checkpoint.tensors(), |_| true);
                let note = if best == Some(step) { " (lowest validation loss)" } else { "" };
                format!("{}: {totals}{note}", path.display())
            }
            Err(reason) => format!("{}: unusable: {}", path.display(), with_sources(&reason)),
        };
        writeln!(out, "{}", printable(&line))?;
    }
    Ok(())
}

/// The output of `inspect`; its fields are the keys of `--json`.
#[derive(Debug, Serialize)]
struct Report {
    path: PathBuf,
    kind: &'static str,
    step: Option<u64>,
    state: Option<serde_json::Value>,
    tensors: Vec<TensorLine>,
    weights: Totals,
    optimizer: Totals,
    files: Vec<FileLine>,
}

#[derive(Debug, Serialize)]
struct TensorLine {
    name: String,
    dtype: String,
    shape: Vec<usize>,
    bytes: u64,
    num_parts: usize,
}

#[derive(Debug, Serialize)]
struct FileLine {
    name: String,
    bytes: u64,
}

#[derive(Debug, Serialize)]
struct Totals {
    num_tensors: usize,
    num_elements: usize,
    bytes: u64,
}

impl Totals {
    fn new(tensors: &StoredTensors, counted: impl Fn(&str) -> bool) -> Self {
        let mut totals = Totals { num_tensors: 0, num_elements: 0, bytes: 0 };
        for (_, tensor) in tensors.iter().filter(|(name, _)| counted(name)) {
            totals.num_tensors += 1;
            totals.num_elements += tensor.shape().iter().product::<usize>();
            totals.bytes += tensor.stored_bytes();
        }
        totals
    }
}

impl fmt::Display for Totals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} tensors, {} elements, {}", self.num_tensors, self.num_elements, Bytes(self.bytes))
    }
}

impl Report {
    fn new(source: &ModelSource) -> Self {
        let (kind, tensors, checkpoint) = match source {
            ModelSource::Checkpoint { checkpoint, .. } => {
                ("checkpoint", checkpoint.tensors(), Some(checkpoint))
            }
            ModelSource::HuggingFace(directory) => ("hugging_face", directory.tensors(), None),
        };
        let line = |(name, tensor): (&str, &trireme_checkpoint::StoredTensor)| TensorLine {
            name: name.to_owned(),
            dtype: tensor.stored_dtype().to_string(),
            shape: tensor.shape().to_vec(),
            bytes: tensor.stored_bytes(),
            num_parts: tensor.num_parts(),
        };
        let file = |(name, bytes): (&str, u64)| FileLine { name: name.to_owned(), bytes };
        Report {
            path: source.path().to_owned(),
            kind,
            step: checkpoint.map(Checkpoint::step),
            state: checkpoint.map(|checkpoint| checkpoint.state().clone()),
            tensors: tensors.iter().map(line).collect(),
            weights: Totals::new(tensors, |name| !name.starts_with(OPTIMIZER_PREFIX)),
            optimizer: Totals::new(tensors, |name| name.starts_with(OPTIMIZER_PREFIX)),
            files: checkpoint.into_iter().flat_map(Checkpoint::files).map(file).collect(),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} ({})", self.path.display(), self.kind)?;
        if let Some(step) = self.step {
            writeln!(f, "step: {step}")?;
        }
        if let Some(state) = &self.state {
            writeln!(f, "state: {state}")?;
        }
        let name_width = self.tensors.iter().map(|tensor| tensor.name.len()).max().unwrap_or(0);
        for TensorLine { name, dtype, shape, bytes, .. } in &self.tensors {
            writeln!(f, "{name:name_width$}  {dtype:4}  {:>10}  {shape:?}", Bytes(*bytes))?;
        }
        writeln!(f, "weights: {}", self.weights)?;
        if self.optimizer.num_tensors > 0 {
            writeln!(f, "optimizer: {}", self.optimizer)?;
        }
        for FileLine { name, bytes } in &self.files {
            writeln!(f, "file: {name}, {}", Bytes(*bytes))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use trireme_checkpoint::{InMemory, Snapshot, save};
    use trireme_plan::{Mesh, TensorPlacement};

    #[derive(Parser)]
    struct Cli {
        #[command(subcommand)]
        command: CheckpointCommand,
    }

    /// Creates a run with one checkpoint of a weight and its optimizer state.
    fn run_folder() -> tempfile::TempDir {
        let run = tempfile::tempdir().unwrap();
        let mesh = Mesh::data_parallel(1);
        let tensors = ["w", "optimizer.exp_avg.w"]
            .map(|name| TensorPlacement::replicated(name, &[3, 2], DType::F32, &mesh));
        let zeros = [&[0; 24][..]; 2];
        let files = [ExtraFile { name: "config.json", contents: b"{}" }];
        let state = serde_json::json!({ "tokens_seen": 7 });
        let snapshot = Snapshot { step: 5, mesh: &mesh, tensors: &tensors, state: &state, files: &files };
        let folder = run.path().join("checkpoints");
        save(&trireme_comm::single(), &folder, &snapshot, &mut InMemory(&zeros), 0).unwrap();
        run
    }

    fn inspected(path: &Path, json: bool, verify: bool) -> anyhow::Result<String> {
        let mut out = Vec::new();
        inspect(path, json, verify, &mut out)?;
        Ok(String::from_utf8(out)?)
    }

    #[test]
    fn a_run_is_inspected_as_text_and_as_json() {
        let run = run_folder();
        let text = inspected(run.path(), false, true).unwrap();
        for part in
            ["step: 5", r#"{"tokens_seen":7}"#, "weights: 1 tensors, 6 elements, 24B", "all checksums match"]
        {
            assert!(text.contains(part), "{text}");
        }
        let json: serde_json::Value =
            serde_json::from_str(&inspected(run.path(), true, true).unwrap()).unwrap();
        assert_eq!((&json["kind"], &json["step"]), (&"checkpoint".into(), &5.into()));
        assert_eq!(json["optimizer"]["bytes"], 24);
        assert_eq!(json["tensors"][1]["shape"], serde_json::json!([3, 2]));
    }

    #[test]
    fn control_characters_in_names_are_escaped() {
        let run = run_folder();
        let hostile = run.path().join("\u{1b}[2J");
        std::fs::create_dir(&hostile).unwrap();
        std::fs::rename(run.path().join("checkpoints"), hostile.join("checkpoints")).unwrap();
        std::fs::create_dir(hostile.join("checkpoints/step-6")).unwrap();
        let mut out = Vec::new();
        list(&hostile, &mut out).unwrap();
        let listed = String::from_utf8(out).unwrap();
        for text in [listed, inspected(&hostile.join("checkpoints/step-5"), false, false).unwrap()] {
            assert!(text.contains(r"/\u{1b}[2J/checkpoints/step-5") && !text.contains('\u{1b}'), "{text}");
        }
    }

    #[test]
    fn verifying_names_the_damaged_file() {
        let run = run_folder();
        let shard = run.path().join("checkpoints/step-5/shard-00000.safetensors");
        let mut contents = std::fs::read(&shard).unwrap();
        *contents.last_mut().unwrap() ^= 1;
        std::fs::write(&shard, contents).unwrap();
        assert!(inspected(run.path(), false, false).is_ok());
        let refused = inspected(run.path(), false, true).unwrap_err().to_string();
        assert!(refused.contains("shard-00000.safetensors"), "{refused}");
    }

    #[test]
    fn an_export_is_a_model_directory() {
        let (run, other) = (run_folder(), tempfile::tempdir().unwrap());
        let target = other.path().join("model");
        write_model(run.path(), &target, Bytes(5 << 30), None, false, &mut Vec::new()).unwrap();
        let text = inspected(&target, false, false).unwrap();
        assert!(text.contains("hugging_face") && text.contains("weights: 1 tensors"), "{text}");
        assert!(inspected(&target, false, true).is_err(), "there are no checksums to verify");
        assert!(write_model(run.path(), &target, Bytes(1), None, false, &mut Vec::new()).is_err());
    }

    #[test]
    fn checkpoints_are_listed_with_the_reason_why_one_cannot_be_used() {
        let run = run_folder();
        std::fs::create_dir(run.path().join("checkpoints/step-6")).unwrap();
        let mut out = Vec::new();
        list(run.path(), &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("step-5: 2 tensors") && text.contains("step-6: unusable"), "{text}");
        assert!(list(&run.path().join("none"), &mut Vec::new()).is_err());
    }

    #[test]
    fn sizes_are_parsed_and_wrong_ones_refused() {
        let parse = |size| Cli::try_parse_from(["checkpoint", "export", "a", "b", "--max-shard-size", size]);
        let CheckpointCommand::Export { max_shard_size, .. } = parse("100MiB").unwrap().command else {
            panic!("an export was asked for");
        };
        assert_eq!(max_shard_size, Bytes(100 << 20));
        assert!(parse("100 bananas").is_err());
    }
}
