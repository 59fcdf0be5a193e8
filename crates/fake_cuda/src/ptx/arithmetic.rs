//! The arithmetic of instructions, on the bits of registers.

use super::instruction::{Binary, Comparison, Rounding, Type, Unary};

pub(super) fn masked(bits: u64, num_bytes: usize) -> u64 {
    if num_bytes >= 8 { bits } else { bits & ((1 << (8 * num_bytes)) - 1) }
}

/// Returns the value of an integer.
pub(super) fn integer(bits: u64, of_type: Type) -> i128 {
    let size = of_type.num_bytes();
    let bits = masked(bits, size);
    let is_negative = matches!(of_type, Type::Signed(_)) && bits >> (8 * size - 1) & 1 == 1;
    i128::from(bits) - if is_negative { 1 << (8 * size) } else { 0 }
}

/// Returns the bits that a load writes to a register, which may be wider.
pub(super) fn extended(bits: u64, of_type: Type) -> u64 {
    match of_type {
        Type::Signed(_) => integer(bits, of_type) as u64,
        _ => bits,
    }
}

pub(super) fn f32_of(bits: u64) -> f32 {
    f32::from_bits(bits as u32)
}

pub(super) fn bits_of(value: f32) -> u64 {
    value.to_bits().into()
}

pub(super) fn unary(operation: Unary, of_type: Type, bits: u64) -> u64 {
    let size = of_type.num_bytes();
    let f64_of = f64::from_bits(bits);
    match (operation, of_type) {
        (Unary::Move, _) => bits,
        (Unary::Not, Type::Predicate) => u64::from(bits == 0),
        (Unary::Not, _) => masked(!bits, size),
        (Unary::Neg, Type::F32) => bits_of(-f32_of(bits)),
        (Unary::Neg, Type::F64) => (-f64_of).to_bits(),
        (Unary::Neg, _) => masked(bits.wrapping_neg(), size),
        (Unary::Abs, Type::F64) => f64_of.abs().to_bits(),
        (Unary::Abs, _) => bits_of(f32_of(bits).abs()),
        (Unary::Clz, _) => u64::from(masked(bits, size).leading_zeros()) - (64 - 8 * size as u64),
        (Unary::Popc, _) => u64::from(masked(bits, size).count_ones()),
        (Unary::Sqrt, Type::F64) => f64_of.sqrt().to_bits(),
        (Unary::Sqrt, _) => bits_of(f32_of(bits).sqrt()),
        (Unary::Reciprocal, Type::F64) => (1.0 / f64_of).to_bits(),
        (Unary::Reciprocal, _) => bits_of(1.0 / f32_of(bits)),
        (Unary::Exp2, _) => bits_of(flushed(flushed(f32_of(bits)).exp2())),
    }
}

/// Replaces subnormal values by zero.
pub(super) fn flushed(value: f32) -> f32 {
    if value.is_subnormal() { 0.0_f32.copysign(value) } else { value }
}

/// Computes an operation of two floats of the same type.
macro_rules! of_floats {
    ($operation:expr, $left:expr, $right:expr) => {{
        let (x, y) = ($left, $right);
        match $operation {
            Binary::Add => x + y,
            Binary::Sub => x - y,
            Binary::Mul => x * y,
            Binary::Div => x / y,
            Binary::Min => x.min(y),
            Binary::Max => x.max(y),
            Binary::CopySign => y.copysign(x),
            operation => unreachable!("{operation:?} of floats"),
        }
    }};
}

pub(super) fn binary(operation: Binary, of_type: Type, [left, right]: [u64; 2]) -> u64 {
    match of_type {
        Type::F32 if operation == Binary::AddToZero => {
            let (x, y) = (f32_of(left), f32_of(right));
            let (exact, nearest) = (f64::from(x) + f64::from(y), x + y);
            let is_beyond = f64::from(nearest).abs() > exact.abs();
            bits_of(if is_beyond { f32::from_bits(nearest.to_bits() - 1) } else { nearest })
        }
        Type::F32 => bits_of(of_floats!(operation, f32_of(left), f32_of(right))),
        Type::F64 => of_floats!(operation, f64::from_bits(left), f64::from_bits(right)).to_bits(),
        Type::Bits(_) | Type::Signed(_) | Type::Predicate => {
            let (size, bits) = (of_type.num_bytes(), 8 * of_type.num_bytes() as u32);
            let (x, y) = (integer(left, of_type), integer(right, of_type));
            // Shifts by more than the width give 0, or the sign.
            let distance = (right as u32).min(bits);
            let result = match operation {
                Binary::Add => x + y,
                Binary::Sub => x - y,
                Binary::Mul => x * y,
                Binary::MulWide => return masked((x * y) as u64, 2 * size),
                Binary::MulHigh if matches!(of_type, Type::Bits(_)) => {
                    ((x as u128 * y as u128) >> bits) as i128
                }
                Binary::MulHigh => (x * y) >> bits,
                // Undefined for 0.
                Binary::Div => x.checked_div(y).unwrap_or(-1),
                Binary::Rem => x.checked_rem(y).unwrap_or(x),
                Binary::Min => x.min(y),
                Binary::Max => x.max(y),
                Binary::And => x & y,
                Binary::Or => x | y,
                Binary::Xor => x ^ y,
                Binary::Shl => x << distance,
                Binary::Shr => x >> distance,
                Binary::CopySign | Binary::AddToZero => unreachable!("{operation:?} of integers"),
            };
            masked(result as u64, size)
        }
    }
}

pub(super) fn multiply_add(of_type: Type, rounding: Rounding, [left, right, added]: [u64; 3]) -> u64 {
    match (of_type, rounding) {
        (Type::F32, Rounding::Down) => {
            let exact = f64::from(f32_of(left)) * f64::from(f32_of(right)) + f64::from(f32_of(added));
            let nearest = exact as f32;
            bits_of(if f64::from(nearest) > exact { nearest.next_down() } else { nearest })
        }
        (Type::F32, _) => bits_of(f32_of(left).mul_add(f32_of(right), f32_of(added))),
        (Type::F64, _) => {
            f64::from_bits(left).mul_add(f64::from_bits(right), f64::from_bits(added)).to_bits()
        }
        _ => {
            let product = binary(Binary::Mul, of_type, [left, right]);
            binary(Binary::Add, of_type, [product, added])
        }
    }
}

pub(super) fn convert(to: Type, from: Type, rounding: Rounding, saturates: bool, bits: u64) -> u64 {
    let value = match from {
        Type::F32 => f64::from(f32_of(bits)),
        Type::F64 => f64::from_bits(bits),
        _ => {
            let value = integer(bits, from);
            match to {
                Type::F32 => return bits_of(value as f32),
                Type::F64 => return (value as f64).to_bits(),
                _ => return masked(value as u64, to.num_bytes()),
            }
        }
    };
    let value = match rounding {
        Rounding::Nearest => value,
        Rounding::Zero => value.trunc(),
        Rounding::Down => value.floor(),
        Rounding::Up => value.ceil(),
    };
    match to {
        // NaN becomes 0.
        Type::F32 if saturates => bits_of(if value > 0.0 { value.min(1.0) as f32 } else { 0.0 }),
        Type::F32 => bits_of(value as f32),
        Type::F64 => value.to_bits(),
        Type::Signed(4) => masked(value as i32 as u64, 4),
        Type::Bits(4) => u64::from(value as u32),
        Type::Signed(_) => value as i64 as u64,
        _ => value as u64,
    }
}

pub(super) fn compares(comparison: Comparison, of_type: Type, [left, right]: [u64; 2]) -> bool {
    use std::cmp::Ordering;
    let order = match of_type {
        Type::F32 => f32_of(left).partial_cmp(&f32_of(right)),
        Type::F64 => f64::from_bits(left).partial_cmp(&f64::from_bits(right)),
        _ => Some(integer(left, of_type).cmp(&integer(right, of_type))),
    };
    let holds = |if_nan: bool, holds: fn(Ordering) -> bool| order.map_or(if_nan, holds);
    match comparison {
        Comparison::Less(if_nan) => holds(if_nan, Ordering::is_lt),
        Comparison::LessOrEqual(if_nan) => holds(if_nan, Ordering::is_le),
        Comparison::Equal(if_nan) => holds(if_nan, Ordering::is_eq),
        Comparison::NotEqual(if_nan) => holds(if_nan, Ordering::is_ne),
        Comparison::GreaterOrEqual(if_nan) => holds(if_nan, Ordering::is_ge),
        Comparison::Greater(if_nan) => holds(if_nan, Ordering::is_gt),
        Comparison::IsNan => order.is_none(),
    }
}
