//! Cleanup after a save: removes old checkpoints and the remains of crashes, and writes the file `latest`. A failure here is reported, and
//! does not fail the save.

use crate::error::CheckpointError;
use crate::files::FileOperation;
use crate::folder::{BEST_FILE, FolderNames, best_step, steps_to_prune};
use crate::publication::{cleanup_operations, leftover_removals, name_checkpoint};
use std::fs;
use std::path::Path;

/// Cleans up `folder`, whose newest checkpoint has the step `newest`, after a crash or a cleanup that failed. Removes unfinished folders,
/// writes the name of the newest checkpoint to `latest`, and removes all checkpoints except the newest `keep_latest_k` (0 keeps all) and
/// the [best](mark_best). Callers also use it after another checkpoint became the best, because the previous best may then be removed.
/// Only one process may call it, and no process may save to the folder meanwhile. Calls `on_progress` before each change and each entry of
/// a folder that is removed.
///
/// Returns the errors of the changes that failed. The checkpoints are complete all the same.
pub fn clean_up(
    folder: &Path,
    newest: u64,
    keep_latest_k: usize,
    on_progress: &dyn Fn(),
) -> Vec<CheckpointError> {
    let mut cleanup_errors = Vec::new();
    match FolderNames::read(folder) {
        Ok(names) => {
            try_all(&leftover_removals(folder, &names.leftovers), &mut cleanup_errors, on_progress);
            mark_latest_and_prune(folder, newest, &names, keep_latest_k, &mut cleanup_errors, on_progress);
        }
        Err(error) => cleanup_errors.push(error),
    }
    cleanup_errors
}

/// Names the checkpoint of `step` in `folder` as the one with the lowest validation loss. It is not removed until another checkpoint is
/// named. Only one process may call it.
///
/// # Errors
/// If the name cannot be written.
pub fn mark_best(folder: &Path, step: u64) -> Result<(), CheckpointError> {
    name_checkpoint(folder, BEST_FILE, step).iter().try_for_each(FileOperation::execute)
}

/// Names the checkpoint of `step` as the latest, and removes the checkpoints that are not kept.
pub(crate) fn mark_latest_and_prune(
    folder: &Path,
    step: u64,
    names: &FolderNames,
    keep_latest_k: usize,
    cleanup_errors: &mut Vec<CheckpointError>,
    on_progress: &dyn Fn(),
) {
    let pruned = steps_to_prune(&names.steps, step, best_step(folder), keep_latest_k);
    try_all(&cleanup_operations(folder, step, &pruned), cleanup_errors, on_progress);
}

/// Makes changes that need not succeed, and adds the failures to `cleanup_errors`. Each list ends at its first failure, and the files
/// that it wrote are then removed.
pub(crate) fn try_all(
    lists: &[Vec<FileOperation>],
    cleanup_errors: &mut Vec<CheckpointError>,
    on_progress: &dyn Fn(),
) {
    for operations in lists {
        if let Err(error) = operations.iter().try_for_each(|step| step.execute_with_progress(on_progress)) {
            cleanup_errors.push(error);
            for step in operations {
                if let FileOperation::WriteFile { path, .. } = step {
                    // Best effort: the file may not exist, or may have been renamed already.
                    let _ = fs::remove_file(path);
                }
            }
        }
    }
}
