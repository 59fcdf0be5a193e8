//! Models of boards, and of memory that barriers divide among ranks.

use super::Cell;
use super::board::{Board, Post};
use crate::Operation;
use crate::call::Call;
use crate::models::explore;
use loom::sync::Arc;
use loom::thread;
use std::time::{Duration, Instant};
use trireme_base::Rank;

/// The memory that one rank shares with the others.
#[derive(Default)]
struct Area {
    board: Board,
    stages: [Cell<u32>; 2],
    /// A vector that peers write to.
    vector: [Cell<u32>; 2],
}

fn call(sequence: u64) -> Call {
    Call {
        is_awaited: true,
        operation: Operation::BARRIER,
        sequence,
        started: Instant::now(),
        timeout: Duration::MAX,
    }
}

/// Waits like `Board::wait`, but polls only once before it sleeps.
fn wait(board: &Board, barrier: u32) {
    while !board.has_arrived(barrier) && !board.sleep_once(barrier).expect("sleep") {}
}

/// Posts an operation and waits for all members, like `SharedMemory::post_and_synchronize`.
fn post_and_synchronize(own: usize, areas: &[Area], barrier: u32, sequence: u64) {
    areas[own].board.post(barrier, &call(sequence), Post::STAGED);
    synchronize(own, areas, barrier);
    for (member, area) in areas.iter().enumerate() {
        area.board.read(barrier, &call(sequence), Rank(own), Rank(member)).expect("the peer's post");
    }
}

fn synchronize(own: usize, areas: &[Area], barrier: u32) {
    areas[own].board.arrive(barrier);
    for (_, area) in areas.iter().enumerate().filter(|(member, _)| *member != own) {
        wait(&area.board, barrier);
    }
}

/// Runs `rank` in one thread for each of `N` members.
fn run_ranks<const N: usize>(rank: impl Fn(usize, &[Area]) + Copy + Send + 'static) {
    let areas: Arc<[Area; N]> = Arc::new(std::array::from_fn(|_| Area::default()));
    let peers = (1..N).map(|own| {
        let areas = Arc::clone(&areas);
        thread::spawn(move || rank(own, &areas[..]))
    });
    let peers: Vec<_> = peers.collect();
    rank(0, &areas[..]);
    peers.into_iter().for_each(|peer| peer.join().unwrap());
}

/// Three consecutive operations go through stages; the third one reuses the stage of the first.
#[test]
fn loom_one_barrier_separates_the_stages_of_operations() {
    explore(3, || {
        run_ranks::<2>(|own, areas| {
            for turn in 1..=3 {
                areas[own].stages[turn % 2].set(turn as u32);
                post_and_synchronize(own, areas, turn as u32, turn as u64);
                assert_eq!(areas[1 - own].stages[turn % 2].get(), turn as u32);
            }
        });
    });
}

/// Each rank reduces its share of both vectors in place, and reads its full vector after the second barrier.
#[test]
fn loom_two_barriers_protect_vectors_that_peers_write_to() {
    explore(3, || {
        run_ranks::<2>(|own, areas| {
            for step in 1..=2 {
                areas[own].vector.iter().for_each(|element| element.set(step));
                post_and_synchronize(own, areas, 2 * step - 1, step.into());
                let sum: u32 = areas.iter().map(|area| area.vector[own].get()).sum();
                areas.iter().for_each(|area| area.vector[own].set(sum));
                synchronize(own, areas, 2 * step);
                areas[own].vector.iter().for_each(|element| assert_eq!(element.get(), 2 * step));
            }
        });
    });
}

#[test]
fn loom_all_sleepers_of_a_board_are_woken() {
    explore(3, || {
        run_ranks::<3>(|own, areas| match own {
            0 => {
                areas[0].stages[1].set(7);
                areas[0].board.arrive(1);
            }
            _ => {
                wait(&areas[0].board, 1);
                assert_eq!(areas[0].stages[1].get(), 7);
            }
        });
    });
}

#[test]
fn loom_three_ranks_synchronize() {
    explore(3, || {
        run_ranks::<3>(|own, areas| {
            areas[own].stages[1].set(own as u32);
            post_and_synchronize(own, areas, 1, 1);
            let all = areas.iter().map(|area| area.stages[1].get());
            assert!(all.eq(0..3));
        });
    });
}
