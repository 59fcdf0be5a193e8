//! The blocks of an arena that are in use, for messages of allocations that fail.

use crate::shape::Shape;
use trireme_base::{Bytes, Category, DType};

/// Number of kinds of blocks that a message lists.
const NUM_LARGEST: usize = 3;

/// The blocks in use, in the order of their addresses. Blocks without bytes are left out.
#[derive(Debug)]
pub(super) struct BlocksInUse(Vec<BlockInUse>);

#[derive(Debug, Clone, Copy)]
struct BlockInUse {
    offset: usize,
    kind: Kind,
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
        // Room for more blocks than a step uses, so that the list does not grow in steady state.
        BlocksInUse(Vec::with_capacity(4096))
    }

    fn index_of(&self, offset: usize) -> usize {
        self.0.partition_point(|block| block.offset < offset)
    }

    pub(super) fn insert(&mut self, offset: usize, (shape, dtype): (Shape, DType), category: Category) {
        let block = BlockInUse { offset, kind: Kind { category, shape, dtype } };
        if block.kind.num_bytes() > 0 {
            self.0.insert(self.index_of(offset), block);
        }
    }

    pub(super) fn remove(&mut self, offset: usize) {
        let index = self.index_of(offset);
        if self.0.get(index).is_some_and(|block| block.offset == offset) {
            self.0.remove(index);
        }
    }

    /// Describes the kinds of blocks that use the most memory. Empty if no blocks are in use.
    pub(super) fn describe_largest(&self) -> String {
        let mut kinds: Vec<(Kind, usize)> = Vec::new();
        for block in &self.0 {
            match kinds.iter_mut().find(|(kind, _)| *kind == block.kind) {
                Some((_, num)) => *num += 1,
                None => kinds.push((block.kind, 1)),
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
        blocks.insert(8192, matrix, Category::Activations);
        blocks.insert(4096, vector, Category::Parameters);
        blocks.insert(6144, vector, Category::Parameters);
        blocks.insert(4096, ([0].into(), DType::F32), Category::Gradients);
        blocks.insert(0, vector, Category::Parameters);
        blocks.insert(20480, ([1].into(), DType::U8), Category::Gradients);
        blocks.insert(20544, ([2].into(), DType::U8), Category::Gradients);
        let matrices = "1 [256, 4] in f32 for activations, 4.00KiB each";
        let vectors = |num: usize| format!("{num} [1024] in bf16 for parameters, 2.00KiB each");
        let bytes = "1 [2] in u8 for gradients, 2B each";
        assert_eq!(blocks.describe_largest(), format!("{}; {matrices}; {bytes}", vectors(3)));
        blocks.remove(6144);
        blocks.remove(4096);
        assert_eq!(blocks.describe_largest(), format!("{matrices}; {}; {bytes}", vectors(1)));
    }
}
