//! Checks of the conditions for the first step, before anything is computed. One message names every rank that violates them.

use crate::agreement::{Facts, agree};
use crate::all_gather_json::all_gather_json;
use crate::config::Config;
use crate::error::TrainError;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant, SystemTime};
use trireme_base::{Bytes, Heartbeat, Rank, format_ranks};
use trireme_checkpoint::{CHECKPOINTS_FOLDER, list_checkpoints};
use trireme_comm::{CommError, Group};
use trireme_tensor::SimdLevel;

/// Maximum time until a file written on one host must be visible on another. A network file system may cache directories for some seconds.
const VISIBLE_MAX: Duration = Duration::from_secs(5);
const VISIBLE_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Maximum difference of clocks, in seconds, that counts as agreement. Reading the clocks of two hosts is not simultaneous.
const CLOCKS_APART_MAX: f64 = 2.0;

/// Checks that all ranks run the same program with the same config and SIMD level, which is the machine's, but at most `simd_level_max`. On
/// several hosts with checkpoints enabled, also checks that they share the run's folder and can write to it. Returns one warning for each
/// group of ranks whose clocks differ from the clock of rank 0 by more than 2 s. Collective.
///
/// Costs up to five exchanges of small messages. On several hosts, each rank also creates and removes a small file, and waits up to 5 s
/// until the file of rank 0 is visible.
///
/// # Errors
/// [`TrainError::RanksDisagree`] on all ranks, with every difference and its ranks; failed communication.
pub fn preflight(
    config: &Config,
    simd_level_max: Option<SimdLevel>,
    group: &Group,
) -> Result<Vec<String>, TrainError> {
    let mut facts = Facts::of_config(config, simd_level_max);
    let marker = if config.checkpoint().enable && group.hosts().num_hosts() > 1 {
        MarkerFile::share(&config.run_folder(), group)?
    } else {
        None
    };
    if let Some(marker) = &marker {
        let folder = config.run_folder().display().to_string();
        let sees = if marker.is_visible(group.heartbeat()) { "has" } else { "lacks" };
        facts.insert(
            "[run] folder, which all hosts must share",
            format!("{folder} {sees} the file that rank 0 has just written there"),
        );
        let writes =
            marker.check_writable(group.rank()).map_or_else(|error| error.to_string(), |()| "yes".to_owned());
        facts.insert("[run] folder can be written", writes);
    }
    let agreed = agree(&facts, group);
    drop(marker);
    agreed?;
    compare_clocks(group)
}

/// A file that rank 0 writes into the run's folder, by which other ranks recognize the folder.
struct MarkerFile {
    path: PathBuf,
    /// Folders that were created for the file, the innermost first.
    created_folders: Vec<PathBuf>,
}

impl MarkerFile {
    /// Writes the file on rank 0 and sends its name to the other ranks. Returns `None` if rank 0 cannot write it; the run then fails when
    /// it opens the folder.
    fn share(folder: &Path, group: &Group) -> Result<Option<Self>, CommError> {
        let own = if group.rank() == Rank::ROOT { MarkerFile::write(folder).ok() } else { None };
        let name = own.as_ref().and_then(|marker| marker.path.file_name()?.to_str()).unwrap_or_default();
        let names = group.all_gather_bytes(name.as_bytes()).wait()?;
        let name = String::from_utf8_lossy(&names[0]);
        let seen = || {
            (!name.is_empty()).then(|| MarkerFile { path: folder.join(&*name), created_folders: Vec::new() })
        };
        Ok(own.or_else(seen))
    }

    fn write(folder: &Path) -> io::Result<Self> {
        let missing = folder.ancestors().take_while(|folder| !folder.exists());
        let created_folders = missing.map(Path::to_owned).collect();
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let name = format!(".preflight-{:x}-{:x}", std::process::id(), now.as_nanos());
        let marker = MarkerFile { path: folder.join(name), created_folders };
        fs::create_dir_all(folder)?;
        File::create_new(&marker.path)?.sync_all()?;
        Ok(marker)
    }

    /// Returns whether the file is visible within [`VISIBLE_MAX`].
    fn is_visible(&self, heartbeat: &Heartbeat) -> bool {
        let deadline = Instant::now() + VISIBLE_MAX;
        while !self.path.exists() {
            if Instant::now() >= deadline {
                return false;
            }
            heartbeat.beat();
            thread::sleep(VISIBLE_POLL_INTERVAL);
        }
        true
    }

    /// Creates a file next to the marker file, and removes it.
    fn check_writable(&self, rank: Rank) -> io::Result<()> {
        let mut path = self.path.clone().into_os_string();
        path.push(format!("-{rank}"));
        // A missing folder is already reported.
        if self.path.exists() {
            File::create_new(&path)?;
            fs::remove_file(&path)?;
        }
        Ok(())
    }
}

impl Drop for MarkerFile {
    /// Removes the file on every rank, and on rank 0 also the folders that it created. Failures are ignored, because at worst an empty file
    /// remains.
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
        self.created_folders.iter().for_each(|folder| drop(fs::remove_dir(folder)));
    }
}

/// Returns a warning for each group of ranks whose clocks differ from the clock of rank 0 by the same number of seconds. Collective.
fn compare_clocks(group: &Group) -> Result<Vec<String>, TrainError> {
    // After the barrier, all ranks read their clocks within the time of one message.
    group.barrier().wait()?;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Ok(clock_warnings(&all_gather_json(group, &now.as_secs_f64())?))
}

fn clock_warnings(times: &[f64]) -> Vec<String> {
    let mut apart: BTreeMap<i64, Vec<Rank>> = BTreeMap::new();
    for (rank, time) in times.iter().enumerate() {
        let difference = time - times[0];
        if difference.abs() > CLOCKS_APART_MAX {
            apart.entry(difference.round() as i64).or_default().push(Rank(rank));
        }
    }
    let line = |(seconds, of): (i64, Vec<Rank>)| {
        let direction = if seconds > 0 { "ahead of" } else { "behind" };
        format!(
            "the clocks of {} are {} s {direction} that of rank 0: times in their logs do not compare; synchronize the hosts' clocks (NTP)",
            format_ranks(of),
            seconds.abs()
        )
    };
    apart.into_iter().map(line).collect()
}

/// Refuses a disk without room for two checkpoints: a complete one, and the next one while it is written. Returns a notice if there is no
/// room for `keep_latest_k` complete checkpoints and the next one.
pub(crate) fn check_room(config: &Config, checkpoint_bytes: u64) -> Result<Option<String>, TrainError> {
    let folder = config.run_folder().join(CHECKPOINTS_FOLDER);
    let existing = folder.ancestors().find(|folder| folder.exists()).unwrap_or(Path::new("."));
    // Some file systems do not report their size, or report 0.
    let Ok(system) = rustix::fs::statvfs(existing) else { return Ok(None) };
    if system.f_blocks == 0 || system.f_frsize == 0 {
        return Ok(None);
    }
    let available = system.f_bavail.saturating_mul(system.f_frsize);
    // Existing checkpoints are deleted to make room for later ones.
    let num_kept = list_checkpoints(&folder).map_or(0, |kept| kept.len() as u64);
    room(checkpoint_bytes, num_kept, available, config.checkpoint().keep_latest_k as u64, folder)
}

fn room(
    checkpoint_bytes: u64,
    num_kept: u64,
    available: u64,
    keep_latest_k: u64,
    folder: PathBuf,
) -> Result<Option<String>, TrainError> {
    let needed_for = |num: u64| checkpoint_bytes.saturating_mul(num.saturating_sub(num_kept).max(1));
    if available < needed_for(2) {
        return Err(TrainError::NoRoom { folder, needed: needed_for(2), available });
    }
    let wanted = needed_for(keep_latest_k + 1);
    let (available, wanted_text) = (Bytes(available), Bytes(wanted));
    Ok((available.0 < wanted).then(|| {
        format!(
            "[checkpoint] keep_latest_k = {keep_latest_k} will need {wanted_text} more in {}, where {available} are free",
            folder.display()
        )
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_that_differ_are_reported_with_their_ranks() {
        assert!(clock_warnings(&[100.0, 101.5, 98.5]).is_empty());
        let warnings = clock_warnings(&[100.0, 160.2, 160.1, 40.0]);
        assert_eq!(warnings.len(), 2);
        assert!(warnings[0].contains("rank 3 are 60 s behind"), "{warnings:?}");
        assert!(warnings[1].contains("ranks 1, 2 are 60 s ahead"), "{warnings:?}");
    }

    #[test]
    fn there_is_room_for_two_checkpoints_or_the_run_is_refused() {
        let folder = || PathBuf::from("a");
        let refused = |num_kept, available| room(100, num_kept, available, 1, folder()).is_err();
        assert!(refused(0, 199) && !refused(0, 200));
        assert!(refused(1, 99) && !refused(1, 100));
        // The oldest checkpoint is deleted only after the next one is complete.
        assert!(refused(5, 99) && !refused(5, 100));
        assert_eq!(room(100, 0, 200, 1, folder()).unwrap(), None);
        let notice = room(100, 1, 250, 3, folder()).unwrap().unwrap();
        assert!(
            notice.contains("keep_latest_k = 3 will need 300B more in a, where 250B are free"),
            "{notice}"
        );
    }

    #[test]
    fn the_marker_file_leaves_nothing_behind() {
        let scratch = tempfile::tempdir().unwrap();
        let folder = scratch.path().join("runs/new");
        let marker = MarkerFile::write(&folder).unwrap();
        marker.check_writable(Rank(3)).unwrap();
        let copy = MarkerFile { path: marker.path.clone(), created_folders: Vec::new() };
        assert!(copy.is_visible(&Heartbeat::new()));
        drop(marker);
        assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0);
    }
}
