//! The folder of a run's checkpoints. It contains `step-N` for each complete checkpoint, `latest` with the name of the newest one, `best`
//! with the name of the one with the lowest validation loss, `step-N.partial-xxxxxxxx` for a save that a crash interrupted, and
//! `step-N.damaged-xxxxxxxx` for a checkpoint that could not be read back.

use crate::checkpoint::Checkpoint;
use crate::error::CheckpointError;
use crate::files::{
    FileOperation, damaged, damaged_suffix, is_partial_suffix, parent_of, read_bounded, reading,
};
use crate::manifest::MANIFEST_FILE;
use crate::model_source::checkpoints_folder;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// File with the name of the newest checkpoint, for people and other programs. [`find_latest`] does not read it, but lists the checkpoints
/// themselves.
pub(crate) const LATEST_FILE: &str = "latest";

/// File with the name of the checkpoint with the lowest validation loss. That checkpoint is not pruned.
pub(crate) const BEST_FILE: &str = "best";

/// Maximum size in bytes of [`LATEST_FILE`] and [`BEST_FILE`].
const NAME_BYTES_MAX: u64 = 64;

const STEP_PREFIX: &str = "step-";

pub(crate) fn step_name(step: u64) -> String {
    format!("{STEP_PREFIX}{step}")
}

/// The checkpoints and unfinished saves in a folder, according to the names of its entries.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct FolderNames {
    /// Steps `N` that have an entry `step-N`, ascending.
    pub(crate) steps: Vec<u64>,
    pub(crate) leftovers: Vec<String>,
}

impl FolderNames {
    /// Reads the names in `folder`. A folder that does not exist counts as empty.
    pub(crate) fn read(folder: &Path) -> Result<Self, CheckpointError> {
        let entries = match fs::read_dir(folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(FolderNames::default()),
            entries => entries.map_err(reading(folder))?,
        };
        let mut names = FolderNames::default();
        for entry in entries {
            // A name that is not UTF-8 was not written by this crate.
            if let Ok(name) = entry.map_err(reading(folder))?.file_name().into_string() {
                names.add(name);
            }
        }
        names.steps.sort_unstable();
        names.leftovers.sort_unstable();
        Ok(names)
    }

    fn add(&mut self, name: String) {
        let Some(rest) = name.strip_prefix(STEP_PREFIX) else { return };
        let (digits, suffix) = rest.split_at(rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len()));
        let Ok(step) = digits.parse::<u64>() else { return };
        // Another spelling of the number, such as 007, was not written by this crate.
        if step.to_string() != digits {
            return;
        }
        if suffix.is_empty() {
            self.steps.push(step);
        } else if is_partial_suffix(suffix) {
            self.leftovers.push(name);
        }
    }
}

/// Returns the step that the file `name` in `folder` names. `None` if there is no such file, or it names no step.
fn named_step(folder: &Path, name: &str) -> Option<u64> {
    let contents = read_bounded(&folder.join(name), NAME_BYTES_MAX).ok()?;
    std::str::from_utf8(&contents).ok()?.trim().strip_prefix(STEP_PREFIX)?.parse().ok()
}

/// Returns the step of the checkpoint with the lowest validation loss, if one was [marked](crate::mark_best).
pub fn best_step(folder: &Path) -> Option<u64> {
    named_step(folder, BEST_FILE)
}

/// Returns the path of the checkpoint that a file `best` or `latest` names, such as `checkpoints/best`. Returns any other path unchanged.
pub(crate) fn resolve_name_file(path: &Path) -> PathBuf {
    let name = path.file_name().and_then(|name| name.to_str());
    let step = name.filter(|name| [BEST_FILE, LATEST_FILE].contains(name) && path.is_file());
    let folder = parent_of(path);
    step.and_then(|name| named_step(folder, name))
        .map_or_else(|| path.to_owned(), |step| folder.join(step_name(step)))
}

/// Returns the steps whose checkpoints are removed once `saved` is complete, oldest first. Keeps the newest `keep_latest_k` (0 keeps all),
/// which include `saved`, and in addition `best`. Never returns `saved`.
pub(crate) fn steps_to_prune(steps: &[u64], saved: u64, best: Option<u64>, keep_latest_k: usize) -> Vec<u64> {
    let is_older = |step: &u64| *step < saved && Some(*step) != best;
    let mut older: Vec<u64> = steps.iter().copied().filter(is_older).collect();
    older.sort_unstable();
    let num_kept = if keep_latest_k == 0 { older.len() } else { keep_latest_k - 1 };
    older.truncate(older.len().saturating_sub(num_kept));
    older
}

/// Returns the steps of the checkpoints in `folder` with their paths, oldest first. Does not open them.
///
/// # Errors
/// If the folder cannot be read. A folder that does not exist counts as empty.
pub fn list_checkpoints(folder: &Path) -> Result<Vec<(u64, PathBuf)>, CheckpointError> {
    let steps = FolderNames::read(folder)?.steps;
    Ok(steps.into_iter().map(|step| (step, folder.join(step_name(step)))).collect())
}

/// A checkpoint that cannot be used.
#[derive(Debug)]
pub struct SkippedCheckpoint {
    /// Folder of the checkpoint.
    pub path: PathBuf,
    /// Why the checkpoint cannot be used.
    pub reason: CheckpointError,
}

/// Opens the newest checkpoint in `folder` that opens (see [`Checkpoint::open`]) and is not among `skipped`. Returns `None` if there is
/// none. Checkpoints that do not open are added to `skipped`, newest first; the caller should report them to the user.
///
/// # Errors
/// If the folder cannot be read. A folder that does not exist counts as empty.
pub fn find_latest(
    folder: &Path,
    skipped: &mut Vec<SkippedCheckpoint>,
) -> Result<Option<Checkpoint>, CheckpointError> {
    for (step, path) in list_checkpoints(folder)?.into_iter().rev() {
        if skipped.iter().any(|skipped| skipped.path == path) {
            continue;
        }
        match open_step(&path, step) {
            Ok(checkpoint) => return Ok(Some(checkpoint)),
            Err(reason) => skipped.push(SkippedCheckpoint { path, reason }),
        }
    }
    Ok(None)
}

/// Opens the checkpoint at `path`, or the newest one if `path` is the folder of a run or of its checkpoints. An older checkpoint is never
/// opened instead.
///
/// # Errors
/// If the checkpoint does not open, or there is none.
pub fn open_newest(path: &Path) -> Result<Checkpoint, CheckpointError> {
    let path = &resolve_name_file(path);
    if path.join(MANIFEST_FILE).is_file() {
        return Checkpoint::open(path);
    }
    if let Some((step, newest)) = list_checkpoints(&checkpoints_folder(path))?.pop() {
        return open_step(&newest, step);
    }
    if !path.exists() {
        return Err(CheckpointError::NoSuchFolder { path: path.to_owned() });
    }
    let (found, expected) = ("no checkpoint", "a checkpoint, or the folder of a run that has saved one");
    Err(CheckpointError::NothingToOpen { path: path.to_owned(), found, expected })
}

fn open_step(path: &Path, step: u64) -> Result<Checkpoint, CheckpointError> {
    let checkpoint = Checkpoint::open(path)?;
    match checkpoint.step() {
        found if found == step => Ok(checkpoint),
        found => Err(damaged(path, format!("its manifest belongs to step {found}"))),
    }
}

/// Renames a damaged checkpoint to `step-N.damaged-xxxxxxxx`, which is not listed as a checkpoint any more. Returns the new path.
///
/// # Errors
/// If the folder cannot be renamed, or its parent cannot be synced.
pub fn set_aside(path: &Path) -> Result<PathBuf, CheckpointError> {
    let mut name = path.as_os_str().to_owned();
    name.push(damaged_suffix());
    let aside = PathBuf::from(name);
    set_aside_operations(path, &aside).iter().try_for_each(FileOperation::execute)?;
    Ok(aside)
}

fn set_aside_operations(path: &Path, aside: &Path) -> Vec<FileOperation> {
    vec![
        FileOperation::Rename { from: path.to_owned(), to: aside.to_owned() },
        FileOperation::SyncFolder(parent_of(path).to_owned()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_names_are_ignored() {
        let mut names = FolderNames::default();
        for name in
            ["step-3", "step-20", "step-007", "step-", "step--1", "step-99999999999999999999", "latest"]
        {
            names.add(name.into());
        }
        for name in [
            "step-5.partial-0123abcd",
            "step-5.partial",
            "step-5.partial-mine",
            "step-5.damaged-0123abcd",
            "old",
        ] {
            names.add(name.into());
        }
        let leftovers = vec!["step-5.partial-0123abcd".to_owned()];
        assert_eq!(names, FolderNames { steps: vec![3, 20], leftovers });
    }

    #[test]
    fn setting_a_checkpoint_aside_syncs_the_folder() {
        let aside = PathBuf::from("checkpoints/step-4.damaged-0123abcd");
        let steps = set_aside_operations(Path::new("checkpoints/step-4"), &aside);
        assert!(matches!(&steps[0], FileOperation::Rename { to, .. } if *to == aside));
        assert_eq!(steps[1..], [FileOperation::SyncFolder("checkpoints".into())]);
    }

    #[test]
    fn pruning_keeps_the_newest() {
        let steps = [10, 20, 30, 40];
        assert_eq!(steps_to_prune(&steps, 40, None, 0), [0; 0]);
        assert_eq!(steps_to_prune(&steps, 40, None, 1), [10, 20, 30]);
        assert_eq!(steps_to_prune(&steps, 40, None, 3), [10]);
        assert_eq!(steps_to_prune(&steps, 40, None, 9), [0; 0]);
        assert_eq!(steps_to_prune(&[], 40, None, 1), [0; 0]);
        // The best checkpoint is kept in addition.
        assert_eq!(steps_to_prune(&steps, 40, Some(10), 2), [20]);
    }
}
