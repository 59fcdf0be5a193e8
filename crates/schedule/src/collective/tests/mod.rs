mod by_hosts;
mod costs;
mod double_tree;
mod interpreter;
mod matrix;
mod oracle;
mod text;
mod times;

use super::*;
use interpreter::*;
use matrix::programs_of;
use proptest::prelude::*;

/// Returns the canonical order as a text with parentheses, by running its stack program.
fn order_as_text(world_size: usize) -> String {
    let mut stack: Vec<String> = Vec::new();
    for term in canonical_order(world_size) {
        match term {
            StackInstruction::Load(rank) => stack.push(rank.to_string()),
            StackInstruction::Reduce(rank) => {
                let left = stack.pop().expect("something to reduce");
                stack.push(format!("({left}+{rank})"));
            }
            StackInstruction::Combine => {
                let right = stack.pop().expect("a right operand");
                let left = stack.pop().expect("a left operand");
                stack.push(format!("({left}+{right})"));
            }
        }
    }
    stack.concat()
}

#[test]
fn the_canonical_order_pairs_neighbors() {
    assert_eq!(order_as_text(1), "0");
    assert_eq!(order_as_text(2), "(0+1)");
    assert_eq!(order_as_text(3), "((0+1)+2)");
    assert_eq!(order_as_text(4), "((0+1)+(2+3))");
    assert_eq!(order_as_text(5), "(((0+1)+2)+(3+4))");
    assert_eq!(order_as_text(6), "(((0+1)+(2+3))+(4+5))");
    assert_eq!(order_as_text(8), "(((0+1)+(2+3))+((4+5)+(6+7)))");
}

/// At the end of the barrier, every rank has heard from every rank.
#[test]
fn no_rank_leaves_the_barrier_before_all_have_entered() {
    for world_size in 1..=17 {
        let hosts = Hosts::single(world_size);
        let programs =
            programs_of(CollectiveKind::Barrier.with_len(0), FlatAlgorithm::Dissemination.into(), &hosts);
        let mut heard: Vec<Vec<bool>> =
            (0..world_size).map(|rank| (0..world_size).map(|other| other == rank).collect()).collect();
        let num_rounds = programs[0].len();
        for round in 0..num_rounds {
            let before = heard.clone();
            for (rank, steps) in programs.iter().enumerate() {
                let receive = parts(&steps[round]).1.expect("every round receives");
                for other in 0..world_size {
                    heard[rank][other] |= before[receive.from.0][other];
                }
            }
        }
        assert!(heard.iter().flatten().all(|&heard| heard), "{world_size}");
    }
}

proptest! {
    #[test]
    fn the_left_operand_is_the_lower_rank(world_size in 1..20_usize) {
        // This reduction keeps the left operand, so only rank 0's value remains.
        let (collective, hosts) = (CollectiveKind::AllReduce.with_len(5), Hosts::single(world_size));
        for flat in [FlatAlgorithm::RecursiveDoubling, FlatAlgorithm::HalvingDoubling, FlatAlgorithm::BinomialTree] {
            let programs = programs_of(collective, flat.into(), &hosts);
            let mut memories: Vec<_> =
                (0..world_size).map(|rank| Memories::in_place(vec![rank as f64; 5])).collect();
            interpret(&programs, &mut memories, |left, _| left);
            prop_assert!(memories.iter().flat_map(|memories| &memories.vector).all(|&value| value == 0.0));
        }
    }

    #[test]
    fn an_all_gather_fills_every_block(lens in proptest::collection::vec(0..5_usize, 1..12)) {
        let mut end = 0;
        let blocks: Vec<_> = lens.iter().map(|len| { end += len; end - len..end }).collect();
        let programs = programs(lens.len(), |rank, steps| all_gather_pairwise(rank, &blocks, steps));
        assert_needs_no_queue(&programs);
        let whole: Vec<f64> = (0..end).map(|index| index as f64).collect();
        let own_block = |block: &std::ops::Range<usize>| {
            let known = |index: usize| if block.contains(&index) { whole[index] } else { -1.0 };
            (0..end).map(known).collect()
        };
        let mut memories: Vec<_> = blocks.iter().map(own_block).map(Memories::in_place).collect();
        interpret(&programs, &mut memories, |a, b| a + b);
        prop_assert!(memories.iter().all(|memories| memories.vector == whole));
    }

    #[test]
    fn owned_ranges_tile_the_vector(world_size in 1..20_usize, len in 0..300_usize, granule in 1..20_usize) {
        let mut end = 0;
        for rank in 0..world_size {
            let range = owned_range(Rank(rank), world_size, len, granule);
            prop_assert_eq!(range.start, end);
            prop_assert!(range.end == len || range.end.is_multiple_of(granule));
            prop_assert!(range.len() <= len.div_ceil(granule).div_ceil(world_size) * granule);
            end = range.end;
        }
        prop_assert_eq!(end, len);
    }

    #[test]
    fn an_all_to_all_of_variable_splits_moves_every_block(
        lens in proptest::collection::vec(proptest::collection::vec(0..4_usize, 7), 1..8),
    ) {
        let world_size = lens.len();
        let lens: Vec<&[usize]> = lens.iter().map(|lens| &lens[..world_size]).collect();
        let receive_lens = |rank: usize| Vec::from_iter(lens.iter().map(|lens| lens[rank]));
        let programs = programs(world_size, |rank, steps| {
            all_to_all_variable(rank, lens[rank.0], &receive_lens(rank.0), steps);
        });
        assert_needs_no_queue(&programs);
        let value = |from: usize, to: usize, index: usize| (100 * from + 10 * to + index) as f64;
        let block = |from: usize, to: usize| (0..lens[from][to]).map(move |index| value(from, to, index));
        let mut memories: Vec<_> = (0..world_size)
            .map(|rank| Memories {
                input: (0..world_size).flat_map(|to| block(rank, to)).collect(),
                ..Memories::in_place(vec![f64::NAN; receive_lens(rank).iter().sum()])
            })
            .collect();
        interpret(&programs, &mut memories, |a, b| a + b);
        for (rank, memories) in memories.iter().enumerate() {
            let expected: Vec<f64> = (0..world_size).flat_map(|from| block(from, rank)).collect();
            prop_assert_eq!(&memories.vector, &expected);
        }
    }

    #[test]
    fn blocks_split_evenly(world_size in 1..20_usize, len in 0..300_usize) {
        let mut end = 0;
        for rank in 0..world_size {
            let range = block(Rank(rank), world_size, len);
            prop_assert_eq!(range.start, end);
            prop_assert_eq!(range.len(), len / world_size + usize::from(rank < len % world_size));
            end = range.end;
        }
        prop_assert_eq!(end, len);
    }
}
