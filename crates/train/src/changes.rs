//! Differences between the config of a resuming run and the config in its checkpoint.

use crate::config::{Change, Config, file_values};
use crate::error::TrainError;
use crate::observer::Observer;
use crate::run_folder::CONFIG_TOML;
use std::collections::{BTreeMap, BTreeSet};
use trireme_checkpoint::Checkpoint;

/// Reports differences between the config of a checkpoint and the config of this run. Returns whether the optimizer state may be read from
/// the checkpoint.
///
/// # Errors
/// [`TrainError::ResumedOptimizerDiffers`] if the optimizer differs and `checkpoint.allow_changed` does not include `optimizer`.
pub(crate) fn check_changes(
    config: &Config,
    checkpoint: &Checkpoint,
    observer: &mut dyn Observer,
) -> Result<bool, TrainError> {
    let Some(text) = checkpoint.read_file(CONFIG_TOML)? else { return Ok(true) };
    let before = file_values(&String::from_utf8_lossy(&text));
    let now = file_values(&config.to_toml());
    let names = [&before, &now].map(|config| config.get("optimizer.name"));
    let is_same = names[0].is_none() || names[0] == names[1];
    if !is_same && !config.checkpoint().allow_changed.contains(&Change::Optimizer) {
        let [found, expected] = names.map(|name| name.cloned().unwrap_or_default());
        let path = checkpoint.path().to_owned();
        return Err(TrainError::ResumedOptimizerDiffers { path, found, expected });
    }
    let changes = training_changes(&before, &now);
    if !changes.is_empty() {
        let changes: String = changes.iter().map(|change| format!("\n  {change}")).collect();
        observer.notice(&format!("the config has changed since the checkpoint:{changes}"));
    }
    if !is_same {
        observer.notice("the optimizer state starts from zero");
    }
    Ok(is_same)
}

/// Returns a line for each key that affects training and whose value differs. Both configs are in the form that [`Config::file_values`]
/// returns.
pub fn training_changes(before: &BTreeMap<String, String>, now: &BTreeMap<String, String>) -> Vec<String> {
    let defaults = Config::defaults();
    // A key is missing if it does not apply, or if the version that wrote the config did not have it. Then its default counts.
    let value = |config: &BTreeMap<String, String>, name: &String| {
        config.get(name).or_else(|| defaults.get(name)).cloned().unwrap_or_else(|| "not set".to_owned())
    };
    let names: BTreeSet<&String> =
        before.keys().chain(now.keys()).filter(|name| Config::affects_training(name)).collect();
    let differing = names.into_iter().map(|name| (name, value(before, name), value(now, name)));
    (differing.filter(|(_, old, new)| old != new))
        .map(|(name, old, new)| format!("{name}: {old} -> {new}"))
        .collect()
}
