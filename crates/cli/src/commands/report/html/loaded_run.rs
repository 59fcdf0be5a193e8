use super::super::breakdown::Breakdown;
use super::super::comparison::Comparison;
use super::super::records::{Records, baseline, records_file};
use super::super::trace::to_svg;
use anyhow::Result;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;
use trireme_base::quoted;
use trireme_checkpoint::ModelSource;
use trireme_train::CONFIG_TOML;
use trireme_train::config::Config;
use trireme_train::trace::{TRACE_FILE, read};

/// Maximum size of a drawing on a page. A larger one, of thousands of passes, needs its own viewer.
const DRAWING_BYTES_MAX: usize = 400_000;

pub(super) struct LoadedRun {
    /// Short name that is unique among the runs.
    pub(super) name: String,
    pub(super) folder: PathBuf,
    pub(super) records: Records,
    /// Keys of `config.toml` with their values; empty if the file cannot be read.
    pub(super) keys: BTreeMap<String, String>,
    /// Validation loss of the bigram baseline.
    pub(super) baseline: Option<f64>,
    /// Elements of the newest checkpoint's weights.
    pub(super) num_parameters: Option<f64>,
    /// The beginning of the run, in Unix seconds. `ended` is in Unix seconds, too.
    pub(super) began: Option<u64>,
    pub(super) ended: Option<u64>,
    /// The last traced step, if any step was traced.
    pub(super) drawing: Option<TraceDrawing>,
    /// The breakdown of that step's time.
    pub(super) breakdown: Option<Breakdown>,
}

impl LoadedRun {
    pub(super) fn missing_parts(&self) -> Vec<String> {
        let mut lacks = Vec::new();
        if self.keys.is_empty() {
            lacks.push(format!("{} has no config.toml that can be read", self.folder.display()));
        }
        if let Some(TraceDrawing::Missing(why)) = &self.drawing {
            lacks.push(format!("the last traced step of {} is not drawn: {why}", self.folder.display()));
        }
        lacks
    }
}

pub(super) enum TraceDrawing {
    Svg(String),
    Missing(String),
}

pub(super) fn load(folders: &[PathBuf]) -> Result<Vec<LoadedRun>> {
    folders.iter().zip(names(folders)).map(|(folder, name)| load_run(folder, name)).collect()
}

fn load_run(folder: &Path, name: String) -> Result<LoadedRun> {
    let records = Records::read(folder)?;
    let config = Some(folder.join(CONFIG_TOML)).filter(|path| path.is_file());
    let keys = config.and_then(|path| Config::file_values(&path).ok()).unwrap_or_default();
    let (drawing, breakdown) = folder.join(TRACE_FILE).exists().then(|| traced(folder)).unzip();
    Ok(LoadedRun {
        name,
        folder: folder.to_owned(),
        records,
        keys,
        baseline: baseline(folder),
        num_parameters: num_parameters(folder),
        began: began(folder),
        ended: ended(folder),
        drawing,
        breakdown: breakdown.flatten(),
    })
}

/// Returns the last component of each path where it is unique, else the path.
fn names(folders: &[PathBuf]) -> Vec<String> {
    let short = |folder: &PathBuf| folder.file_name().map(|name| name.to_string_lossy().into_owned());
    let all: Vec<Option<String>> = folders.iter().map(short).collect();
    let name = |(folder, short): (&PathBuf, &Option<String>)| match short {
        Some(name) if all.iter().filter(|other| *other == short).count() == 1 => name.clone(),
        _ => folder.display().to_string(),
    };
    folders.iter().zip(&all).map(name).collect()
}

fn num_parameters(folder: &Path) -> Option<f64> {
    let weights = ModelSource::open(folder).ok()?.weights();
    // Integers might overflow, because shapes come from a file.
    let elements = |shape: &[usize]| shape.iter().map(|&dim| dim as f64).product::<f64>();
    Some(weights.iter().map(|(_, tensor)| elements(tensor.shape())).sum())
}

/// Returns when the first TensorBoard event file was created, according to its name.
fn began(folder: &Path) -> Option<u64> {
    let seconds = |name: &str| name.strip_prefix("events.out.tfevents.")?.split('.').next()?.parse().ok();
    let entries = fs::read_dir(folder).ok()?.flatten();
    entries.filter_map(|entry| seconds(&entry.file_name().to_string_lossy())).min()
}

/// Returns when the last record was written.
fn ended(folder: &Path) -> Option<u64> {
    let modified = fs::metadata(records_file(folder)).and_then(|metadata| metadata.modified()).ok()?;
    Some(modified.duration_since(UNIX_EPOCH).ok()?.as_secs())
}

/// Returns the drawing of the last traced step, and the breakdown of its time.
fn traced(folder: &Path) -> (TraceDrawing, Option<Breakdown>) {
    let drawn = || -> Result<Option<(String, Breakdown)>> {
        let steps = read(folder)?;
        let last = steps.last().map(Comparison::new).transpose()?;
        Ok(last.map(|last| (to_svg(folder, &last), last.breakdown)))
    };
    match drawn() {
        Ok(Some((svg, breakdown))) if svg.len() <= DRAWING_BYTES_MAX => {
            (TraceDrawing::Svg(svg), Some(breakdown))
        }
        Ok(Some((_, breakdown))) => {
            let why = format!(
                "the last traced step has too many passes for a page; `trireme report trace {} --svg FILE` draws it",
                quoted(&folder.to_string_lossy())
            );
            (TraceDrawing::Missing(why), Some(breakdown))
        }
        Ok(None) => (TraceDrawing::Missing(format!("{TRACE_FILE} contains no step yet")), None),
        Err(error) => (TraceDrawing::Missing(format!("{error:#}")), None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_short_and_tell_runs_apart() {
        let names = |paths: &[&str]| names(&paths.iter().map(PathBuf::from).collect::<Vec<_>>());
        assert_eq!(names(&["runs/a", "/long/runs/b"]), ["a", "b"]);
        assert_eq!(names(&["old/a", "new/a", "new/b"]), ["old/a", "new/a", "b"]);
        assert_eq!(names(&["..", "runs/a/"]), ["..", "a"]);
    }

    #[test]
    fn a_run_began_with_its_first_file_of_events() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(began(folder.path()), None);
        for name in [
            "events.out.tfevents.1700000500.host.7.0",
            "events.out.tfevents.1700000000.host.9.0",
            "events.out.tfevents.x",
        ] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        assert_eq!(began(folder.path()), Some(1_700_000_000));
    }
}
