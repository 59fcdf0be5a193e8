//! Which transports two workers of this host can use, found out by using them.

use serde::Serialize;
use std::fmt;
use std::net::TcpListener;
use std::time::{Duration, Instant};
use trireme_base::{Bytes, Rank, ReduceOp};
use trireme_comm::{CommError, GroupOptions, JoinOptions, TransportChoice, join};

/// Ample for two threads of one process.
const TIMEOUT: Duration = Duration::from_secs(10);

const NUM_ELEMENTS: usize = 4 << 20;
const NUM_RUNS: usize = 5;

/// What came of a try; its fields are keys of `--json`.
#[derive(Debug, Serialize)]
pub(super) struct TransportFigure {
    pub(super) name: String,
    /// Why it cannot be used.
    pub(super) error: Option<String>,
    /// Best time of an all_reduce of `all_reduce_bytes` between two workers.
    pub(super) all_reduce_seconds: Option<f64>,
    pub(super) all_reduce_bytes: u64,
}

impl fmt::Display for TransportFigure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = Bytes(self.all_reduce_bytes);
        match (self.all_reduce_seconds, &self.error) {
            (Some(seconds), _) => {
                write!(f, "works: all_reduce of {size} between 2 workers in {:.1} ms", seconds * 1e3)
            }
            (None, Some(error)) => write!(f, "cannot be used: {error}"),
            (None, None) => unreachable!("a try succeeds or fails"),
        }
    }
}

/// Tries each transport with two workers that are threads of this process.
pub(super) fn check() -> Vec<TransportFigure> {
    [TransportChoice::Shm, TransportChoice::Tcp].map(try_transport).into()
}

fn try_transport(transport: TransportChoice) -> TransportFigure {
    let (all_reduce_seconds, error) = match seconds(transport) {
        Ok(seconds) => (Some(seconds), None),
        Err(error) => (None, Some(format!("{error:#}"))),
    };
    let all_reduce_bytes = (NUM_ELEMENTS * size_of::<f32>()) as u64;
    TransportFigure { name: transport.to_string(), error, all_reduce_seconds, all_reduce_bytes }
}

fn seconds(transport: TransportChoice) -> anyhow::Result<f64> {
    let master_port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let options = |rank| JoinOptions {
        master_port,
        transport,
        job: "doctor".to_owned(),
        join_timeout: TIMEOUT,
        group: GroupOptions { timeout: TIMEOUT, ..GroupOptions::default() },
        ..JoinOptions::new(Rank(rank), 2)
    };
    let [first, second] = std::thread::scope(|scope| {
        [0, 1]
            .map(|rank| scope.spawn(move || all_reduce(&options(rank))))
            .map(|worker| worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    Ok(first?.max(second?))
}

/// Best time of this rank's reductions.
fn all_reduce(options: &JoinOptions) -> Result<f64, CommError> {
    let group = join(options)?;
    let mut buffer = group.buffer::<f32>(NUM_ELEMENTS)?;
    let mut best = f64::INFINITY;
    for _ in 0..NUM_RUNS {
        let start = Instant::now();
        buffer = group.all_reduce(buffer, ReduceOp::Sum).wait()?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    group.barrier()?;
    Ok(best)
}
