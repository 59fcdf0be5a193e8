//! Timing of one operation at one size.

use super::args::CollectivesArgs;
use super::number::{Number, name};
use super::operation::{Bench, Op};
use super::vectors::{BufferMemory, VectorMemory};
use crate::statistics::median;
use anyhow::{Result, bail};
use serde::Serialize;
use std::time::Instant;
use trireme_base::{Bytes, ReduceOp};
use trireme_comm::Group;

/// One line of the output. It has the keys of `peers/torch_collectives.py`, and the transport, memory and algorithm that were used. `peer`
/// names the system that was timed.
#[derive(Debug, Serialize)]
pub(super) struct Measurement {
    peer: &'static str,
    pub(super) op: String,
    pub(super) bytes: usize,
    dtype: String,
    world_size: usize,
    iters: usize,
    pub(super) median_us: f64,
    pub(super) algbw_gbps: f64,
    pub(super) busbw_gbps: f64,
    transport: String,
    memory: String,
    pub(super) algorithm: Option<String>,
}

/// Checks the result of an operation on vectors of at most `bytes`, then times it. All ranks call it.
pub(super) fn measure<T: Number>(
    args: &CollectivesArgs,
    group: &Group,
    memory: &VectorMemory<'_>,
    op: Op,
    bytes: usize,
) -> Result<Measurement> {
    let mut bench = Bench::<T>::new(group, op, memory, bytes)?;
    let bytes = bench.bytes();
    group.set_program_line(format_args!("bench {} of {}", name(op), Bytes(bytes as u64)));
    bench.call()?;
    if !bench.is_right()? {
        bail!("{} of {bytes} bytes gave a wrong result", name(op));
    }
    bench.clear();
    let trial = median(times(group, op, &mut bench, args.warmup.max(1))?);
    // Every worker must run the same number of iterations.
    let iters = ((args.seconds.as_secs_f64() / trial) as usize).clamp(5.min(args.iters), args.iters);
    let median = median(times(group, op, &mut bench, iters)?);
    let bandwidth = bytes as f64 / median / 1e9;
    let world_size = group.world_size();
    Ok(Measurement {
        peer: "trireme",
        op: name(op),
        bytes,
        dtype: name(args.dtype),
        world_size,
        iters,
        median_us: median * 1e6,
        algbw_gbps: bandwidth,
        busbw_gbps: bandwidth * op.bus_factor(world_size),
        transport: memory.transport(group),
        memory: name(args.memory),
        algorithm: bench.algorithm().filter(|_| args.memory != BufferMemory::Gpu),
    })
}

/// Returns the seconds of each call on the slowest rank. Each call starts after a barrier; a round trip of `send` counts half. Collective.
fn times<T: Number>(group: &Group, op: Op, bench: &mut Bench<'_, T>, num_calls: usize) -> Result<Vec<f64>> {
    let mut seconds = group.buffer::<f64>(num_calls)?;
    for seconds in seconds.iter_mut() {
        group.barrier().wait()?;
        let began = Instant::now();
        bench.call()?;
        *seconds = began.elapsed().as_secs_f64() / if op == Op::Send { 2.0 } else { 1.0 };
    }
    Ok(group.all_reduce(seconds, ReduceOp::Max).wait()?.to_vec())
}
