//! Units, the granularity at which parameters are gathered, reduced and updated, and the canonical order of sums over a unit.

use std::ops::Range;

/// Number of leaves of the canonical summation tree over a unit's flat buffer. A sum over a unit's elements is computed within leaves of
/// equal length, and then by a binary tree over the leaves. Any power-of-two number of ranks up to this therefore gets the same sum when
/// each rank sums its shard and a reduction adds the results.
pub const NUM_LEAVES: usize = 1024;

/// Sums `leaf(i)` over `leaves` in the order of the tree over all leaves, as if all other leaves were zero. Returns `zero` if `leaves` is
/// empty.
pub(crate) fn leaf_sum<T: Copy>(
    leaves: Range<usize>,
    zero: T,
    leaf: &mut impl FnMut(usize) -> T,
    add: &impl Fn(T, T) -> T,
) -> T {
    if leaves.is_empty() {
        return zero;
    }
    if leaves.len() == 1 {
        return leaf(leaves.start);
    }
    // The two halves of the smallest subtree that contains all of `leaves`.
    let height = (leaves.start ^ (leaves.end - 1)).ilog2();
    let middle = (leaves.end - 1) >> height << height;
    let left = leaf_sum(leaves.start..middle, zero, leaf, add);
    let right = leaf_sum(middle..leaves.end, zero, leaf, add);
    add(left, right)
}

/// A unit: parameters that are gathered, reduced, fetched and updated together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnitInfo {
    /// Name in reports, for example `transformer.h.3`.
    pub name: String,
    /// The unit's parameters, consecutive in the table.
    pub parameters: Range<usize>,
    /// Length of the flat buffer.
    pub num_elements: usize,
    /// Number of experts over all ranks of the expert axis; 0 if the unit has none.
    pub num_experts: usize,
}

impl UnitInfo {
    /// Returns whether the unit has expert parameters.
    pub fn has_experts(&self) -> bool {
        self.num_experts > 0
    }

    /// Returns the length of a leaf. The last leaves may be shorter or empty.
    pub fn leaf_len(&self) -> usize {
        self.num_elements.div_ceil(NUM_LEAVES)
    }

    /// Returns the length of the flat buffer with all leaves padded to equal length. Ranks shard this length, so that equal shards consist
    /// of full leaves.
    pub fn padded_len(&self) -> usize {
        self.leaf_len().saturating_mul(NUM_LEAVES)
    }

    /// Returns the elements of shard `index` of `num_shards`, without padding.
    ///
    /// # Panics
    /// If `index` is not less than `num_shards`.
    pub fn shard(&self, index: usize, num_shards: usize) -> Range<usize> {
        assert!(index < num_shards, "shard {index} of {num_shards}");
        let (base, longer) = (self.padded_len() / num_shards, self.padded_len() % num_shards);
        let start = |index: usize| (index * base + index.min(longer)).min(self.num_elements);
        start(index)..start(index + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_are_whole_leaves_and_cover_the_unit() {
        for num_elements in [0, 1, 768, 1024, 1025, 5000] {
            let unit = UnitInfo { name: "unit".into(), parameters: 0..0, num_elements, num_experts: 0 };
            assert!(unit.padded_len() >= num_elements && unit.padded_len() < num_elements + NUM_LEAVES);
            for num_shards in [1, 2, 3, 4, 64] {
                let shards: Vec<Range<usize>> =
                    (0..num_shards).map(|index| unit.shard(index, num_shards)).collect();
                assert_eq!((shards[0].start, shards[num_shards - 1].end), (0, num_elements));
                assert!(shards.windows(2).all(|pair| pair[0].end == pair[1].start), "{shards:?}");
                let whole_leaves = |shard: &Range<usize>| shard.start.is_multiple_of(unit.leaf_len().max(1));
                let is_power = num_shards.is_power_of_two();
                assert!(
                    !is_power || shards.iter().all(|shard| shard.is_empty() || whole_leaves(shard)),
                    "{shards:?}"
                );
            }
        }
    }

    #[test]
    fn leaf_sums_follow_the_tree() {
        let mut leaf = |leaf: usize| (leaf % 7) as f64 + 0.1;
        let add = |a: f64, b: f64| a + b;
        for range in [0..0, 3..4, 0..8, 5..13, 1..1024] {
            let mut sums: Vec<f64> =
                (0..NUM_LEAVES).map(|index| if range.contains(&index) { leaf(index) } else { 0.0 }).collect();
            while sums.len() > 1 {
                sums = sums.chunks(2).map(|pair| pair[0] + pair[1]).collect();
            }
            assert_eq!(leaf_sum(range.clone(), 0.0, &mut leaf, &add), sums[0], "{range:?}");
        }
    }
}
