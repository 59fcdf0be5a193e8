//! Conversion between TOML values and the values of keys.

use std::fmt::Display;
use std::net::IpAddr;
use std::ops::{Bound, RangeBounds, RangeInclusive};
use std::path::PathBuf;
use std::time::Duration;
use toml::de::DeValue;
use trireme_base::Bytes;

/// A type of values that keys can have.
pub(super) trait ConfigValue: Sized {
    /// Returns the accepted values, as a phrase that follows "expected".
    fn expected() -> String;

    /// Returns the value, or the accepted values as an error.
    fn read(value: &DeValue<'_>) -> Result<Self, String>;

    /// Returns the TOML that reads as this value, or `None` if the key is left out of a written config.
    fn write(&self) -> Option<toml::Value>;
}

pub(super) fn read_within<T>(value: &DeValue<'_>, range: &impl RangeBounds<T>) -> Result<T, String>
where
    T: ConfigValue + PartialOrd + Display,
{
    T::read(value).ok().filter(|value| range.contains(value)).ok_or_else(|| expected_within(range))
}

/// Returns the accepted values within `range`, as a phrase that follows "expected".
pub(super) fn expected_within<T: ConfigValue + Display>(range: &impl RangeBounds<T>) -> String {
    let kind = T::expected();
    match (range.start_bound(), range.end_bound()) {
        (Bound::Included(low), Bound::Included(high)) => format!("{kind} from {low} to {high}"),
        (Bound::Included(low), Bound::Excluded(high)) => format!("{kind} from {low} to below {high}"),
        (Bound::Included(low), Bound::Unbounded) => format!("{kind}, {low} or more"),
        (Bound::Excluded(low), Bound::Included(high)) => format!("{kind} above {low} and up to {high}"),
        (Bound::Excluded(low), Bound::Excluded(high)) => format!("{kind} above {low} and below {high}"),
        (Bound::Excluded(low), Bound::Unbounded) => format!("{kind} above {low}"),
        (Bound::Unbounded, Bound::Included(high)) => format!("{kind}, {high} or less"),
        (Bound::Unbounded, Bound::Excluded(high)) => format!("{kind} below {high}"),
        (Bound::Unbounded, Bound::Unbounded) => kind,
    }
}

/// All numbers above `low`: a range that leaves out its start.
pub(super) fn above(low: f64) -> (Bound<f64>, Bound<f64>) {
    (Bound::Excluded(low), Bound::Unbounded)
}

/// All numbers above `low` and up to `high`.
pub(super) fn above_up_to(low: f64, high: f64) -> (Bound<f64>, Bound<f64>) {
    (Bound::Excluded(low), Bound::Included(high))
}

macro_rules! whole_number {
    ($($type:ty),+) => {$(
        impl ConfigValue for $type {
            fn expected() -> String {
                "a whole number".to_owned()
            }

            fn read(value: &DeValue<'_>) -> Result<Self, String> {
                let integer = value.as_integer().ok_or_else(Self::expected)?;
                // TOML guarantees only signed integers of 64 bits.
                let number = i64::from_str_radix(integer.as_str(), integer.radix());
                number.ok().and_then(|number| number.try_into().ok()).ok_or_else(Self::expected)
            }

            fn write(&self) -> Option<toml::Value> {
                Some(toml::Value::Integer(
                    i64::try_from(*self).expect("the number came from an i64 or is a small default"),
                ))
            }
        }
    )+};
}

whole_number!(u16, u32, u64, usize, i64);

impl ConfigValue for f64 {
    fn expected() -> String {
        "a number".to_owned()
    }

    fn read(value: &DeValue<'_>) -> Result<Self, String> {
        let number = match value {
            DeValue::Float(float) => float.as_str().parse().ok(),
            // Users may write `lr = 1`. It is written back as `1.0`.
            DeValue::Integer(_) => i64::read(value).ok().map(|integer| integer as f64),
            _ => None,
        };
        number.filter(|number: &f64| number.is_finite()).ok_or_else(Self::expected)
    }

    fn write(&self) -> Option<toml::Value> {
        Some(toml::Value::Float(*self))
    }
}

impl ConfigValue for bool {
    fn expected() -> String {
        "true or false".to_owned()
    }

    fn read(value: &DeValue<'_>) -> Result<Self, String> {
        value.as_bool().ok_or_else(Self::expected)
    }

    fn write(&self) -> Option<toml::Value> {
        Some(toml::Value::Boolean(*self))
    }
}

impl ConfigValue for String {
    fn expected() -> String {
        "a string".to_owned()
    }

    fn read(value: &DeValue<'_>) -> Result<Self, String> {
        value.as_str().map(str::to_owned).ok_or_else(Self::expected)
    }

    fn write(&self) -> Option<toml::Value> {
        Some(toml::Value::String(self.clone()))
    }
}

/// A limit on memory. In a config, it is a size with a unit, or "none" for no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByteLimit(pub Option<Bytes>);

impl ConfigValue for ByteLimit {
    fn expected() -> String {
        "a size with a unit, such as \"512MiB\" or \"1.5GiB\", or \"none\"".to_owned()
    }

    fn read(value: &DeValue<'_>) -> Result<Self, String> {
        match value.as_str() {
            Some("none") => Ok(ByteLimit(None)),
            Some(text) => text.parse().map(|bytes| ByteLimit(Some(bytes))).map_err(|_| Self::expected()),
            None => Err(Self::expected()),
        }
    }

    fn write(&self) -> Option<toml::Value> {
        // Displayed sizes are rounded, but this one must parse to the same number of bytes.
        let exact = |bytes: Bytes| match bytes.to_string().parse() {
            Ok(read) if bytes == read => bytes.to_string(),
            _ => format!("{}B", bytes.0),
        };
        Some(toml::Value::String(self.0.map_or_else(|| "none".to_owned(), exact)))
    }
}

/// The interval between repetitions of an action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interval {
    /// A number of steps, at least 1.
    Steps(u64),
    /// A time, which is checked at the end of each step.
    Time(Duration),
}

impl std::fmt::Display for Interval {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Interval::Steps(1) => f.write_str("1 step"),
            Interval::Steps(steps) => write!(f, "{steps} steps"),
            Interval::Time(time) => write!(f, "{}s", time.as_secs()),
        }
    }
}

impl ConfigValue for Interval {
    fn expected() -> String {
        format!("a number of steps, 1 or more, or {}", Duration::expected())
    }

    fn read(value: &DeValue<'_>) -> Result<Self, String> {
        let steps = || u64::read(value).ok().filter(|&steps| steps > 0).map(Interval::Steps);
        let time = || Duration::read(value).ok().map(Interval::Time);
        steps().or_else(time).ok_or_else(Self::expected)
    }

    fn write(&self) -> Option<toml::Value> {
        match self {
            Interval::Steps(steps) => steps.write(),
            Interval::Time(time) => time.write(),
        }
    }
}

/// Whole seconds, at least 1.
impl ConfigValue for Duration {
    fn expected() -> String {
        "a time such as \"90s\", \"10m\" or \"1h\"".to_owned()
    }

    fn read(value: &DeValue<'_>) -> Result<Self, String> {
        let refuse = || Self::expected();
        let text = value.as_str().ok_or_else(refuse)?.trim();
        let unit = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(refuse)?;
        let seconds = match text[unit..].trim() {
            "s" => 1,
            "m" | "min" => 60,
            "h" => 3600,
            "d" => 86_400,
            _ => return Err(refuse()),
        };
        let number = text[..unit].parse::<u32>().ok().filter(|&number| number > 0).ok_or_else(refuse)?;
        Ok(Duration::from_secs(u64::from(number) * seconds))
    }

    fn write(&self) -> Option<toml::Value> {
        Some(toml::Value::String(format!("{}s", self.as_secs())))
    }
}

/// TCP ports, written as `40000-40063`.
impl ConfigValue for RangeInclusive<u16> {
    fn expected() -> String {
        "ports such as \"40000-40063\", from 1 to 65535".to_owned()
    }

    fn read(value: &DeValue<'_>) -> Result<Self, String> {
        let read = |text: &str| {
            let (first, last) = text.split_once('-').unwrap_or((text, text));
            let [first, last] = [first, last].map(|port| port.trim().parse().ok().filter(|&port| port > 0));
            Some(first?..=last?).filter(|ports: &Self| !ports.is_empty())
        };
        value.as_str().and_then(read).ok_or_else(Self::expected)
    }

    fn write(&self) -> Option<toml::Value> {
        Some(toml::Value::String(format!("{}-{}", self.start(), self.end())))
    }
}

impl ConfigValue for IpAddr {
    fn expected() -> String {
        "an IP address, such as \"127.0.0.1\" or \"::\"".to_owned()
    }

    fn read(value: &DeValue<'_>) -> Result<Self, String> {
        value.as_str().and_then(|text| text.parse().ok()).ok_or_else(Self::expected)
    }

    fn write(&self) -> Option<toml::Value> {
        Some(toml::Value::String(self.to_string()))
    }
}

impl ConfigValue for PathBuf {
    fn expected() -> String {
        "a path".to_owned()
    }

    fn read(value: &DeValue<'_>) -> Result<Self, String> {
        value.as_str().map(PathBuf::from).ok_or_else(Self::expected)
    }

    fn write(&self) -> Option<toml::Value> {
        let text = self.to_str().expect("a path that was read from TOML is valid UTF-8");
        Some(toml::Value::String(text.to_owned()))
    }
}

/// An optional key. An empty string unsets a value that was set earlier.
impl<T: ConfigValue> ConfigValue for Option<T> {
    fn expected() -> String {
        T::expected()
    }

    fn read(value: &DeValue<'_>) -> Result<Self, String> {
        if value.as_str() == Some("") { Ok(None) } else { T::read(value).map(Some) }
    }

    fn write(&self) -> Option<toml::Value> {
        self.as_ref().and_then(T::write)
    }
}

impl<T: ConfigValue> ConfigValue for Vec<T> {
    fn expected() -> String {
        format!("a list, each element {}", T::expected())
    }

    fn read(value: &DeValue<'_>) -> Result<Self, String> {
        let elements = value.as_array().ok_or_else(Self::expected)?;
        let read = |element: &DeValue<'_>| match element.as_str() {
            Some("") => Err("a list without empty strings".to_owned()),
            _ => T::read(element).map_err(|_| Self::expected()),
        };
        elements.iter().map(|element| read(element.get_ref())).collect()
    }

    fn write(&self) -> Option<toml::Value> {
        Some(toml::Value::Array(self.iter().filter_map(T::write).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::borrow::Cow;

    #[test]
    fn intervals_are_of_steps_or_of_time() {
        let read = |text: &str| Interval::read(&DeValue::String(Cow::Borrowed(text)));
        for (text, seconds) in [("90s", 90), ("10m", 600), ("10 min", 600), ("2h", 7200), ("1d", 86_400)] {
            let interval = read(text).unwrap();
            assert_eq!(interval, Interval::Time(Duration::from_secs(seconds)));
            assert_eq!(read(interval.write().unwrap().as_str().unwrap()), Ok(interval));
        }
        for wrong in ["", "m", "0s", "10", "10 parsecs", "-1s", "1.5h", "99999999999h"] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
        assert_eq!(Interval::Steps(5).write(), Some(toml::Value::Integer(5)));
    }

    #[test]
    fn ports_are_a_range() {
        let read = |text: &str| RangeInclusive::<u16>::read(&DeValue::String(Cow::Borrowed(text)));
        for (text, ports) in [("40000-40063", 40_000..=40_063), ("7 - 9", 7..=9), ("8", 8..=8)] {
            assert_eq!(read(text), Ok(ports.clone()));
            assert_eq!(read(ports.write().unwrap().as_str().unwrap()), Ok(ports));
        }
        for wrong in ["", "9-7", "0-9", "1-65536", "a-b", "1-2-3"] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn limits_in_bytes_are_read_again_as_they_were() {
        let read = |text: &str| ByteLimit::read(&DeValue::String(Cow::Borrowed(text)));
        assert_eq!(read("none"), Ok(ByteLimit(None)));
        for (text, bytes) in [("512MiB", 512 << 20), ("1.5GiB", 3 << 29), ("1234567B", 1_234_567)] {
            let limit = read(text).unwrap();
            assert_eq!(limit, ByteLimit(Some(Bytes(bytes))));
            let written = limit.write().unwrap();
            assert_eq!(read(written.as_str().unwrap()), Ok(limit), "{written}");
        }
        for wrong in ["", "lots", "-1GiB", "12MB"] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
        assert!(ByteLimit::read(&DeValue::Boolean(true)).is_err());
    }
}
