//! Compares random sequences of concurrent transfers with an in-memory map.

use crate::support::{METHODS, content, create, filled, folder, options};
use proptest::prelude::*;
use std::collections::{HashMap, VecDeque};
use trireme_swap::{IoMethod, SwapFile, Transfer};

#[derive(Debug, Clone)]
enum Action {
    Write {
        block: usize,
        seed: u32,
    },
    Read {
        block: usize,
    },
    /// Waits for the pending transfer at this index, modulo their number.
    Wait(usize),
    /// Drops the pending transfer at this index, modulo their number.
    Drop(usize),
}

fn action() -> impl Strategy<Value = Action> {
    let index = any::<usize>();
    prop_oneof![
        4 => (index, any::<u32>()).prop_map(|(block, seed)| Action::Write { block, seed }),
        4 => index.prop_map(|block| Action::Read { block }),
        3 => index.prop_map(Action::Wait),
        1 => index.prop_map(Action::Drop),
    ]
}

fn lengths() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(prop_oneof![Just(0), 1..=100_usize, 4000..4200_usize, 1..70_000_usize], 1..6)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_read_sees_the_last_write_before_it(
        lengths in lengths(),
        actions in prop::collection::vec(action(), 1..120),
        part_pages in 1..4_usize,
    ) {
        for method in METHODS {
            run(method, &lengths, &actions, part_pages * 4096);
        }
    }
}

fn run(method: IoMethod, lengths: &[usize], actions: &[Action], part_bytes: usize) {
    let folder = folder();
    let options = trireme_swap::SwapOptions { part_bytes, ..options(method) };
    let Some(swap) = create(folder.path(), lengths, &options) else { return };
    let mut written = HashMap::new();
    let mut pending: VecDeque<(Transfer, Vec<u8>)> = VecDeque::new();
    for action in actions {
        match *action {
            Action::Write { block, seed } => {
                let block = block % lengths.len();
                written.insert(block, seed);
                let transfer = swap.write(block, filled(&swap, lengths[block], seed));
                pending.push_back((transfer, content(lengths[block], seed)));
            }
            Action::Read { block } => {
                issue_read(&swap, block % lengths.len(), lengths, &written, &mut pending)
            }
            Action::Wait(index) if !pending.is_empty() => {
                let (transfer, expected) = pending.remove(index % pending.len()).expect("it is there");
                check(transfer, &expected);
            }
            Action::Drop(index) if !pending.is_empty() => drop(pending.remove(index % pending.len())),
            Action::Wait(_) | Action::Drop(_) => {}
        }
    }
    pending.into_iter().for_each(|(transfer, expected)| check(transfer, &expected));
}

fn issue_read(
    swap: &SwapFile,
    block: usize,
    lengths: &[usize],
    written: &HashMap<usize, u32>,
    pending: &mut VecDeque<(Transfer, Vec<u8>)>,
) {
    if let Some(seed) = written.get(&block) {
        // The buffer fits any block, and its content differs from the content of every block.
        let longest = *lengths.iter().max().expect("there are blocks");
        let mut buffer = swap.buffer(longest).expect("memory");
        buffer.fill(0xA5);
        pending.push_back((swap.read(block, buffer), content(lengths[block], *seed)));
    }
}

fn check(transfer: Transfer, expected: &[u8]) {
    let buffer = transfer.wait().expect("a disk that works");
    assert!(*buffer == *expected, "{} bytes, not as they were written", expected.len());
}
