//! Expected results of operations, computed naively.
use trireme_base::{Bf16, F16, ReduceOp};
use trireme_comm::Element;

/// Reduces `value(0)` to `value(num_values - 1)` in the canonical order of `trireme_schedule::collective`, by plain recursion.
fn oracle<T>(num_values: usize, value: impl Fn(usize) -> T, combine: &impl Fn(T, T) -> T) -> T {
    let num_leaves = 1 << num_values.ilog2();
    let extra = num_values - num_leaves;
    let leaf = |index| {
        if index < extra { combine(value(2 * index), value(2 * index + 1)) } else { value(index + extra) }
    };
    balanced(0, num_leaves, &leaf, combine)
}

/// Reduces the leaves from `first` on, whose number is a power of two.
fn balanced<T>(
    first: usize,
    num_leaves: usize,
    leaf: &impl Fn(usize) -> T,
    combine: &impl Fn(T, T) -> T,
) -> T {
    if num_leaves == 1 {
        return leaf(first);
    }
    let half = num_leaves / 2;
    combine(balanced(first, half, leaf, combine), balanced(first + half, half, leaf, combine))
}

pub(crate) trait Value: Element {
    fn of(rank: usize, index: usize) -> Self;
    fn sum(self, other: Self) -> Self;
    fn product(self, other: Self) -> Self;
    fn divided_by(self, num_ranks: usize) -> Self;
    fn is_above(self, other: Self) -> bool;
}

macro_rules! float_value {
    ($type:ty) => {
        impl Value for $type {
            fn of(rank: usize, index: usize) -> Self {
                // Zeros of both signs compare equal, but have different bits: the result of Max and Min depends on the order.
                if index % 5 == 4 {
                    return if rank % 3 == 1 { -0.0 } else { 0.0 };
                }
                // The last bits of a sum of these values depend on the order.
                1.0 / (3.0 + ((rank * 7919 + index * 104_729) % 1009) as $type) - 0.001 * rank as $type
            }
            fn sum(self, other: Self) -> Self {
                self + other
            }
            fn product(self, other: Self) -> Self {
                self * other
            }
            fn divided_by(self, num_ranks: usize) -> Self {
                self / num_ranks as $type
            }
            fn is_above(self, other: Self) -> bool {
                self > other
            }
        }
    };
}

macro_rules! half_value {
    ($type:ty) => {
        impl Value for $type {
            fn of(rank: usize, index: usize) -> Self {
                <$type>::from_f32(f32::of(rank, index))
            }
            fn sum(self, other: Self) -> Self {
                <$type>::from_f32(self.to_f32() + other.to_f32())
            }
            fn product(self, other: Self) -> Self {
                <$type>::from_f32(self.to_f32() * other.to_f32())
            }
            fn divided_by(self, num_ranks: usize) -> Self {
                <$type>::from_f32(self.to_f32() / num_ranks as f32)
            }
            fn is_above(self, other: Self) -> bool {
                self.to_f32() > other.to_f32()
            }
        }
    };
}

macro_rules! integer_value {
    ($type:ty) => {
        impl Value for $type {
            fn of(rank: usize, index: usize) -> Self {
                let bits = ((rank + 1) * 7919 + index * 104_729) as $type;
                // Values of both signs, if the type has them.
                if index % 2 == 1 { (0 as $type).wrapping_sub(bits) } else { bits }
            }
            fn sum(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            fn product(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
            fn divided_by(self, num_ranks: usize) -> Self {
                self / num_ranks as $type
            }
            fn is_above(self, other: Self) -> bool {
                self > other
            }
        }
    };
}

float_value!(f32);
float_value!(f64);
half_value!(F16);
half_value!(Bf16);
integer_value!(u8);
integer_value!(u32);
integer_value!(u64);
integer_value!(i32);
integer_value!(i64);

/// The expected element of a reduction over all ranks.
pub(crate) fn expected<T: Value>(op: ReduceOp, world_size: usize, index: usize) -> T {
    let reduced = oracle(world_size, |rank| T::of(rank, index), &|left: T, right: T| match op {
        ReduceOp::Sum | ReduceOp::Mean => left.sum(right),
        ReduceOp::Prod => left.product(right),
        ReduceOp::Max => {
            if left.is_above(right) {
                left
            } else {
                right
            }
        }
        ReduceOp::Min => {
            if right.is_above(left) {
                left
            } else {
                right
            }
        }
    });
    if op == ReduceOp::Mean { reduced.divided_by(world_size) } else { reduced }
}
