use std::fmt;
use std::str::FromStr;

/// Size in bytes of a huge page on most machines: 2 MiB, mapped by a single page-table entry.
pub const HUGE_PAGE_BYTES: usize = 2 << 20;

/// A number of bytes that is printed and parsed with binary units: `512MiB`, `1.5GiB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Bytes(pub u64);

const UNITS: [(&str, u64); 5] =
    [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];

impl Bytes {
    /// Returns the largest unit that is at most this number, with the unit's size in bytes; `("B", 1)` for zero.
    pub fn unit(self) -> (&'static str, u64) {
        UNITS.into_iter().find(|(_, size)| self.0 >= *size).unwrap_or(("B", 1))
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, size) = self.unit();
        let text = if size == 1 {
            format!("{}{unit}", self.0)
        } else {
            format!("{:.2}{unit}", self.0 as f64 / size as f64)
        };
        f.pad(&text)
    }
}

/// The error returned when a text is not a size in bytes. Holds the text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not a size; write a number with a unit, such as 512MiB or 1.5GiB")]
pub struct ParseBytesError(pub String);

impl FromStr for Bytes {
    type Err = ParseBytesError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let refuse = || ParseBytesError(text.to_owned());
        let trimmed = text.trim();
        let (number, size) = UNITS
            .into_iter()
            .find_map(|(unit, size)| trimmed.strip_suffix(unit).map(|number| (number, size)))
            .unwrap_or((trimmed, 1));
        let number: f64 = number.trim().parse().map_err(|_| refuse())?;
        let bytes = number * size as f64;
        // 2^53: above this bound an f64 cannot represent every integer.
        if !(0.0..=9_007_199_254_740_992.0).contains(&bytes) {
            return Err(refuse());
        }
        Ok(Bytes(bytes.round() as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prints_the_largest_fitting_unit() {
        assert_eq!(Bytes(0).to_string(), "0B");
        assert_eq!(Bytes(1023).to_string(), "1023B");
        assert_eq!(Bytes(1536).to_string(), "1.50KiB");
        assert_eq!(Bytes(3 << 30).to_string(), "3.00GiB");
        assert_eq!(format!("{:>10}", Bytes(1023)), "     1023B");
    }

    #[test]
    fn parses_what_people_write_and_refuses_the_rest() {
        assert_eq!("512MiB".parse(), Ok(Bytes(512 << 20)));
        assert_eq!("1.5 GiB".parse(), Ok(Bytes(3 << 29)));
        assert_eq!("17".parse(), Ok(Bytes(17)));
        for wrong in ["", "MiB", "-1B", "1e300TiB", "NaN", "12MB"] {
            assert!(wrong.parse::<Bytes>().is_err(), "{wrong}");
        }
    }
}
