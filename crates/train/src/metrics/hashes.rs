//! `hashes.jsonl`: hashes of the results of recorded steps, by which two runs are compared.

use super::json_lines::JsonLines;
use super::record_file::Unwritten;
use super::{MetricsError, Written};
use serde::{Deserialize, Serialize};
use std::path::Path;
use trireme_parallel::StepHashes;
use trireme_tensor::ParameterTable;

/// The file of hashes in a run's folder, with one [`HashRecord`] per line.
pub const HASHES_FILE: &str = "hashes.jsonl";

/// Maximum number of bytes in a line of `hashes.jsonl`, enough for some hundred thousand tensors.
pub const HASH_LINE_BYTES_MAX: usize = 16 << 20;

/// Hashes of one step, or of the parameters that a run begins or resumes with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HashRecord {
    /// The step. Parameter hashes are of the parameters after it.
    pub step: u64,
    /// The bits of the loss as an f64. `None` in the record of the parameters that a run begins or resumes with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss: Option<HexBits>,
    /// Hashes of all units, in forward order; empty if the step was skipped.
    pub units: Vec<UnitHashes>,
}

/// Hashes of a unit's tensors.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnitHashes {
    /// Name of the unit.
    pub unit: String,
    /// Hashes of the unit's parameters, in the model's order.
    pub tensors: Vec<TensorHashes>,
}

/// Hashes of a parameter and its gradient, as described at [`StepHashes`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorHashes {
    /// Name of the parameter.
    pub name: String,
    /// Hash of its reduced gradient. `None` in the record of the parameters that a run begins or resumes with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gradient: Option<HexBits>,
    /// Hash of the parameter after the update.
    pub parameter: HexBits,
}

/// 64 bits, written as 16 hexadecimal digits because many JSON readers round large numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "&str")]
pub struct HexBits(pub u64);

impl From<HexBits> for String {
    fn from(HexBits(bits): HexBits) -> Self {
        format!("{bits:016x}")
    }
}

impl TryFrom<&str> for HexBits {
    type Error = String;

    fn try_from(text: &str) -> Result<Self, String> {
        let is_hex = text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let bits = u64::from_str_radix(text, 16).ok().filter(|_| is_hex);
        bits.map(HexBits).ok_or_else(|| format!("expected 16 hexadecimal digits, found {text:?}"))
    }
}

impl HashRecord {
    /// Returns the record of the parameters after `step`, with which a run begins or resumes.
    pub(crate) fn of_start(step: u64, parameters: &[u64], table: &ParameterTable) -> Self {
        HashRecord { step, loss: None, units: units(table, None, parameters) }
    }

    /// Returns the record of a step with this loss. `hashes` is `None` if the step was skipped.
    pub(crate) fn of_step(step: u64, loss: f64, hashes: Option<&StepHashes>, table: &ParameterTable) -> Self {
        let units = hashes.map(|hashes| units(table, Some(&hashes.gradients), &hashes.parameters));
        HashRecord { step, loss: Some(HexBits(loss.to_bits())), units: units.unwrap_or_default() }
    }
}

fn units(table: &ParameterTable, gradients: Option<&[u64]>, parameters: &[u64]) -> Vec<UnitHashes> {
    let tensor = |index: usize| TensorHashes {
        name: table.parameters()[index].name.clone(),
        gradient: gradients.map(|gradients| HexBits(gradients[index])),
        parameter: HexBits(parameters[index]),
    };
    let unit = |unit: &trireme_tensor::UnitInfo| UnitHashes {
        unit: unit.name.clone(),
        tensors: unit.parameters.clone().map(tensor).collect(),
    };
    table.units().iter().map(unit).collect()
}

#[derive(Debug)]
pub(crate) struct HashWriter(JsonLines);

impl HashWriter {
    /// Opens the file in a run's folder, to continue after `resumed_step`. Later records are removed.
    pub(crate) fn open(folder: &Path, resumed_step: u64) -> Result<Self, MetricsError> {
        let lines = JsonLines::open(folder.join(HASHES_FILE), resumed_step, HASH_LINE_BYTES_MAX)?;
        Ok(HashWriter(lines))
    }

    /// Writes a record. If the disk is full, the record waits in memory. Fails if the limit of waiting bytes is exceeded, or if the record
    /// is too long.
    pub(crate) fn write(&mut self, record: &HashRecord) -> Result<Written, MetricsError> {
        let has_waited = self.0.file.is_waiting();
        match self.0.write(record) {
            Ok(()) if has_waited => Ok(Written::WithWaiting),
            Ok(()) => Ok(Written::Now),
            Err(Unwritten::Waits(error)) => Ok(Written::Later(vec![error])),
            Err(Unwritten::Refused(error)) => Err(error),
        }
    }

    pub(crate) fn finish(&mut self) -> Result<(), MetricsError> {
        self.0.file.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(step: u64, loss: Option<HexBits>, name: &str) -> HashRecord {
        let gradient = loss.map(|_| HexBits(1));
        let tensors = vec![TensorHashes { name: name.to_owned(), gradient, parameter: HexBits(u64::MAX) }];
        HashRecord { step, loss, units: vec![UnitHashes { unit: "head".to_owned(), tensors }] }
    }

    #[test]
    fn a_resume_cuts_later_records_and_a_record_is_read_as_it_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let loss = Some(HexBits(2.5_f64.to_bits()));
        let mut writer = HashWriter::open(folder.path(), 0).unwrap();
        for step in 0..=4 {
            let record = record(step, loss.filter(|_| step > 0), "weight");
            assert!(matches!(writer.write(&record), Ok(Written::Now)));
        }
        HashWriter::open(folder.path(), 2).unwrap().write(&record(2, None, "weight")).unwrap();
        let text = std::fs::read_to_string(folder.path().join(HASHES_FILE)).unwrap();
        let found: Vec<HashRecord> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let expected = [(0, None), (1, loss), (2, loss), (2, None)];
        assert_eq!(found, expected.map(|(step, loss)| record(step, loss, "weight")));
        assert!(
            text.contains("{\"step\":1,\"loss\":\"4004000000000000\",\"units\":[{\"unit\":\"head\""),
            "{text}"
        );
    }

    #[test]
    fn a_record_that_readers_would_refuse_is_not_written() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = HashWriter::open(folder.path(), 0).unwrap();
        let long = record(1, None, &"x".repeat(HASH_LINE_BYTES_MAX));
        let error = writer.write(&long).unwrap_err().to_string();
        assert!(error.contains("hashes.jsonl") && error.contains("hash_interval = 0"), "{error}");
        assert_eq!(std::fs::read(folder.path().join(HASHES_FILE)).unwrap(), b"");
    }

    #[test]
    fn bits_are_sixteen_hexadecimal_digits() {
        for text in ["", "0", "+000000000000000", "00000000000000000", "000000000000000g", "é00000000000000"]
        {
            let refused = HexBits::try_from(text).unwrap_err();
            assert!(refused.contains("16 hexadecimal digits"), "{refused}");
        }
        assert_eq!(HexBits::try_from("00000000000000ff"), Ok(HexBits(255)));
    }
}
