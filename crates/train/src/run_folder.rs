//! The files in a run's folder other than checkpoints.

use crate::config::Config;
use crate::error::TrainError;
use crate::metrics::{HASHES_FILE, HashWriter, METRICS_FILE, MetricsWriter, PrometheusEndpoint};
use crate::observer::Observer;
use crate::trace::TRACE_FILE;
use std::fs;
use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use trireme_base::{Bytes, create_regular};
use trireme_checkpoint::CHECKPOINTS_FOLDER;
use trireme_comm::{Choice, Group};
use trireme_parallel::Executor;
use trireme_schedule::Program;
use trireme_schedule::collective::CostModel;

/// The folder in a run's folder to which workers write their last operations after a failure.
pub const FLIGHT_RECORDER_FOLDER: &str = "flight-recorder";

/// The file with the resolved config, in a run's folder and in a checkpoint.
pub const CONFIG_TOML: &str = "config.toml";

const GIVEN_FILE: &str = "config.given.toml";

/// Writes the files that describe the run, and opens its metrics. `comment` is written after the program, and `given` is the config as the
/// user gave it.
pub(crate) fn open(
    config: &Config,
    comment: &str,
    given: Option<&str>,
    executor: &Executor,
    resumed_step: u64,
) -> Result<MetricsWriter, TrainError> {
    let folder = config.run_folder();
    let write = |name: &str, contents: &str| write_file(folder.join(name), contents);
    write(CONFIG_TOML, &config.to_toml())?;
    if let Some(given) = given {
        write(GIVEN_FILE, given)?;
    }
    write_program(config, executor.program(), comment)?;
    write_algorithm_choices(config, executor.group())?;
    Ok(MetricsWriter::open(&folder, config.metrics(), resumed_step)?)
}

/// Opens the run's file of hashes, if the config asks for hashes. In any case, removes the hashes after `resumed_step` of an earlier part
/// of the run.
pub(crate) fn open_hashes(config: &Config, resumed_step: u64) -> Result<Option<HashWriter>, TrainError> {
    let (folder, is_wanted) = (config.run_folder(), config.metrics().hash_interval > 0);
    if !is_wanted && !folder.join(HASHES_FILE).exists() {
        return Ok(None);
    }
    let hashes = HashWriter::open(&folder, resumed_step)?;
    Ok(is_wanted.then_some(hashes))
}

/// Starts to serve metrics to Prometheus, if the config asks for that. Writes no file.
pub(crate) fn listen(config: &Config) -> Result<Option<PrometheusEndpoint>, TrainError> {
    let metrics = config.metrics();
    let address = SocketAddr::new(metrics.prometheus_address, metrics.prometheus_port);
    let endpoint = (metrics.prometheus_port > 0).then(|| PrometheusEndpoint::open(address));
    Ok(endpoint.transpose()?)
}

/// Writes the step program of this rank to `program.txt`, followed by `comment`.
pub(crate) fn write_program(config: &Config, program: &Program, comment: &str) -> Result<(), TrainError> {
    let path = config.run_folder().join("program.txt");
    // The comment follows the program, so that lines of the file have the numbers that errors name.
    let comment: String = comment.lines().map(|line| format!("# {line}\n")).collect();
    write_file(path, &format!("{program}{comment}"))
}

fn write_file(path: PathBuf, contents: &str) -> Result<(), TrainError> {
    let written = create_regular(&path).and_then(|mut file| file.write_all(contents.as_bytes()));
    written.map_err(|source| TrainError::RunFolder { path, source })
}

/// Writes the algorithms that the group has chosen so far, and the costs by which it chose them, to `collectives.txt`.
pub(crate) fn write_algorithm_choices(config: &Config, group: &Group) -> Result<(), TrainError> {
    write_file(config.run_folder().join("collectives.txt"), &algorithm_choices(group))
}

fn algorithm_choices(group: &Group) -> String {
    let CostModel { within, across, direct, .. } = group.costs();
    let (num_ranks, num_hosts) = (group.world_size(), group.hosts().num_hosts());
    let mut text = format!("{num_ranks} workers, hosts: {num_hosts}, transport: {}\n", group.transport());
    let mut cost = |name: &str, latency_seconds: f64, seconds_per_byte: f64| {
        let (microseconds, gigabytes_per_second) = (latency_seconds * 1e6, 1e-9 / seconds_per_byte);
        text += &format!("{name:<24}{microseconds:>8.1} us {gigabytes_per_second:>8.2} GB/s\n");
    };
    cost("messages within a host", within.latency_seconds, within.seconds_per_byte);
    if num_hosts > 1 {
        cost("messages across hosts", across.latency_seconds, across.seconds_per_byte);
    }
    if let Some(direct) = direct {
        cost("shared memory", direct.synchronization_seconds, direct.seconds_per_byte);
    }
    text.push('\n');
    let mut row = |operation: &str, size: &str, elements: &str, algorithm: &str| {
        text += &format!("{operation:<14} {size:>10} {elements:>16}  {algorithm}\n");
    };
    row("operation", "size", "elements", "algorithm");
    for choice in group.choices() {
        let Choice { collective, element_bytes, algorithm } = choice;
        let elements = format!("{} x {element_bytes}B", collective.len);
        row(&collective.to_string(), &Bytes(choice.bytes()).to_string(), &elements, &algorithm.to_string());
    }
    text
}

/// Moves the files of an earlier run in `folder` to `folder/previous-K`, so that a new run can begin and nothing is lost.
pub(crate) fn set_aside(folder: &Path, observer: &mut dyn Observer) -> Result<(), TrainError> {
    let failed = |source| TrainError::RunFolder { path: folder.to_owned(), source };
    let (mut names, mut configs) = (Vec::new(), Vec::new());
    for entry in fs::read_dir(folder).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        let text = name.to_string_lossy();
        let is_of_run = [CHECKPOINTS_FOLDER, METRICS_FILE, HASHES_FILE, TRACE_FILE].contains(&&*text);
        if [CONFIG_TOML, GIVEN_FILE].contains(&&*text) {
            configs.push(name.clone());
        }
        if is_of_run || text.starts_with("events.out.tfevents.") {
            names.push(name);
        }
    }
    if names.is_empty() {
        return Ok(());
    }
    names.extend(configs);
    let free = (1..).map(|index| folder.join(format!("previous-{index}"))).find(|path| !path.exists());
    let previous = free.expect("there are more numbers than folders");
    fs::create_dir(&previous).map_err(failed)?;
    for name in names {
        fs::rename(folder.join(&name), previous.join(&name)).map_err(failed)?;
    }
    observer.notice(&format!("the earlier run was moved to {}", previous.display()));
    Ok(())
}
