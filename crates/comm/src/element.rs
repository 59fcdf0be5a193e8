use bytemuck::Pod;
use trireme_base::{Bf16, DType, F16, ReduceOp};
use trireme_schedule::collective::Side;

/// A type whose vectors can be communicated and reduced: `f32`, `f64`, [`F16`], [`Bf16`], `u8`, `u32`, `u64`, `i32`, `i64`.
///
/// Integers wrap around. Sums and products of 16-bit floats are computed in f32 and rounded to nearest even. `Max` and `Min` of a NaN and a
/// number are NaN.
pub trait Element: Pod + Send + Sync + private::Reduce {
    /// The dtype that names this type in operations and on the wire.
    const DTYPE: DType;
}

/// The element type of a [`Buffer`](crate::Buffer): an [`Element`] known at compile time, or [`Untyped`].
pub trait BufferElement: Send + Sync + 'static {}

impl<T: Element> BufferElement for T {}

/// Elements of a type known at run time, [`Buffer::dtype`](crate::Buffer::dtype).
#[derive(Debug)]
pub struct Untyped;

impl BufferElement for Untyped {}

mod private {
    /// The reductions of two elements. Sealed, because ranks identify element types by dtype, so a type without one cannot be sent.
    pub trait Reduce: Copy {
        fn sum(left: Self, right: Self) -> Self;
        fn prod(left: Self, right: Self) -> Self;
        fn max(left: Self, right: Self) -> Self;
        fn min(left: Self, right: Self) -> Self;
        /// Divides a sum over `num_ranks` ranks to get the mean. Integers round toward zero.
        fn mean_of(self, num_ranks: usize) -> Self;
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
            fn prod(left: Self, right: Self) -> Self {
                left * right
            }
            fn mean_of(self, num_ranks: usize) -> Self {
                self / num_ranks as $type
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
            fn prod(left: Self, right: Self) -> Self {
                Self::from_f32(left.to_f32() * right.to_f32())
            }
            fn mean_of(self, num_ranks: usize) -> Self {
                Self::from_f32(self.to_f32() / num_ranks as f32)
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
            fn prod(left: Self, right: Self) -> Self {
                left.wrapping_mul(right)
            }
            fn mean_of(self, num_ranks: usize) -> Self {
                // Widened, because a group may have more ranks than an 8-bit integer can count.
                (self as i128 / num_ranks as i128) as $type
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
integer_element!(i32, DType::I32);
integer_element!(i64, DType::I64);

/// Whether an [`Element`] has this dtype.
pub(crate) fn has_element(dtype: DType) -> bool {
    dtype != DType::U16
}

/// Calls a generic function with the element type of a dtype.
macro_rules! call_for_element {
    ($dtype:expr, $function:ident($($argument:expr),*)) => {
        match $dtype {
            DType::F32 => $function::<f32>($($argument),*),
            DType::F64 => $function::<f64>($($argument),*),
            DType::F16 => $function::<F16>($($argument),*),
            DType::Bf16 => $function::<Bf16>($($argument),*),
            DType::U8 => $function::<u8>($($argument),*),
            DType::U32 => $function::<u32>($($argument),*),
            DType::U64 => $function::<u64>($($argument),*),
            DType::I32 => $function::<i32>($($argument),*),
            DType::I64 => $function::<i64>($($argument),*),
            DType::U16 => unreachable!("u16 is no Element, so no buffer of it exists"),
        }
    };
}

/// Reduces `other` into `own`, both elements of `dtype`. `own` is the operand on `side`. A mean is a sum until [`finish_mean`].
///
/// # Panics
/// If the lengths differ, the bytes do not form full, aligned elements, or `dtype` has no [`Element`].
pub(crate) fn reduce_into(own: &mut [u8], other: &[u8], dtype: DType, op: ReduceOp, side: Side) {
    call_for_element!(dtype, reduce_typed(own, other, op, side))
}

/// Reduces `left` and `right` into `out`, all elements of `dtype`.
///
/// # Panics
/// As [`reduce_into`].
pub(crate) fn combine_into(out: &mut [u8], left: &[u8], right: &[u8], dtype: DType, op: ReduceOp) {
    call_for_element!(dtype, combine_typed(out, left, right, op))
}

/// Divides sums over `num_ranks` ranks to get means, if `op` is a mean.
pub(crate) fn finish_mean(sums: &mut [u8], dtype: DType, op: ReduceOp, num_ranks: usize) {
    if op == ReduceOp::Mean {
        call_for_element!(dtype, divide(sums, num_ranks))
    }
}

fn reduce_typed<T: Element>(own: &mut [u8], other: &[u8], op: ReduceOp, side: Side) {
    let (own, other) = (bytemuck::cast_slice_mut::<u8, T>(own), bytemuck::cast_slice::<u8, T>(other));
    match op {
        ReduceOp::Sum | ReduceOp::Mean => reduce_with(own, other, side, T::sum),
        ReduceOp::Prod => reduce_with(own, other, side, T::prod),
        ReduceOp::Max => reduce_with(own, other, side, T::max),
        ReduceOp::Min => reduce_with(own, other, side, T::min),
    }
}

fn combine_typed<T: Element>(out: &mut [u8], left: &[u8], right: &[u8], op: ReduceOp) {
    let out = bytemuck::cast_slice_mut::<u8, T>(out);
    let (left, right) = (bytemuck::cast_slice::<u8, T>(left), bytemuck::cast_slice::<u8, T>(right));
    match op {
        ReduceOp::Sum | ReduceOp::Mean => combine_with(out, left, right, T::sum),
        ReduceOp::Prod => combine_with(out, left, right, T::prod),
        ReduceOp::Max => combine_with(out, left, right, T::max),
        ReduceOp::Min => combine_with(out, left, right, T::min),
    }
}

fn divide<T: Element>(sums: &mut [u8], num_ranks: usize) {
    for sum in bytemuck::cast_slice_mut::<u8, T>(sums) {
        *sum = sum.mean_of(num_ranks);
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

fn combine_with<T: Copy>(out: &mut [T], left: &[T], right: &[T], combine: impl Fn(T, T) -> T) {
    assert!(out.len() == left.len() && out.len() == right.len(), "reduced vectors have one length");
    for ((out, &left), &right) in out.iter_mut().zip(left).zip(right) {
        *out = combine(left, right);
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
        // 1 is half a unit in the last place of 256 in bf16: it rounds to even, down and then up. f16 has three more bits.
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
        // 0.0 == -0.0, so the right operand is kept, and the side says which one that is.
        assert!(reduced(0.0_f32, -0.0, ReduceOp::Max, Side::Left).is_sign_negative());
        assert!(reduced(0.0_f32, -0.0, ReduceOp::Max, Side::Right).is_sign_positive());
    }
}
