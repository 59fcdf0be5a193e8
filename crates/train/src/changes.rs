//! What a run that resumes has in another way than the run that wrote the checkpoint.

use crate::config::{Change, Config, file_values};
use crate::error::TrainError;
use crate::observer::Observer;
use trireme_checkpoint::Checkpoint;

/// The resolved config in a checkpoint, and in a run's folder.
pub(crate) const CONFIG_TOML: &str = "config.toml";

/// Sections of what does not change the training.
const UNTOLD_SECTIONS: [&str; 5] = ["run", "checkpoint", "metrics", "launch", "generate"];

/// Keys of the kind in other sections.
const UNTOLD_KEYS: [&str; 9] = [
    "training.threads",
    "data.folder",
    "data.inputs",
    "comm.interface",
    "comm.secret_file",
    "comm.tls_certificate",
    "comm.tls_key",
    "comm.tls_ca",
    "comm.timeout_seconds",
];

/// Tells what is different, and refuses another optimizer unless the config allows it. Whether the optimizer's state is to be read.
pub(crate) fn check_changes(
    config: &Config,
    checkpoint: &Checkpoint,
    observer: &mut dyn Observer,
) -> Result<bool, TrainError> {
    let Some(text) = checkpoint.read_file(CONFIG_TOML)? else { return Ok(true) };
    let before = file_values(&String::from_utf8_lossy(&text));
    let now = file_values(&config.to_toml());
    let defaults = Config::defaults();
    let mut lines = Vec::new();
    for (name, value) in &now {
        let section = name.split_once('.').map_or("", |(section, _)| section);
        if UNTOLD_SECTIONS.contains(&section) || UNTOLD_KEYS.contains(&name.as_str()) {
            continue;
        }
        match before.get(name) {
            Some(old) if old != value => lines.push(format!("\n  {name}: {old} -> {value}")),
            // An earlier version did not know it.
            None if defaults.get(name) != Some(value) => {
                lines.push(format!("\n  {name}: not set -> {value}"));
            }
            _ => {}
        }
    }
    let names = [&before, &now].map(|config| config.get("optimizer.name"));
    let is_same = names[0].is_none() || names[0] == names[1];
    if !is_same && !config.checkpoint().allow_changed.contains(&Change::Optimizer) {
        let [found, expected] = names.map(|name| name.cloned().unwrap_or_default());
        let path = checkpoint.path().to_owned();
        return Err(TrainError::ResumedOptimizerDiffers { path, found, expected });
    }
    if !lines.is_empty() {
        observer.notice(&format!("the config has changed since the checkpoint:{}", lines.concat()));
    }
    if !is_same {
        observer.notice("the state of the optimizer begins anew");
    }
    Ok(is_same)
}
