//! `trireme config`.

use super::check_config_path;
use super::init::DEFAULT_CONFIG;
use crate::console::Output;
use anyhow::Result;
use std::io::Write;
use std::path::PathBuf;
use trireme_train::config::Config;

/// Check a config file and print the resolved config, or explain the available keys.
#[derive(Debug, clap::Args)]
pub(crate) struct ConfigArgs {
    /// Config file.
    #[arg(default_value = DEFAULT_CONFIG)]
    file: PathBuf,
    /// Override a key of the file; the value is TOML or a bare string.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    overrides: Vec<String>,
    /// Print the keys of one section, or of all sections, with types, defaults and descriptions. Any other word is searched for in names
    /// and descriptions, and among the words of other systems, such as learning_rate.
    #[arg(long, value_name = "WORD", num_args = 0..=1, conflicts_with = "overrides")]
    explain: Option<Option<String>>,
}

pub(crate) fn run(args: &ConfigArgs) -> Result<()> {
    let text = match &args.explain {
        Some(section) => Config::explain(section.as_deref())?,
        None => {
            check_config_path(&args.file)?;
            Config::load(&args.file, &args.overrides, None)?.to_toml()
        }
    };
    Ok(Output.write_all(text.as_bytes())?)
}
