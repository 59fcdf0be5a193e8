use trireme_base::{Bf16, F16};
use trireme_comm::Element;

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Dtype {
    F32,
    F64,
    F16,
    Bf16,
    I32,
    I64,
}

/// Returns the name of a value on the command line.
pub(super) fn name(value: impl clap::ValueEnum) -> String {
    value.to_possible_value().expect("no value is hidden").get_name().to_owned()
}

/// An element whose value can be compared with an expected number.
pub(super) trait Number: Element {
    /// Converts a number to the nearest value of this type.
    fn of(value: f64) -> Self;

    fn value(self) -> f64;

    /// Whether the value equals `expected` within 1/32 of it, which covers the rounding of sums in every type.
    fn is_close_to(self, expected: f64) -> bool {
        let (found, expected) = (self.value(), Self::of(expected).value());
        found == expected || (found - expected).abs() <= expected.abs() / 32.0
    }
}

macro_rules! number {
    ($type:ty, $of:expr, $value:expr) => {
        impl Number for $type {
            fn of(value: f64) -> Self {
                $of(value)
            }

            fn value(self) -> f64 {
                $value(self)
            }
        }
    };
}

number!(f32, |value| value as f32, f64::from);
number!(f64, f64::from, f64::from);
number!(i32, |value| value as i32, f64::from);
number!(i64, |value| value as i64, |value| value as f64);
number!(F16, |value| F16::from_f32(value as f32), |value: F16| value.to_f32().into());
number!(Bf16, |value| Bf16::from_f32(value as f32), |value: Bf16| value.to_f32().into());
