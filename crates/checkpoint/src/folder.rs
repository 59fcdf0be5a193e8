//! The folder of a run's checkpoints: `step-N` for each complete one, `latest` naming the newest, `step-N.partial-xxxxxxxx`
//! for what a crash left unfinished, and `step-N.damaged-xxxxxxxx` for one that could not be read back.

use crate::checkpoint::Checkpoint;
use crate::error::CheckpointError;
use crate::files::{FileStep, damaged, damaged_suffix, is_partial_suffix, parent_of, read_bounded, reading};
use crate::manifest::MANIFEST_FILE;
use crate::model_source::checkpoints_folder;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Names the newest checkpoint, for people and other programs; [`find_latest`] trusts the checkpoints
/// themselves.
pub(crate) const LATEST_FILE: &str = "latest";

/// Names the checkpoint with the lowest validation loss, which is not removed.
pub(crate) const BEST_FILE: &str = "best";

/// Bytes of a name.
const NAME_BYTES_MAX: u64 = 64;

const STEP: &str = "step-";

pub(crate) fn step_name(step: u64) -> String {
    format!("{STEP}{step}")
}

/// What the names in a folder of checkpoints say.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct FolderNames {
    /// Steps with a folder of their own, ascending.
    pub(crate) steps: Vec<u64>,
    pub(crate) leftovers: Vec<String>,
}

impl FolderNames {
    /// Reads the names in `folder`; one that does not exist is empty.
    pub(crate) fn read(folder: &Path) -> Result<Self, CheckpointError> {
        let entries = match fs::read_dir(folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(FolderNames::default()),
            entries => entries.map_err(reading(folder))?,
        };
        let mut names = FolderNames::default();
        for entry in entries {
            // A name that is no UTF-8 is none of ours.
            if let Ok(name) = entry.map_err(reading(folder))?.file_name().into_string() {
                names.add(name);
            }
        }
        names.steps.sort_unstable();
        names.leftovers.sort_unstable();
        Ok(names)
    }

    fn add(&mut self, name: String) {
        let Some(rest) = name.strip_prefix(STEP) else { return };
        let (digits, suffix) = rest.split_at(rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len()));
        let Ok(step) = digits.parse::<u64>() else { return };
        // Another spelling of the number, such as 007, is not ours.
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

/// The step that a file of names in `folder` has, if there is one.
fn named_step(folder: &Path, name: &str) -> Option<u64> {
    let contents = read_bounded(&folder.join(name), NAME_BYTES_MAX).ok()?;
    std::str::from_utf8(&contents).ok()?.trim().strip_prefix(STEP)?.parse().ok()
}

/// The step of the checkpoint with the lowest validation loss, if one was [named](crate::mark_best).
pub fn best_step(folder: &Path) -> Option<u64> {
    named_step(folder, BEST_FILE)
}

/// The checkpoint that `path` names, if it is the file of a name, such as `checkpoints/best`; else `path`.
pub(crate) fn follow_name(path: &Path) -> PathBuf {
    let name = path.file_name().and_then(|name| name.to_str());
    let step = name.filter(|name| [BEST_FILE, LATEST_FILE].contains(name) && path.is_file());
    let folder = parent_of(path);
    step.and_then(|name| named_step(folder, name))
        .map_or_else(|| path.to_owned(), |step| folder.join(step_name(step)))
}

/// The steps whose checkpoints go once `saved` is complete, if the newest `keep_latest_k` and the `best` are to stay
/// (0: all of them). The newest never goes.
pub(crate) fn steps_to_prune(steps: &[u64], saved: u64, best: Option<u64>, keep_latest_k: usize) -> Vec<u64> {
    let is_older = |step: &u64| *step < saved && Some(*step) != best;
    let mut older: Vec<u64> = steps.iter().copied().filter(is_older).collect();
    older.sort_unstable();
    let num_kept = if keep_latest_k == 0 { older.len() } else { keep_latest_k - 1 };
    older.truncate(older.len().saturating_sub(num_kept));
    older
}

/// The steps of the checkpoints in `folder` with their paths, oldest first. They are not opened.
///
/// # Errors
/// If the folder cannot be read; one that does not exist is empty.
pub fn list_checkpoints(folder: &Path) -> Result<Vec<(u64, PathBuf)>, CheckpointError> {
    let steps = FolderNames::read(folder)?.steps;
    Ok(steps.into_iter().map(|step| (step, folder.join(step_name(step)))).collect())
}

/// A checkpoint that cannot be used.
#[derive(Debug)]
pub struct SkippedCheckpoint {
    /// Its folder.
    pub path: PathBuf,
    /// Why not.
    pub reason: CheckpointError,
}

/// The newest checkpoint in `folder` that opens (see [`Checkpoint::open`]) and is not among `skipped`. Those that do not
/// open are added to `skipped`, newest first; report them to the user.
///
/// # Errors
/// If the folder cannot be read; one that does not exist is empty.
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

/// The checkpoint at `path`, or the newest one of the run whose folder `path` is. If that one does not open, no older one
/// takes its place.
///
/// # Errors
/// If it does not open, or there is none.
pub fn open_newest(path: &Path) -> Result<Checkpoint, CheckpointError> {
    let path = &follow_name(path);
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

/// Renames a damaged checkpoint to `step-N.damaged-xxxxxxxx`, which no function of this crate takes for a checkpoint;
/// returns the new path.
///
/// # Errors
/// If it cannot be renamed, or its folder cannot be synced.
pub fn set_aside(path: &Path) -> Result<PathBuf, CheckpointError> {
    let mut name = path.as_os_str().to_owned();
    name.push(damaged_suffix());
    let aside = PathBuf::from(name);
    set_aside_steps(path, &aside).iter().try_for_each(FileStep::execute)?;
    Ok(aside)
}

fn set_aside_steps(path: &Path, aside: &Path) -> Vec<FileStep> {
    vec![
        FileStep::Rename { from: path.to_owned(), to: aside.to_owned() },
        FileStep::SyncFolder(parent_of(path).to_owned()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_own_names_count() {
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
    fn setting_a_checkpoint_aside_lasts() {
        let aside = PathBuf::from("checkpoints/step-4.damaged-0123abcd");
        let steps = set_aside_steps(Path::new("checkpoints/step-4"), &aside);
        assert!(matches!(&steps[0], FileStep::Rename { to, .. } if *to == aside));
        assert_eq!(steps[1..], [FileStep::SyncFolder("checkpoints".into())]);
    }

    #[test]
    fn pruning_keeps_the_newest() {
        let steps = [10, 20, 30, 40];
        assert_eq!(steps_to_prune(&steps, 40, None, 0), [0; 0]);
        assert_eq!(steps_to_prune(&steps, 40, None, 1), [10, 20, 30]);
        assert_eq!(steps_to_prune(&steps, 40, None, 3), [10]);
        assert_eq!(steps_to_prune(&steps, 40, None, 9), [0; 0]);
        assert_eq!(steps_to_prune(&[], 40, None, 1), [0; 0]);
        // The best is one more.
        assert_eq!(steps_to_prune(&steps, 40, Some(10), 2), [20]);
    }
}
