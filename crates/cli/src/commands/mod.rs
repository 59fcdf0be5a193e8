//! The commands, one file each, and the functions that several share.

pub(crate) mod bench;
pub(crate) mod checkpoint;
pub(crate) mod completions;
pub(crate) mod config;
pub(crate) mod costs;
pub(crate) mod data;
pub(crate) mod doctor;
pub(crate) mod eval;
pub(crate) mod flight_recorder;
pub(crate) mod generate;
pub(crate) mod init;
pub(crate) mod plan;
pub(crate) mod prepare;
pub(crate) mod prove_kernels;
pub(crate) mod report;
pub(crate) mod train;

use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};

/// Extensions of files that hold training data.
const DATA_EXTENSIONS: [&str; 6] = ["gz", "jsonl", "ndjson", "parquet", "txt", "zst"];

fn write_file(path: &Path, contents: &str) -> Result<()> {
    fs::write(path, contents).with_context(|| format!("cannot write {}", path.display()))
}

fn read_file(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Refuses a path that cannot be a config, and suggests what may have been meant.
fn check_config_path(path: &Path) -> Result<()> {
    if path.is_dir() {
        bail!(
            "{} is a folder; expected a config, such as one that `trireme init DIR` writes",
            path.display()
        );
    }
    let extension = path.extension().unwrap_or_default().to_string_lossy();
    if DATA_EXTENSIONS.contains(&&*extension) {
        bail!(
            "{0} looks like data, not like a config; to train on it, set [data] inputs = [\"{0}\"] in a config",
            path.display()
        );
    }
    if path.exists() {
        return Ok(());
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let configs = match &configs_in(folder)[..] {
        [] => "begin with `trireme init DIR`".to_owned(),
        here => format!("its folder has {}", here.join(", ")),
    };
    bail!("the config {} does not exist; {configs}", path.display())
}

/// Returns the first few configs in a folder, by name.
fn configs_in(folder: &Path) -> Vec<String> {
    const NUM_SHOWN_MAX: usize = 5;
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut found: Vec<PathBuf> =
        entries.filter(|path| path.extension().is_some_and(|end| end == "toml")).collect();
    found.sort();
    found.truncate(NUM_SHOWN_MAX);
    found.iter().map(|path| path.strip_prefix(".").unwrap_or(path).display().to_string()).collect()
}
