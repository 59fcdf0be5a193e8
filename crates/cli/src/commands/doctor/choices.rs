//! Algorithms of collectives, by operation and size.

use serde::Serialize;
use trireme_base::{Bytes, Rank};
use trireme_schedule::collective::{Algorithm, Collective, CollectiveKind, CostModel, Hosts, choose};

/// Range of the sizes for which algorithms are shown. Each size is four times the previous one.
const SMALLEST_BYTES: usize = 1 << 10;
const LARGEST_BYTES: usize = 64 << 20;

#[derive(Debug, Clone, Serialize)]
pub(super) struct AlgorithmChoice {
    pub(super) operation: String,
    pub(super) bytes: u64,
    pub(super) algorithm: String,
}

/// Returns the algorithm that `choose` selects for each operation and size. `choose` receives the collective and the bytes of an element.
pub(super) fn choices(choose: impl Fn(Collective, usize) -> Algorithm) -> Vec<AlgorithmChoice> {
    let kinds = [
        CollectiveKind::AllReduce,
        CollectiveKind::ReduceScatter,
        CollectiveKind::AllGather,
        CollectiveKind::Broadcast,
        CollectiveKind::AllToAll,
    ];
    let element_bytes = size_of::<f32>();
    let sizes = (0..).map(|power| SMALLEST_BYTES << (2 * power)).take_while(|&bytes| bytes <= LARGEST_BYTES);
    let choice = |(kind, bytes): (CollectiveKind, usize)| {
        let collective = kind.with_root(Rank::ROOT, bytes / element_bytes);
        AlgorithmChoice {
            operation: collective.to_string(),
            bytes: bytes as u64,
            algorithm: choose(collective, element_bytes).to_string(),
        }
    };
    let all = kinds.into_iter();
    all.flat_map(|kind| sizes.clone().map(move |bytes| (kind, bytes))).map(choice).collect()
}

/// Returns a line for each operation with its algorithms by size, such as `all_reduce: recursive_doubling to 64 KiB, then
/// halving_doubling`.
pub(super) fn lines(choices: &[AlgorithmChoice]) -> Vec<String> {
    let of_operation = |choices: &[AlgorithmChoice]| {
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
    choices.chunk_by(|one, other| one.operation == other.operation).map(of_operation).collect()
}

/// The algorithms that workers of several hosts would choose; the fields are keys of `--json`.
#[derive(Debug, Serialize)]
pub(super) struct MultiHostChoices {
    pub(super) hosts: usize,
    pub(super) workers_per_host: usize,
    /// Cost of messages between hosts: as given, or typical.
    pub(super) across_latency_seconds: f64,
    pub(super) across_seconds_per_byte: f64,
    pub(super) algorithms: Vec<AlgorithmChoice>,
}

impl MultiHostChoices {
    /// Chooses by `costs`, with sums in their canonical order.
    pub(super) fn new(hosts: usize, workers_per_host: usize, costs: &CostModel) -> Self {
        let host_of: Vec<usize> = (0..hosts * workers_per_host).map(|rank| rank / workers_per_host).collect();
        let placed = Hosts::new(&host_of);
        let choose = |collective, element_bytes| choose(collective, &placed, element_bytes, costs, true);
        MultiHostChoices {
            hosts,
            workers_per_host,
            across_latency_seconds: costs.across.latency_seconds,
            across_seconds_per_byte: costs.across.seconds_per_byte,
            algorithms: choices(choose),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trireme_schedule::collective::{DirectCost, LinkCost};

    #[test]
    fn choices_read_as_ranges_of_sizes() {
        let choice = |operation: &str, bytes, algorithm: &str| AlgorithmChoice {
            operation: operation.to_owned(),
            bytes,
            algorithm: algorithm.to_owned(),
        };
        let choices = [
            choice("all_reduce", 1 << 10, "doubling"),
            choice("all_reduce", 4 << 10, "doubling"),
            choice("all_reduce", 16 << 10, "ring"),
            choice("broadcast", 1 << 10, "tree"),
        ];
        assert_eq!(lines(&choices), ["all_reduce: doubling to 4.00KiB, then ring", "broadcast: tree"]);
    }

    #[test]
    fn workers_of_several_hosts_choose_hierarchical_algorithms() {
        let costs = CostModel {
            within: LinkCost::of(1.0, 10.0),
            across: LinkCost::of(50.0, 0.1),
            direct: Some(DirectCost::of(1.0, 10.0)),
            reduce_seconds_per_byte: 1e-10,
            copy_seconds_per_byte: 1e-10,
        };
        let figure = MultiHostChoices::new(2, 4, &costs);
        let all_reduce = figure.algorithms.iter().rfind(|choice| choice.operation == "all_reduce").unwrap();
        assert!(all_reduce.algorithm.starts_with("hierarchical:all:direct:"), "{all_reduce:?}");
        let alone = MultiHostChoices::new(8, 1, &CostModel { direct: None, ..costs });
        assert!(alone.algorithms.iter().all(|choice| !choice.algorithm.contains("direct")));
    }
}
