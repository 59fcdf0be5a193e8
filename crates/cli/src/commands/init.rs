//! `trireme init`: writes a first config and text.

use super::write_file;
use crate::console::Output;
use anyhow::{Context, Result, bail};
use std::fs;
use std::io::Write;
use std::path::PathBuf;
use trireme_base::quoted;

/// The config that `trireme train` reads by default.
pub(crate) const DEFAULT_CONFIG: &str = "train.toml";

const TEXT_FILE: &str = "text.txt";

const CONFIG: &str = include_str!("init.toml");

/// This program's own documentation: enough for a small model to learn from.
const TEXTS: [&str; 6] = [
    include_str!("../../../../ARCHITECTURE.md"),
    include_str!("../../../../docs/guide.md"),
    include_str!("../../../../docs/collectives.md"),
    include_str!("../../../../docs/memory.md"),
    include_str!("../../../../docs/pipeline.md"),
    include_str!("../../../../docs/optimizers.md"),
];

const EXAMPLES: &str = "\
Example:
  trireme init first && cd first && trireme train
      A small model that learns this program's documentation, in about a minute.";

/// Write a commented config and a small text to begin with.
///
/// Makes the files train.toml and text.txt; `trireme train` in the folder trains a small model.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct InitArgs {
    /// Folder to write to; created if missing.
    folder: PathBuf,
}

pub(crate) fn run(args: &InitArgs) -> Result<()> {
    let folder = &args.folder;
    let paths = [DEFAULT_CONFIG, TEXT_FILE].map(|name| folder.join(name));
    if let Some(path) = paths.iter().find(|path| path.exists()) {
        bail!("{} exists; choose another folder, or move the file away", path.display());
    }
    fs::create_dir_all(folder).with_context(|| format!("cannot create the folder {}", folder.display()))?;
    let [config, text] = paths;
    write_file(&text, &TEXTS.concat())?;
    write_file(&config, CONFIG)?;
    writeln!(Output, "written: {} and {}", config.display(), text.display())?;
    Ok(writeln!(Output, "next step:\n  cd {} && trireme train", quoted(&folder.to_string_lossy()))?)
}
