use super::report::Direction;
use super::text::ProgramLineText;
use crate::Operation;
use std::time::Instant;
use trireme_base::Rank;

/// Number of operations, and of messages, that are kept per group.
pub(super) const NUM_KEPT: u64 = 256;

/// The program line and time of an operation's issue.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Issued {
    pub(crate) line: ProgramLineText,
    pub(crate) at: Instant,
}

/// The record of one operation or one message.
#[derive(Debug, Clone, Copy)]
pub(super) struct Record {
    /// Number that determines the slot in the ring: position among all operations, or all messages, of the group.
    pub(super) number: u64,
    /// Position among the operations of the group, or among the messages with the same sender and receiver.
    pub(super) sequence: u64,
    pub(super) operation: Operation,
    pub(super) peer: Option<(Direction, Rank)>,
    pub(super) issued: Issued,
    pub(super) started: Option<Instant>,
    pub(super) ended: Option<Instant>,
    pub(super) has_failed: bool,
}

impl Record {
    /// Creates the record of an operation that has not begun.
    pub(super) fn issued(number: u64, sequence: u64, operation: Operation, issued: Issued) -> Self {
        let (peer, started, ended, has_failed) = (None, None, None, false);
        Record { number, sequence, operation, peer, issued, started, ended, has_failed }
    }
}

/// A ring of the most recent records. Records of operations that have not ended are never overwritten.
pub(super) struct RecordRing(Vec<Option<Record>>);

impl RecordRing {
    /// Creates an empty ring. Memory is allocated with the first record.
    pub(super) fn new() -> Self {
        RecordRing(Vec::new())
    }

    /// Adds a record. Drops it if its slot holds an operation that has not ended, because then too many are pending to keep all.
    pub(super) fn add(&mut self, record: Record) {
        if self.0.is_empty() {
            self.0.resize(NUM_KEPT as usize, None);
        }
        let slot = &mut self.0[(record.number % NUM_KEPT) as usize];
        if slot.is_none_or(|earlier| earlier.ended.is_some()) {
            *slot = Some(record);
        }
    }

    pub(super) fn find(&mut self, number: u64) -> Option<&mut Record> {
        let slot = self.0.get_mut((number % NUM_KEPT) as usize)?;
        slot.as_mut().filter(|record| record.number == number)
    }

    pub(super) fn records(&self) -> Vec<Record> {
        let mut records: Vec<Record> = self.0.iter().flatten().copied().collect();
        records.sort_by_key(|record| record.number);
        records
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(number: u64) -> Record {
        let issued = Issued { line: ProgramLineText::EMPTY, at: Instant::now() };
        Record::issued(number, number, Operation::BARRIER, issued)
    }

    #[test]
    fn recent_and_pending_records_are_kept() {
        let mut ring = RecordRing::new();
        assert!(ring.records().is_empty() && ring.find(0).is_none());
        for number in 0..3 * NUM_KEPT {
            ring.add(record(number));
            if let Some(added) = ring.find(number).filter(|_| number != NUM_KEPT + 5) {
                added.ended = Some(Instant::now());
            }
        }
        let kept: Vec<u64> = ring.records().iter().map(|record| record.number).collect();
        let last = 2 * NUM_KEPT..3 * NUM_KEPT;
        let expected = std::iter::once(NUM_KEPT + 5).chain(last.filter(|&number| number % NUM_KEPT != 5));
        assert_eq!(kept, expected.collect::<Vec<_>>());
        assert!(ring.find(2 * NUM_KEPT + 5).is_none());
    }
}
