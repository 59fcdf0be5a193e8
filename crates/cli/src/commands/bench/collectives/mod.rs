//! `trireme bench collectives`.

mod args;
mod measuring;
mod number;
mod operation;
mod vectors;

pub(crate) use args::CollectivesArgs;

use crate::console::Output;
use crate::host::HostShare;
use crate::launch::{WorkerEnvironment, join_options, launch_workers, recorder_folder, work_in_world};
use anyhow::{Context, Result, bail};
use measuring::{Measurement, measure};
use number::{Dtype, Number, name};
use operation::Op;
use std::io::Write;
use std::time::Instant;
use trireme_base::{Bf16, Bytes, F16, Rank};
use trireme_comm::{Group, GroupOptions, JoinOptions};
use trireme_train::config::{Bind, HugePages};
use vectors::VectorMemory;

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
    let local_rank = environment.local_rank;
    work_in_world(options, recorder_folder(), |group| {
        let memory = VectorMemory::open(args.memory, &group, local_rank)?;
        match args.dtype {
            Dtype::F32 => sweep::<f32>(args, &group, &memory),
            Dtype::F64 => sweep::<f64>(args, &group, &memory),
            Dtype::F16 => sweep::<F16>(args, &group, &memory),
            Dtype::Bf16 => sweep::<Bf16>(args, &group, &memory),
            Dtype::I32 => sweep::<i32>(args, &group, &memory),
            Dtype::I64 => sweep::<i64>(args, &group, &memory),
        }
    })
}

fn sweep<T: Number>(args: &CollectivesArgs, group: &Group, memory: &VectorMemory<'_>) -> Result<()> {
    if args.ops.contains(&Op::Send) && group.world_size() < 2 {
        bail!("send needs two workers; set --workers to 2 or more");
    }
    if !args.unbound {
        let share = HostShare::of_world(group, HugePages::Transparent, Bind::Cores)?;
        share.bind().context("cannot bind to cores; try --unbound")?;
    }
    let is_root = group.rank() == Rank::ROOT;
    if is_root && !args.json {
        print_header(args, group, memory)?;
    }
    for &op in &args.ops {
        let larger = |bytes: &usize| bytes.checked_mul(args.factor).filter(|_| op.has_sizes());
        let sizes = std::iter::successors(Some(args.min_bytes), larger);
        for bytes in sizes.take_while(|&bytes| bytes <= args.max_bytes || !op.has_sizes()) {
            let measurement = measure::<T>(args, group, memory, op, bytes)?;
            if is_root {
                print(args, &measurement)?;
            }
        }
    }
    Ok(group.barrier().wait()?)
}

fn print_header(args: &CollectivesArgs, group: &Group, memory: &VectorMemory<'_>) -> Result<()> {
    let (dtype, place) = (name(args.dtype), name(args.memory));
    Ok(writeln!(
        Output,
        "{} workers over {}, vectors of {dtype} in {place} memory\n          \
         operation         size       median   bandwidth         bus",
        group.world_size(),
        memory.transport(group)
    )?)
}

fn print(args: &CollectivesArgs, measurement: &Measurement) -> Result<()> {
    if args.json {
        return Ok(writeln!(Output, "{}", serde_json::to_string(measurement)?)?);
    }
    let Measurement { op, bytes, median_us, algbw_gbps, busbw_gbps, algorithm, .. } = measurement;
    let algorithm = algorithm.as_deref().unwrap_or_default();
    let size = Bytes(*bytes as u64).to_string();
    let line = format!(
        "{op:>19} {size:>12} {median_us:>9.1} us {algbw_gbps:>6.2} GB/s {busbw_gbps:>6.2} GB/s  {algorithm}"
    );
    Ok(writeln!(Output, "{}", line.trim_end())?)
}
