//! Malformed and hostile inputs for parsers, the same in every run.

use crate::notice::{NOTICE_BYTES, Notice, NoticeKind};
use crate::recorder::{GroupName, OperationState, ProgramLineText, ReportedPlace};
use crate::{Operation, words};
use trireme_base::{DType, Random, RandomKey, Rank, ReduceOp};
use trireme_schedule::collective::CollectiveKind;

/// Values for which checks of lengths, counts and tags are often wrong.
const EDGE_VALUES: [u64; 8] = [0, 1, 2, 255, 1 << 16, 1 << 32, u64::MAX - 1, u64::MAX];

/// Generates inputs: valid messages with a few changes each, and some random bytes.
pub(crate) struct Fuzzer {
    random: Random,
    valid: Vec<Vec<u8>>,
    input: Vec<u8>,
}

impl Fuzzer {
    /// Creates the input sequence called `purpose`, derived from `valid` messages.
    pub(crate) fn new(purpose: &str, valid: Vec<Vec<u8>>) -> Self {
        assert!(!valid.is_empty(), "a message to begin with");
        Fuzzer { random: Random::new(RandomKey::new(7, purpose), 0), valid, input: Vec::new() }
    }

    /// The next input, of any length.
    pub(crate) fn next(&mut self) -> &[u8] {
        self.start();
        for _ in 0..=self.below(3) {
            self.change();
        }
        &self.input
    }

    /// The next input, truncated or padded with zeros to `BYTES` bytes.
    pub(crate) fn next_array<const BYTES: usize>(&mut self) -> [u8; BYTES] {
        self.next();
        self.input.resize(BYTES, 0);
        self.input.as_slice().try_into().expect("as many bytes")
    }

    /// A random number below `bound`.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.random.below(bound as u64) as usize
    }

    fn start(&mut self) {
        let chosen = self.below(self.valid.len());
        self.input.clear();
        self.input.extend(&self.valid[chosen]);
        if self.below(8) == 0 {
            let len = self.below(2 * self.input.len() + 1);
            self.input.resize(len, 0);
            for chunk in self.input.chunks_mut(4) {
                chunk.copy_from_slice(&self.random.next_u32().to_le_bytes()[..chunk.len()]);
            }
        }
    }

    fn change(&mut self) {
        let len = self.input.len();
        match self.below(6) {
            0 => self.input.truncate(self.random.below(len as u64 + 1) as usize),
            1 => self.input.push(self.random.next_u32() as u8),
            2 if len >= 8 => {
                let (word, place) = (EDGE_VALUES[self.below(EDGE_VALUES.len())], 8 * self.below(len / 8));
                self.input[place..place + 8].copy_from_slice(&word.to_le_bytes());
            }
            3 if len > 0 => {
                let place = self.below(len);
                self.input[place] = self.random.next_u32() as u8;
            }
            // Replaces the end with the end of another message.
            4 => {
                let (other, keep) = (self.below(self.valid.len()), self.below(len + 1));
                self.input.truncate(keep);
                self.input.extend(self.valid[other].iter().skip(keep));
            }
            _ if len > 0 => {
                let bit = self.below(8 * len);
                self.input[bit / 8] ^= 1 << (bit % 8);
            }
            _ => {}
        }
    }
}

fn operations() -> [Operation; 4] {
    [
        Operation::reduction_of(CollectiveKind::AllReduce.with_len(1 << 20), ReduceOp::Mean, DType::Bf16),
        Operation::of(CollectiveKind::Broadcast.with_root(Rank(2), 9), DType::F64),
        Operation::ALL_GATHER_BYTES,
        Operation::BARRIER,
    ]
}

#[test]
fn hostile_operations_are_read_or_refused() {
    let valid = operations().map(|operation| words::to_bytes::<2, 16>(operation.encode()).to_vec());
    let mut fuzzer = Fuzzer::new("operations", valid.to_vec());
    let mut num_read = 0;
    for _ in 0..200_000 {
        let words = words::from_bytes::<2, 16>(&fuzzer.next_array());
        if let Some(operation) = Operation::decode(words) {
            assert_eq!(operation.encode(), words);
            num_read += 1;
        }
    }
    // Both outcomes must be frequent.
    assert!((10_000..190_000).contains(&num_read), "{num_read}");
}

#[test]
fn hostile_notices_are_read_or_refused() {
    let [first, second, ..] = operations();
    let mismatch = NoticeKind::Mismatch { sequence: 5, first: (Rank(0), first), second: (Rank(3), second) };
    let place = NoticeKind::Place(Some(ReportedPlace {
        group: GroupName::of(format_args!("world/data")),
        sequence: 3,
        operation: first,
        peer: None,
        line: ProgramLineText::of(format_args!("line 7: REDUCE_GRAD 2")),
        state: OperationState::Running,
        milliseconds: 40,
    }));
    let waiting = NoticeKind::Waiting { operation: second };
    let events = [
        waiting,
        NoticeKind::Goodbye,
        NoticeKind::Lost { rank: Rank(1) },
        mismatch,
        NoticeKind::TimedOut,
        place,
    ];
    let valid = events.map(|event| Notice { sequence: 8, kind: event }.encode().to_vec());
    let mut fuzzer = Fuzzer::new("notices", valid.to_vec());
    let mut num_read = 0;
    for _ in 0..200_000 {
        let bytes: [u8; NOTICE_BYTES] = fuzzer.next_array();
        let world_size = 1 + fuzzer.below(5);
        if let Some(notice) = Notice::decode(&bytes, world_size) {
            assert_eq!(Notice::decode(&notice.encode(), world_size), Some(notice));
            num_read += 1;
        }
    }
    assert!((10_000..190_000).contains(&num_read), "{num_read}");
}
