//! Warnings about this machine, with advice.

use super::UsedFeatures;
use super::machine::Machine;
use crate::host::{CpuLimit, MemoryLimit, Pages};
use crate::simd::Excluded;
use serde::Serialize;
use trireme_base::Bytes;
use trireme_tensor::SimdLevel;
use trireme_tensor::probe::reason_unsupported;

/// Minimum of available memory. With less, a process may not even start.
const MEMORY_BYTES_MIN: u64 = 1 << 30;

/// A warning; its fields are keys of `--json`.
#[derive(Debug, Serialize)]
pub(super) struct Warning {
    pub(super) problem: String,
    pub(super) advice: String,
}

/// Returns every warning that applies. `is_debug` is true for a development build, which checks its own arithmetic.
pub(super) fn warnings(machine: &Machine, uses: &UsedFeatures, is_debug: bool) -> Vec<Warning> {
    let mut found = Vec::new();
    let mut warn = |problem: String, advice: &str| found.push(Warning { problem, advice: advice.to_owned() });
    let Machine { num_cores, num_cores_available, .. } = *machine;
    if is_debug {
        warn(
            "this is a development build: it checks its own arithmetic, so all figures are low".to_owned(),
            "Build with `cargo build --release`.",
        );
    }
    if let Some(load) = machine.load.filter(|load| *load >= 0.5 * num_cores as f64) {
        warn(
            format!("the machine has been busy (load {load:.2} on {num_cores} cores), so figures may be low"),
            "Stop other programs, wait a minute and run this command again.",
        );
    }
    if num_cores_available < num_cores {
        warn(
            format!("this process may use only {num_cores_available} of {num_cores} cores"),
            "If it should have more, check the container's quota and the launcher's core binding.",
        );
    }
    if let (Some(num_cores), Some(file)) = (machine.cpu_limit_cores, machine.cpu_limit_file.clone()) {
        warn(
            format!("all processes together may use only {}", CpuLimit { num_cores, file }),
            "More threads than that make the kernel pause all of them once the quota of a period is used up.",
        );
    }
    if uses.threads != num_cores_available {
        warn(
            format!("{} threads were measured, but {num_cores_available} cores are available", uses.threads),
            "More threads than cores take turns; fewer leave cores idle. 0 uses all available cores.",
        );
    }
    if machine.threads_per_core > 1 {
        warn(
            format!("{} logical cores share the units of one physical core", machine.threads_per_core),
            "One thread per physical core can saturate them: try half as many [training] threads, and compare steps.",
        );
    }
    if let Some(bytes) = machine.memory_limit_bytes {
        let file = machine.memory_limit_file.clone();
        let limit = MemoryLimit { bytes, file, pages: Pages::Ordinary };
        warn(
            format!("this process may use only {limit}"),
            "Training refuses to start if it is predicted to exceed this limit, because the system would kill it.",
        );
    }
    if let Some(available) = machine.memory_available_bytes.filter(|bytes| *bytes < MEMORY_BYTES_MIN) {
        warn(
            format!("only {} of memory is available", Bytes(available)),
            "Stop other programs: a model of a hundred million parameters takes a few GiB.",
        );
    }
    if machine.huge_pages.as_deref() == Some("never") {
        warn(
            "huge pages are disabled, so address translation for large tensors is slower".to_owned(),
            "As root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        );
    }
    if cfg!(target_arch = "x86_64") && SimdLevel::detect() < SimdLevel::Avx2 {
        warn(
            "this processor has no AVX2, or the hypervisor hides it: matrix multiplications are several times slower"
                .to_owned(),
            "On a virtual machine, choose a CPU model that exposes the host's features.",
        );
    }
    if machine.instruction_sets.contains(&"amx_bf16")
        && let Some(why) = reason_unsupported(SimdLevel::AmxBf16)
    {
        warn(
            format!("this processor has AMX, but bf16 matrix multiplications cannot use it: {why}"),
            "Linux supports it since 5.16, unless the container's system call filter blocks it.",
        );
    }
    for Excluded { kernel, reason } in &uses.excluded {
        warn(
            format!("{kernel} are not used, because {reason}"),
            "No computation uses them. Please report this with the output of `trireme doctor --json`.",
        );
    }
    for transport in uses.transports.iter().filter(|transport| transport.error.is_some()) {
        warn(
            format!("the transport {} {transport}", transport.name),
            "Training with several workers on this host falls back to the other transport; one worker needs none.",
        );
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::transports::TransportReport;
    use super::*;
    use trireme_tensor::Precision;
    use trireme_tensor::verification::MatmulKernel;

    /// Returns a machine with two cores and no problems, and the features that Trireme uses on it.
    fn quiet() -> (Machine, UsedFeatures) {
        let machine = Machine {
            processor: None,
            architecture: "x86_64",
            num_cores: 2,
            num_cores_available: 2,
            threads_per_core: 1,
            hypervisor: None,
            instruction_sets: Vec::new(),
            caches: Vec::new(),
            memory_bytes: Some(8 << 30),
            memory_available_bytes: Some(4 << 30),
            cpu_limit_cores: None,
            cpu_limit_file: None,
            memory_limit_bytes: None,
            memory_limit_file: None,
            huge_pages: Some("madvise".to_owned()),
            huge_pages_reserved_bytes: 0,
            dev_shm_bytes: None,
            load: Some(0.1),
        };
        let shm = TransportReport {
            name: "shm".to_owned(),
            error: None,
            workers: 2,
            all_reduce_seconds: Some(1.0),
            all_reduce_bytes: 1,
            message_latency_seconds: Some(1e-6),
            message_seconds_per_byte: Some(1e-9),
            algorithms: Vec::new(),
            costs: None,
        };
        let transports = Vec::from([shm]);
        let uses = UsedFeatures {
            features: String::new(),
            features_reason: "",
            threads: 2,
            binding: String::new(),
            products: Vec::new(),
            excluded: Vec::new(),
            transports,
            hosts: None,
        };
        (machine, uses)
    }

    /// Returns the warnings after a change, except the one about a processor without AVX2.
    fn after(change: impl FnOnce(&mut Machine, &mut UsedFeatures)) -> Vec<String> {
        let (mut machine, mut uses) = quiet();
        change(&mut machine, &mut uses);
        let found = warnings(&machine, &uses, false);
        assert!(found.iter().all(|warning| !warning.problem.is_empty() && !warning.advice.is_empty()));
        let is_of_change = |problem: &String| !problem.contains("no AVX2");
        found.into_iter().map(|warning| warning.problem).filter(is_of_change).collect()
    }

    #[test]
    fn a_quiet_machine_has_no_warnings_and_each_trouble_has_its_own() {
        assert!(after(|_, _| ()).is_empty());
        for (found, fact) in [
            (after(|machine, _| machine.load = Some(1.0)), "load 1.00 on 2 cores"),
            (after(|machine, _| machine.num_cores = 4), "may use only 2 of 4 cores"),
            (after(|_, uses| uses.threads = 3), "3 threads were measured, but 2 cores"),
            (after(|machine, _| machine.threads_per_core = 2), "2 logical cores share"),
            (after(|machine, _| machine.memory_limit_bytes = Some(1 << 30)), "only the 1.00GiB of"),
            (after(|machine, _| machine.memory_available_bytes = Some(5 << 20)), "only 5.00MiB"),
            (after(|machine, _| machine.huge_pages = Some("never".to_owned())), "huge pages are disabled"),
            (
                after(|_, uses| {
                    uses.transports[0].all_reduce_seconds = None;
                    uses.transports[0].error = Some("forbidden".to_owned());
                }),
                "the transport shm cannot be used: forbidden",
            ),
            (
                after(|_, uses| {
                    let kernel = MatmulKernel::of(SimdLevel::Avx512, Precision::F32);
                    uses.excluded.push(Excluded { kernel, reason: "1 is 2".to_owned() });
                }),
                "f32 products on fma 512 are not used, because 1 is 2",
            ),
        ] {
            assert!(found.len() == 1 && found[0].contains(fact), "{fact}: {found:?}");
        }
    }

    #[test]
    fn a_development_build_and_unavailable_amx_are_reported() {
        let (machine, uses) = quiet();
        let in_debug = warnings(&machine, &uses, true).len();
        assert_eq!(in_debug, warnings(&machine, &uses, false).len() + 1);
        let found = after(|machine, _| machine.instruction_sets.push("amx_bf16"));
        assert_eq!(found.len(), usize::from(SimdLevel::detect() < SimdLevel::AmxBf16), "{found:?}");
    }
}
