use crate::DataError;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

/// What becomes of a corpus that is in the output folder already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Existing {
    /// The new one takes its place.
    Replace,
    /// It stays, and preparing is refused.
    Keep,
}

/// Files in the making lie here, inside the output folder so that renaming them is atomic.
const STAGING_FOLDER: &str = ".trireme-prepare";

/// An output folder that shows either the old set of files or the new, and no half of one.
///
/// Files are made in a hidden folder beside their place. [`commit`](Self::commit) first removes the old mark
/// of completeness, then moves the files, the new mark last. Without a commit everything goes when the value
/// is dropped. The folder is locked meanwhile; a lock ends with its process, so a killed one leaves none.
#[derive(Debug)]
pub(super) struct Staging {
    folder: PathBuf,
    /// Holds the lock.
    locked: File,
    /// The folder and those above it, as far as they were not there; the innermost first.
    folders_made: Vec<PathBuf>,
    stage: Stage,
}

#[derive(Debug, PartialEq, Eq)]
enum Stage {
    Making,
    Committing,
    Committed,
}

impl Staging {
    /// Locks `folder`, making it if it is not there. Files named `names` in it must come from an earlier commit, known by
    /// its `mark`, that `existing` allows to replace: others are not overwritten.
    pub(super) fn new(
        folder: &Path,
        names: &[&str],
        mark: &str,
        existing: Existing,
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
        let is_own = match folder.join(mark).exists() {
            true => existing == Existing::Replace,
            false => is_interrupted(folder, mark).map_err(write)?,
        };
        if let Some(name) = [mark].iter().chain(names).find(|name| !is_own && folder.join(name).exists()) {
            return Err(DataError::Occupied { path: folder.join(name) });
        }
        let staging = Staging { folder: folder.to_owned(), locked, folders_made, stage: Stage::Making };
        staging.remove_leftovers().and_then(|()| fs::create_dir(staging.path(""))).map_err(write)?;
        Ok(staging)
    }

    /// Where to make the file `name`.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.join(STAGING_FOLDER).join(name)
    }

    /// Puts the files `names` into the folder in place of those named by `old`, `mark` last.
    pub(super) fn commit(mut self, old: &[&str], names: &[&str], mark: &str) -> Result<(), DataError> {
        self.stage = Stage::Committing;
        self.move_files(old, names, mark)
            .map_err(|source| DataError::Write { path: self.folder.clone(), source })?;
        self.stage = Stage::Committed;
        Ok(())
    }

    fn move_files(&self, old: &[&str], names: &[&str], mark: &str) -> io::Result<()> {
        for name in [mark].iter().chain(old) {
            if_there(fs::remove_file(self.folder.join(name)))?;
        }
        // The old set must be gone from the disk before the first new file can be there.
        self.locked.sync_all()?;
        for name in names {
            fs::rename(self.path(name), self.folder.join(name))?;
        }
        self.locked.sync_all()?;
        fs::rename(self.path(mark), self.folder.join(mark))?;
        self.locked.sync_all()
    }

    fn remove_leftovers(&self) -> io::Result<()> {
        if_there(fs::remove_dir_all(self.folder.join(STAGING_FOLDER)))
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // A commit that failed half-way leaves the staging folder, which tells the next preparation that it may
        // overwrite the files here.
        if self.stage != Stage::Committing {
            // Nobody is left to tell; the next preparation removes what is left.
            let _ = self.remove_leftovers();
        }
        if self.stage == Stage::Making {
            // As far as they are empty.
            let _ = self.folders_made.iter().try_for_each(fs::remove_dir);
        }
    }
}

/// Whether a commit into the folder was cut short: between removing the old mark and setting the new one, only the staging
/// folder tells.
pub(super) fn is_interrupted(folder: &Path, mark: &str) -> io::Result<bool> {
    Ok(!folder.join(mark).try_exists()? && folder.join(STAGING_FOLDER).try_exists()?)
}

/// The result of removing something that need not be there.
fn if_there(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
