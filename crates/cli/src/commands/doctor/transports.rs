//! Transports that workers of this host can use, tested by using them.

use super::choices::{AlgorithmChoice, choices};
use anyhow::Context;
use serde::Serialize;
use std::fmt;
use std::io;
use std::net::TcpListener;
use std::time::{Duration, Instant};
use trireme_base::{Bytes, Rank, ReduceOp, spawn_scoped_thread};
use trireme_comm::{CommError, GivenCosts, GroupOptions, JoinOptions, TransportChoice, join};
use trireme_schedule::collective::CostModel;

/// Ample for workers that are threads of one process.
const TIMEOUT: Duration = Duration::from_secs(10);

const NUM_ELEMENTS: usize = 4 << 20;
const NUM_RUNS: usize = 5;

/// The result of testing a transport; the fields are keys of `--json`.
#[derive(Debug, Serialize)]
pub(super) struct TransportReport {
    pub(super) name: String,
    /// Reason why the transport cannot be used.
    pub(super) error: Option<String>,
    pub(super) workers: usize,
    /// Best time of an all_reduce of `all_reduce_bytes` among the workers.
    pub(super) all_reduce_seconds: Option<f64>,
    pub(super) all_reduce_bytes: u64,
    /// Cost of messages between two workers: as given, or measured when the workers join.
    pub(super) message_latency_seconds: Option<f64>,
    pub(super) message_seconds_per_byte: Option<f64>,
    /// The algorithms that the workers choose by these costs.
    pub(super) algorithms: Vec<AlgorithmChoice>,
    /// All costs by which algorithms are chosen.
    #[serde(skip)]
    pub(super) costs: Option<CostModel>,
}

struct TransportMeasurement {
    all_reduce_seconds: f64,
    costs: CostModel,
    algorithms: Vec<AlgorithmChoice>,
}

impl fmt::Display for TransportReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(seconds) = self.all_reduce_seconds else {
            return write!(f, "cannot be used: {}", self.error.as_deref().unwrap_or_default());
        };
        let (size, workers) = (Bytes(self.all_reduce_bytes), self.workers);
        write!(f, "works: all_reduce of {size} among {workers} workers in {:.1} ms", seconds * 1e3)?;
        if let (Some(latency), Some(per_byte)) = (self.message_latency_seconds, self.message_seconds_per_byte)
        {
            write!(f, "; messages {:.1} us and {:.1} GB/s", latency * 1e6, 1e-9 / per_byte)?;
        }
        Ok(())
    }
}

/// Tests each transport with workers that are threads of this process.
pub(super) fn check(workers: usize, costs: GivenCosts) -> Vec<TransportReport> {
    [TransportChoice::Shm, TransportChoice::Tcp]
        .map(|transport| try_transport(transport, workers, costs))
        .into()
}

fn try_transport(transport: TransportChoice, workers: usize, costs: GivenCosts) -> TransportReport {
    let found = measure_transport(transport, workers, costs);
    let (error, findings) = (found.as_ref().err().map(|error| format!("{error:#}")), found.ok());
    TransportReport {
        name: transport.to_string(),
        error,
        workers,
        all_reduce_seconds: findings.as_ref().map(|findings| findings.all_reduce_seconds),
        all_reduce_bytes: (NUM_ELEMENTS * size_of::<f32>()) as u64,
        message_latency_seconds: findings.as_ref().map(|findings| findings.costs.within.latency_seconds),
        message_seconds_per_byte: findings.as_ref().map(|findings| findings.costs.within.seconds_per_byte),
        costs: findings.as_ref().map(|findings| findings.costs),
        algorithms: findings.map_or_else(Vec::new, |findings| findings.algorithms),
    }
}

fn measure_transport(
    transport: TransportChoice,
    workers: usize,
    costs: GivenCosts,
) -> anyhow::Result<TransportMeasurement> {
    let master_port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let options = |rank| JoinOptions {
        master_port,
        transport,
        job: "doctor".to_owned(),
        join_timeout: TIMEOUT,
        group: GroupOptions { timeout: TIMEOUT, costs, ..GroupOptions::default() },
        ..JoinOptions::new(Rank(rank), workers)
    };
    let found = std::thread::scope(|scope| {
        let start = |rank| {
            let options = options(rank);
            spawn_scoped_thread(scope, &format!("worker-{rank}"), move || work(&options))
        };
        let threads = (0..workers).map(start).collect::<io::Result<Vec<_>>>()?;
        let ended = threads.into_iter().map(|thread| thread.join());
        let found = ended.map(|end| end.unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        Ok::<_, io::Error>(found.collect::<Vec<_>>())
    })?;
    let slower = |one: TransportMeasurement, other: TransportMeasurement| TransportMeasurement {
        all_reduce_seconds: one.all_reduce_seconds.max(other.all_reduce_seconds),
        ..one
    };
    let found = found.into_iter().collect::<Result<Vec<_>, _>>()?;
    found.into_iter().reduce(slower).context("there is at least one worker")
}

fn work(options: &JoinOptions) -> Result<TransportMeasurement, CommError> {
    let group = join(options)?;
    let mut buffer = group.buffer::<f32>(NUM_ELEMENTS)?;
    let mut best = f64::INFINITY;
    for _ in 0..NUM_RUNS {
        let start = Instant::now();
        buffer = group.all_reduce(buffer, ReduceOp::Sum).wait()?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    group.barrier().wait()?;
    Ok(TransportMeasurement {
        all_reduce_seconds: best,
        costs: group.costs(),
        algorithms: choices(|collective, element_bytes| group.algorithm(collective, element_bytes)),
    })
}
