use bytemuck::Pod;
use trireme_base::{Bf16, DType, F16, ReduceOp};

/// A type whose vectors can be communicated and reduced: `f32`, `f64`, [`F16`], [`Bf16`], `u8`, `u32`, `u64`.
///
/// Sums of integers wrap; a sum of two 16-bit floats is taken in f32 and rounded to nearest even. With `Max` and `Min` of
/// floats NaN wins.
pub trait Element: Pod + Send + Sync + private::Reduce {
    /// The name of the type on the wire.
    const DTYPE: DType;
}

mod private {
    /// How two elements become one; sealed, because the other side of a wire must know it too.
    pub trait Reduce: Copy {
        fn sum(left: Self, right: Self) -> Self;
        fn max(left: Self, right: Self) -> Self;
        fn min(left: Self, right: Self) -> Self;
    }
}

macro_rules! float_element {
    ($type:ty, $dtype:expr) => {
        impl Element for $type {
            const DTYPE: DType = $dtype;
        }
        impl private::Reduce for $type {
            fn sum(left: Self, right: Self) -> Self {
                left + right
            }
            fn max(left: Self, right: Self) -> Self {
                if left > right || left.is_nan() { left } else { right }
            }
            fn min(left: Self, right: Self) -> Self {
                if left < right || left.is_nan() { left } else { right }
            }
        }
    };
}

macro_rules! half_element {
    ($type:ty, $dtype:expr) => {
        impl Element for $type {
            const DTYPE: DType = $dtype;
        }
        impl private::Reduce for $type {
            fn sum(left: Self, right: Self) -> Self {
                Self::from_f32(left.to_f32() + right.to_f32())
            }
            fn max(left: Self, right: Self) -> Self {
                Self::from_f32(private::Reduce::max(left.to_f32(), right.to_f32()))
            }
            fn min(left: Self, right: Self) -> Self {
                Self::from_f32(private::Reduce::min(left.to_f32(), right.to_f32()))
            }
        }
    };
}

macro_rules! integer_element {
    ($type:ty, $dtype:expr) => {
        impl Element for $type {
            const DTYPE: DType = $dtype;
        }
        impl private::Reduce for $type {
            fn sum(left: Self, right: Self) -> Self {
                left.wrapping_add(right)
            }
            fn max(left: Self, right: Self) -> Self {
                left.max(right)
            }
            fn min(left: Self, right: Self) -> Self {
                left.min(right)
            }
        }
    };
}

float_element!(f32, DType::F32);
float_element!(f64, DType::F64);
half_element!(F16, DType::F16);
half_element!(Bf16, DType::Bf16);
integer_element!(u8, DType::U8);
integer_element!(u32, DType::U32);
integer_element!(u64, DType::U64);

/// On which side of the operation the elements already there stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Left,
    Right,
}

/// Reduces `other` into `own`, both made of elements of `dtype`; `own` stands on `side`.
///
/// # Panics
/// If the lengths differ, the bytes are not whole, aligned elements, or `dtype` has no [`Element`].
pub(crate) fn reduce_into(own: &mut [u8], other: &[u8], dtype: DType, op: ReduceOp, side: Side) {
    match dtype {
        DType::F32 => reduce_typed::<f32>(own, other, op, side),
        DType::F64 => reduce_typed::<f64>(own, other, op, side),
        DType::F16 => reduce_typed::<F16>(own, other, op, side),
        DType::Bf16 => reduce_typed::<Bf16>(own, other, op, side),
        DType::U8 => reduce_typed::<u8>(own, other, op, side),
        DType::U32 => reduce_typed::<u32>(own, other, op, side),
        DType::U64 => reduce_typed::<u64>(own, other, op, side),
        DType::U16 => unreachable!("u16 is no Element, so no buffer of it exists"),
    }
}

fn reduce_typed<T: Element>(own: &mut [u8], other: &[u8], op: ReduceOp, side: Side) {
    let (own, other) = (bytemuck::cast_slice_mut::<u8, T>(own), bytemuck::cast_slice::<u8, T>(other));
    match op {
        ReduceOp::Sum => reduce_with(own, other, side, T::sum),
        ReduceOp::Max => reduce_with(own, other, side, T::max),
        ReduceOp::Min => reduce_with(own, other, side, T::min),
    }
}

fn reduce_with<T: Copy>(own: &mut [T], other: &[T], side: Side, combine: impl Fn(T, T) -> T) {
    assert_eq!(own.len(), other.len(), "reduced vectors have one length");
    let pairs = own.iter_mut().zip(other);
    match side {
        Side::Left => pairs.for_each(|(own, &other)| *own = combine(*own, other)),
        Side::Right => pairs.for_each(|(own, &other)| *own = combine(other, *own)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reduced<T: Element>(own: T, other: T, op: ReduceOp, side: Side) -> T {
        let mut values = [own];
        reduce_into(bytemuck::cast_slice_mut(&mut values), bytemuck::bytes_of(&other), T::DTYPE, op, side);
        values[0]
    }

    #[test]
    fn nan_wins_and_integers_wrap() {
        for op in [ReduceOp::Max, ReduceOp::Min, ReduceOp::Sum] {
            for side in [Side::Left, Side::Right] {
                assert!(reduced(f32::NAN, 1.0, op, side).is_nan());
                assert!(reduced(1.0, f64::NAN, op, side).is_nan());
            }
        }
        assert_eq!(reduced(250_u8, 10, ReduceOp::Sum, Side::Left), 4);
        assert_eq!(reduced(2_u32, 3, ReduceOp::Max, Side::Left), 3);
        assert_eq!(reduced(2_u64, 3, ReduceOp::Min, Side::Right), 2);
        assert_eq!(reduced(1.5_f32, -2.0, ReduceOp::Min, Side::Right), -2.0);
    }

    #[test]
    fn sums_of_halves_are_rounded_once() {
        let sum = |left: f32, right: f32| {
            let bf16 = reduced(Bf16::from_f32(left), Bf16::from_f32(right), ReduceOp::Sum, Side::Left);
            let f16 = reduced(F16::from_f32(left), F16::from_f32(right), ReduceOp::Sum, Side::Left);
            (bf16.to_f32(), f16.to_f32())
        };
        // Half a unit in the last place of 256 in bf16: to even, down and up; f16 has three bits more.
        assert_eq!(sum(256.0, 1.0), (256.0, 257.0));
        assert_eq!(sum(258.0, 1.0), (260.0, 259.0));
        assert_eq!(sum(65_504.0, 65_504.0), (131_072.0, f32::INFINITY));
        for op in [ReduceOp::Max, ReduceOp::Min, ReduceOp::Sum] {
            for side in [Side::Left, Side::Right] {
                assert!(reduced(F16::from_f32(f32::NAN), F16::from_f32(1.0), op, side).to_f32().is_nan());
                assert!(reduced(Bf16::from_f32(1.0), Bf16::from_f32(f32::NAN), op, side).to_f32().is_nan());
            }
        }
    }

    #[test]
    fn the_side_decides_between_equal_values() {
        // 0.0 == -0.0, so the right operand is kept: which one that is depends on the side.
        assert!(reduced(0.0_f32, -0.0, ReduceOp::Max, Side::Left).is_sign_negative());
        assert!(reduced(0.0_f32, -0.0, ReduceOp::Max, Side::Right).is_sign_positive());
    }
}
