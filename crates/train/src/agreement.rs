//! Checks before training that all ranks have the same config, task, samples and model of GPU, so that either all of them train the same
//! run or none does.
//!
//! Ranks that are started by hand may be given different configs, models or texts. Nothing in training would detect this: each rank would
//! apply its own learning rate to the common gradient, and a checkpoint would mix their weights. Ranks whose kernels run at different SIMD
//! levels, or on different GPUs, diverge in the same way, because each rank computes some updates, such as Muon's, on its own.

use crate::config::Config;
use crate::dataset::Dataset;
use crate::device::LocalGpu;
use crate::error::TrainError;
use crate::task::Task;
use std::collections::{BTreeMap, BTreeSet};
use trireme_base::{Rank, format_ranks};
use trireme_checkpoint::StoredTensors;
use trireme_comm::{CONTROL_BYTES_MAX, Group};
use trireme_tensor::{FoundLibrary, Gpu, SimdLevel};

/// The maximum number of characters of a value that a message quotes.
const VALUE_CHARS_MAX: usize = 200;

/// The number of differences that an error lists. Further differences are only counted.
const LISTED_MAX: usize = 20;

/// Named values that must be equal on all ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Facts(BTreeMap<String, String>);

impl Facts {
    /// Returns the version of the program, the config, and the SIMD level of the kernels. Kernels of different levels round differently.
    pub(crate) fn of_config(config: &Config, simd_level_max: Option<SimdLevel>) -> Self {
        let version = ("version".to_owned(), env!("CARGO_PKG_VERSION").to_owned());
        let supported = SimdLevel::detect();
        let level = simd_level_max.map_or(supported, |most| most.min(supported)).to_string();
        let level = ("SIMD level (set TRIREME_SIMD to the lowest on all ranks)".to_owned(), level);
        let keys = config.values().into_iter().filter(|(name, _)| !Config::may_differ(name));
        Facts(keys.chain([version, level]).collect())
    }

    pub(crate) fn insert(&mut self, name: &str, value: String) {
        self.0.insert(name.to_owned(), value);
    }

    /// Returns the facts of the task and of its training and validation samples.
    pub(crate) fn of_task(task: &dyn Task, train: &dyn Dataset, validation: Option<&dyn Dataset>) -> Self {
        let mut facts = BTreeMap::from_iter(task.facts());
        facts.insert("model".to_owned(), task.description());
        for (part, samples) in [("training", Some(train)), ("validation", validation)] {
            let Some(samples) = samples else { continue };
            let specs: Vec<String> =
                samples.sample().iter().map(|spec| format!("{} {spec}", spec.name)).collect();
            facts.insert(
                format!("{part} samples"),
                format!("{} of {}", samples.num_samples(), specs.join(", ")),
            );
            let identity = samples.identity().into_iter();
            facts.extend(identity.map(|(name, value)| (format!("{name} of {part} samples"), value)));
        }
        Facts(facts)
    }

    /// Returns the facts about a worker's GPU, which must be equal because replicas would round differently otherwise: its model, for which
    /// kernels are compiled and chosen, and the versions of NVRTC and cuBLASLt. Empty without a GPU.
    pub(crate) fn of_gpu(gpu: Option<&LocalGpu>) -> Self {
        let Some(LocalGpu { gpu, libraries: [_, nvrtc, blas], .. }) = gpu else {
            return Facts(BTreeMap::new());
        };
        let Gpu { name, num_multiprocessors, .. } = gpu;
        let gpu = format!(
            "{name} with compute capability {} and {num_multiprocessors} multiprocessors",
            gpu.compute_capability()
        );
        let version = |name: &str, FoundLibrary { version: (major, minor), .. }: &FoundLibrary| {
            (format!("{name} version (install the same on all hosts)"), format!("{major}.{minor}"))
        };
        let gpu = ("GPU (use the same model on all ranks)".to_owned(), gpu);
        Facts(BTreeMap::from([gpu, version("NVRTC", nvrtc), version("cuBLASLt", blas)]))
    }

    pub(crate) fn of_weights(weights: &StoredTensors) -> Result<Self, TrainError> {
        let value = format!("checksum {:08x}", weights.fingerprint()?);
        Ok(Facts(BTreeMap::from([("weights in model.init_from".to_owned(), value)])))
    }

    pub(crate) fn merged_with(mut self, others: Facts) -> Self {
        self.0.extend(others.0);
        self
    }

    fn checksum(&self) -> u32 {
        self.0.iter().flat_map(|(name, value)| [name, value]).fold(0, |checksum, text| {
            let checksum = crc32c::crc32c_append(checksum, &(text.len() as u64).to_le_bytes());
            crc32c::crc32c_append(checksum, text.as_bytes())
        })
    }

    /// Encodes the facts as JSON of at most [`CONTROL_BYTES_MAX`] bytes. Long values are truncated, and facts that do not fit are left out.
    fn to_bytes(&self) -> Vec<u8> {
        let mut facts = BTreeMap::new();
        // JSON escapes a byte to at most six bytes.
        let mut bytes_left = CONTROL_BYTES_MAX / 6 - 2;
        for (name, value) in &self.0 {
            let mut quoted: String = value.chars().take(VALUE_CHARS_MAX).collect();
            if quoted.len() < value.len() {
                quoted += &format!("... with checksum {:08x}", crc32c::crc32c(value.as_bytes()));
            }
            let punctuation = r#""":"","#.len();
            let Some(rest) = bytes_left.checked_sub(name.len() + quoted.len() + punctuation) else { break };
            bytes_left = rest;
            facts.insert(name, quoted);
        }
        serde_json::to_vec(&facts).expect("a map of texts is JSON")
    }

    /// Decodes a message of another rank. Returns no facts if the message cannot be parsed, because another version may use another
    /// format.
    fn from_bytes(bytes: &[u8]) -> Self {
        Facts(serde_json::from_slice(bytes).unwrap_or_default())
    }
}

/// Compares facts on all ranks. Collective.
///
/// Costs one all-gather of four bytes. The facts themselves are exchanged only if checksums differ.
///
/// # Errors
/// [`TrainError::RanksDisagree`] on all ranks, with each differing fact, its values and the ranks that have them.
pub(crate) fn agree(facts: &Facts, group: &Group) -> Result<(), TrainError> {
    group.set_program_line(format_args!("comparing the configs of the ranks"));
    let checksums = group.all_gather_bytes(&facts.checksum().to_le_bytes()).wait()?;
    if checksums.iter().all(|checksum| *checksum == checksums[0]) {
        return Ok(());
    }
    let all = group.all_gather_bytes(&facts.to_bytes()).wait()?;
    let all: Vec<Facts> = all.iter().map(|bytes| Facts::from_bytes(bytes)).collect();
    Err(TrainError::RanksDisagree { differences: differences(&all) })
}

/// Returns a line for each fact that differs, with its values and their ranks.
fn differences(all: &[Facts]) -> Vec<String> {
    let names: BTreeSet<&String> = all.iter().flat_map(|facts| facts.0.keys()).collect();
    let mut lines: Vec<String> = names.into_iter().filter_map(|name| difference(name, all)).collect();
    let num_more = lines.len().saturating_sub(LISTED_MAX);
    if num_more > 0 {
        lines.truncate(LISTED_MAX);
        lines.push(format!("and {num_more} more"));
    }
    lines
}

fn difference(name: &str, all: &[Facts]) -> Option<String> {
    let mut by_value: BTreeMap<Option<&String>, Vec<Rank>> = BTreeMap::new();
    for (rank, facts) in all.iter().enumerate() {
        by_value.entry(facts.0.get(name)).or_default().push(Rank(rank));
    }
    let mut values: Vec<_> = by_value.into_iter().collect();
    // The value of rank 0 comes first.
    values.sort_by_key(|(_, ranks)| ranks[0]);
    let text = |(value, of): &(Option<&String>, Vec<Rank>)| {
        format!("{} on {}", value.map_or("not set", |value| value), format_ranks(of.iter().copied()))
    };
    let texts: Vec<String> = values.iter().map(text).collect();
    (texts.len() > 1).then(|| format!("{name}: {}", texts.join("; ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use trireme_testkit::run_ranks;

    fn facts(pairs: &[(&str, &str)]) -> Facts {
        Facts(pairs.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect())
    }

    #[test]
    fn all_ranks_report_each_difference_with_its_ranks() {
        let found = run_ranks(5, |group| {
            let lr = if [1, 4].contains(&group.rank().0) { "1e-3" } else { "3e-4" };
            let mut own = vec![("optimizer.lr", lr), ("training.seed", "0")];
            if group.rank() == Rank(2) {
                own.push(("data.field", "body"));
            }
            agree(&facts(&own), &group).unwrap_err().to_string()
        });
        assert!(found.iter().all(|text| *text == found[0]));
        for line in [
            "\n  data.field: not set on ranks 0, 1, 3, 4; body on rank 2",
            "\n  optimizer.lr: 3e-4 on ranks 0, 2, 3; 1e-3 on ranks 1, 4",
        ] {
            assert!(found[0].contains(line), "{}", found[0]);
        }
        assert!(!found[0].contains("seed"), "{}", found[0]);
    }

    #[test]
    fn ranks_that_agree_continue() {
        let same = run_ranks(3, |group| agree(&facts(&[("a", "1"), ("b", "2")]), &group).is_ok());
        assert_eq!(same, [true; 3]);
        assert_ne!(facts(&[("a", "1b")]).checksum(), facts(&[("a1", "b")]).checksum());
    }

    #[test]
    fn messages_and_lists_are_bounded() {
        let many = |value: &str| {
            Facts((0..20_000).map(|index| (format!("key {index:06}"), value.repeat(300))).collect())
        };
        assert!(many("\u{1}").to_bytes().len() <= CONTROL_BYTES_MAX);
        let found = run_ranks(2, |group| {
            let value = if group.rank() == Rank::ROOT { "x" } else { "y" };
            match agree(&many(value), &group) {
                Err(TrainError::RanksDisagree { differences }) => differences,
                other => panic!("{other:?}"),
            }
        });
        assert_eq!(found[0].len(), LISTED_MAX + 1);
        assert!(found[0][LISTED_MAX].starts_with("and "), "{:?}", found[0]);
    }

    #[test]
    fn values_that_differ_after_the_quoted_part_differ() {
        let both = ["1", "2"].map(|end| facts(&[("a", &("x".repeat(VALUE_CHARS_MAX) + end))]));
        let both = both.map(|facts| Facts::from_bytes(&facts.to_bytes()));
        assert_eq!(differences(&both).len(), 1);
    }
}
