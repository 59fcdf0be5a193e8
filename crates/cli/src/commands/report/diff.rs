//! `trireme report diff`.

use super::record_lines::RecordLines;
use crate::console::Output;
use crate::diagnostics::print_diagnostic;
use crate::hang::escape_controls;
use anyhow::{Context, Result, bail};
use std::cmp::Ordering;
use std::fmt;
use std::io::Write;
use std::path::{Path, PathBuf};
use trireme_base::with_sources;
use trireme_train::config::Config;
use trireme_train::metrics::{HASH_LINE_BYTES_MAX, HASHES_FILE, HashRecord, HexBits, TensorHashes};
use trireme_train::{CONFIG_TOML, training_changes};

const EXAMPLES: &str = "\
Compares the hashes that runs record with `[metrics] hash_interval`: of losses, of gradients and of
parameters. They do not depend on the number of workers, ZeRO or pipelines. Exits with 0 if all
common records are equal, and with 1 if some differ or the runs cannot be compared.

Examples:
  trireme train a.toml --set metrics.hash_interval=1
  trireme train b.toml --set metrics.hash_interval=1
  trireme report diff runs/a runs/b
      The first step, unit and tensor at which the runs' bits differ.";

/// Find the first step, unit and tensor at which the bits of two runs differ.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct DiffArgs {
    /// The folder of a run.
    run: PathBuf,
    /// The folder of another run.
    other_run: PathBuf,
}

/// The error of a comparison that found a difference. The difference has already been printed.
#[derive(Debug, thiserror::Error)]
#[error("the runs differ")]
pub(crate) struct RunsDiffer;

pub(super) fn run(args: &DiffArgs) -> Result<()> {
    let folders = [&*args.run, &*args.other_run];
    let (equal, difference) = first_difference(folders)?;
    let changes = config_changes(folders);
    if !changes.is_empty() {
        writeln!(Output, "configs differ in what affects training:")?;
        changes.iter().try_for_each(|change| writeln!(Output, "  {}", escape_controls(change)))?;
    }
    write!(Output, "{}", equal.to_text())?;
    match difference {
        Some(difference) => {
            write!(Output, "{difference}")?;
            Err(RunsDiffer.into())
        }
        None => Ok(writeln!(Output, "no difference: losses, gradients and parameters have equal bits")?),
    }
}

/// Returns the common steps before the first difference of two runs, and a description of the difference, if there is one.
fn first_difference(folders: [&Path; 2]) -> Result<(EqualSteps, Option<String>)> {
    let [mut left, mut right] = [Steps::open(folders[0])?, Steps::open(folders[1])?];
    let mut equal = EqualSteps::default();
    let mut current = [left.next()?, right.next()?];
    while let [Some(of_left), Some(of_right)] = &current {
        let order = of_left.step.cmp(&of_right.step);
        if order == Ordering::Equal {
            let difference = compare([of_left, of_right], folders, &equal)?;
            if difference.is_some() {
                return Ok((equal, difference));
            }
            equal.add(of_left.step);
        }
        if order.is_le() {
            current[0] = left.next()?;
        }
        if order.is_ge() {
            current[1] = right.next()?;
        }
    }
    if equal.last.is_none() {
        bail!(
            "{} and {} have no recorded step in common; train both with the same [metrics] hash_interval",
            folders[0].display(),
            folders[1].display()
        );
    }
    Ok((equal, None))
}

/// Returns the config keys that affect training and differ; none if a config cannot be read.
fn config_changes(folders: [&Path; 2]) -> Vec<String> {
    match folders.map(|folder| Config::file_values(&folder.join(CONFIG_TOML))) {
        [Ok(left), Ok(right)] => training_changes(&left, &right),
        [Err(error), _] | [_, Err(error)] => {
            print_diagnostic(&format!("warning: the configs are not compared: {}", with_sources(&error)));
            Vec::new()
        }
    }
}

/// The common steps that were found to be equal.
#[derive(Debug, Default)]
struct EqualSteps {
    first: u64,
    last: Option<u64>,
    num_steps: usize,
}

impl EqualSteps {
    fn add(&mut self, step: u64) {
        if self.last.is_none() {
            self.first = step;
        }
        self.last = Some(step);
        self.num_steps += 1;
    }

    fn to_text(&self) -> String {
        match self.last {
            None => String::new(),
            Some(last) if last == self.first => format!("equal: the records of step {last}\n"),
            Some(last) => {
                format!("equal: {} records in common, of steps {} to {last}\n", self.num_steps, self.first)
            }
        }
    }

    /// If steps before `step` were not compared, returns a sentence that says so: the difference at `step` may have begun in them.
    fn gap(&self, step: u64) -> Option<String> {
        let unknown = match self.last {
            Some(last) if last + 1 >= step => return None,
            Some(last) => format!("no step between {last} and {step} is"),
            None => "no earlier step is".to_owned(),
        };
        Some(format!(
            "{unknown} recorded by both runs, so the difference may have begun earlier; train both with [metrics] hash_interval = 1"
        ))
    }
}

/// The records of one step of a run.
#[derive(Debug)]
struct Step {
    step: u64,
    /// Record of the step itself.
    trained: Option<HashRecord>,
    /// Record of the parameters with which the run began or resumed after the step.
    at_start: Option<HashRecord>,
}

impl Step {
    /// Returns the record of the parameters with which the run continues; `None` if the step was skipped and so has none.
    fn parameters(&self) -> Option<&HashRecord> {
        self.at_start.as_ref().or(self.trained.as_ref()).filter(|record| !record.units.is_empty())
    }
}

/// The steps of a run's file of hashes, in order.
struct Steps {
    lines: RecordLines,
    lookahead: Option<HashRecord>,
}

impl Steps {
    fn open(folder: &Path) -> Result<Self> {
        let advice =
            "expected the folder of a run, such as runs/NAME, trained with [metrics] hash_interval = 1";
        let lines = RecordLines::open(folder, HASHES_FILE, HASH_LINE_BYTES_MAX, advice)?;
        let mut steps = Steps { lines, lookahead: None };
        steps.lookahead = steps.read()?;
        if steps.lookahead.is_none() {
            bail!("{} has no recorded hashes yet", folder.display());
        }
        Ok(steps)
    }

    fn read(&mut self) -> Result<Option<HashRecord>> {
        let Some((_, line)) = self.lines.read()? else { return Ok(None) };
        let record = serde_json::from_slice(line);
        record.map(Some).with_context(|| format!("{} is not a record of hashes", self.lines.location()))
    }

    fn next(&mut self) -> Result<Option<Step>> {
        let Some(first) = self.lookahead.take() else { return Ok(None) };
        let mut step = Step { step: first.step, trained: None, at_start: None };
        let mut next = Some(first);
        while let Some(record) = next {
            match record.step.cmp(&step.step) {
                Ordering::Less => {
                    bail!("{} has an earlier step than the line above it", self.lines.location())
                }
                Ordering::Greater => {
                    self.lookahead = Some(record);
                    break;
                }
                Ordering::Equal if record.loss.is_some() => step.trained = Some(record),
                Ordering::Equal => step.at_start = Some(record),
            }
            next = self.read()?;
        }
        Ok(Some(step))
    }
}

/// Describes the first difference in a step, in the order of cause and effect: loss, gradients from the last unit to the first, parameters.
fn compare(steps: [&Step; 2], folders: [&Path; 2], equal: &EqualSteps) -> Result<Option<String>> {
    let step = steps[0].step;
    if let [Some(left), Some(right)] = [&steps[0].trained, &steps[1].trained]
        && let Some(difference) = compare_trained([left, right], folders, equal)?
    {
        return Ok(Some(difference));
    }
    let [Some(left), Some(right)] = [steps[0].parameters(), steps[1].parameters()] else { return Ok(None) };
    let tensors = Tensors::of([left, right])?;
    let differing = tensors.differing(HashKind::Parameter);
    let Some(first) = differing.first() else { return Ok(None) };
    let when = if step == 0 { "the first step".to_owned() } else { format!("the step after step {step}") };
    let counted = tensors.counts(&[HashKind::Parameter]);
    let who = match [&steps[0].at_start, &steps[1].at_start] {
        [Some(_), Some(_)] => "the runs".to_owned(),
        [Some(_), None] => folders[0].display().to_string(),
        _ => folders[1].display().to_string(),
    };
    let mut text = format!("first difference: before {when}, in the parameter {first}\n");
    text += &match step {
        0 => "  the runs begin with different values: their seeds, models or [model] init_from differ\n"
            .to_owned(),
        _ => format!("  {who} resumed after step {step} from a checkpoint with different parameters\n"),
    };
    Ok(Some(text + &counted))
}

/// Like [`compare`], for the records of the step itself.
fn compare_trained(
    records: [&HashRecord; 2],
    folders: [&Path; 2],
    equal: &EqualSteps,
) -> Result<Option<String>> {
    let step = records[0].step;
    let losses = records.map(|record| record.loss);
    let is_skipped = records.map(|record| record.units.is_empty());
    let tensors = match is_skipped {
        [false, false] => Tensors::of(records)?,
        _ => Tensors(Vec::new()),
    };
    let (of_gradients, of_parameters) =
        (tensors.differing(HashKind::Gradient), tensors.differing(HashKind::Parameter));
    let (what, meaning) = if losses[0] != losses[1] {
        let [left, right] = losses.map(|loss| loss.map_or(f64::NAN, |HexBits(bits)| f64::from_bits(bits)));
        let gradient =
            of_gradients.first().map(|first| format!("; backward then computes the gradient of {first}"));
        let meaning = "the parameters before the step are equal, so the samples or the forward passes differ: data, seed, dtype or layout";
        (format!("in the loss: {left} and {right}{}", gradient.unwrap_or_default()), meaning)
    } else if is_skipped[0] != is_skipped[1] {
        let skipping = folders[usize::from(is_skipped[1])].display();
        let meaning = "the loss is equal, so gradients or the loss scale differ";
        (format!("in the update, which only {skipping} skipped"), meaning)
    } else if let Some(first) = of_gradients.first() {
        let meaning = "the loss and the gradients that backward computes earlier are equal, so the backward pass of this unit differs, or the sum \
                       of the gradient over microbatches and workers";
        (format!("in the gradient of {first}"), meaning)
    } else if let Some(first) = of_parameters.first() {
        let meaning = "the loss and all gradients are equal, so the update differs: learning rate, clipping, settings or state of the optimizer";
        (format!("after the update, in the parameter {first}"), meaning)
    } else {
        return Ok(None);
    };
    let meaning = equal.gap(step).unwrap_or_else(|| meaning.to_owned());
    let counts = tensors.counts(&[HashKind::Gradient, HashKind::Parameter]);
    Ok(Some(format!("first difference: step {step}, {what}\n  {meaning}\n{counts}")))
}

/// A tensor of two runs, with the name of its unit.
struct Tensor<'a> {
    unit: &'a str,
    of_runs: [&'a TensorHashes; 2],
}

impl fmt::Display for Tensor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of unit {}", escape_controls(&self.of_runs[0].name), escape_controls(self.unit))
    }
}

/// The two hashes of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HashKind {
    Gradient,
    Parameter,
}

impl HashKind {
    fn plural(self) -> &'static str {
        match self {
            HashKind::Gradient => "gradients",
            HashKind::Parameter => "parameters",
        }
    }

    fn hash_of(self, tensor: &TensorHashes) -> Option<HexBits> {
        match self {
            HashKind::Gradient => tensor.gradient,
            HashKind::Parameter => Some(tensor.parameter),
        }
    }
}

/// The tensors of two runs, in the order of the model.
struct Tensors<'a>(Vec<Tensor<'a>>);

impl<'a> Tensors<'a> {
    /// Pairs the tensors of two records.
    ///
    /// # Errors
    /// If the records are of different models.
    fn of(records: [&'a HashRecord; 2]) -> Result<Self> {
        let [left, right] = records.map(|record| {
            let units = record.units.iter();
            units.flat_map(|unit| unit.tensors.iter().map(|tensor| (&*unit.unit, tensor))).collect::<Vec<_>>()
        });
        let names = |(unit, tensor): &(&'a str, &'a TensorHashes)| (*unit, &*tensor.name);
        let is_same = left.iter().map(names).eq(right.iter().map(names));
        if !is_same {
            bail!(
                "at step {} the runs have different tensors, {} and {} of them; only runs of the same model can be compared",
                records[0].step,
                left.len(),
                right.len()
            );
        }
        let pairs = left.into_iter().zip(right);
        Ok(Tensors(pairs.map(|((unit, left), (_, right))| Tensor { unit, of_runs: [left, right] }).collect()))
    }

    /// Returns the tensors whose hashes of this kind differ, in the order in which a step computes them: gradients in reverse.
    fn differing(&self, part: HashKind) -> Vec<&Tensor<'a>> {
        let differs =
            |tensor: &&Tensor<'_>| part.hash_of(tensor.of_runs[0]) != part.hash_of(tensor.of_runs[1]);
        let mut found: Vec<_> = self.0.iter().filter(differs).collect();
        if part == HashKind::Gradient {
            found.reverse();
        }
        found
    }

    /// Returns a line with the number of tensors whose hashes differ, for each of these kinds; empty for a step without tensors.
    fn counts(&self, parts: &[HashKind]) -> String {
        if self.0.is_empty() {
            return String::new();
        }
        let count = |part: &HashKind| {
            format!("{} of {} {}", self.differing(*part).len(), self.0.len(), part.plural())
        };
        format!("  {} differ in this record\n", parts.iter().map(count).collect::<Vec<_>>().join(" and "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trireme_train::metrics::UnitHashes;

    /// Creates a record of two units, whose hashes are 0 except for 1 in the changed ones.
    fn record(step: u64, loss: Option<f64>, changed: &[(&str, HashKind)]) -> HashRecord {
        let tensor = |name: &str| {
            let bits = |part| HexBits(u64::from(changed.contains(&(name, part))));
            let gradient = loss.map(|_| bits(HashKind::Gradient));
            TensorHashes { name: name.to_owned(), gradient, parameter: bits(HashKind::Parameter) }
        };
        let unit = |unit: &str, names: [&str; 2]| UnitHashes {
            unit: unit.to_owned(),
            tensors: names.map(tensor).into(),
        };
        let units = vec![unit("block", ["a", "b"]), unit("head", ["c", "d"])];
        HashRecord { step, loss: loss.map(|loss| HexBits(loss.to_bits())), units }
    }

    /// Compares runs with these records.
    fn diff(runs: [&[HashRecord]; 2]) -> Result<String> {
        let folders = [tempfile::tempdir()?, tempfile::tempdir()?];
        for (records, folder) in runs.iter().zip(&folders) {
            let lines = records.iter().map(|record| serde_json::to_string(record).unwrap() + "\n");
            std::fs::write(folder.path().join(HASHES_FILE), lines.collect::<String>())?;
        }
        let paths = [folders[0].path(), folders[1].path()];
        let (equal, difference) = first_difference(paths)?;
        let text = equal.to_text() + &difference.unwrap_or_default();
        Ok(text
            .replace(&paths[0].display().to_string(), "LEFT")
            .replace(&paths[1].display().to_string(), "RIGHT"))
    }

    #[track_caller]
    fn assert_contains(runs: [&[HashRecord]; 2], facts: &[&str]) {
        let text = diff(runs).unwrap();
        facts.iter().for_each(|fact| assert!(text.contains(fact), "no '{fact}' in {text}"));
    }

    #[test]
    fn the_first_difference_in_the_order_of_cause_and_effect_is_named() {
        use HashKind::{Gradient, Parameter};
        let common = [record(0, None, &[]), record(1, Some(2.0), &[])];
        let [start, first] = &common;
        let with = |last: HashRecord| [start.clone(), first.clone(), last];
        let plain = with(record(2, Some(1.5), &[]));
        assert_eq!(diff([&plain, &plain]).unwrap(), "equal: 3 records in common, of steps 0 to 2\n");
        let later = [("d", Parameter), ("b", Gradient), ("c", Gradient), ("a", Gradient)];
        assert_contains(
            [&plain, &with(record(2, Some(1.25), &later))],
            &[
                "step 2, in the loss: 1.5 and 1.25; backward then computes the gradient of c of unit head",
                "3 of 4 gradients and 1 of 4",
            ],
        );
        assert_contains(
            [&plain, &with(record(2, Some(1.5), &later))],
            &[
                "equal: 2 records in common, of steps 0 to 1",
                "step 2, in the gradient of c of unit head",
                "backward pass of this unit",
            ],
        );
        assert_contains(
            [&plain, &with(record(2, Some(1.5), &later[..1]))],
            &["step 2, after the update, in the parameter d of unit head", "learning rate"],
        );
        let skipped = HashRecord { units: Vec::new(), ..record(2, Some(1.5), &[]) };
        assert_contains([&plain, &with(skipped)], &["step 2, in the update, which only RIGHT skipped"]);
        assert_contains(
            [&[record(0, None, &[("b", Parameter)])], &plain],
            &["before the first step", "b of unit block", "seeds"],
        );
    }

    #[test]
    fn a_changed_checkpoint_is_distinguished_from_a_step_and_missing_steps_are_reported() {
        let steps = |range: std::ops::RangeInclusive<u64>, changed: &[(&str, HashKind)]| -> Vec<HashRecord> {
            range.map(|step| record(step, Some(1.0), changed)).collect()
        };
        let whole = steps(1..=4, &[]);
        let changed = [("b", HashKind::Parameter)];
        let resumed = [steps(1..=2, &[]), vec![record(2, None, &changed)], steps(3..=4, &changed)].concat();
        assert_contains(
            [&whole, &resumed],
            &[
                "equal: the records of step 1\n",
                "before the step after step 2, in the parameter b of unit block",
                "RIGHT resumed after step 2",
            ],
        );
        assert_contains([&resumed[2..], &whole], &["LEFT resumed after step 2"]);
        let other = steps(4..=4, &changed);
        assert_contains(
            [&whole, &other],
            &["step 4, after the update", "no earlier step is recorded by both runs"],
        );
        let other = [&whole[..1], &other].concat();
        assert_contains(
            [&whole, &other],
            &["no step between 1 and 4 is recorded by both runs", "hash_interval = 1"],
        );
        let refused = diff([&whole, &steps(5..=6, &[])]).unwrap_err().to_string();
        assert!(refused.contains("no recorded step in common"), "{refused}");
        let mut other = record(1, Some(1.0), &[]);
        other.units[1].tensors.pop();
        let refused = diff([&whole, &[other]]).unwrap_err().to_string();
        assert!(refused.contains("different tensors, 4 and 3 of them"), "{refused}");
    }
}
