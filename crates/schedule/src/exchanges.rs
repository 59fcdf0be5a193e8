//! The exchanges of a unit's passes with other ranks, as written in programs.

use std::fmt;
use std::ops::Range;
use trireme_base::{AxisExchange, ExchangeKind, PassExchanges, UnitAxis};

/// Consecutive units with the same exchanges.
///
/// The text form lists the exchanges of each pass, with the axis and the bytes of the vector:
/// `1-4:F=tensor.all_gather/4096,tensor.reduce_scatter/4096:B=ring.shift/4096`. Passes without exchanges are left out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnitExchanges {
    /// The units.
    pub units: Range<usize>,
    /// The exchanges of their passes.
    pub passes: PassExchanges,
}

impl UnitExchanges {
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split(':');
        let (start, end) = parts.next()?.split_once('-')?;
        let mut passes = PassExchanges::default();
        for part in parts {
            let (name, exchanges) = part.split_once('=')?;
            let pass = match name {
                "F" => &mut passes.forward,
                "B" => &mut passes.backward,
                "I" => &mut passes.input_half,
                "W" => &mut passes.weight_half,
                _ => return None,
            };
            *pass = exchanges.split(',').map(parse_exchange).collect::<Option<_>>()?;
        }
        Some(UnitExchanges { units: start.parse().ok()?..end.parse().ok()?, passes })
    }
}

fn parse_exchange(text: &str) -> Option<AxisExchange> {
    let (axis, rest) = text.split_once('.')?;
    let (kind, num_bytes) = rest.split_once('/')?;
    let (axis, kind) = (UnitAxis::named(axis)?, ExchangeKind::named(kind)?);
    Some(AxisExchange { axis, kind, num_bytes: num_bytes.parse().ok()? })
}

impl fmt::Display for UnitExchanges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PassExchanges { forward, backward, input_half, weight_half } = &self.passes;
        write!(f, "{}-{}", self.units.start, self.units.end)?;
        for (name, exchanges) in [("F", forward), ("B", backward), ("I", input_half), ("W", weight_half)] {
            for (place, AxisExchange { axis, kind, num_bytes }) in exchanges.iter().enumerate() {
                let before = if place == 0 { format!(":{name}=") } else { ",".to_owned() };
                write!(f, "{before}{}.{}/{num_bytes}", axis.name(), kind.name())?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exchanges_read_back_as_written() {
        let text = "1-4:F=tensor.all_gather/4096,ring.shift/4096:I=heads.all_to_all/12";
        let exchanges = UnitExchanges::parse(text).unwrap();
        assert_eq!((exchanges.to_string(), exchanges.units), (text.to_owned(), 1..4));
        assert_eq!(exchanges.passes.forward.len(), 2);
        for text in [
            "",
            "1",
            "1-2:F",
            "1-2:X=ring.shift/1",
            "1-2:F=ring.all/1",
            "1-2:F=shift/1",
            "1-2:F=ring.shift/x",
        ] {
            assert_eq!(UnitExchanges::parse(text), None, "{text}");
        }
    }
}
