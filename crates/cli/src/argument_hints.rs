//! Hints for command-line arguments of other systems.

use clap::error::{ContextKind, ContextValue, Error, ErrorKind};
use trireme_train::config::Config;

/// Commands of other systems, with the equivalent command here.
const COMMANDS: [(&str, &str); 7] = [
    ("chat", "generate --chat"),
    ("evaluate", "eval"),
    ("export", "checkpoint export"),
    ("fine-tune", "train, with [model] init_from"),
    ("finetune", "train, with [model] init_from"),
    ("run", "train"),
    ("tokenize", "prepare"),
];

/// Commands that read a config.
const WITH_CONFIG: [&str; 4] = ["config", "data", "plan", "train"];

/// Returns what to try instead of an unknown command, or instead of an unknown argument of `command`.
pub(crate) fn hint(error: &Error, command: Option<&str>) -> Option<String> {
    let word = |kind| match error.get(kind) {
        Some(ContextValue::String(word)) => Some(word.as_str()),
        _ => None,
    };
    match error.kind() {
        ErrorKind::InvalidSubcommand => {
            let found = word(ContextKind::InvalidSubcommand)?;
            let (_, own) = COMMANDS.iter().find(|(foreign, _)| *foreign == found)?;
            Some(format!("use `trireme {own}`"))
        }
        ErrorKind::UnknownArgument if command.is_some_and(|command| WITH_CONFIG.contains(&command)) => {
            let found = word(ContextKind::InvalidArg)?;
            match found {
                "--config" | "--config-file" => Some(
                    "the config is an argument without an option's name: `trireme train my.toml`".to_owned(),
                ),
                _ => Config::key_named(found.trim_start_matches('-'))
                    .map(|key| format!("set the key of the config: `--set {key}=VALUE`")),
            }
        }
        _ => None,
    }
}

/// Replaces clap's own suggestions by a hint.
pub(crate) fn add(error: &mut Error, hint: String) {
    for kind in [ContextKind::SuggestedSubcommand, ContextKind::SuggestedArg] {
        error.remove(kind);
    }
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs([hint.into()].into()));
}
