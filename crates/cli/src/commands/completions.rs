//! `trireme completions` and `trireme man`: shell completions and manual pages.

use crate::console::Output;
use anyhow::{Context, Result};
use clap::Command;
use clap_complete::Shell;
use std::io::Write;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  trireme completions bash > ~/.local/share/bash-completion/completions/trireme
  trireme completions zsh > ~/.zfunc/_trireme
  trireme completions fish > ~/.config/fish/completions/trireme.fish";

/// Print a script that completes commands and options in a shell.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct CompletionsArgs {
    /// The shell.
    shell: Shell,
}

/// Write the manual pages of all commands.
#[derive(Debug, clap::Args)]
pub(crate) struct ManArgs {
    /// Folder to write to, such as ~/.local/share/man/man1; created if missing.
    folder: PathBuf,
}

pub(crate) fn completions(args: &CompletionsArgs, mut command: Command) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "trireme", &mut script);
    Ok(Output.write_all(&script)?)
}

pub(crate) fn man(args: &ManArgs, command: Command) -> Result<()> {
    let folder = &args.folder;
    std::fs::create_dir_all(folder)
        .with_context(|| format!("cannot make the folder {}", folder.display()))?;
    clap_mangen::generate_to(command, folder)
        .with_context(|| format!("cannot write to {}", folder.display()))?;
    Ok(writeln!(Output, "written to {}", folder.display())?)
}
