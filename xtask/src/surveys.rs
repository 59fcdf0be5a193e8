//! `cargo xtask surveys`: computes claims of surveys with Trireme, and writes docs/surveys.md.

use crate::commands::{build, cargo, succeed};
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};

const HELP: &str = "\
Builds Trireme, goes through large models in dry runs, and trains small ones on
two cores, for about ten minutes. Run nothing else on the machine meanwhile. The
dry part is a test: cargo test -p trireme --test surveys.";

/// Compute the claims of surveys on distributed training, and write docs/surveys.md.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct SurveysArgs {
    /// Program that trains, instead of a release build made for it.
    #[arg(long, value_name = "PATH")]
    binary: Option<PathBuf>,
}

pub(crate) fn run(args: &SurveysArgs, root: &Path) -> Result<()> {
    let binary = match &args.binary {
        Some(binary) => {
            std::path::absolute(binary).with_context(|| format!("cannot find {}", binary.display()))?
        }
        None => build(root)?.join("release/trireme"),
    };
    let test = ["test", "--package", "trireme", "--test", "surveys", "--", "--ignored", "--exact"];
    succeed(cargo(root).args(test).arg("the_document_is_written").env("TRIREME_SURVEYS_BINARY", binary))
}
