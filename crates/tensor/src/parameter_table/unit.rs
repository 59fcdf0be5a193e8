//! Units: what is gathered, reduced and updated together, and the tree that sums over them follow.

use std::ops::Range;

/// Leaves of the canonical tree over a unit's flat buffer: sums over a unit's elements are taken within leaves of equal
/// length, and then of neighbours first. So up to so many ranks, if they are a power of two, come to the same sum by adding
/// what each of them finds in its shard, in the order of any reduction.
pub const LEAVES: usize = 1024;

/// Sum over some leaves, of neighbours first: what the tree over all leaves comes to if the others are zero. `zero` is the
/// sum of no leaves.
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
    // The two halves of the smallest subtree that has them all.
    let height = (leaves.start ^ (leaves.end - 1)).ilog2();
    let middle = (leaves.end - 1) >> height << height;
    let left = leaf_sum(leaves.start..middle, zero, leaf, add);
    let right = leaf_sum(middle..leaves.end, zero, leaf, add);
    add(left, right)
}

/// What is gathered, reduced, fetched and stepped together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnitInfo {
    /// Name in reports, such as `transformer.h.3`.
    pub name: String,
    /// Its parameters, consecutive in the table.
    pub parameters: Range<usize>,
    /// Elements of its flat buffer.
    pub num_elements: usize,
    /// Its experts, on all ranks of the expert axis; 0 if it has none.
    pub num_experts: usize,
}

impl UnitInfo {
    /// Whether it has parameters of experts.
    pub fn has_experts(&self) -> bool {
        self.num_experts > 0
    }

    /// Elements of a leaf: the last leaves may have fewer, or none.
    pub fn leaf_len(&self) -> usize {
        self.num_elements.div_ceil(LEAVES)
    }

    /// Elements of the flat buffer with all leaves filled up, which is what ranks shard: equal shards are whole leaves.
    pub fn padded_len(&self) -> usize {
        self.leaf_len().saturating_mul(LEAVES)
    }

    /// The elements of shard `index` of `num_shards`, without what fills up the last leaves.
    ///
    /// # Panics
    /// If there is no such shard.
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
            assert!(unit.padded_len() >= num_elements && unit.padded_len() < num_elements + LEAVES);
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
    fn leaves_are_summed_as_their_tree_says() {
        let mut leaf = |leaf: usize| (leaf % 7) as f64 + 0.1;
        let add = |a: f64, b: f64| a + b;
        for range in [0..0, 3..4, 0..8, 5..13, 1..1024] {
            let mut sums: Vec<f64> =
                (0..LEAVES).map(|index| if range.contains(&index) { leaf(index) } else { 0.0 }).collect();
            while sums.len() > 1 {
                sums = sums.chunks(2).map(|pair| pair[0] + pair[1]).collect();
            }
            assert_eq!(leaf_sum(range.clone(), 0.0, &mut leaf, &add), sums[0], "{range:?}");
        }
    }
}
