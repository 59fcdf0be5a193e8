//! `trireme bench collectives`.

mod measuring;
mod number;
mod operation;

use crate::commands::costs::CostArgs;
use crate::console::Output;
use crate::launch::{
    HostShare, WorkerEnvironment, join_options, launch_workers, recorder_folder, work_in_world,
};
use anyhow::{Context, Result, bail};
use measuring::{Measurement, measure};
use number::{Dtype, Number};
use operation::Op;
use std::fmt;
use std::io::Write;
use std::time::{Duration, Instant};
use trireme_base::{Bf16, Bytes, F16, Rank};
use trireme_comm::{Group, GroupOptions, JoinOptions, TransportChoice};
use trireme_schedule::collective::Algorithm;
use trireme_train::config::{Bind, HugePages};

const HELP: &str = "\
How to read it:
  Each line shows the median time of an operation on vectors of one size. The
  first bandwidth is the size divided by the time. The second, the bus bandwidth,
  applies the factors of nccl-tests, so it compares with the hardware's: with W
  workers, 2 (W - 1) / W for all_reduce, 1 for broadcast, reduce and send, and
  (W - 1) / W for the others. The last column is the algorithm that the group
  chose; it is empty where there is no choice.

  Sizes are counted as in nccl-tests: the whole buffer of all_reduce, broadcast
  and reduce; the gathered output of all_gather and of gather's root; the input
  of reduce_scatter and of scatter's root; the send buffer of both all_to_alls;
  one message of send. A barrier has no size and is timed once.

  In all_to_all_variable, a worker sends a block of 1 to W units to each worker,
  each of a different length. All workers send the same amount in total.

Examples:
  trireme bench collectives
      Two workers on this host.
  trireme bench collectives --workers 4 --ops barrier,all_reduce --max-bytes 64K --dtype bf16
      Small messages between four workers.
  trireme bench collectives --algorithm ring --any-order --transport tcp
      One algorithm, to compare with the one chosen by default.
  srun --ntasks-per-node 4 trireme bench collectives --max-bytes 64M
      Workers started by another launcher: torchrun, srun and mpirun are supported.

If a worker dies or does not respond within --timeout, the command exits with a
table that shows where each worker was (docs/hangs.md).";

/// Time the collective operations of a group of workers.
///
/// Each operation runs once to check its result, then repeatedly between barriers. Its time is that of the slowest
/// worker.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct CollectivesArgs {
    /// Worker processes on this host. Ignored if another launcher started this process.
    #[arg(long, value_name = "W", default_value_t = 2)]
    workers: usize,
    /// Transport for data: auto, shm, tcp or mpi.
    #[arg(long, default_value = "auto")]
    transport: TransportChoice,
    /// Operations to time.
    #[arg(long, value_enum, value_delimiter = ',', num_args = 1.., default_values_t = Op::COMMON)]
    ops: Vec<Op>,
    /// Data type of the elements.
    #[arg(long, value_enum, default_value_t = Dtype::F32)]
    dtype: Dtype,
    /// Where vectors are stored: in the memory that suits the group's transport best, or in each worker's own memory.
    #[arg(long, value_enum, default_value_t = Place::Arena)]
    memory: Place,
    /// Algorithm to use where it applies, such as ring, halving_doubling or hierarchical:all:direct:ring. By default,
    /// the fastest one.
    #[arg(long, value_name = "NAME")]
    algorithm: Option<Algorithm>,
    /// Allow sums in any order, as determinism = "run" does.
    #[arg(long)]
    any_order: bool,
    /// TCP connections to each peer.
    #[arg(long, value_name = "N", default_value_t = 1)]
    sockets_per_peer: usize,
    /// Send a checksum with each message.
    #[arg(long)]
    checksums: bool,
    /// Smallest size in bytes; suffixes K, M and G are allowed.
    #[arg(long, value_name = "BYTES", default_value = "4K", value_parser = size)]
    min_bytes: usize,
    /// Largest size in bytes.
    #[arg(long, value_name = "BYTES", default_value = "256M", value_parser = size)]
    max_bytes: usize,
    /// Factor from one size to the next.
    #[arg(long, value_name = "F", default_value_t = 4)]
    factor: usize,
    /// Maximum number of timed iterations per size.
    #[arg(long, value_name = "N", default_value_t = 200)]
    iters: usize,
    /// Target time per size.
    #[arg(long, default_value = "1", value_parser = super::seconds, value_name = "SECONDS")]
    seconds: Duration,
    /// Untimed iterations before the timed ones.
    #[arg(long, value_name = "N", default_value_t = 5)]
    warmup: usize,
    /// How long a worker waits for the others in one operation before it gives up.
    #[arg(long, default_value = "300", value_parser = super::seconds, value_name = "SECONDS")]
    timeout: Duration,
    /// Let the system move workers between cores. By default, each worker is bound to its share of the available
    /// cores, as with mpirun, if there are enough cores.
    #[arg(long)]
    unbound: bool,
    /// Print one line of JSON per operation and size.
    #[arg(long)]
    json: bool,
    // Last: its heading would cover all options after it.
    #[command(flatten)]
    costs: CostArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Place {
    /// Memory shared between the workers of a host, where available.
    Arena,
    /// Heap memory.
    Private,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Place::Arena => "arena",
            Place::Private => "private",
        })
    }
}

/// Reads a number of bytes.
fn size(text: &str) -> Result<usize, String> {
    let (digits, unit) = match text.strip_suffix(['K', 'M', 'G']) {
        Some(digits) => (digits, 1 << (10 * (1 + "KMG".find(&text[digits.len()..]).unwrap_or(0)))),
        None => (text, 1),
    };
    let number: Option<usize> = digits.parse().ok();
    number
        .and_then(|number| number.checked_mul(unit))
        .ok_or_else(|| "expected bytes, such as 4096, 4K or 64M".to_owned())
}

/// Runs `trireme bench collectives`.
pub(crate) fn run(args: &CollectivesArgs, started: Instant) -> Result<()> {
    if args.workers == 0 || args.factor < 2 || args.min_bytes == 0 || args.iters == 0 {
        bail!("--workers, --min-bytes and --iters must be at least 1, and --factor at least 2");
    }
    let Some(environment) = WorkerEnvironment::of_this_process()? else {
        return launch_workers(args.workers, started, None);
    };
    let group = GroupOptions {
        algorithm: args.algorithm,
        keeps_order: !args.any_order,
        costs: args.costs.given(),
        timeout: args.timeout,
        sockets_per_peer: args.sockets_per_peer,
        checksums: args.checksums,
        ..GroupOptions::default()
    };
    let options = JoinOptions {
        transport: args.transport,
        job: "bench".to_owned(),
        group,
        ..join_options(&environment, None)?
    };
    work_in_world(options, recorder_folder(), |group| match args.dtype {
        Dtype::F32 => sweep::<f32>(args, &group),
        Dtype::F64 => sweep::<f64>(args, &group),
        Dtype::F16 => sweep::<F16>(args, &group),
        Dtype::Bf16 => sweep::<Bf16>(args, &group),
        Dtype::I32 => sweep::<i32>(args, &group),
        Dtype::I64 => sweep::<i64>(args, &group),
    })
}

/// Measures every operation at every size.
fn sweep<T: Number>(args: &CollectivesArgs, group: &Group) -> Result<()> {
    if args.ops.contains(&Op::Send) && group.world_size() < 2 {
        bail!("send needs two workers; set --workers to 2 or more");
    }
    if !args.unbound {
        let share = HostShare::of_world(group, HugePages::Transparent, Bind::Cores)?;
        share.bind().context("cannot bind to cores; try --unbound")?;
    }
    let is_root = group.rank() == Rank::ROOT;
    if is_root && !args.json {
        print_header(args, group)?;
    }
    for &op in &args.ops {
        let larger = |bytes: &usize| bytes.checked_mul(args.factor).filter(|_| op.has_sizes());
        let sizes = std::iter::successors(Some(args.min_bytes), larger);
        for bytes in sizes.take_while(|&bytes| bytes <= args.max_bytes || !op.has_sizes()) {
            let measurement = measure::<T>(args, group, op, bytes)?;
            if is_root {
                print(args, &measurement)?;
            }
        }
    }
    Ok(group.barrier().wait()?)
}

fn print_header(args: &CollectivesArgs, group: &Group) -> Result<()> {
    let CollectivesArgs { dtype, memory, .. } = args;
    writeln!(
        Output,
        "{} workers over {}, vectors of {dtype} in {memory} memory",
        group.world_size(),
        group.transport()
    )?;
    writeln!(
        Output,
        "{:>19} {:>12} {:>12} {:>11} {:>11}",
        "operation", "size", "median", "bandwidth", "bus"
    )?;
    Ok(())
}

fn print(args: &CollectivesArgs, measurement: &Measurement) -> Result<()> {
    if args.json {
        writeln!(Output, "{}", serde_json::to_string(measurement)?)?;
        return Ok(());
    }
    let Measurement { op, bytes, median_us, algbw_gbps, busbw_gbps, algorithm, .. } = measurement;
    let algorithm = algorithm.as_deref().unwrap_or_default();
    let size = Bytes(*bytes as u64).to_string();
    let line = format!(
        "{op:>19} {size:>12} {median_us:>9.1} us {algbw_gbps:>6.2} GB/s {busbw_gbps:>6.2} GB/s  {algorithm}"
    );
    writeln!(Output, "{}", line.trim_end())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        assert_eq!(["0", "17", "4K", "3M", "2G"].map(size), [0, 17, 4096, 3 << 20, 2 << 30].map(Ok));
        for wrong in ["", "K", "4k", "4KK", "-1", "1.5M", "4 K", "99999999999999999999", "99999999999999G"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
    }
}
