//! `cargo xtask foreign`: round trips of models between transformers and Trireme.

use crate::commands::{build, virtual_environment};
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::process::Command;

const HELP: &str = "\
Saves small models of several families with transformers, and checks that Trireme exports them
again as they were, computes the same logits, and continues prompts with the same text; also after
some steps of training. Installs the packages of peers/requirements.txt (PyTorch among them,
about 5 GB) into target/peers-venv, unless --python names an interpreter that has them.";

/// Check imports and exports with transformers itself.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct ForeignArgs {
    /// Python with the packages of peers/requirements.txt, instead of the one in target/peers-venv.
    #[arg(long)]
    python: Option<PathBuf>,
}

/// Runs `cargo xtask foreign`. Returns whether all checks passed.
pub(crate) fn run(args: &ForeignArgs, root: &Path) -> Result<bool> {
    let target = build(root)?;
    let python = match &args.python {
        Some(python) => python.clone(),
        None => virtual_environment(root, &target.join("peers-venv"))?,
    };
    let mut check = Command::new(&python);
    check.arg("peers/foreign_models.py").arg(target.join("release/trireme")).current_dir(root);
    let status = check.status().with_context(|| format!("cannot start {}", python.display()))?;
    Ok(status.success())
}
