//! The blocks of an arena that are in use, for messages of allocations that fail.

use crate::shape::Shape;
use trireme_base::{Bytes, Category, DType};

/// Number of kinds of blocks that a message lists.
const NUM_LARGEST: usize = 3;

/// The arrays of the blocks in use, each in a slot.
#[derive(Debug)]
pub(super) struct BlocksInUse {
    slots: Vec<Option<Kind>>,
    vacant: Vec<usize>,
}

/// The array that a block was allocated for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Kind {
    category: Category,
    shape: Shape,
    dtype: DType,
}

impl Kind {
    fn num_bytes(self) -> usize {
        self.shape.num_elements() * self.dtype.size()
    }
}

impl BlocksInUse {
    pub(super) fn new() -> Self {
        // Room for more blocks than a step uses, so that the lists do not grow in steady state.
        BlocksInUse { slots: Vec::with_capacity(4096), vacant: Vec::with_capacity(4096) }
    }

    /// Adds a block. Returns its slot.
    pub(super) fn insert(&mut self, (shape, dtype): (Shape, DType), category: Category) -> usize {
        let slot = self.vacant.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        self.slots[slot] = Some(Kind { category, shape, dtype });
        slot
    }

    pub(super) fn remove(&mut self, slot: usize) {
        self.slots[slot] = None;
        self.vacant.push(slot);
    }

    /// Describes the kinds of blocks that use the most memory. Empty if no blocks are in use.
    pub(super) fn describe_largest(&self) -> String {
        let mut kinds: Vec<(Kind, usize)> = Vec::new();
        for used in self.slots.iter().flatten() {
            match kinds.iter_mut().find(|(kind, _)| kind == used) {
                Some((_, num)) => *num += 1,
                None => kinds.push((*used, 1)),
            }
        }
        let total = |(kind, num): (Kind, usize)| kind.num_bytes() * num;
        kinds.sort_by_key(|&kind| std::cmp::Reverse(total(kind)));
        let describe = |&(kind, num): &(Kind, usize)| {
            let Kind { category, shape, dtype } = kind;
            let each = Bytes(kind.num_bytes() as u64);
            format!("{num} {shape:?} in {dtype} for {category}, {each} each")
        };
        kinds.iter().take(NUM_LARGEST).map(describe).collect::<Vec<_>>().join("; ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_of_blocks_are_listed_by_the_memory_that_they_use() {
        let mut blocks = BlocksInUse::new();
        assert_eq!(blocks.describe_largest(), "");
        let (matrix, vector) = (([256, 4].into(), DType::F32), ([1024].into(), DType::Bf16));
        blocks.insert(matrix, Category::Activations);
        let vectors = [(); 3].map(|()| blocks.insert(vector, Category::Parameters));
        blocks.insert(([1].into(), DType::U8), Category::Gradients);
        blocks.insert(([2].into(), DType::U8), Category::Gradients);
        let matrix = "1 [256, 4] in f32 for activations, 4.00KiB each";
        let of_vectors = |num: usize| format!("{num} [1024] in bf16 for parameters, 2.00KiB each");
        let bytes = "1 [2] in u8 for gradients, 2B each";
        assert_eq!(blocks.describe_largest(), format!("{}; {matrix}; {bytes}", of_vectors(3)));
        blocks.remove(vectors[0]);
        blocks.remove(vectors[2]);
        assert_eq!(blocks.describe_largest(), format!("{matrix}; {}; {bytes}", of_vectors(1)));
        assert_eq!(blocks.insert(vector, Category::Parameters), vectors[2], "slots are used again");
    }
}
