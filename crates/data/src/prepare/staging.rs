use crate::DataError;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

/// The treatment of a corpus that already exists in the output folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExistingCorpus {
    /// The new corpus replaces it.
    Replace,
    /// It is kept, and preparing is refused.
    Keep,
}

/// Name of the staging folder. It is inside the output folder, so that files can be moved by an atomic rename.
const STAGING_FOLDER: &str = ".trireme-prepare";

/// A transaction on the files of an output folder. While the folder contains a marker file, it also contains one
/// complete set of files, the old or the new one.
///
/// New files are written into a hidden staging folder. [`commit`](Self::commit) removes the old marker file, moves the
/// new files, and moves the new marker file last. Without a commit, dropping the value deletes the staged files. The
/// folder is locked in the meantime; the lock ends with the process, even if it is killed.
#[derive(Debug)]
pub(super) struct Staging {
    folder: PathBuf,
    /// The open folder, which holds the lock.
    locked: File,
    /// The folders that were created: the output folder and its missing ancestors, innermost first.
    created_folders: Vec<PathBuf>,
    commit_state: CommitState,
}

#[derive(Debug, PartialEq, Eq)]
enum CommitState {
    Uncommitted,
    Committing,
    Committed,
}

impl Staging {
    /// Locks `folder`, and creates it if it does not exist. Refuses a folder that already contains `marker` or one of the files `names`,
    /// with two exceptions: an interrupted commit wrote the files, or an earlier commit wrote them (`marker` exists) and `existing` says
    /// to replace them.
    pub(super) fn new(
        folder: &Path,
        names: &[&str],
        marker: &str,
        existing: ExistingCorpus,
    ) -> Result<Self, DataError> {
        if folder.is_file() {
            return Err(DataError::OutputIsFile { path: folder.to_owned() });
        }
        let write = |source| DataError::Write { path: folder.to_owned(), source };
        let folders_made =
            folder.ancestors().take_while(|folder| !folder.exists()).map(PathBuf::from).collect();
        fs::create_dir_all(folder).map_err(write)?;
        let locked = File::open(folder).map_err(write)?;
        match locked.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(DataError::Busy { folder: folder.to_owned() }),
            Err(TryLockError::Error(source)) => return Err(write(source)),
        }
        let may_overwrite = if folder.join(marker).exists() {
            existing == ExistingCorpus::Replace
        } else {
            is_interrupted(folder, marker).map_err(write)?
        };
        if let Some(name) =
            [marker].iter().chain(names).find(|name| !may_overwrite && folder.join(name).exists())
        {
            return Err(DataError::Occupied { path: folder.join(name) });
        }
        let staging = Staging {
            folder: folder.to_owned(),
            locked,
            created_folders: folders_made,
            commit_state: CommitState::Uncommitted,
        };
        staging.remove_leftovers().and_then(|()| fs::create_dir(staging.path(""))).map_err(write)?;
        Ok(staging)
    }

    /// Returns the staging path of the file `name`.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.join(STAGING_FOLDER).join(name)
    }

    /// Replaces the files `old` of the folder by the staged files `names`, and moves the file `marker` last.
    pub(super) fn commit(mut self, old: &[&str], names: &[&str], marker: &str) -> Result<(), DataError> {
        self.commit_state = CommitState::Committing;
        self.move_files(old, names, marker)
            .map_err(|source| DataError::Write { path: self.folder.clone(), source })?;
        self.commit_state = CommitState::Committed;
        Ok(())
    }

    fn move_files(&self, old: &[&str], names: &[&str], marker: &str) -> io::Result<()> {
        for name in [marker].iter().chain(old) {
            ignore_not_found(fs::remove_file(self.folder.join(name)))?;
        }
        // The removal of the old set must be durable before the first new file appears.
        self.locked.sync_all()?;
        for name in names {
            fs::rename(self.path(name), self.folder.join(name))?;
        }
        self.locked.sync_all()?;
        fs::rename(self.path(marker), self.folder.join(marker))?;
        self.locked.sync_all()
    }

    fn remove_leftovers(&self) -> io::Result<()> {
        ignore_not_found(fs::remove_dir_all(self.folder.join(STAGING_FOLDER)))
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // A failed commit leaves the staging folder. It tells the next preparation that the files in the output folder
        // may be overwritten.
        if self.commit_state != CommitState::Committing {
            // An error cannot be reported from here; the next preparation removes what remains.
            let _ = self.remove_leftovers();
        }
        if self.commit_state == CommitState::Uncommitted {
            // Removes only empty folders.
            let _ = self.created_folders.iter().try_for_each(fs::remove_dir);
        }
    }
}

/// Whether a commit into the folder was interrupted: the marker file is missing, and the staging folder exists.
pub(super) fn is_interrupted(folder: &Path, marker: &str) -> io::Result<bool> {
    Ok(!folder.join(marker).try_exists()? && folder.join(STAGING_FOLDER).try_exists()?)
}

/// Ignores the error that the file to remove does not exist.
fn ignore_not_found(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
