//! Computes the time of a step from the journal of a dry run and the speed of a machine.

use std::collections::BTreeMap;
use std::sync::Arc;
use trireme_base::{AsyncOperation, JournalEntry, KernelCall, Rank, StepEntries};
use trireme_schedule::engine::{Deadlock, Entry, Interval, Job, RankProgram, TaskDuration, run};

/// Times of kernels and asynchronous operations on a machine, in seconds.
pub trait OperationTimes {
    /// Returns the time of a kernel while `load` workers of a host compute.
    fn kernel(&self, call: &KernelCall, load: usize) -> f64;

    /// Returns the time of a collective, a message or a disk transfer under the same load. For a message, this is the time until it arrives
    /// at the receiver.
    fn operation(&self, issued: &AsyncOperation, load: usize) -> f64;
}

/// Predicted time of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepTime {
    /// Seconds from the end of a step to the end of the next one.
    pub seconds: f64,
    /// Seconds of a step during which each pipeline rank computes.
    pub compute_seconds: Vec<f64>,
}

/// Number of simulated steps, of which the last one is measured. Operations issued in one step may end in the next, so the first step is
/// not typical: no operation is in flight when it begins.
const NUM_STEPS: usize = 3;

/// Returns the time of a step of a job on one host, by simulating a few steps. `ranks` holds the entries of one rank for each pipeline
/// rank. Each of these stands for `data_degree` ranks with consecutive numbers, which all do the same work.
///
/// Cost: for each entry of the three simulated steps, `2 * ranks.len() * data_degree` calls of `times`, one for each load.
///
/// # Errors
/// [`Deadlock`] if a rank waits for an operation that never ends.
pub fn step_time(
    ranks: &[StepEntries],
    data_degree: usize,
    times: &dyn OperationTimes,
) -> Result<StepTime, Deadlock> {
    let num_workers = ranks.len() * data_degree;
    let mut builder = EntryBuilder { data_degree, num_workers, times, channels: BTreeMap::new() };
    let entries: Vec<RankEntries> =
        (ranks.iter().enumerate()).map(|(place, rank)| RankEntries::new(place, rank, &mut builder)).collect();
    let actor = |rank| RankProgram { entries: rank, host: 0, load: data_degree };
    let actors: Vec<RankProgram<'_>> = entries.iter().map(|rank| actor(&rank.entries[..])).collect();
    let found = run(&actors)?;
    let end = |step: usize| {
        let of_rank = |(rank, found): (&RankEntries, &Vec<Interval>)| {
            let entries = rank.entries.iter().zip(found).take(rank.steps[step].end);
            let own = entries.filter(|(entry, _)| matches!(entry, Entry::Compute(_) | Entry::Await(_)));
            own.map(|(_, interval)| interval.end).fold(0.0, f64::max)
        };
        entries.iter().zip(&found).map(of_rank).fold(0.0, f64::max)
    };
    let computing = |(rank, found): (&RankEntries, &Vec<Interval>)| {
        let last = rank.steps[NUM_STEPS - 1].clone();
        let entries = rank.entries[last.clone()].iter().zip(&found[last]);
        let computes = entries.filter(|(entry, _)| matches!(entry, Entry::Compute(_)));
        computes.map(|(_, interval)| interval.end - interval.start).sum()
    };
    let seconds = end(NUM_STEPS - 1) - end(NUM_STEPS - 2);
    Ok(StepTime { seconds, compute_seconds: entries.iter().zip(&found).map(computing).collect() })
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Channel {
    Group(Arc<[Rank]>),
    Message(Rank, Rank),
    Disk(usize),
}

struct EntryBuilder<'a> {
    data_degree: usize,
    num_workers: usize,
    times: &'a dyn OperationTimes,
    channels: BTreeMap<Channel, usize>,
}

impl EntryBuilder<'_> {
    fn length(&self, seconds: impl Fn(usize) -> f64) -> TaskDuration {
        TaskDuration::ByLoad((1..=2 * self.num_workers).map(seconds).collect())
    }

    fn channel(&mut self, channel: Channel) -> usize {
        let next = self.channels.len();
        *self.channels.entry(channel).or_insert(next)
    }

    /// Returns the simulated rank that stands for `rank`.
    fn representative(&self, rank: Rank) -> Rank {
        Rank(rank.0 / self.data_degree * self.data_degree)
    }

    fn entry(&mut self, pipeline_rank: usize, number: usize, issued: &AsyncOperation) -> Entry {
        let own = Rank(pipeline_rank * self.data_degree);
        let (channel, num_starts, load) = match issued {
            AsyncOperation::Collective { members, .. } => {
                let mut pipeline_ranks: Vec<usize> =
                    members.iter().map(|rank| rank.0 / self.data_degree).collect();
                pipeline_ranks.dedup();
                (Channel::Group(Arc::clone(members)), pipeline_ranks.len(), members.len())
            }
            AsyncOperation::Send { to, .. } => {
                (Channel::Message(own, self.representative(*to)), 1, self.data_degree)
            }
            AsyncOperation::Receive { from, .. } => {
                let channel = self.channel(Channel::Message(self.representative(*from), own));
                return Entry::Expect(number, channel);
            }
            AsyncOperation::DiskRead { .. } | AsyncOperation::DiskWrite { .. } => {
                (Channel::Disk(pipeline_rank), 1, 0)
            }
        };
        let (channel, duration) =
            (self.channel(channel), self.length(|load| self.times.operation(issued, load)));
        let lag = TaskDuration::Fixed(0.0);
        let job = Job { channel, num_starts, streams: vec![channel], load, duration, lag };
        Entry::Start(number, Box::new(job))
    }
}

struct RankEntries {
    entries: Vec<Entry>,
    /// Range of the entries of each step.
    steps: Vec<std::ops::Range<usize>>,
}

impl RankEntries {
    fn new(pipeline_rank: usize, rank: &StepEntries, builder: &mut EntryBuilder<'_>) -> Self {
        let numbers = rank.actions.iter().flatten().filter_map(|event| match event {
            JournalEntry::Issue(number, _) => Some(*number),
            _ => None,
        });
        let first = numbers.min().unwrap_or(0);
        let (mut entries, mut steps): (Vec<Entry>, Vec<_>) = (Vec::new(), Vec::new());
        for step in 0..NUM_STEPS {
            let begin = entries.len();
            let number = |number: usize| (step * rank.issued_per_step + number).checked_sub(first);
            for action in &rank.actions {
                let mut kernels: Vec<&KernelCall> = Vec::new();
                for event in action {
                    if let JournalEntry::Kernel(call) = event {
                        kernels.push(call);
                        continue;
                    }
                    entries.extend(computation(&mut kernels, builder));
                    match event {
                        JournalEntry::Issue(issue, issued) => {
                            let number = number(*issue).expect("it is the first or comes later");
                            entries.push(builder.entry(pipeline_rank, number, issued));
                        }
                        // Operations issued before the first step have ended.
                        JournalEntry::Await(issue) => entries.extend(number(*issue).map(Entry::Await)),
                        JournalEntry::Kernel(_) | JournalEntry::Pause => (),
                    }
                }
                entries.extend(computation(&mut kernels, builder));
            }
            steps.push(begin..entries.len());
        }
        RankEntries { entries, steps }
    }
}

fn computation(kernels: &mut Vec<&KernelCall>, builder: &EntryBuilder<'_>) -> Option<Entry> {
    let kernels = std::mem::take(kernels);
    let seconds = |load| kernels.iter().map(|call| builder.times.kernel(call, load)).sum();
    (!kernels.is_empty()).then(|| Entry::Compute(builder.length(seconds)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use trireme_base::Cost;

    /// A machine on which a kernel takes one second per operation, or two if more than two workers compute. An asynchronous operation takes
    /// 4 seconds.
    struct Machine;

    impl OperationTimes for Machine {
        fn kernel(&self, call: &KernelCall, load: usize) -> f64 {
            call.cost.other_operations as f64 * if load > 2 { 2.0 } else { 1.0 }
        }

        fn operation(&self, _: &AsyncOperation, _: usize) -> f64 {
            4.0
        }
    }

    fn kernel(operations: usize) -> JournalEntry {
        JournalEntry::Kernel(KernelCall { kernel: "any", cost: Cost::others(&[operations]) })
    }

    fn collective(number: usize, members: &[usize]) -> JournalEntry {
        let members = members.iter().copied().map(Rank).collect();
        let operation = "all_reduce";
        JournalEntry::Issue(
            number,
            AsyncOperation::Collective { operation, len: 1, element_bytes: 4, members },
        )
    }

    fn seconds(ranks: &[Vec<Vec<JournalEntry>>], num_issued: usize, data_degree: usize) -> f64 {
        let entries = |actions: &Vec<Vec<JournalEntry>>| StepEntries {
            actions: actions.clone(),
            issued_per_step: num_issued,
        };
        let ranks: Vec<StepEntries> = ranks.iter().map(entries).collect();
        step_time(&ranks, data_degree, &Machine).unwrap().seconds
    }

    #[test]
    fn overlapped_operations_are_hidden_and_awaited_ones_are_not() {
        let members = [0, 1];
        let hidden = vec![collective(7, &members), kernel(9), JournalEntry::Await(7)];
        // The kernels overlap the collective of two ranks, at half speed for its 4 seconds.
        assert_eq!(seconds(&[vec![hidden]], 1, 2), 11.0);
        let awaited = vec![kernel(9), collective(7, &members), JournalEntry::Await(7)];
        assert_eq!(seconds(&[vec![awaited]], 1, 2), 13.0);
        // The collective is awaited in the next step: number 6 is its counterpart in the previous step.
        let next = vec![kernel(9), JournalEntry::Await(6), kernel(1), collective(7, &members)];
        assert_eq!(seconds(&[vec![next]], 1, 2), 12.0);
    }

    #[test]
    fn pipeline_ranks_wait_for_messages_and_collectives() {
        let (send, receive) = (
            AsyncOperation::Send { to: Rank(1), bytes: 8 },
            AsyncOperation::Receive { from: Rank(0), bytes: 8 },
        );
        let first =
            vec![kernel(5), JournalEntry::Issue(0, send), collective(1, &[0, 1]), JournalEntry::Await(1)];
        let second = vec![
            JournalEntry::Issue(0, receive),
            JournalEntry::Await(0),
            kernel(3),
            collective(1, &[0, 1]),
            JournalEntry::Await(1),
        ];
        assert_eq!(seconds(&[vec![first], vec![second]], 2, 1), 5.0 + 4.0 + 3.0 + 4.0);
    }

    #[test]
    fn ring_messages_arrive_at_the_representative_rank() {
        let (to, from) = (Rank(1), Rank(1));
        let shift = |first: usize| {
            let (send, receive) =
                (AsyncOperation::Send { to, bytes: 8 }, AsyncOperation::Receive { from, bytes: 8 });
            [JournalEntry::Issue(first, send), JournalEntry::Issue(first + 1, receive)]
        };
        let wait = |first: usize| [JournalEntry::Await(first + 1), JournalEntry::Await(first)];
        let entries = shift(0).into_iter().chain([kernel(3)]).chain(wait(0));
        let entries = entries.chain(shift(2)).chain([kernel(9)]).chain(wait(2)).collect();
        // Kernels run at half speed for the 4 seconds of a message.
        assert_eq!(seconds(&[vec![entries]], 4, 2), (4.0 + 1.0) + (4.0 + 7.0));
    }
}
