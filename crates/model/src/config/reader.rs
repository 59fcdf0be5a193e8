//! Reading values from a `config.json`.

use crate::error::{ModelError, Result};
use serde_json::{Map, Value};
use trireme_base::json_text;

/// Maximum size. A larger number is treated as a damaged config.
const SIZE_MAX: u64 = 1 << 24;

pub(crate) struct Reader<'a> {
    pub(crate) map: &'a Map<String, Value>,
    pub(crate) family: &'static str,
}

impl Reader<'_> {
    pub(crate) fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    pub(crate) fn size(&self, key: &'static str) -> Result<usize> {
        self.optional_size(key)?.ok_or_else(|| self.missing(key))
    }

    pub(crate) fn missing(&self, key: &'static str) -> ModelError {
        ModelError::MissingKey { key, family: self.family.to_owned() }
    }

    /// Returns a non-negative integer.
    pub(crate) fn non_negative(&self, key: &'static str, default: usize) -> Result<usize> {
        let Some(value) = self.get(key) else { return Ok(default) };
        match value.as_u64() {
            Some(number @ 0..=SIZE_MAX) => Ok(number as usize),
            _ => Err(wrong(key, value, "a whole number up to 16777216")),
        }
    }

    pub(crate) fn optional_size(&self, key: &'static str) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64() {
            Some(size @ 1..=SIZE_MAX) => Ok(Some(size as usize)),
            _ => Err(wrong(key, value, "a whole number from 1 to 16777216")),
        }
    }

    pub(crate) fn size_or(&self, key: &'static str, default: usize) -> Result<usize> {
        Ok(self.optional_size(key)?.unwrap_or(default))
    }

    pub(crate) fn number(&self, key: &'static str, default: f64) -> Result<f64> {
        let Some(value) = self.get(key) else { return Ok(default) };
        match value.as_f64() {
            Some(number) if number > 0.0 && number.is_finite() => Ok(number),
            _ => Err(wrong(key, value, "a positive number")),
        }
    }

    /// Returns a positive number as f32. Fails if the number rounds to 0, to a subnormal number or to infinity.
    pub(crate) fn number_f32(&self, key: &'static str, default: f64) -> Result<f32> {
        let number = self.number(key, default)? as f32;
        let found =
            || wrong(key, self.get(key).unwrap_or(&Value::Null), "a positive number within the range of f32");
        if number.is_normal() { Ok(number) } else { Err(found()) }
    }

    /// Returns a positive number, or `None` if the key is missing or null.
    pub(crate) fn optional_number(&self, key: &'static str) -> Result<Option<f64>> {
        self.get(key).map(|_| self.number(key, 1.0)).transpose()
    }

    /// Returns whether the key is present, even with null.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    pub(crate) fn flag(&self, key: &'static str, default: bool) -> Result<bool> {
        let Some(value) = self.get(key) else { return Ok(default) };
        value.as_bool().ok_or_else(|| wrong(key, value, "true or false"))
    }

    /// Returns the weight of a loss, at least 0.
    pub(crate) fn weight(&self, key: &'static str, default: f64) -> Result<f32> {
        match self.get(key) {
            Some(value) if value.as_f64() == Some(0.0) => Ok(0.0),
            None if default == 0.0 => Ok(0.0),
            _ => self.number_f32(key, default),
        }
    }

    /// Returns a list of indices below `len`; empty if the key is missing or null.
    pub(crate) fn indices(&self, key: &'static str, len: usize) -> Result<Vec<usize>> {
        let Some(value) = self.get(key) else { return Ok(Vec::new()) };
        let index =
            |value: &Value| value.as_u64().filter(|&index| index < len as u64).map(|index| index as usize);
        let indices = value.as_array().and_then(|all| all.iter().map(index).collect::<Option<Vec<usize>>>());
        indices.ok_or_else(|| wrong(key, value, &format!("a list of numbers below {len}")))
    }

    /// Rejects a key whose value asks for arithmetic that is not implemented. The `accepted` values are JSON.
    pub(crate) fn require(&self, key: &str, accepted: &[&str]) -> Result<()> {
        let Some(value) = self.get(key) else { return Ok(()) };
        let is_same = |text: &&str| match (value.as_f64(), text.parse::<f64>()) {
            (Some(found), Ok(accepted)) => found == accepted,
            _ => serde_json::from_str::<Value>(text).is_ok_and(|accepted| accepted == *value),
        };
        if accepted.iter().any(is_same) { Ok(()) } else { Err(wrong(key, value, &accepted.join(" or "))) }
    }
}

/// Returns an error unless the size `fits`.
pub(crate) fn check_size(key: &str, found: usize, fits: bool, expected: String) -> Result<()> {
    if fits { Ok(()) } else { Err(wrong(key, &found.into(), &expected)) }
}

/// Returns the text of a value for an error message.
fn display_value(value: &Value) -> String {
    if value.is_string() { json_text(value) } else { value.to_string() }
}

pub(crate) fn wrong(key: &str, value: &Value, expected: &str) -> ModelError {
    ModelError::WrongValue { key: key.to_owned(), found: display_value(value), expected: expected.to_owned() }
}

/// Returns the f64 with the same shortest text as `x`: 1e-5 instead of 9.99999974e-6.
pub(crate) fn shortest(x: f32) -> f64 {
    x.to_string().parse().expect("a printed number parses")
}
