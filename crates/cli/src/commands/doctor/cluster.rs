//! `trireme doctor --cluster`: checks that the workers of a run agree, and measures links and the shared disk.
//!
//! It calls the functions that a run calls before it trains: [`preflight`] and [`HostShare::of_world`].

use crate::commands::check_config_path;
use crate::commands::train::world_options;
use crate::console::Output;
use crate::host::HostShare;
use crate::launch::{WorkerEnvironment, before_joining, launch_workers, recorder_folder, work_in_world};
use crate::numbers::with_noun;
use crate::statistics::median;
use anyhow::{Result, bail};
use rustix::fs::{Advice, fadvise, statvfs};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;
use trireme_base::{Bytes, Rank, format_ranges};
use trireme_comm::{Buffer, CommError, Group, host_name};
use trireme_train::config::Config;
use trireme_train::{all_gather_json, preflight};

/// Round trips that measure a latency. The quickest counts.
const NUM_LATENCY_ROUND_TRIPS: usize = 20;
const SHORT_BYTES: usize = 64;
/// Round trips that measure a bandwidth. The quickest counts.
const NUM_BANDWIDTH_ROUND_TRIPS: usize = 3;
const LONG_BYTES: usize = 16 << 20;
/// Maximum number of hosts for which every pair is measured. With more hosts, each is measured with the next.
const NUM_HOSTS_ALL_PAIRS: usize = 8;
/// Bytes that a host writes and reads.
const FILE_BYTES: usize = 64 << 20;
const BLOCK_BYTES: usize = 1 << 20;
/// A link or disk that is slower than the median by more than this factor is reported, because it holds up all others.
const SLOWNESS_MAX: f64 = 3.0;

/// The output; the fields are keys of `--json`.
#[derive(Debug, Serialize)]
struct Report {
    hosts: Vec<HostReport>,
    links: Vec<LinkMeasurement>,
    disks: Vec<DiskMeasurement>,
    /// Problems that would slow the run down or make its logs misleading. A problem that keeps a run from starting is the error of the
    /// command instead.
    problems: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct HostReport {
    name: String,
    ranks: Vec<usize>,
    /// Threads of the host's first rank.
    threads: usize,
    cores: Option<String>,
    memory_bytes: u64,
}

/// A connection between the first ranks of two hosts, or between two ranks of a single host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct LinkMeasurement {
    ranks: [usize; 2],
    latency_seconds: f64,
    bytes_per_second: f64,
}

/// The file system of the run's folder, as one host measures it while all others use it as well.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct DiskMeasurement {
    rank: usize,
    written_bytes_per_second: f64,
    read_bytes_per_second: f64,
    available_bytes: u64,
}

/// Runs `trireme doctor --cluster` in this process, either as a worker or as the launcher of this host's workers.
pub(super) fn run(path: &Path, json: bool, started: Instant) -> Result<()> {
    let load = |world_size| -> Result<Config> {
        check_config_path(path)?;
        Ok(Config::load(path, &[], world_size)?)
    };
    let Some(environment) = WorkerEnvironment::of_this_process()? else {
        return launch_workers(load(None)?.world_size(), started, None);
    };
    let (config, options) = before_joining(Some(&environment), || {
        let config = load(Some(environment.world_size))?;
        let options = world_options(&config, &environment)?;
        Ok((config, options))
    })?;
    work_in_world(options, recorder_folder(), |group| {
        let report = check(&config, &group)?;
        if group.rank() == Rank::ROOT {
            if json {
                writeln!(Output, "{}", serde_json::to_string_pretty(&report)?)?;
            } else {
                print(&report, &config.run_folder(), &group)?;
            }
        }
        // All ranks wait until rank 0 has printed, because a launcher may end them after the first failure.
        group.barrier().wait()?;
        match report.problems.len() {
            0 => Ok(()),
            1 => bail!("the cluster has a problem: {}", report.problems[0]),
            num => bail!("the cluster has {num} problems:\n  {}", report.problems.join("\n  ")),
        }
    })
}

/// Runs all checks. Collective; all ranks return the same report.
fn check(config: &Config, group: &Group) -> Result<Report> {
    let mut problems = preflight(config, None, group)?;
    let hosts = hosts(config, group)?;
    let links = links(group)?;
    let disks = disks(&config.run_folder(), group)?;
    problems.extend(slow_links(&links));
    problems.extend(slow_disks(&disks));
    Ok(Report { hosts, links, disks, problems })
}

fn hosts(config: &Config, group: &Group) -> Result<Vec<HostReport>> {
    let share = HostShare::of_world(group, config.memory().huge_pages, config.launch().bind)?;
    let ranks = |host| group.hosts().ranks(host).iter().map(|rank| rank.0).collect();
    let own = HostReport {
        name: host_name(),
        ranks: ranks(group.hosts().host_of(group.rank())),
        threads: share.num_threads,
        cores: share.bound_to(),
        memory_bytes: share.limits.iter().map(|shared| shared.limit.bytes).min().unwrap_or(0),
    };
    let all = all_gather_json(group, &own)?;
    Ok((0..group.hosts().num_hosts()).map(|host| all[group.hosts().ranks(host)[0].0].clone()).collect())
}

/// Returns the pairs of ranks to measure, one after the other.
fn pairs(group: &Group) -> Vec<[Rank; 2]> {
    let num_hosts = group.hosts().num_hosts();
    let first = |host: usize| group.hosts().ranks(host)[0];
    match num_hosts {
        1 if group.world_size() == 1 => Vec::new(),
        1 => Vec::from([[Rank(0), Rank(1)]]),
        2..=NUM_HOSTS_ALL_PAIRS => {
            let of = |host| (host + 1..num_hosts).map(move |other| [first(host), first(other)]);
            (0..num_hosts).flat_map(of).collect()
        }
        _ => (0..num_hosts).map(|host| [first(host), first((host + 1) % num_hosts)]).collect(),
    }
}

fn links(group: &Group) -> Result<Vec<LinkMeasurement>> {
    let mut own = Vec::new();
    for pair in pairs(group) {
        if let Some(place) = pair.iter().position(|&rank| rank == group.rank()) {
            let figure = link(group, pair, place)?;
            own.extend((place == 0).then_some(figure));
        }
        group.barrier().wait()?;
    }
    Ok(all_gather_json(group, &own)?.into_iter().flatten().collect())
}

fn link(group: &Group, pair: [Rank; 2], place: usize) -> Result<LinkMeasurement, CommError> {
    let peer = pair[1 - place];
    let round_trip = |num_bytes: usize, num_rounds: usize| -> Result<f64, CommError> {
        let mut buffer: Buffer<u8> = group.buffer(num_bytes)?;
        let mut quickest = f64::INFINITY;
        for _ in 0..num_rounds {
            let start = Instant::now();
            if place == 0 {
                buffer = group.send(buffer, peer).wait()?;
                buffer = group.receive(buffer, peer).wait()?;
            } else {
                buffer = group.receive(buffer, peer).wait()?;
                buffer = group.send(buffer, peer).wait()?;
            }
            quickest = quickest.min(start.elapsed().as_secs_f64());
        }
        Ok(quickest / 2.0)
    };
    let latency_seconds = round_trip(SHORT_BYTES, NUM_LATENCY_ROUND_TRIPS)?;
    let bytes_per_second = LONG_BYTES as f64 / round_trip(LONG_BYTES, NUM_BANDWIDTH_ROUND_TRIPS)?;
    Ok(LinkMeasurement { ranks: pair.map(|rank| rank.0), latency_seconds, bytes_per_second })
}

/// Measures the run's folder. The first rank of each host writes a file and reads it again, all at the same time. Collective.
fn disks(folder: &Path, group: &Group) -> Result<Vec<DiskMeasurement>> {
    let is_first = group.hosts().local_rank(group.rank()) == 0;
    if group.rank() == Rank::ROOT {
        // A failure shows up again below. Other hosts must not use the folder before it exists.
        let _ = fs::create_dir_all(folder);
    }
    group.barrier().wait()?;
    let own = is_first.then(|| {
        disk(folder, group)
            .map_err(|error| format!("rank {} cannot use {}: {error}", group.rank(), folder.display()))
    });
    let all = all_gather_json(group, &own)?;
    if group.rank() == Rank::ROOT {
        // Does nothing if a run has files in the folder.
        let _ = fs::remove_dir(folder);
    }
    let figures: Result<Vec<DiskMeasurement>, String> = all.into_iter().flatten().collect();
    figures.map_err(anyhow::Error::msg)
}

fn disk(folder: &Path, group: &Group) -> io::Result<DiskMeasurement> {
    fs::create_dir_all(folder)?;
    let path = folder.join(format!(".doctor-{}-{}", group.rank(), std::process::id()));
    let figure = measure_file(&path, group);
    // Best effort: the file may not exist.
    let _ = fs::remove_file(&path);
    let (written_bytes_per_second, read_bytes_per_second) = figure?;
    let system = statvfs(folder)?;
    let available_bytes = system.f_bavail.saturating_mul(system.f_frsize);
    Ok(DiskMeasurement {
        rank: group.rank().0,
        written_bytes_per_second,
        read_bytes_per_second,
        available_bytes,
    })
}

fn measure_file(path: &PathBuf, group: &Group) -> io::Result<(f64, f64)> {
    let mut block: Vec<u8> = (0..BLOCK_BYTES).map(|index| (index * 31 % 251) as u8).collect();
    let start = Instant::now();
    let mut file = File::create_new(path)?;
    for _ in 0..FILE_BYTES / BLOCK_BYTES {
        file.write_all(&block)?;
        group.heartbeat().beat();
    }
    file.sync_all()?;
    let written = FILE_BYTES as f64 / start.elapsed().as_secs_f64();
    // Reading from this host's page cache would not measure the disk. Not every file system drops its pages on request.
    let _ = fadvise(&file, 0, None, Advice::DontNeed);
    let mut file = File::open(path)?;
    let start = Instant::now();
    for _ in 0..FILE_BYTES / BLOCK_BYTES {
        file.read_exact(&mut block)?;
        group.heartbeat().beat();
    }
    Ok((written, FILE_BYTES as f64 / start.elapsed().as_secs_f64()))
}

fn slow_links(links: &[LinkMeasurement]) -> Vec<String> {
    if links.is_empty() {
        return Vec::new();
    }
    let usual = median(links.iter().map(|link| link.bytes_per_second));
    let slow = links.iter().filter(|link| link.bytes_per_second * SLOWNESS_MAX < usual);
    let line = |link: &LinkMeasurement| {
        let [first, second] = link.ranks;
        format!(
            "the link between rank {first} and rank {second} carries {:.2} GB/s, the median link {:.2} GB/s; check cables, switch ports and [comm] interface",
            link.bytes_per_second / 1e9,
            usual / 1e9
        )
    };
    slow.map(line).collect()
}

fn slow_disks(disks: &[DiskMeasurement]) -> Vec<String> {
    let usual = median(disks.iter().map(|disk| disk.written_bytes_per_second));
    let slow = disks.iter().filter(|disk| disk.written_bytes_per_second * SLOWNESS_MAX < usual);
    let line = |disk: &DiskMeasurement| {
        let (rank, speed, usual) = (disk.rank, disk.written_bytes_per_second / 1e9, usual / 1e9);
        format!("the host of rank {rank} writes {speed:.2} GB/s to the run's folder, others {usual:.2} GB/s")
    };
    slow.map(line).collect()
}

fn print(report: &Report, folder: &Path, group: &Group) -> Result<()> {
    let (workers, hosts) = (with_noun(group.world_size(), "worker"), with_noun(report.hosts.len(), "host"));
    writeln!(Output, "{workers} on {hosts} over {}", group.transport())?;
    for host in &report.hosts {
        let cores = host.cores.as_ref().map_or_else(String::new, |cores| format!(" on {cores}"));
        writeln!(
            Output,
            "  host {:<20} ranks {:<12} {} a worker{cores}, {} of memory",
            host.name,
            format_ranges(host.ranks.iter().copied()),
            with_noun(host.threads, "thread"),
            Bytes(host.memory_bytes)
        )?;
    }
    for LinkMeasurement { ranks: [first, second], latency_seconds, bytes_per_second } in &report.links {
        let (latency, bandwidth) = (latency_seconds * 1e6, bytes_per_second / 1e9);
        let ranks = format!("{first} - {second}");
        writeln!(Output, "  link {ranks:<20} {latency:.1} us, {bandwidth:.2} GB/s")?;
    }
    for disk in &report.disks {
        writeln!(
            Output,
            "  disk {:<20} writes {:.2} GB/s, reads {:.2} GB/s, {} free in {}",
            format!("of rank {}", disk.rank),
            disk.written_bytes_per_second / 1e9,
            disk.read_bytes_per_second / 1e9,
            Bytes(disk.available_bytes),
            folder.display()
        )?;
    }
    if report.problems.is_empty() {
        writeln!(Output, "passed: all ranks have the same program and config, and their clocks agree")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn much_slower_links_and_disks_are_problems() {
        let link = |second, bytes_per_second| LinkMeasurement {
            ranks: [0, second],
            latency_seconds: 1e-6,
            bytes_per_second,
        };
        assert!(slow_links(&[]).is_empty());
        assert!(slow_links(&[link(1, 1e9), link(2, 2e9), link(3, 2.5e9)]).is_empty());
        let problems = slow_links(&[link(1, 0.1e9), link(2, 2e9), link(3, 2.5e9)]);
        assert_eq!(
            problems,
            [
                "the link between rank 0 and rank 1 carries 0.10 GB/s, the median link 2.00 GB/s; check cables, switch ports and [comm] interface"
            ]
        );
        let disk = |rank, written_bytes_per_second| DiskMeasurement {
            rank,
            written_bytes_per_second,
            read_bytes_per_second: 1e9,
            available_bytes: 1,
        };
        assert_eq!(slow_disks(&[disk(0, 1e9), disk(4, 0.2e9), disk(8, 1e9)]).len(), 1);
    }
}
