//! `trireme bench collectives`.

use super::launch_workers;
use crate::console::Output;
use crate::launch::{WorkerEnvironment, join_options};
use anyhow::{Context, Result, bail};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::Serialize;
use std::fmt;
use std::io::Write;
use std::time::{Duration, Instant};
use trireme_base::{Bytes, Rank, ReduceOp};
use trireme_comm::{Buffer, Group, GroupOptions, JoinOptions, TransportChoice, join};
use trireme_schedule::collective::{Algorithm, Collective, block};

/// Time the operations of a group of workers.
///
/// Each operation works on f32 elements, once to check the result, then between barriers; its time is that of the
/// slowest worker. `bytes` is what nccl-tests calls size: the whole buffer of all_reduce, broadcast and reduce, the
/// gathered output of all_gather, the input of reduce_scatter, the send buffer of all_to_all, one message of send.
/// Bus bandwidths have the factors of nccl-tests, so they compare with the hardware's.
#[derive(Debug, clap::Args)]
pub(crate) struct CollectivesArgs {
    /// Worker processes on this host. Not counted where another launcher has started this process.
    #[arg(long, value_name = "W", default_value_t = 2)]
    workers: usize,
    /// What carries the data: auto, shm, tcp or mpi.
    #[arg(long, default_value = "auto")]
    transport: TransportChoice,
    /// The operations to time.
    #[arg(long, value_enum, value_delimiter = ',', num_args = 1.., default_values_t = Op::COMMON)]
    ops: Vec<Op>,
    /// Where vectors lie: in memory that the group's transport handles best, or in the workers' own.
    #[arg(long, value_enum, default_value_t = Place::Arena)]
    memory: Place,
    /// The algorithm to take where it fits, such as ring, halving_doubling or hierarchical:all:direct:ring; the best
    /// one without it.
    #[arg(long, value_name = "NAME")]
    algorithm: Option<Algorithm>,
    /// Allow any order of sums, as with determinism = "run".
    #[arg(long)]
    any_order: bool,
    /// Smallest size.
    #[arg(long, value_name = "BYTES", default_value_t = 4 << 10)]
    min_bytes: usize,
    /// Largest size.
    #[arg(long, value_name = "BYTES", default_value_t = 256 << 20)]
    max_bytes: usize,
    /// Step from one size to the next.
    #[arg(long, value_name = "F", default_value_t = 4)]
    factor: usize,
    /// Most timed iterations of one size.
    #[arg(long, value_name = "N", default_value_t = 200)]
    iters: usize,
    /// Time to aim for at one size.
    #[arg(long, default_value = "1", value_parser = super::seconds, value_name = "SECONDS")]
    seconds: Duration,
    /// Iterations before them.
    #[arg(long, value_name = "N", default_value_t = 5)]
    warmup: usize,
    /// Let the system move workers between cores. Without it each keeps to its share of the cores it may use, as mpirun
    /// has it, if there are enough.
    #[arg(long)]
    unbound: bool,
    /// Print one line of JSON for each operation and size.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
enum Op {
    AllReduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Broadcast,
    Reduce,
    /// A message from rank 0 to rank 1 and back; the time is that of one way.
    Send,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Place {
    /// Memory that the workers of a host share, where there is such.
    Arena,
    /// The heap.
    Private,
}

impl Op {
    /// Those that other libraries' benchmarks have, too.
    const COMMON: [Op; 5] = [Op::AllReduce, Op::AllGather, Op::ReduceScatter, Op::AllToAll, Op::Broadcast];

    /// Bus bandwidth over bytes a second (nccl-tests, doc/PERFORMANCE.md).
    fn bus_factor(self, world_size: usize) -> f64 {
        let n = world_size as f64;
        match self {
            Op::AllReduce => 2.0 * (n - 1.0) / n,
            Op::AllGather | Op::ReduceScatter | Op::AllToAll => (n - 1.0) / n,
            Op::Broadcast | Op::Reduce | Op::Send => 1.0,
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = clap::ValueEnum::to_possible_value(self).expect("every operation has a name");
        f.write_str(value.get_name())
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Place::Arena => "arena",
            Place::Private => "private",
        })
    }
}

/// One line; the keys are those of common PyTorch timing scripts, and how it was done.
#[derive(Debug, Serialize)]
struct Measurement {
    peer: &'static str,
    op: String,
    bytes: usize,
    world_size: usize,
    iters: usize,
    median_us: f64,
    algbw_gbps: f64,
    busbw_gbps: f64,
    transport: String,
    memory: String,
    algorithm: String,
}

/// Runs `trireme bench collectives`.
pub(crate) fn run(args: &CollectivesArgs, started: Instant) -> Result<()> {
    if args.workers == 0 || args.factor < 2 || args.min_bytes == 0 || args.iters == 0 {
        bail!("--workers, --min-bytes and --iters must be at least 1, and --factor 2");
    }
    let Some(environment) = WorkerEnvironment::of_this_process()? else {
        return launch_workers(args.workers, started);
    };
    let group =
        GroupOptions { algorithm: args.algorithm, keeps_order: !args.any_order, ..GroupOptions::default() };
    let options = JoinOptions {
        transport: args.transport,
        job: "bench".to_owned(),
        group,
        ..join_options(&environment, None)?
    };
    let group = join(&options)?;
    if args.ops.contains(&Op::Send) && group.world_size() < 2 {
        bail!("send takes two workers; set --workers 2 or more");
    }
    if !args.unbound {
        bind(&group)?;
    }
    if group.rank() == Rank::ROOT && !args.json {
        writeln!(
            Output,
            "{} workers over {}, vectors in {} memory",
            group.world_size(),
            group.transport(),
            args.memory
        )?;
        writeln!(
            Output,
            "{:>14} {:>12} {:>12} {:>11} {:>11}",
            "operation", "size", "median", "algorithm", "bus"
        )?;
    }
    for &op in &args.ops {
        let mut bytes = args.min_bytes;
        while bytes <= args.max_bytes {
            let measurement = Bench::new(args, &group, op, bytes)?.measure(args)?;
            if group.rank() == Rank::ROOT {
                print(args, &measurement)?;
            }
            let Some(larger) = bytes.checked_mul(args.factor) else { break };
            bytes = larger;
        }
    }
    group.barrier().wait()?;
    Ok(())
}

/// Keeps this process to its rank's share of the processors, where each rank of the host can have one.
fn bind(group: &Group) -> Result<()> {
    let hosts = group.hosts();
    let num_ranks = hosts.ranks(hosts.host_of(group.rank())).len();
    let allowed = sched_getaffinity(None).context("cannot tell which cores may be used")?;
    let processors: Vec<usize> =
        (0..CpuSet::MAX_CPU).filter(|&processor| allowed.is_set(processor)).collect();
    if num_ranks > processors.len() {
        return Ok(());
    }
    let border = |rank: usize| rank * processors.len() / num_ranks;
    let local_rank = hosts.local_rank(group.rank());
    let mut own = CpuSet::new();
    processors[border(local_rank)..border(local_rank + 1)].iter().for_each(|&processor| own.set(processor));
    sched_setaffinity(None, &own).context("cannot keep to some cores; try --unbound")
}

fn print(args: &CollectivesArgs, measurement: &Measurement) -> Result<()> {
    if args.json {
        writeln!(Output, "{}", serde_json::to_string(measurement)?)?;
        return Ok(());
    }
    let Measurement { op, bytes, median_us, algbw_gbps, busbw_gbps, algorithm, .. } = measurement;
    let size = Bytes(*bytes as u64).to_string();
    writeln!(
        Output,
        "{op:>14} {size:>12} {median_us:>9.1} us {algbw_gbps:>6.2} GB/s {busbw_gbps:>6.2} GB/s  {algorithm}"
    )?;
    Ok(())
}

/// One operation on vectors of one size.
struct Bench<'a> {
    group: &'a Group,
    op: Op,
    /// Elements of the whole vector, a multiple of the number of workers.
    len: usize,
    place: Place,
    /// What goes in, and what comes out of it if that is another vector.
    vectors: Option<(Buffer<f32>, Option<Buffer<f32>>)>,
}

impl<'a> Bench<'a> {
    fn new(args: &CollectivesArgs, group: &'a Group, op: Op, bytes: usize) -> Result<Self> {
        let world_size = group.world_size();
        let len = bytes / size_of::<f32>() / world_size * world_size;
        let len = if op == Op::Send { bytes / size_of::<f32>() } else { len };
        let place = args.memory;
        let buffer = |len| match place {
            Place::Arena => group.buffer::<f32>(len),
            Place::Private => Buffer::private(len),
        };
        let (input, output) = match op {
            Op::AllReduce | Op::Broadcast | Op::Reduce | Op::Send => (len, None),
            Op::AllGather => (len / world_size, Some(len)),
            Op::ReduceScatter => (len, Some(len / world_size)),
            Op::AllToAll => (len, Some(len)),
        };
        let mut input = buffer(input)?;
        input.fill(group.rank().0 as f32 + 1.0);
        Ok(Bench { group, op, len, place, vectors: Some((input, output.map(buffer).transpose()?)) })
    }

    /// Does it once.
    fn call(&mut self) -> Result<()> {
        let (group, rank) = (self.group, self.group.rank().0);
        let (input, output) = self.vectors.take().expect("every call gives them back");
        let in_place = match (self.op, output) {
            (Op::AllReduce, _) => group.all_reduce(input, ReduceOp::Sum),
            (Op::Broadcast, _) => group.broadcast(input, Rank::ROOT),
            (Op::Reduce, _) => group.reduce(input, ReduceOp::Sum, Rank::ROOT),
            (Op::Send, _) if rank == 0 => {
                let sent = group.send(input, Rank(1)).wait()?;
                group.receive(sent, Rank(1))
            }
            (Op::Send, _) if rank == 1 => {
                let received = group.receive(input, Rank(0)).wait()?;
                group.send(received, Rank(0))
            }
            (Op::Send, output) => {
                self.vectors = Some((input, output));
                return Ok(());
            }
            (op, output) => {
                let output = output.expect("operations out of place have an output");
                let pair = match op {
                    Op::AllGather => group.all_gather_into(input, output),
                    Op::ReduceScatter => group.reduce_scatter_into(input, output, ReduceOp::Sum),
                    _ => group.all_to_all_into(input, output),
                };
                let (input, output) = pair.wait()?;
                self.vectors = Some((input, Some(output)));
                return Ok(());
            }
        };
        self.vectors = Some((in_place.wait()?, None));
        Ok(())
    }

    /// Whether the first call's result is right.
    fn is_right(&self) -> bool {
        let (rank, world_size) = (self.group.rank(), self.group.world_size());
        let Some((input, output)) = &self.vectors else { return false };
        let total = (world_size * (world_size + 1) / 2) as f32;
        let each_has_its_own = |vector: &[f32]| {
            (0..world_size).all(|rank| {
                vector[block(Rank(rank), world_size, self.len)]
                    .iter()
                    .all(|&value| value == rank as f32 + 1.0)
            })
        };
        match (self.op, output) {
            (Op::AllReduce, _) => input.iter().all(|&value| value == total),
            (Op::Reduce, _) => rank != Rank::ROOT || input.iter().all(|&value| value == total),
            (Op::Broadcast, _) => input.iter().all(|&value| value == 1.0),
            (Op::Send, _) => rank.0 > 1 || input.iter().all(|&value| value == 1.0),
            (Op::ReduceScatter, Some(output)) => output.iter().all(|&value| value == total),
            (_, Some(output)) => each_has_its_own(output),
            (_, None) => false,
        }
    }

    /// How the group does it.
    fn algorithm(&self) -> String {
        let (len, root) = (self.len, Rank::ROOT);
        let collective = match self.op {
            Op::AllReduce => Collective::AllReduce { len },
            Op::AllGather => Collective::AllGather { len },
            Op::ReduceScatter => Collective::ReduceScatter { len },
            Op::AllToAll => Collective::AllToAll { len },
            Op::Broadcast => Collective::Broadcast { root, len },
            Op::Reduce => Collective::Reduce { root, len },
            Op::Send => return "message".to_owned(),
        };
        self.group.algorithm(collective, size_of::<f32>()).to_string()
    }

    fn seconds_of_a_call(&mut self) -> Result<f64> {
        self.group.barrier().wait()?;
        let began = Instant::now();
        self.call()?;
        let seconds = began.elapsed().as_secs_f64();
        Ok(if self.op == Op::Send { seconds / 2.0 } else { seconds })
    }

    fn measure(mut self, args: &CollectivesArgs) -> Result<Measurement> {
        self.call()?;
        if !self.is_right() {
            bail!("{} of {} elements gave a wrong result", self.op, self.len);
        }
        let (input, _) = self.vectors.as_mut().context("every call gives the vectors back")?;
        // Keeps repeated sums finite.
        input.fill(0.0);
        let mut trials = vec![0.0; args.warmup.max(1)];
        for trial in &mut trials {
            *trial = self.seconds_of_a_call()?;
        }
        let trial = median(&slowest(self.group, &trials)?);
        // Every worker must run the same number of iterations.
        let iters = ((args.seconds.as_secs_f64() / trial) as usize).clamp(5.min(args.iters), args.iters);
        let mut times = vec![0.0; iters];
        for time in &mut times {
            *time = self.seconds_of_a_call()?;
        }
        let median = median(&slowest(self.group, &times)?);
        let bytes = self.len * size_of::<f32>();
        let bandwidth = bytes as f64 / median / 1e9;
        let world_size = self.group.world_size();
        Ok(Measurement {
            peer: "trireme",
            op: self.op.to_string(),
            bytes,
            world_size,
            iters,
            median_us: median * 1e6,
            algbw_gbps: bandwidth,
            busbw_gbps: bandwidth * self.op.bus_factor(world_size),
            transport: self.group.transport().to_string(),
            memory: self.place.to_string(),
            algorithm: self.algorithm(),
        })
    }
}

/// Each time, that of the slowest worker.
fn slowest(group: &Group, seconds: &[f64]) -> Result<Vec<f64>> {
    let mut buffer = group.buffer::<f64>(seconds.len())?;
    buffer.copy_from_slice(seconds);
    Ok(group.all_reduce(buffer, ReduceOp::Max).wait()?.to_vec())
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}
