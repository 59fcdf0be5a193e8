//! The keys of `[comm]` that give the costs of communication.

use super::Config;
use super::checks::Checks;
use super::sections::Comm;
use trireme_comm::GivenCosts;
use trireme_schedule::collective::{DirectCost, LinkCost};

/// A latency in microseconds and a bandwidth in gigabytes per second. Both are 0 if not given.
type Pair = [f64; 2];

impl Config {
    /// Returns the costs of communication that the config gives. Costs that it does not give are `None`.
    pub fn costs(&self) -> GivenCosts {
        let [within, across, memory] = pairs(self.comm()).map(|(_, pair)| Some(pair).filter(is_given));
        GivenCosts {
            within: within.map(|[latency, bandwidth]| LinkCost::of(latency, bandwidth)),
            across: across.map(|[latency, bandwidth]| LinkCost::of(latency, bandwidth)),
            direct: memory.map(|[latency, bandwidth]| DirectCost::of(latency, bandwidth)),
        }
    }
}

/// Returns the values of the keys, by the prefix of their names.
fn pairs(comm: &Comm) -> [(&'static str, Pair); 3] {
    [
        ("within_hosts", [comm.within_hosts_latency_microseconds, comm.within_hosts_gigabytes_per_second]),
        ("across_hosts", [comm.across_hosts_latency_microseconds, comm.across_hosts_gigabytes_per_second]),
        ("shared_memory", [comm.shared_memory_latency_microseconds, comm.shared_memory_gigabytes_per_second]),
    ]
}

fn is_given(pair: &Pair) -> bool {
    pair.iter().all(|&value| value > 0.0)
}

/// Requires that a latency and its bandwidth are given together.
pub(super) fn check_costs(checks: &mut Checks<'_>) {
    for (name, pair) in pairs(&checks.unchecked.sections.comm) {
        let keys = ["latency_microseconds", "gigabytes_per_second"].map(|unit| format!("comm.{name}_{unit}"));
        checks.require(is_given(&pair) || pair == [0.0; 2], &keys.each_ref().map(|key| &**key), || {
            format!("set both {name}_latency_microseconds and {name}_gigabytes_per_second")
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ConfigError;
    use std::path::Path;

    fn read(comm: &str) -> Result<Config, ConfigError> {
        let text =
            format!("[model]\narchitecture = \"gpt2\"\n[data]\ninputs = [\"text.txt\"]\n[comm]\n{comm}");
        Config::parse(&text, Path::new("try.toml"), &[], None)
    }

    #[test]
    fn costs_are_given_in_pairs() {
        assert_eq!(read("").unwrap().costs(), GivenCosts::default());
        let halves = "across_hosts_latency_microseconds = 5\nshared_memory_gigabytes_per_second = 20.0\n";
        let refused = read(halves).unwrap_err().to_string();
        for mistake in [
            "try.toml:6: across_hosts_latency_microseconds = 5: set both across_hosts_latency_microseconds and \
             across_hosts_gigabytes_per_second",
            "try.toml:7: shared_memory_gigabytes_per_second = 20.0: set both shared_memory_latency_microseconds and \
             shared_memory_gigabytes_per_second",
        ] {
            assert!(refused.contains(mistake), "{refused}");
        }
        let others = "across_hosts_gigabytes_per_second = 12.5\nshared_memory_latency_microseconds = 0.5\n";
        let whole = read(&format!("{halves}{others}")).unwrap();
        let costs = GivenCosts {
            within: None,
            across: Some(LinkCost { latency_seconds: 5.0 * 1e-6, seconds_per_byte: 1e-9 / 12.5 }),
            direct: Some(DirectCost { synchronization_seconds: 0.5 * 1e-6, seconds_per_byte: 1e-9 / 20.0 }),
        };
        assert_eq!(whole.costs(), costs);
        let negative = read("within_hosts_latency_microseconds = -1").unwrap_err().to_string();
        assert!(negative.contains("expected a number from 0 to 1000000"), "{negative}");
    }
}
