//! Workers of commands without a run folder.

use super::LaunchError;
use super::supervisor::{LocalWorld, OnSignal, run_local_workers, worker_command};
use crate::simd::Simd;
use crate::temporary::temporary_folder;
use anyhow::Result;
use std::path::PathBuf;
use std::time::Instant;
use trireme_train::FLIGHT_RECORDER_FOLDER;

/// Environment variable with the folder for the reports of a worker's flight recorder.
const RECORDER_VARIABLE: &str = "TRIREME_FLIGHT_RECORDER";

/// Starts this command again for each worker, and waits until all have exited. If one dies, its log and the flight recorders' reports are
/// kept in a folder with the layout of a run's folder. `simd` is the SIMD level of the workers' kernels, if they have any.
pub(crate) fn launch_workers(num_workers: usize, started: Instant, simd: Option<&Simd>) -> Result<()> {
    let folder = temporary_folder("trireme-workers-")?;
    let (log_folder, recorder_folder) = (folder.path(), &folder.path().join(FLIGHT_RECORDER_FOLDER));
    let on_signal = OnSignal::End;
    let world = LocalWorld { num_workers, master_port: 0, log_folder, recorder_folder, on_signal };
    let command = worker_command(started, simd)?;
    let ended = run_local_workers(world, |_| {
        let mut worker = command();
        worker.env(RECORDER_VARIABLE, recorder_folder);
        worker
    });
    // Only the error of a worker's death names the log.
    if matches!(ended, Err(LaunchError::WorkerDied { .. })) {
        let _kept = folder.keep();
    }
    Ok(ended?)
}

/// Returns the folder for the reports of this worker's flight recorder, if Trireme's launcher has set it.
pub(crate) fn recorder_folder() -> Option<PathBuf> {
    std::env::var_os(RECORDER_VARIABLE).map(PathBuf::from)
}
