//! The expected results of collectives, computed naively.

use super::super::*;
use super::interpreter::*;
use std::ops::Range;

/// Whole numbers, whose sum is the same in any order.
pub(super) fn whole_numbers(rank: usize, index: usize) -> f64 {
    ((rank * 7919 + index * 104_729) % 1009) as f64
}

/// Fractions, whose sum is not exact: another order gives other bits.
pub(super) fn fractions(rank: usize, index: usize) -> f64 {
    1.0 / (3.0 + whole_numbers(rank, index))
}

pub(super) fn vectors(world_size: usize, len: usize, value: fn(usize, usize) -> f64) -> Vec<Vec<f64>> {
    (0..world_size).map(|rank| (0..len).map(|index| value(rank, index)).collect()).collect()
}

/// Returns the initial memories of the ranks: NaN where an operation must not read.
pub(super) fn inputs(
    collective: Collective,
    world_size: usize,
    value: fn(usize, usize) -> f64,
) -> Vec<Memories> {
    let len = collective.len;
    let is_given = |rank: usize, index: usize| match collective.kind {
        CollectiveKind::AllReduce
        | CollectiveKind::Reduce
        | CollectiveKind::ReduceScatter
        | CollectiveKind::AllToAll
        | CollectiveKind::Barrier => true,
        CollectiveKind::Broadcast | CollectiveKind::Scatter => collective.root() == Some(Rank(rank)),
        CollectiveKind::AllGather | CollectiveKind::Gather => {
            block(Rank(rank), world_size, len).contains(&index)
        }
    };
    let element = |rank, index| if is_given(rank, index) { value(rank, index) } else { f64::NAN };
    let vector = |rank| (0..len).map(|index| element(rank, index)).collect();
    (0..world_size).map(|rank| Memories::in_place(vector(rank))).collect()
}

/// Returns the expected result of `rank`, and its range.
pub(super) fn expected(
    collective: Collective,
    world_size: usize,
    rank: usize,
    value: fn(usize, usize) -> f64,
) -> (Range<usize>, Vec<f64>) {
    let len = collective.len;
    let all = vectors(world_size, len, value);
    let own = block(Rank(rank), world_size, len);
    let nothing = (0..0, Vec::new());
    let gathered = || {
        let owner =
            |index: &usize| (0..world_size).find(|&rank| block(Rank(rank), world_size, len).contains(index));
        (0..len).map(|index| all[owner(&index).expect("blocks cover")][index]).collect()
    };
    let root = collective.root().unwrap_or(Rank::ROOT);
    match collective.kind {
        CollectiveKind::Barrier => nothing,
        CollectiveKind::AllReduce => (0..len, canonical(&all)),
        CollectiveKind::Reduce if rank == root.0 => (0..len, canonical(&all)),
        CollectiveKind::Gather if rank == root.0 => (0..len, gathered()),
        CollectiveKind::Reduce | CollectiveKind::Gather => nothing,
        CollectiveKind::Broadcast => (0..len, all[root.0].clone()),
        CollectiveKind::Scatter => (own.clone(), all[root.0][own].to_vec()),
        CollectiveKind::AllGather => (0..len, gathered()),
        CollectiveKind::ReduceScatter => (own.clone(), canonical(&all)[own].to_vec()),
        CollectiveKind::AllToAll => {
            let each = 0..world_size;
            (0..len, each.flat_map(|from| all[from][own.clone()].to_vec()).collect())
        }
    }
}

/// Returns the sum in canonical order.
pub(super) fn canonical(vectors: &[Vec<f64>]) -> Vec<f64> {
    let merge = |left: Vec<f64>, right: &[f64]| left.iter().zip(right).map(|(a, b)| a + b).collect();
    let mut stack: Vec<Vec<f64>> = Vec::new();
    for term in canonical_order(vectors.len()) {
        match term {
            StackInstruction::Load(rank) => stack.push(vectors[rank.0].clone()),
            StackInstruction::Reduce(rank) => {
                let top = stack.pop().expect("something to reduce");
                stack.push(merge(top, &vectors[rank.0]));
            }
            StackInstruction::Combine => {
                let right = stack.pop().expect("a right operand");
                let left = stack.pop().expect("a left operand");
                stack.push(merge(left, &right));
            }
        }
        assert!(stack.len() <= num_partials(vectors.len()));
    }
    assert_eq!(stack.len(), 1);
    stack.remove(0)
}

/// Returns every collective of `len` elements, with several roots.
pub(super) fn collectives(world_size: usize, len: usize) -> Vec<Collective> {
    let mut all = vec![
        CollectiveKind::AllReduce.with_len(len),
        CollectiveKind::AllGather.with_len(len),
        CollectiveKind::ReduceScatter.with_len(len),
        CollectiveKind::AllToAll.with_len(len * world_size),
        CollectiveKind::Barrier.with_len(0),
    ];
    let some_roots = [0, 1, world_size / 2, world_size - 1];
    for root in (0..world_size).filter(|root| world_size < 7 || some_roots.contains(root)).map(Rank) {
        all.extend([
            CollectiveKind::Reduce.with_root(root, len),
            CollectiveKind::Broadcast.with_root(root, len),
            CollectiveKind::Gather.with_root(root, len),
            CollectiveKind::Scatter.with_root(root, len),
        ]);
    }
    all
}

/// Edge-case lengths: none, one, fewer than ranks, not divisible, larger.
pub(super) fn lens(world_size: usize) -> [usize; 6] {
    [0, 1, world_size - 1, world_size, 2 * world_size + 1, 5 * world_size + world_size / 2]
}
