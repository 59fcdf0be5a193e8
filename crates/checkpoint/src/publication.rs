//! The changes that rank 0 makes in a folder of checkpoints, as lists of single changes. A list is complete before its first change is
//! made, so that a test can stop after each one, as a crash would.

use crate::files::{ExtraFile, FileOperation, damaged_suffix, parent_of, partial_suffix};
use crate::folder::{LATEST_FILE, step_name};
use crate::manifest::MANIFEST_FILE;
use std::iter;
use std::path::Path;

/// Returns the changes that rank 0 makes before the ranks write.
pub(crate) fn begin_operations(folder: &Path, partial_name: &str) -> Vec<FileOperation> {
    vec![
        FileOperation::CreateFolder(folder.to_owned()),
        FileOperation::SyncFolder(parent_of(folder).to_owned()),
        FileOperation::CreateFolder(folder.join(partial_name)),
    ]
}

/// Returns the changes that remove unfinished saves, which crashes have left. None has to succeed, because the next save tries again.
pub(crate) fn leftover_removals(folder: &Path, leftovers: &[String]) -> Vec<Vec<FileOperation>> {
    leftovers.iter().map(|name| vec![FileOperation::Remove(folder.join(name))]).collect()
}

/// The publication of a checkpoint, by rank 0 after the ranks have written their shards.
pub(crate) struct Publication<'a> {
    pub(crate) folder: &'a Path,
    pub(crate) partial_name: &'a str,
    pub(crate) step: u64,
    pub(crate) files: &'a [ExtraFile<'a>],
    pub(crate) manifest: String,
    /// Whether a damaged checkpoint of the same step has to be renamed first.
    pub(crate) damaged_exists: bool,
}

impl Publication<'_> {
    /// Returns the changes that publish the checkpoint, in order. Until the rename to `step-N`, the earlier checkpoints are as before;
    /// after it, the new checkpoint is complete.
    pub(crate) fn operations(&self) -> Vec<FileOperation> {
        let partial = self.folder.join(self.partial_name);
        let published = self.folder.join(step_name(self.step));
        let mut operations: Vec<FileOperation> = (self.files.iter())
            .map(|file| FileOperation::WriteFile {
                path: partial.join(file.name),
                contents: file.contents.to_vec(),
            })
            .collect();
        let contents = self.manifest.clone().into_bytes();
        operations.push(FileOperation::WriteFile { path: partial.join(MANIFEST_FILE), contents });
        operations.push(FileOperation::SyncFolder(partial.clone()));
        if self.damaged_exists {
            let to = self.folder.join(step_name(self.step) + &damaged_suffix());
            operations.push(FileOperation::Rename { from: published.clone(), to });
        }
        operations.extend([
            FileOperation::Rename { from: partial, to: published },
            FileOperation::SyncFolder(self.folder.to_owned()),
        ]);
        operations
    }
}

/// Returns the cleanup once the checkpoint of `step` is complete: a list of changes that names this checkpoint the latest, and for each
/// checkpoint of `pruned` a list that removes it. The lists are independent, and each ends at its first failure. None has to succeed,
/// because the next save tries again.
pub(crate) fn cleanup_operations(folder: &Path, step: u64, pruned: &[u64]) -> Vec<Vec<FileOperation>> {
    iter::once(name_checkpoint(folder, LATEST_FILE, step))
        .chain(pruned.iter().map(|&step| removal(folder, step)))
        .collect()
}

/// Returns the changes that name the checkpoint of `step` in the file `name`, which is `latest` or `best`.
pub(crate) fn name_checkpoint(folder: &Path, name: &str, step: u64) -> Vec<FileOperation> {
    let (to, from) = (folder.join(name), folder.join(format!("{name}.partial")));
    let contents = format!("{}\n", step_name(step)).into_bytes();
    vec![
        FileOperation::WriteFile { path: from.clone(), contents },
        FileOperation::Rename { from, to },
        FileOperation::SyncFolder(folder.to_owned()),
    ]
}

/// Returns the changes that remove a checkpoint. Its folder is first renamed to the name of an unfinished save, so that a partly removed
/// checkpoint never looks complete.
fn removal(folder: &Path, step: u64) -> Vec<FileOperation> {
    let aside = folder.join(step_name(step) + &partial_suffix());
    let from = folder.join(step_name(step));
    vec![FileOperation::Rename { from, to: aside.clone() }, FileOperation::Remove(aside)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::folder::{FolderNames, find_latest};
    use crate::{InMemory, Snapshot, save};
    use std::fs;
    use trireme_base::DType;
    use trireme_plan::{Mesh, TensorPlacement};

    fn save_alone(folder: &Path, step: u64, keep_latest_k: usize) {
        let mesh = Mesh::data_parallel(1);
        let tensors = [TensorPlacement::replicated("w", &[4], DType::U8, &mesh)];
        let state = serde_json::json!({ "step": step });
        let files = [ExtraFile { name: "config.toml", contents: b"seed = 1" }];
        let snapshot = Snapshot { step, mesh: &mesh, tensors: &tensors, state: &state, files: &files };
        let values = [&[step as u8; 4][..]];
        save(&trireme_comm::single(), folder, &snapshot, &mut InMemory(&values), keep_latest_k).unwrap();
    }

    /// Returns all changes in `folder` when step 30 is saved, given `template`, a complete checkpoint of that step. A copy of its shard
    /// stands in for the shards that the ranks write.
    fn all_operations(folder: &Path, template: &Path) -> Vec<FileOperation> {
        let partial_name = "step-30.partial-0000abcd";
        let read = |name: &str| fs::read(template.join(name)).unwrap();
        let mut operations = leftover_removals(folder, &["step-7.partial-00000007".to_owned()]).concat();
        operations.extend(begin_operations(folder, partial_name));
        let shard = "shard-00000.safetensors";
        let path = folder.join(partial_name).join(shard);
        operations.push(FileOperation::WriteFile { path, contents: read(shard) });
        let publication = Publication {
            folder,
            partial_name,
            step: 30,
            files: &[ExtraFile { name: "config.toml", contents: &read("config.toml") }],
            manifest: String::from_utf8(read(MANIFEST_FILE)).unwrap(),
            damaged_exists: true,
        };
        operations.extend(publication.operations());
        operations.extend(cleanup_operations(folder, 30, &[10]).concat());
        operations
    }

    /// Creates a folder with complete checkpoints of steps 10 and 20, an unfinished one of step 7 and a damaged one of step 30.
    fn folder_before() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        save_alone(folder.path(), 10, 0);
        save_alone(folder.path(), 20, 0);
        fs::create_dir(folder.path().join("step-7.partial-00000007")).unwrap();
        fs::create_dir(folder.path().join("step-30")).unwrap();
        folder
    }

    #[test]
    fn a_crash_after_any_change_leaves_the_last_complete_checkpoint() {
        let model = tempfile::tempdir().unwrap();
        save_alone(model.path(), 30, 0);
        let num_steps = all_operations(model.path(), &model.path().join("step-30")).len();
        let mut found = Vec::new();
        for num_done in 0..=num_steps {
            let folder = folder_before();
            let operations = all_operations(folder.path(), &model.path().join("step-30"));
            for step in &operations[..num_done] {
                step.execute().unwrap();
            }
            let latest = find_latest(folder.path(), &mut Vec::new()).unwrap().expect("a checkpoint");
            let is_published = folder.path().join("step-30/shard-00000.safetensors").exists();
            assert_eq!(latest.step(), if is_published { 30 } else { 20 }, "after {num_done} changes");
            assert!(latest.verify().is_empty());
            assert_eq!(latest.state()["step"], latest.step());
            found.push(latest.step());

            // The next save succeeds, and removes all leftovers.
            save_alone(folder.path(), 40, 2);
            let names = FolderNames::read(folder.path()).unwrap();
            assert_eq!(names.leftovers, [""; 0], "after {num_done} changes");
            assert_eq!(names.steps.last(), Some(&40));
            assert_eq!(fs::read_to_string(folder.path().join(LATEST_FILE)).unwrap(), "step-40\n");
        }
        assert_eq!((found.first(), found.last()), (Some(&20), Some(&30)));
        assert!(found.is_sorted(), "{found:?}");
    }

    #[test]
    fn a_save_keeps_as_many_checkpoints_as_asked() {
        let folder = tempfile::tempdir().unwrap();
        let saved = [(1, 0), (2, 0), (3, 0), (4, 2), (5, 0)];
        let kept = saved.map(|(step, keep_latest_k)| {
            save_alone(folder.path(), step, keep_latest_k);
            FolderNames::read(folder.path()).unwrap().steps
        });
        assert_eq!(kept[2..], [vec![1, 2, 3], vec![3, 4], vec![3, 4, 5]]);
    }

    #[test]
    fn a_publication_marks_the_newest_and_removes_the_old() {
        let model = tempfile::tempdir().unwrap();
        save_alone(model.path(), 30, 0);
        let folder = folder_before();
        for step in all_operations(folder.path(), &model.path().join("step-30")) {
            step.execute().unwrap();
        }
        assert_eq!(fs::read_to_string(folder.path().join(LATEST_FILE)).unwrap(), "step-30\n");
        assert_eq!(FolderNames::read(folder.path()).unwrap().steps, [20, 30]);
    }
}
