//! What a run keeps in its folder besides checkpoints.

use crate::checkpointing::RunFiles;
use crate::config::Config;
use crate::error::TrainError;
use crate::metrics::{MetricsFiles, MetricsWriter};
use crate::observer::Observer;
use std::fs::{self, File, TryLockError};
use std::path::Path;
use trireme_parallel::Executor;

/// Where workers write what they did last when something goes wrong, in a run's folder.
pub const FLIGHT_RECORDER_FOLDER: &str = "flight-recorder";

/// Writes the run's description and opens its metrics.
pub(crate) fn open(
    config: &Config,
    files: &RunFiles,
    executor: &Executor,
    resumed_step: u64,
) -> Result<MetricsWriter, TrainError> {
    let folder = config.run_folder();
    let write = |name: &str, contents: &str| {
        let path = folder.join(name);
        fs::write(&path, contents).map_err(|source| TrainError::RunFolder { path, source })
    };
    write("config.toml", &files.config_toml)?;
    write("program.txt", &executor.program().to_string())?;
    let metrics = config.metrics();
    let which = MetricsFiles { jsonl: metrics.jsonl, tensorboard: metrics.tensorboard };
    Ok(MetricsWriter::open(&folder, which, resumed_step)?)
}

/// Makes the folder, and keeps other processes from training into it while the file stays open.
pub(crate) fn lock(folder: &Path) -> Result<File, TrainError> {
    let path = folder.join(".lock");
    let failed = |source| TrainError::RunFolder { path: path.clone(), source };
    fs::create_dir_all(folder).map_err(failed)?;
    let lock = File::create(&path).map_err(failed)?;
    match lock.try_lock() {
        Ok(()) => Ok(lock),
        Err(TryLockError::WouldBlock) => Err(TrainError::RunInUse { path: folder.to_owned() }),
        Err(TryLockError::Error(source)) => Err(failed(source)),
    }
}

/// Moves what an earlier run left in `folder` into `previous-K` there, so that a new run begins and nothing is lost.
pub(crate) fn set_aside(folder: &Path, observer: &mut dyn Observer) -> Result<(), TrainError> {
    let failed = |source| TrainError::RunFolder { path: folder.to_owned(), source };
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        let text = name.to_string_lossy();
        if text == "checkpoints" || text == "metrics.jsonl" || text.starts_with("events.out.tfevents.") {
            names.push(name);
        }
    }
    if names.is_empty() {
        return Ok(());
    }
    let free = (1..).map(|index| folder.join(format!("previous-{index}"))).find(|path| !path.exists());
    let previous = free.expect("there are more numbers than folders");
    fs::create_dir(&previous).map_err(failed)?;
    for name in names {
        fs::rename(folder.join(&name), previous.join(&name)).map_err(failed)?;
    }
    observer.notice(&format!("the earlier run was moved to {}", previous.display()));
    Ok(())
}
