use super::report::RankReport;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use trireme_base::{create_regular, read_at_most};

/// Upper bound of a report's length. Actual reports are far shorter.
const FILE_BYTES_MAX: u64 = 64 << 20;
/// Maximum world size, as in `rendezvous`.
const WORLD_SIZE_MAX: usize = 1 << 16;

/// The reason why reports cannot be read.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages explain the fields")]
pub enum ReadReportsError {
    #[error("cannot read the flight recorder report {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} is not a flight recorder report: {what}", path.display())]
    NotAReport { path: PathBuf, what: String },
}

/// Path of a rank's report in `folder`.
pub fn report_path(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("rank-{rank}.json"))
}

/// Writes a report and replaces an earlier one atomically.
pub(super) fn write_report(folder: &Path, report: &RankReport) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let path = report_path(folder, report.rank);
    let partial_path = folder.join(format!(".rank-{}.json.partial", report.rank));
    let mut text = serde_json::to_vec(report)?;
    text.push(b'\n');
    // Not synced: a disk that hangs must not hold up a failed worker.
    let written = create_regular(&partial_path).and_then(|mut file| file.write_all(&text));
    written
        .and_then(|()| fs::rename(&partial_path, path))
        .inspect_err(|_| drop(fs::remove_file(&partial_path)))
}

/// Reads all reports in a folder, in rank order.
///
/// # Errors
/// If the folder or a file cannot be read, or a file is not a report of its rank. The first error is returned.
pub fn read_reports(folder: &Path) -> Result<Vec<RankReport>, ReadReportsError> {
    let unreadable = |source| ReadReportsError::Read { path: folder.to_owned(), source };
    let ranks = ranks(folder).map_err(unreadable)?;
    ranks.into_iter().map(|rank| RankReport::read(folder, rank)).collect()
}

/// Removes all reports in a folder. The folder need not exist.
///
/// # Errors
/// If the folder cannot be read, or a file cannot be removed.
pub fn remove_reports(folder: &Path) -> io::Result<()> {
    if !folder.exists() {
        return Ok(());
    }
    ranks(folder)?.into_iter().try_for_each(|rank| fs::remove_file(report_path(folder, rank)))
}

/// The ranks that have a report in a folder, in ascending order.
fn ranks(folder: &Path) -> io::Result<Vec<usize>> {
    let mut ranks = Vec::new();
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name();
        let rank =
            name.to_str().and_then(|name| name.strip_prefix("rank-")?.strip_suffix(".json")?.parse().ok());
        ranks.extend(rank.filter(|&rank| report_path(folder, rank).ends_with(&name)));
    }
    ranks.sort_unstable();
    Ok(ranks)
}

impl RankReport {
    /// Reads one rank's report in a folder.
    ///
    /// # Errors
    /// If the file cannot be read, or is not a report of this rank.
    pub fn read(folder: &Path, rank: usize) -> Result<Self, ReadReportsError> {
        read_report(&report_path(folder, rank), rank)
    }
}

fn read_report(path: &Path, rank: usize) -> Result<RankReport, ReadReportsError> {
    let unreadable = |source| ReadReportsError::Read { path: path.to_owned(), source };
    let refuse = |what: String| ReadReportsError::NotAReport { path: path.to_owned(), what };
    let text = read_at_most(path, FILE_BYTES_MAX).map_err(unreadable)?;
    let report: RankReport = serde_json::from_slice(&text).map_err(|error| refuse(error.to_string()))?;
    if report.format != RankReport::FORMAT {
        return Err(refuse(format!(
            "its format is {}, but this program reads {}",
            report.format,
            RankReport::FORMAT
        )));
    }
    if report.rank != rank || report.world_size > WORLD_SIZE_MAX {
        return Err(refuse(format!("it claims to be from rank {} of {}", report.rank, report.world_size)));
    }
    let named = report.groups.iter().flat_map(|group| {
        let heard = group.heard.iter().map(|place| place.rank);
        let missing = group.failure.iter().flat_map(|failure| failure.missing.iter().copied());
        let issued = group.failure.iter().flat_map(|failure| failure.mismatch.iter().map(|side| side.rank));
        group.members.iter().copied().chain(heard).chain(missing).chain(issued)
    });
    match named.chain([rank]).find(|&named| named >= report.world_size) {
        Some(named) => Err(refuse(format!("it names rank {named} of {}", report.world_size))),
        None => Ok(report),
    }
}
