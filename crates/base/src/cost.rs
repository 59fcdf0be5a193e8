//! The cost of a computation: arithmetic operations and bytes of memory traffic.

use std::ops::{Add, AddAssign};

/// The number of floating-point operations of a computation, and the bytes of its operands and results. All sums saturate.
///
/// The traffic does not include a kernel's own workspace, such as packed operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Cost {
    /// Operations of matrix products, including the products of attention. A multiply-add counts as two operations.
    pub product_operations: u64,
    /// The portion of `product_operations` that recomputes results of forward, such as the attention scores in backward.
    pub recomputed_operations: u64,
    /// All other operations. An exponential counts as [`Cost::EXP`].
    pub other_operations: u64,
    /// Bytes of memory that are read and written.
    pub traffic: Traffic,
}

/// Bytes of memory that a computation reads and writes. Each byte is counted in exactly one field.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Traffic {
    /// Bytes that are only read.
    pub read: usize,
    /// Bytes that are read and then overwritten in place.
    pub updated: usize,
    /// Bytes that are only written.
    pub written: usize,
}

impl Cost {
    /// Number of operations that an exponential counts as.
    pub const EXP: usize = 23;

    /// The cost of no computation.
    pub const ZERO: Cost = Cost {
        product_operations: 0,
        recomputed_operations: 0,
        other_operations: 0,
        traffic: Traffic { read: 0, updated: 0, written: 0 },
    };

    /// Returns a cost whose `product_operations` is the product of `factors`, and whose other fields are zero.
    pub fn products(factors: &[usize]) -> Self {
        Cost { product_operations: product(factors), ..Cost::ZERO }
    }

    /// Adds the product of `factors` to `recomputed_operations`.
    pub fn recomputes(self, factors: &[usize]) -> Self {
        Cost { recomputed_operations: self.recomputed_operations.saturating_add(product(factors)), ..self }
    }

    /// Returns a cost whose `other_operations` is the product of `factors`, and whose other fields are zero.
    pub fn others(factors: &[usize]) -> Self {
        Cost { other_operations: product(factors), ..Cost::ZERO }
    }

    /// Adds `num_bytes` to the bytes that are only read.
    pub fn reads(mut self, num_bytes: usize) -> Self {
        self.traffic.read = self.traffic.read.saturating_add(num_bytes);
        self
    }

    /// Adds `num_bytes` to the bytes that are updated in place.
    pub fn updates(mut self, num_bytes: usize) -> Self {
        self.traffic.updated = self.traffic.updated.saturating_add(num_bytes);
        self
    }

    /// Adds `num_bytes` to the bytes that are only written.
    pub fn writes(mut self, num_bytes: usize) -> Self {
        self.traffic.written = self.traffic.written.saturating_add(num_bytes);
        self
    }

    /// Returns the number of operations of matrix products, excluding recomputed ones. MFU is computed from this number.
    pub fn model_operations(&self) -> u64 {
        self.product_operations.saturating_sub(self.recomputed_operations)
    }

    /// Returns the number of all operations, including recomputed ones.
    pub fn operations(&self) -> u64 {
        self.product_operations.saturating_add(self.other_operations)
    }
}

impl Traffic {
    /// Returns the size in bytes of the memory that is accessed. An updated byte counts once.
    pub fn extent(&self) -> usize {
        self.read.saturating_add(self.updated).saturating_add(self.written)
    }

    /// Returns the number of bytes transferred between memory and registers. An updated byte counts twice.
    pub fn moved(&self) -> usize {
        self.extent().saturating_add(self.updated)
    }
}

fn product(factors: &[usize]) -> u64 {
    factors.iter().fold(1, |product: u64, &factor| product.saturating_mul(factor as u64))
}

impl Add for Cost {
    type Output = Cost;

    fn add(self, other: Cost) -> Cost {
        let traffic = other.traffic;
        Cost {
            product_operations: self.product_operations.saturating_add(other.product_operations),
            recomputed_operations: self.recomputed_operations.saturating_add(other.recomputed_operations),
            other_operations: self.other_operations.saturating_add(other.other_operations),
            ..self.reads(traffic.read).updates(traffic.updated).writes(traffic.written)
        }
    }
}

impl AddAssign for Cost {
    fn add_assign(&mut self, other: Cost) {
        *self = *self + other;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_add_up_to_the_largest_number_and_no_further() {
        let cost = Cost::products(&[2, 3]).reads(5).updates(7).writes(11) + Cost::others(&[13]).reads(1);
        assert_eq!((cost.operations(), cost.traffic.extent(), cost.traffic.moved()), (19, 24, 31));
        let twice = Cost::products(&[4, 5]).recomputes(&[2, 3]) + Cost::products(&[7]).recomputes(&[1]);
        assert_eq!((twice.operations(), twice.model_operations()), (27, 20));
        let most = Cost::products(&[usize::MAX, 2]).reads(usize::MAX);
        assert_eq!(most + most, most);
        assert_eq!((most.operations(), most.updates(1).traffic.moved()), (u64::MAX, usize::MAX));
    }
}
