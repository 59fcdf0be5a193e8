//! Which transports two workers of this host can use, found out by using them.

use serde::Serialize;
use std::fmt;
use std::net::TcpListener;
use std::time::{Duration, Instant};
use trireme_base::{Bytes, Rank, ReduceOp};
use trireme_comm::{CommError, Group, GroupOptions, JoinOptions, TransportChoice, join};
use trireme_schedule::collective::{Collective, CostModel};

/// Ample for two threads of one process.
const TIMEOUT: Duration = Duration::from_secs(10);

const NUM_ELEMENTS: usize = 4 << 20;
const NUM_RUNS: usize = 5;

/// Sizes for which algorithms are shown, each four times the one before.
const SMALLEST_BYTES: usize = 1 << 10;
const LARGEST_BYTES: usize = 64 << 20;

/// What came of a try; its fields are keys of `--json`.
#[derive(Debug, Serialize)]
pub(super) struct TransportFigure {
    pub(super) name: String,
    /// Why it cannot be used.
    pub(super) error: Option<String>,
    /// Best time of an all_reduce of `all_reduce_bytes` between two workers.
    pub(super) all_reduce_seconds: Option<f64>,
    pub(super) all_reduce_bytes: u64,
    /// What messages between two workers cost, as measured when they meet.
    pub(super) message_latency_seconds: Option<f64>,
    pub(super) message_seconds_per_byte: Option<f64>,
    /// The algorithms that two workers choose by it.
    pub(super) algorithms: Vec<Choice>,
}

/// How an operation is done.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Choice {
    pub(super) operation: String,
    pub(super) bytes: u64,
    pub(super) algorithm: String,
}

/// What two workers find out together.
struct Findings {
    all_reduce_seconds: f64,
    costs: CostModel,
    algorithms: Vec<Choice>,
}

impl fmt::Display for TransportFigure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = Bytes(self.all_reduce_bytes);
        match (self.all_reduce_seconds, &self.error) {
            (Some(seconds), _) => {
                write!(f, "works: all_reduce of {size} between 2 workers in {:.1} ms", seconds * 1e3)?;
            }
            (None, Some(error)) => return write!(f, "cannot be used: {error}"),
            (None, None) => unreachable!("a try succeeds or fails"),
        }
        if let (Some(latency), Some(per_byte)) = (self.message_latency_seconds, self.message_seconds_per_byte)
        {
            write!(f, "; messages {:.1} us and {:.1} GB/s", latency * 1e6, 1e-9 / per_byte)?;
        }
        Ok(())
    }
}

impl TransportFigure {
    /// For each operation the algorithms by size, `all_reduce: recursive_doubling to 64 KiB, then halving_doubling`.
    pub(super) fn choices(&self) -> Vec<String> {
        let of_operation = |choices: &[Choice]| {
            let mut line = format!("{}: ", choices[0].operation);
            for (index, run) in choices.chunk_by(|one, other| one.algorithm == other.algorithm).enumerate() {
                let last = &run[run.len() - 1];
                let is_largest = std::ptr::eq(last, &choices[choices.len() - 1]);
                line += if index > 0 { ", then " } else { "" };
                line += &run[0].algorithm;
                line += &if is_largest { String::new() } else { format!(" to {}", Bytes(last.bytes)) };
            }
            line
        };
        self.algorithms.chunk_by(|one, other| one.operation == other.operation).map(of_operation).collect()
    }
}

/// Tries each transport with two workers that are threads of this process.
pub(super) fn check() -> Vec<TransportFigure> {
    [TransportChoice::Shm, TransportChoice::Tcp].map(try_transport).into()
}

fn try_transport(transport: TransportChoice) -> TransportFigure {
    let (findings, error) = match find_out(transport) {
        Ok(findings) => (Some(findings), None),
        Err(error) => (None, Some(format!("{error:#}"))),
    };
    TransportFigure {
        name: transport.to_string(),
        error,
        all_reduce_seconds: findings.as_ref().map(|findings| findings.all_reduce_seconds),
        all_reduce_bytes: (NUM_ELEMENTS * size_of::<f32>()) as u64,
        message_latency_seconds: findings.as_ref().map(|findings| findings.costs.within.latency_seconds),
        message_seconds_per_byte: findings.as_ref().map(|findings| findings.costs.within.seconds_per_byte),
        algorithms: findings.map_or_else(Vec::new, |findings| findings.algorithms),
    }
}

fn find_out(transport: TransportChoice) -> anyhow::Result<Findings> {
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
            .map(|rank| scope.spawn(move || work(&options(rank))))
            .map(|worker| worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    let (first, second) = (first?, second?);
    Ok(Findings { all_reduce_seconds: first.all_reduce_seconds.max(second.all_reduce_seconds), ..first })
}

/// One worker's part.
fn work(options: &JoinOptions) -> Result<Findings, CommError> {
    let group = join(options)?;
    let mut buffer = group.buffer::<f32>(NUM_ELEMENTS)?;
    let mut best = f64::INFINITY;
    for _ in 0..NUM_RUNS {
        let start = Instant::now();
        buffer = group.all_reduce(buffer, ReduceOp::Sum).wait()?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    group.barrier().wait()?;
    Ok(Findings { all_reduce_seconds: best, costs: group.costs(), algorithms: choices(&group) })
}

/// What a group chooses, operation by operation.
fn choices(group: &Group) -> Vec<Choice> {
    let collectives = [
        |len| Collective::AllReduce { len },
        |len| Collective::ReduceScatter { len },
        |len| Collective::AllGather { len },
        |len| Collective::Broadcast { root: Rank::ROOT, len },
        |len| Collective::AllToAll { len },
    ];
    let element_bytes = size_of::<f32>();
    let sizes = (0..).map(|power| SMALLEST_BYTES << (2 * power)).take_while(|&bytes| bytes <= LARGEST_BYTES);
    let choose = |(collective, bytes): (fn(usize) -> Collective, usize)| {
        let collective = collective(bytes / element_bytes);
        Choice {
            operation: collective.to_string(),
            bytes: bytes as u64,
            algorithm: group.algorithm(collective, element_bytes).to_string(),
        }
    };
    collectives
        .into_iter()
        .flat_map(|collective| sizes.clone().map(move |bytes| (collective, bytes)))
        .map(choose)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_read_as_ranges_of_sizes() {
        let choice = |operation: &str, bytes, algorithm: &str| Choice {
            operation: operation.to_owned(),
            bytes,
            algorithm: algorithm.to_owned(),
        };
        let figure = TransportFigure {
            name: "tcp".to_owned(),
            error: None,
            all_reduce_seconds: Some(1.0),
            all_reduce_bytes: 1,
            message_latency_seconds: None,
            message_seconds_per_byte: None,
            algorithms: vec![
                choice("all_reduce", 1 << 10, "doubling"),
                choice("all_reduce", 4 << 10, "doubling"),
                choice("all_reduce", 16 << 10, "ring"),
                choice("broadcast", 1 << 10, "tree"),
            ],
        };
        assert_eq!(figure.choices(), ["all_reduce: doubling to 4.00KiB, then ring", "broadcast: tree"]);
    }
}
