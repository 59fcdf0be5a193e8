//! Communication costs as options of commands that choose algorithms.

use trireme_comm::GivenCosts;
use trireme_schedule::collective::{DirectCost, LinkCost};

/// Costs by which algorithms are chosen; those that are not given are measured.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Communication costs")]
pub(crate) struct CostArgs {
    /// Messages between workers of a host: latency in microseconds and bandwidth in gigabytes per second, such as
    /// 3:10. Measured by default.
    #[arg(long, value_name = "US:GB/S", value_parser = pair)]
    within_hosts: Option<(f64, f64)>,
    /// Messages between workers of different hosts.
    #[arg(long, value_name = "US:GB/S", value_parser = pair)]
    across_hosts: Option<(f64, f64)>,
    /// Shared memory between the workers of a host: microseconds until every worker knows that all have arrived, and
    /// gigabytes per second.
    #[arg(long, value_name = "US:GB/S", value_parser = pair)]
    shared_memory: Option<(f64, f64)>,
}

impl CostArgs {
    /// Returns the costs that are given, and so are not measured.
    pub(crate) fn given(&self) -> GivenCosts {
        let to_link = |(latency, bandwidth)| LinkCost::of(latency, bandwidth);
        GivenCosts {
            within: self.within_hosts.map(to_link),
            across: self.across_hosts.map(to_link),
            direct: self.shared_memory.map(|(latency, bandwidth)| DirectCost::of(latency, bandwidth)),
        }
    }
}

fn pair(text: &str) -> Result<(f64, f64), &'static str> {
    let number = |text: &str| text.parse().ok().filter(|number: &f64| *number > 0.0 && *number <= 1e6);
    let pair =
        text.split_once(':').and_then(|(latency, bandwidth)| Some((number(latency)?, number(bandwidth)?)));
    pair.ok_or("expected microseconds and gigabytes per second, both above 0, such as 40:1.2")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_are_two_numbers() {
        assert_eq!(pair("40:1.2"), Ok((40.0, 1.2)));
        for wrong in ["", "40", ":", "40:", ":1", "0:1", "1:0", "-1:1", "nan:1", "1:inf", "40us:1", "1:2:3"] {
            assert!(pair(wrong).is_err(), "{wrong}");
        }
    }
}
