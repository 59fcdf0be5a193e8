//! Fusion: short vectors that are reduced together.

use crate::support::{TRANSPORTS, on_ranks, small_pieces};
use std::sync::Arc;
use trireme_base::{DType, Rank, ReduceOp};
use trireme_comm::{Buffer, CommError, Fusion, Group, PageSize, Untyped};

const LEN_MAX: usize = 100;
/// Empty, short, half a batch, more than half, and more than a batch.
const LENGTHS: [usize; 12] = [0, 1, 30, 30, 30, 30, 50, 51, 7, 250, 0, 3];

fn zeros(group: &Group, len: usize) -> Buffer<Untyped> {
    group.buffer_of(DType::F32, len, PageSize::Base).expect("memory")
}

fn vector(group: &Group, number: usize) -> Buffer<Untyped> {
    let mut buffer = zeros(group, LENGTHS[number]);
    let rank = group.rank().0;
    for (index, value) in buffer.elements_mut::<f32>().iter_mut().enumerate() {
        *value = 1.0 / (3 + rank * 17 + number * 5 + index) as f32;
    }
    buffer
}

fn bits(vector: &Buffer<Untyped>) -> Vec<u32> {
    vector.elements::<f32>().iter().map(|value| value.to_bits()).collect()
}

#[test]
fn fused_vectors_have_the_bits_of_single_ones() {
    for transport in TRANSPORTS {
        on_ranks(transport, 3, &small_pieces(), |group| {
            let group = Arc::new(group);
            for op in [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max] {
                let single: Vec<Vec<u32>> = (0..LENGTHS.len())
                    .map(|number| {
                        bits(&group.all_reduce(vector(&group, number), op).wait().expect("reduced"))
                    })
                    .collect();
                let fusion = Fusion::new(Arc::clone(&group), op, LEN_MAX);
                for round in 0..3 {
                    let works: Vec<_> =
                        (0..LENGTHS.len()).map(|number| fusion.all_reduce(vector(&group, number))).collect();
                    if round == 1 {
                        fusion.flush();
                    }
                    let mut works: Vec<_> = works.into_iter().enumerate().collect();
                    if round == 2 {
                        works.reverse();
                    }
                    for (number, work) in works {
                        assert_eq!(
                            bits(&work.wait().expect("reduced")),
                            single[number],
                            "{transport}, {number}"
                        );
                    }
                }
            }
        });
    }
}

#[test]
fn few_operations_carry_many_vectors() {
    for transport in TRANSPORTS {
        on_ranks(transport, 2, &small_pieces(), |group| {
            let group = Arc::new(group);
            let fusion = Fusion::new(Arc::clone(&group), ReduceOp::Sum, LEN_MAX);
            let before = group.statistics().num_operations;
            // A batch has room for three vectors of thirty, so ten of its elements remain empty.
            let works: Vec<_> = (0..9).map(|_| fusion.all_reduce(zeros(&group, 30))).collect();
            for work in works {
                drop(work.wait().expect("reduced"));
            }
            assert_eq!(group.statistics().num_operations - before, 3, "{transport}");
        });
    }
}

#[test]
fn a_failure_reaches_every_vector_of_a_batch() {
    for transport in TRANSPORTS {
        on_ranks(transport, 2, &small_pieces(), |group| {
            if group.rank() == Rank(1) {
                return;
            }
            let group = Arc::new(group);
            let fusion = Fusion::new(Arc::clone(&group), ReduceOp::Sum, LEN_MAX);
            let works = [1, 2, 3].map(|len| fusion.all_reduce(zeros(&group, len)));
            for work in works {
                assert!(matches!(work.wait(), Err(CommError::PeerLeft { rank: Rank(1), .. })), "{transport}");
            }
        });
    }
}
