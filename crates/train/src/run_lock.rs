//! The lock that lets one process at a time train into a run's folder.

use crate::config::Config;
use crate::error::TrainError;
use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};
use trireme_base::create_regular;

/// Maximum time to wait for a lock that another process holds.
const LOCK_WAIT_MAX: Duration = Duration::from_secs(2);

/// Pause between attempts to take the lock.
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// A lock that keeps other processes from training into a run's folder until it is dropped. A process that dies leaves no lock behind.
///
/// Folders that were created only for the lock are removed with it, so a refused run leaves no files behind.
#[derive(Debug)]
pub struct RunLock {
    path: PathBuf,
    /// The run's folder and its ancestors that did not exist; the innermost first.
    created_folders: Vec<PathBuf>,
    _file: File,
}

impl RunLock {
    /// Locks the folder of a run, and creates it if it does not exist. A process that was killed a moment ago may hold its lock a little
    /// longer, so this function waits up to 2 seconds for a lock.
    ///
    /// # Errors
    /// If the folder cannot be created, or if another process is using the run.
    pub fn of_run(config: &Config) -> Result<Self, TrainError> {
        let deadline = Instant::now() + LOCK_WAIT_MAX;
        RunLock::take(&config.run_folder(), || {
            thread::sleep(LOCK_PAUSE);
            Instant::now() < deadline
        })
    }

    /// Tries to lock `folder` until `waits` returns false.
    fn take(folder: &Path, mut waits: impl FnMut() -> bool) -> Result<Self, TrainError> {
        let path = folder.join(".lock");
        let failed = |source| TrainError::RunFolder { path: path.clone(), source };
        let folders_made: Vec<PathBuf> =
            folder.ancestors().take_while(|folder| !folder.exists()).map(PathBuf::from).collect();
        loop {
            fs::create_dir_all(folder).map_err(failed)?;
            let file = match create_regular(&path) {
                // The earlier holder of the lock may have removed the folder as well.
                Err(error) if error.kind() == io::ErrorKind::NotFound && waits() => continue,
                file => file.map_err(failed)?,
            };
            match file.try_lock() {
                // The earlier holder may have removed the file. A lock on a removed file would not exclude other processes.
                Ok(()) if is_at(&file, &path).map_err(failed)? => {
                    return Ok(RunLock { path, created_folders: folders_made, _file: file });
                }
                Ok(()) => {}
                Err(TryLockError::WouldBlock) if waits() => {}
                Err(TryLockError::WouldBlock) => {
                    return Err(TrainError::RunInUse { path: folder.to_owned() });
                }
                Err(TryLockError::Error(source)) => return Err(failed(source)),
            }
        }
    }
}

/// Returns whether `path` refers to the open file.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let open = file.metadata()?;
    match fs::metadata(path) {
        Ok(named) => Ok((named.dev(), named.ino()) == (open.dev(), open.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

impl Drop for RunLock {
    fn drop(&mut self) {
        let Some(folder) = self.created_folders.first() else { return };
        let is_alone = fs::read_dir(folder).is_ok_and(|entries| entries.count() == 1);
        if is_alone && fs::remove_file(&self.path).is_ok() {
            // Only empty folders are removed. A failure cannot be reported from here.
            let _ = self.created_folders.iter().try_for_each(fs::remove_dir);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_is_released_meanwhile_is_taken_and_another_one_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("runs/tiny");
        let mut held = Some(RunLock::take(&run, || false).unwrap());
        let refused = RunLock::take(&run, || false);
        assert!(matches!(refused, Err(TrainError::RunInUse { .. })));
        // The first lock is dropped while the second attempt waits, and removes the folders that it created.
        let taken = RunLock::take(&run, || held.take().is_some()).unwrap();
        assert!(matches!(RunLock::take(&run, || false), Err(TrainError::RunInUse { .. })));
        fs::write(run.join("metrics.jsonl"), "").unwrap();
        drop(taken);
        assert!(run.join("metrics.jsonl").exists() && run.join(".lock").exists());
    }

    #[test]
    fn a_refused_run_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        drop(RunLock::take(&folder.path().join("runs/tiny"), || false).unwrap());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
