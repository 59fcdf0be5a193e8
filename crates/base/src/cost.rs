//! What a computation costs: arithmetic, and bytes of memory.

use std::ops::{Add, AddAssign};

/// Floating-point operations, and bytes of operands and results. Numbers that grow too large stay at the largest.
///
/// What a kernel packs or keeps for itself on the way is not among the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Cost {
    /// Operations of matrix products, those of attention among them: a multiplication and an addition are two.
    pub product_operations: u64,
    /// The portion of `product_operations` that computes again what forward has computed, such as attention's scores in backward.
    pub repeated_operations: u64,
    /// All other operations. An exponential counts as [`Cost::EXP`].
    pub other_operations: u64,
    /// Bytes of memory read and written.
    pub traffic: Traffic,
}

/// Bytes of memory that a computation reads and writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Traffic {
    /// Read only.
    pub read: usize,
    /// Read, and written where they were read.
    pub updated: usize,
    /// Written only.
    pub written: usize,
}

impl Cost {
    /// Operations of an exponential.
    pub const EXP: usize = 23;

    /// Nothing.
    pub const ZERO: Cost = Cost {
        product_operations: 0,
        repeated_operations: 0,
        other_operations: 0,
        traffic: Traffic { read: 0, updated: 0, written: 0 },
    };

    /// As many operations of products as the product of `factors`.
    pub fn products(factors: &[usize]) -> Self {
        Cost { product_operations: product(factors), ..Cost::ZERO }
    }

    /// The same, with as many of the operations of products repeated as the product of `factors`.
    pub fn repeats(self, factors: &[usize]) -> Self {
        Cost { repeated_operations: self.repeated_operations.saturating_add(product(factors)), ..self }
    }

    /// As many other operations as the product of `factors`.
    pub fn others(factors: &[usize]) -> Self {
        Cost { other_operations: product(factors), ..Cost::ZERO }
    }

    /// The same, and these bytes read.
    pub fn reads(mut self, num_bytes: usize) -> Self {
        self.traffic.read = self.traffic.read.saturating_add(num_bytes);
        self
    }

    /// The same, and these bytes updated.
    pub fn updates(mut self, num_bytes: usize) -> Self {
        self.traffic.updated = self.traffic.updated.saturating_add(num_bytes);
        self
    }

    /// The same, and these bytes written.
    pub fn writes(mut self, num_bytes: usize) -> Self {
        self.traffic.written = self.traffic.written.saturating_add(num_bytes);
        self
    }

    /// Operations of products that the mathematics of the model needs: without those that are repeated.
    pub fn model_operations(&self) -> u64 {
        self.product_operations.saturating_sub(self.repeated_operations)
    }

    /// All operations.
    pub fn operations(&self) -> u64 {
        self.product_operations.saturating_add(self.other_operations)
    }
}

impl Traffic {
    /// Bytes of memory touched, each counted once.
    pub fn extent(&self) -> usize {
        self.read.saturating_add(self.updated).saturating_add(self.written)
    }

    /// Bytes that move between memory and registers.
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
            repeated_operations: self.repeated_operations.saturating_add(other.repeated_operations),
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
        let twice = Cost::products(&[4, 5]).repeats(&[2, 3]) + Cost::products(&[7]).repeats(&[1]);
        assert_eq!((twice.operations(), twice.model_operations()), (27, 20));
        let most = Cost::products(&[usize::MAX, 2]).reads(usize::MAX);
        assert_eq!(most + most, most);
        assert_eq!((most.operations(), most.updates(1).traffic.moved()), (u64::MAX, usize::MAX));
    }
}
