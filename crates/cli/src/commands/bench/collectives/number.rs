use std::fmt;
use trireme_base::{Bf16, F16};
use trireme_comm::Element;

/// The type of the elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Dtype {
    F32,
    F64,
    F16,
    Bf16,
    I32,
    I64,
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = clap::ValueEnum::to_possible_value(self).expect("every type has a name");
        f.write_str(value.get_name())
    }
}

/// An element that can be compared with what it should be.
pub(super) trait Number: Element {
    /// The nearest one.
    fn of(value: f64) -> Self;

    fn value(self) -> f64;

    /// Whether it is this number, as near as sums of its type come to it.
    fn is(self, expected: f64) -> bool {
        let (found, expected) = (self.value(), Self::of(expected).value());
        found == expected || (found - expected).abs() <= expected.abs() / 32.0
    }
}

macro_rules! primitive {
    ($($type:ty),+) => {$(
        impl Number for $type {
            fn of(value: f64) -> Self {
                value as $type
            }

            fn value(self) -> f64 {
                self as f64
            }
        }
    )+};
}

macro_rules! half {
    ($($type:ty),+) => {$(
        impl Number for $type {
            fn of(value: f64) -> Self {
                <$type>::from_f32(value as f32)
            }

            fn value(self) -> f64 {
                f64::from(self.to_f32())
            }
        }
    )+};
}

primitive!(f32, f64, i32, i64);
half!(F16, Bf16);
