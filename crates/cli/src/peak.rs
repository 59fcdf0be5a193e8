//! The peak FLOP/s of a worker's device, which MFU is relative to.

use crate::host::{HostShare, load_average};
use crate::machine_cache::MachineCache;
use crate::numbers::with_noun;
use anyhow::Result;
use std::collections::BTreeMap;
use std::time::Duration;
use trireme_comm::Group;
use trireme_tensor::probe::{ExecutionUnit, Probe};
use trireme_tensor::{Device, DeviceOptions, SimdLevel};
use trireme_train::config::{Config, DeviceName};
use trireme_train::{all_gather_json, executor_options, local_threads, share_of_cores};

/// Long enough for several undisturbed milliseconds, and short enough not to delay the first step.
const MEASURING_DURATION: Duration = Duration::from_millis(30);

/// FLOP/s that no CPU thread reaches. A cached value above it was not measured.
const THREAD_PEAK_MAX: f64 = 1e15;

/// FLOP/s of one thread, by the unit that multiplies and the number of busy threads.
type ThreadPeaks = BTreeMap<String, f64>;

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct WorkerPeak {
    /// FLOP/s in the training dtype.
    pub(crate) flops: f64,
    pub(crate) note: String,
}

/// Returns the peak FLOP/s of this worker; `None` if the config sets a peak, or on a GPU, whose peak is not known. On a CPU, this is the
/// peak of one thread times the worker's threads, or times its share of the CPUs if that is smaller. The thread is measured while one
/// thread is busy for each CPU that the host's workers use, so the peaks of workers that share cores add up to the peak of these cores.
/// Unless `cache` has the figure, the first worker of each host measures it while the others wait. Collective.
pub(crate) fn worker_peak(
    config: &Config,
    share: &HostShare,
    simd_level: SimdLevel,
    group: &Group,
    cache: Option<MachineCache>,
) -> Result<Option<WorkerPeak>> {
    // A device with a known peak gets its own arm here.
    match config.training().device {
        DeviceName::Auto | DeviceName::Cpu | DeviceName::Detached => {}
        // Peaks of GPUs are not known yet; `[metrics] peak_flops` sets one.
        DeviceName::Cuda => return Ok(None),
    }
    let unit = ExecutionUnit::of(simd_level, executor_options(config).precision);
    let num_threads = local_threads(config, share.num_threads);
    let own = share.num_cpus.min(num_threads as f64);
    // From this exchange to the next one, no other worker of the host computes.
    let shares = all_gather_json(group, &own)?;
    let ranks = group.hosts().ranks(group.hosts().host_of(group.rank()));
    let num_busy = ranks.iter().map(|rank| shares[rank.0]).sum::<f64>().round() as usize;
    let num_busy = num_busy.clamp(1, share_of_cores(1));
    let is_configured = config.metrics().peak_flops > 0.0;
    let measures = ranks.first() == Some(&group.rank()) && !is_configured;
    let measured = measures.then(|| thread_peak(unit, num_busy, cache)).transpose()?;
    let found = all_gather_json(group, &measured)?;
    let Some((thread_peak, how)) = ranks.first().and_then(|first| found[first.0].clone()) else {
        return Ok(None);
    };
    let flops = own * thread_peak;
    let shared = if own < num_threads as f64 { format!(" on {own:.2} CPUs") } else { String::new() };
    let note = format!(
        "note: the peak of this worker, for MFU, is {:.1} GFLOP/s: {unit}, {}{shared}, {how}",
        flops / 1e9,
        with_noun(num_threads, "thread")
    );
    Ok((!is_configured).then_some(WorkerPeak { flops, note }))
}

/// Returns the FLOP/s of one of `num_busy` busy threads, and how it is known. A measurement while other programs compute is not cached.
fn thread_peak(unit: ExecutionUnit, num_busy: usize, cache: Option<MachineCache>) -> Result<(f64, String)> {
    let key = format!("{unit}, {num_busy} threads");
    let mut peaks: ThreadPeaks = cache.as_ref().and_then(MachineCache::read).unwrap_or_default();
    if let Some(&peak) = peaks.get(&key).filter(|peak| (1.0..THREAD_PEAK_MAX).contains(*peak)) {
        return Ok((peak, "measured by an earlier command".to_owned()));
    }
    let (simd_level_max, load) = (Some(unit.min_simd_level()), load_average());
    let device =
        Device::cpu(DeviceOptions { num_threads: num_busy, simd_level_max, ..DeviceOptions::default() })?;
    let peak = Probe::new(&device, MEASURING_DURATION).peak(unit) / num_busy as f64;
    if load > share_of_cores(1) as f64 / 2.0 {
        return Ok((peak, format!("measured while other programs may have computed (load {load:.1})")));
    }
    peaks.insert(key, peak);
    if let Some(cache) = cache {
        // A cache that cannot be written costs the next command the time of the measurement.
        let _ = cache.write(&peaks);
    }
    Ok((peak, "measured now".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use trireme_comm::single;
    use trireme_train::config::HugePages;

    fn config(keys: &[&str]) -> Config {
        let text =
            "[model]\narchitecture = \"gpt2\"\n[data]\ninputs = [\"text.txt\"]\n[training]\nthreads = 2\n";
        let overrides: Vec<String> = keys.iter().map(|key| (*key).to_owned()).collect();
        Config::parse(text, std::path::Path::new("try.toml"), &overrides, None).unwrap()
    }

    fn peak(keys: &[&str], num_cpus: f64) -> Option<WorkerPeak> {
        let mut share = HostShare::of_equal_workers(1, HugePages::Transparent);
        share.num_cpus = num_cpus;
        worker_peak(&config(keys), &share, SimdLevel::Portable, &single(), None).unwrap()
    }

    #[test]
    fn a_worker_has_the_peak_of_its_threads_and_no_more_cpus_than_its_share() {
        let of_share = peak(&[], 0.25).unwrap();
        assert!(of_share.flops > 1e6 && of_share.note.contains("2 threads on 0.25 CPUs"), "{of_share:?}");
        assert!(!peak(&[], 8.0).unwrap().note.contains("CPUs"));
        assert_eq!(peak(&["metrics.peak_flops=1e12"], 2.0), None);
    }

    #[test]
    fn impossible_peaks_of_a_file_are_not_believed() {
        let folder = tempfile::tempdir().unwrap();
        let cache = || Some(MachineCache::at(&folder.path().join("peaks.json")));
        let unit = ExecutionUnit::MulAdd128;
        for (kept, is_believed) in [(7e9, true), (0.0, false), (-1.0, false), (1e300, false)] {
            let peaks: ThreadPeaks = [(format!("{unit}, 1 threads"), kept)].into();
            cache().unwrap().write(&peaks).unwrap();
            let (peak, how) = thread_peak(unit, 1, cache()).unwrap();
            assert_eq!((peak == kept, how.contains("earlier")), (is_believed, is_believed), "{kept}");
        }
    }
}
