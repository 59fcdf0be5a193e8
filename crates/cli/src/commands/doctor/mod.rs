//! `trireme doctor`.

mod advice;
mod choices;
mod cluster;
mod cuda;
mod machine;
mod matmul;
mod transports;

use crate::commands::bench::seconds;
use crate::commands::costs::CostArgs;
use crate::commands::init::DEFAULT_CONFIG;
use crate::console::{MeasurementStatus, Output};
use crate::host::HostShare;
use crate::simd::{Excluded, Simd, Verification};
use advice::Warning;
use anyhow::{Context, Result, bail};
use choices::MultiHostChoices;
use cuda::CudaFacts;
use machine::Machine;
use serde::Serialize;
use serde_json::json;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use transports::TransportReport;
use trireme_base::Bytes;
use trireme_tensor::probe::{ExecutionUnit, MatmulSizes, reason_unsupported};
use trireme_tensor::verification::MatmulKernel;
use trireme_tensor::{Device, DeviceOptions, Precision, SimdLevel};

const SIZES: [MatmulSizes; 1] = [MatmulSizes { rows: 512, cols: 512, inner: 512 }];
const THOROUGH_SIZES: [MatmulSizes; 2] =
    [MatmulSizes { rows: 2048, cols: 2304, inner: 768 }, MatmulSizes { rows: 4096, cols: 4096, inner: 1024 }];

/// Maximum number of workers that test transports. Each is a thread.
const NUM_WORKERS_MAX: usize = 64;
/// Maximum number of ranks on all hosts. Choosing algorithms simulates all of them.
const NUM_RANKS_MAX: usize = 256;

/// Maximum rows, columns and inner dimension of a product: its factors take a few GiB.
const SIZE_MAX: usize = 1 << 14;

const HELP: &str = "\
How to read it:
  No matrix multiplication can be faster than the processor unit that computes
  it. The column peak shows what that unit just reached in a loop that never
  touches memory; the other columns show what Trireme's kernel reached. NN is
  the product of the forward pass, NT the gradient of the input, and TN the
  gradient of the weight. Speeds are the best of several runs. Kernels marked *
  are used for training; the others are for machines with fewer features.
  Percentages for large sizes (--thorough) show what a large model reaches; those
  for small sizes include all overhead of a call.

Examples:
  trireme doctor
      A quick look at the machine, in a few seconds.
  trireme doctor --thorough
      Matrix sizes of real models, on one thread and on all.
  trireme doctor --shape 2048x1152x384 --seconds 1
      The size that you care about, measured longer.
  trireme doctor --workers 4 --hosts 8 --across-hosts 5:12.5
      The algorithms for 8 hosts with 4 workers each, on a 100 Gbit/s network.
  srun trireme doctor --cluster books.toml
      Whether this job can train: what its workers disagree about, how fast links
      and the shared disk are.
  trireme doctor --json | jq '.warnings'
      Output for scripts.

The exit code is 0 unless something prevents training on this machine. With
--cluster, any problem gives 1.";

/// Show this machine, which of its features Trireme uses, and how fast matrix multiplications are.
///
/// Warnings at the end describe problems and how to fix them. Without `--cluster`, the command writes nothing. With it, the first worker of
/// each host writes a file of 64 MiB to the run's folder and removes it.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct DoctorArgs {
    /// Check a job instead of this machine. All workers compare program and config, the run's folder and clocks; then links between hosts
    /// and the disk are measured. Start it as the job will be started: with srun, mpirun or torchrun. Without a launcher, it starts the
    /// config's workers on this host.
    #[arg(long, conflicts_with_all = ["workers", "hosts", "threads", "sizes", "thorough", "seconds"])]
    cluster: bool,
    /// The run's config, for --cluster.
    #[arg(default_value = DEFAULT_CONFIG, requires = "cluster")]
    config: PathBuf,
    /// Number of local workers to test transports with.
    #[arg(long, value_name = "W", default_value_t = 2)]
    workers: usize,
    /// Also show the algorithms for this many hosts with --workers workers each.
    #[arg(long, value_name = "H", default_value_t = 1)]
    hosts: usize,
    /// Number of threads to measure in addition to one; 0 uses one per available core.
    #[arg(long, value_name = "K", default_value_t = 0)]
    threads: usize,
    /// Matrix size to measure: rows x columns x inner dimension. May be repeated; 512x512x512 by default.
    #[arg(long = "shape", value_name = "MxNxK", value_parser = parse_sizes)]
    sizes: Vec<MatmulSizes>,
    /// Measure 2048x2304x768 and 4096x4096x1024 as well; takes minutes.
    #[arg(long, conflicts_with = "sizes")]
    thorough: bool,
    /// How long to measure each figure.
    #[arg(long, value_name = "SECONDS", default_value = "0.03", value_parser = seconds)]
    seconds: Duration,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    // The last field, because its heading would cover all options after it.
    #[command(flatten)]
    costs: CostArgs,
}

fn parse_sizes(text: &str) -> Result<MatmulSizes, String> {
    let number = |text: &str| text.parse().ok().filter(|number| (1..=SIZE_MAX).contains(number));
    match text.split('x').map(number).collect::<Vec<_>>()[..] {
        [Some(rows), Some(cols), Some(inner)] => Ok(MatmulSizes { rows, cols, inner }),
        _ => Err(format!("expected three numbers from 1 to {SIZE_MAX}, such as 512x512x512")),
    }
}

#[derive(Debug, Serialize)]
struct UsedFeatures {
    features: String,
    features_reason: &'static str,
    threads: usize,
    /// The CPUs that each local worker is bound to, or why they are not bound.
    binding: String,
    products: Vec<UsedKernel>,
    /// Kernels that failed their verification or could not be tried.
    excluded: Vec<Excluded>,
    transports: Vec<TransportReport>,
    /// The algorithms for several hosts, if `--hosts` asks for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    hosts: Option<MultiHostChoices>,
}

#[derive(Debug, Serialize)]
struct UsedKernel {
    precision: String,
    unit: String,
    /// Whether values are rounded to the precision, then multiplied as f32.
    is_emulated: bool,
    /// Reasons why faster units are not used.
    not_used: Vec<String>,
}

impl UsedKernel {
    fn of(simd: &Simd, precision: Precision) -> Self {
        let MatmulKernel { unit, .. } = MatmulKernel::of(simd.level, precision);
        let all = MatmulKernel::up_to(SimdLevel::AmxBf16).into_iter();
        let faster = all.filter(|other| other.precision == precision && other.unit > unit);
        let reason = |other: MatmulKernel| {
            if let Some(why) = reason_unsupported(other.unit.min_simd_level()) {
                return format!("{} unavailable: {why}", other.unit);
            }
            let excluded = simd.excluded.iter().find(|excluded| excluded.kernel == other);
            let why = excluded.map_or(simd.reason_unused(), |excluded| &*excluded.reason);
            format!("{} unused: {why}", other.unit)
        };
        UsedKernel {
            precision: precision.to_string(),
            unit: unit.to_string(),
            is_emulated: precision != Precision::F32 && unit <= ExecutionUnit::Fma512,
            not_used: faster.map(reason).collect(),
        }
    }
}

pub(crate) fn run(args: &DoctorArgs, started: Instant) -> Result<()> {
    if args.cluster {
        return cluster::run(&args.config, args.json, started);
    }
    if !(2..=NUM_WORKERS_MAX).contains(&args.workers) {
        bail!("--workers must be from 2 to {NUM_WORKERS_MAX}");
    }
    if args.hosts == 0 || args.hosts > NUM_RANKS_MAX / args.workers {
        bail!("--hosts must be at least 1, with at most {NUM_RANKS_MAX} workers on all hosts in total");
    }
    let simd = Simd::choose(Verification::Fresh)?;
    // Read before this command itself loads the machine.
    let machine = Machine::read(Path::new("/"));
    let threads = match args.threads {
        0 => machine.num_cores_available,
        threads => threads,
    };
    let options = DeviceOptions { num_threads: threads, ..DeviceOptions::default() };
    Device::cpu(options).with_context(|| match args.threads {
        0 => "training cannot run on this machine".to_owned(),
        threads => format!("cannot measure with --threads {threads}"),
    })?;
    let measuring = MeasurementStatus::new();
    measuring.show("transports between workers");
    let transports = transports::check(args.workers, args.costs.given());
    // The costs of the first transport that works: shared memory within hosts, if it is available.
    let costs = transports.iter().find_map(|transport| transport.costs);
    let hosts =
        costs.filter(|_| args.hosts > 1).map(|costs| MultiHostChoices::new(args.hosts, args.workers, &costs));
    let uses = UsedFeatures {
        features: simd.level.to_string(),
        features_reason: simd.reason(),
        threads,
        binding: HostShare::preview(args.workers),
        products: Precision::ALL.map(|precision| UsedKernel::of(&simd, precision)).into(),
        excluded: simd.excluded.clone(),
        transports,
        hosts,
    };
    let sizes = match (&args.sizes[..], args.thorough) {
        (_, true) => &THOROUGH_SIZES[..],
        ([], false) => &SIZES,
        (given, false) => given,
    };
    let products = matmul::measure(sizes, threads, args.seconds, &simd, &measuring)?;
    drop(measuring);
    let cuda = CudaFacts::read();
    let warnings = advice::warnings(&machine, &uses, cfg!(debug_assertions));
    if args.json {
        let report = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "machine": serde_json::to_value(&machine)?,
            "cuda": cuda,
            "uses": uses,
            "products": products,
            "warnings": warnings,
        });
        return Ok(writeln!(Output, "{report:#}")?);
    }
    print_machine(&machine)?;
    cuda.print()?;
    print_uses(&uses)?;
    matmul::print(&products)?;
    for Warning { problem, advice } in &warnings {
        writeln!(Output, "\nwarning: {problem}\n  {advice}")?;
    }
    Ok(())
}

fn print_machine(machine: &Machine) -> Result<()> {
    let known = |text: Option<String>| text.unwrap_or_else(|| "unknown".to_owned());
    let size = |bytes: Option<u64>| known(bytes.map(|bytes| Bytes(bytes).to_string()));
    let line = |name: &str, value: String| writeln!(Output, "  {name:<14}{value}");
    writeln!(Output, "machine")?;
    line("processor", format!("{} ({})", known(machine.processor.clone()), machine.architecture))?;
    line(
        "cores",
        format!("{}, {} of them available to this process", machine.num_cores, machine.num_cores_available),
    )?;
    if let Some(hypervisor) = &machine.hypervisor {
        line("virtual", hypervisor.clone())?;
    }
    line("instructions", machine.instruction_sets.join(" "))?;
    let caches = machine.caches.iter().map(|cache| {
        let shared =
            if cache.num_cores > 1 { format!(" per {} cores", cache.num_cores) } else { String::new() };
        format!("{} {}{shared}", cache.name, Bytes(cache.bytes))
    });
    line("caches", caches.collect::<Vec<_>>().join(", "))?;
    line(
        "memory",
        format!("{}, {} available", size(machine.memory_bytes), size(machine.memory_available_bytes)),
    )?;
    let reserved = Bytes(machine.huge_pages_reserved_bytes);
    line("huge pages", format!("{}, {reserved} reserved", known(machine.huge_pages.clone())))?;
    line(
        "/dev/shm",
        format!("{} (not needed: workers share memory through memfd)", size(machine.dev_shm_bytes)),
    )?;
    Ok(line("load", known(machine.load.map(|load| format!("{load:.2} in the last minute"))))?)
}

fn print_uses(uses: &UsedFeatures) -> Result<()> {
    let line = |name: &str, value: &str| writeln!(Output, "  {name:<14}{value}");
    writeln!(Output, "\nTrireme uses")?;
    line("SIMD level", &format!("{}: {}", uses.features, uses.features_reason))?;
    line("threads", &uses.threads.to_string())?;
    line("cores", &uses.binding)?;
    for kernel in &uses.products {
        let rounded =
            if kernel.is_emulated { ", values rounded to this precision and widened to f32" } else { "" };
        line(&format!("{} matmul", kernel.precision), &format!("{}{rounded}", kernel.unit))?;
        for reason in &kernel.not_used {
            line("", reason)?;
        }
    }
    for transport in &uses.transports {
        line(&format!("{} transport", transport.name), &transport.to_string())?;
        for choice in choices::lines(&transport.algorithms) {
            line("", &choice)?;
        }
    }
    if let Some(figure) = &uses.hosts {
        let MultiHostChoices {
            hosts, workers_per_host, across_latency_seconds, across_seconds_per_byte, ..
        } = figure;
        let (latency, bandwidth) = (across_latency_seconds * 1e6, 1e-9 / across_seconds_per_byte);
        line(
            &format!("{hosts} hosts"),
            &format!(
                "with {workers_per_host} workers each, assuming {latency:.1} us and {bandwidth:.1} GB/s between them"
            ),
        )?;
        for choice in choices::lines(&figure.algorithms) {
            line("", &choice)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_three_numbers_within_bounds() {
        assert_eq!(parse_sizes("3x16384x5"), Ok(MatmulSizes { rows: 3, cols: 16384, inner: 5 }));
        for wrong in ["", "3", "3x4", "3x4x5x6", "0x4x5", "3x16385x5", "3x4x-5", "3x4xx5", "axbxc", "3x4x5x"]
        {
            assert!(parse_sizes(wrong).is_err(), "{wrong}");
        }
    }
}
