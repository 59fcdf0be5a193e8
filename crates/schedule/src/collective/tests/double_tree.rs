//! The properties by which two trees use the full bandwidth.

use super::super::double_tree::{all_reduce_by, num_chunks};
use super::super::*;
use super::interpreter::*;
use super::oracle::*;

fn steps_of(world_size: usize, len: usize, num_chunks: usize) -> Vec<Vec<Step>> {
    programs(world_size, |rank, steps| {
        all_reduce_by(
            num_chunks,
            &rank_context::RankContext { rank: rank.0, root: 0, blocks: Blocks::even(world_size, len) },
            steps,
        )
    })
}

#[test]
fn chunks_follow_each_other_through_the_trees() {
    for world_size in 1..=33 {
        for (len, num_chunks) in [(0, 1), (1, 1), (7, 3), (64, 1), (64, 2), (64, 5), (500, 32)] {
            let programs = steps_of(world_size, len, num_chunks);
            assert_needs_no_queue(&programs);
            let mut memories = inputs(CollectiveKind::AllReduce.with_len(len), world_size, whole_numbers);
            let traffic = interpret(&programs, &mut memories, |a, b| a + b);
            let expected = canonical(&vectors(world_size, len, whole_numbers));
            assert!(memories.iter().all(|memories| memories.vector == expected), "{world_size} {len}");
            assert!((0..world_size).all(|rank| traffic.sent_by(rank) <= 2 * (len + len % 2)));
            let height = world_size.ilog2() as usize;
            let longest = programs.iter().map(Vec::len).max();
            assert!(longest <= Some(4 * (num_chunks + height)), "{world_size} {num_chunks}: {longest:?}");
        }
    }
}

/// Each tree carries one half of the vector. A rank reduces elements of a half only if it has children in the tree of that half.
#[test]
fn a_rank_has_children_in_one_tree_at_most() {
    for world_size in 2..=40 {
        for (rank, steps) in steps_of(world_size, 2, 1).iter().enumerate() {
            let reductions = steps.iter().filter_map(|step| parts(step).1);
            let mut halves: Vec<usize> = reductions
                .filter(|receive| receive.action != ReceiveAction::Copy)
                .map(|receive| receive.span.range.start)
                .collect();
            halves.dedup();
            assert!(halves.len() <= 1, "rank {rank} of {world_size}");
        }
    }
}

/// With many chunks, the operation takes about as long as sending the vector twice, for any number of ranks.
#[test]
fn time_hardly_depends_on_the_number_of_ranks() {
    let link = LinkCost { latency_seconds: 1e-6, seconds_per_byte: 1e-9 };
    let model = CostModel {
        within: link,
        across: link,
        direct: None,
        reduce_seconds_per_byte: 0.0,
        copy_seconds_per_byte: 0.0,
    };
    let len = 1 << 22;
    assert_eq!(num_chunks(len), 64);
    for world_size in [4, 7, 16, 33] {
        let programs = steps_of(world_size, len, 64);
        let seconds = simulate(&programs, &Hosts::single(world_size), 4, &model);
        let slots = (4 * (64 + world_size.ilog2())) as f64;
        let slot = link.latency_seconds + 4.0 * len as f64 / 128.0 * link.seconds_per_byte;
        assert!(seconds <= slots * slot, "{world_size}: {seconds} s, {} s", slots * slot);
    }
}
