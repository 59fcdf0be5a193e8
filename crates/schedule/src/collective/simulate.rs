use super::cost::CostModel;
use super::{Hosts, Outgoing, ReceiveAction, Step};
use crate::engine::{Entry, Job, RankProgram, TaskDuration, run};
use trireme_base::Rank;

/// Returns the seconds from the common start until the last rank has finished its steps. `programs[r]` are the steps of rank `r`.
///
/// A message of `b` bytes takes `latency_seconds + b * seconds_per_byte` and occupies sender and receiver for that time (Hockney: "The
/// communication challenge for MPP", 1994). A sender does not wait for its receiver. The ranks of a host share one link to other hosts,
/// which carries one outgoing and one incoming message at a time. Reductions and copies take time in proportion to their bytes.
///
/// # Panics
/// If there is not one program per rank, or a rank waits for a message that is never sent.
pub fn simulate(programs: &[Vec<Step>], hosts: &Hosts, element_bytes: usize, model: &CostModel) -> f64 {
    assert_eq!(programs.len(), hosts.world_size(), "one program for each rank");
    let machine = Machine { hosts, element_bytes: element_bytes as f64, model };
    let entries: Vec<Vec<Entry>> =
        programs.iter().enumerate().map(|(rank, steps)| machine.entries(Rank(rank), steps)).collect();
    let actors: Vec<RankProgram<'_>> =
        entries.iter().enumerate().map(|(host, entries)| RankProgram { entries, host, load: 0 }).collect();
    let found = run(&actors);
    let found =
        found.unwrap_or_else(|stuck| panic!("rank {} waits for a message that is never sent", stuck.rank));
    found.iter().flatten().map(|interval| interval.end).fold(0.0, f64::max)
}

struct Machine<'a> {
    hosts: &'a Hosts,
    element_bytes: f64,
    model: &'a CostModel,
}

impl Machine<'_> {
    fn entries(&self, rank: Rank, steps: &[Step]) -> Vec<Entry> {
        let compute = |elements: usize, seconds_per_byte: f64| {
            Entry::Compute(TaskDuration::Fixed(elements as f64 * self.element_bytes * seconds_per_byte))
        };
        let mut entries = Vec::with_capacity(5 * steps.len());
        for (index, step) in steps.iter().enumerate() {
            let (sent, received) = (2 * index, 2 * index + 1);
            let (send, receive) = match step {
                Step::Exchange { send, receive } => (send, receive),
                Step::Copy { from, .. } => {
                    entries.push(compute(from.range.len(), self.model.copy_seconds_per_byte));
                    continue;
                }
            };
            entries.extend(send.as_ref().map(|send| Entry::Start(sent, self.message(rank, send))));
            if let Some(receive) = receive {
                let (from, len) = (receive.from, receive.span.range.len());
                let (length, lag) = self.seconds(from, rank, len);
                entries.push(Entry::Expect(received, self.channel(from, rank)));
                entries.push(Entry::Compute(TaskDuration::Fixed(length + lag)));
                entries.push(Entry::Await(received));
                if let ReceiveAction::Reduce { .. } = receive.action {
                    entries.push(compute(len, self.model.reduce_seconds_per_byte));
                }
            }
            entries.extend(send.is_some().then_some(Entry::Await(sent)));
        }
        entries
    }

    fn message(&self, rank: Rank, Outgoing { to, span }: &Outgoing) -> Box<Job> {
        let (from_host, to_host) = (self.hosts.host_of(rank), self.hosts.host_of(*to));
        let (length, lag) = self.seconds(rank, *to, span.range.len());
        let (duration, lag) = (TaskDuration::Fixed(length), TaskDuration::Fixed(lag));
        // Each host has one stream for outgoing messages and one for incoming messages.
        let streams = if from_host == to_host { Vec::new() } else { vec![2 * from_host, 2 * to_host + 1] };
        Box::new(Job { channel: self.channel(rank, *to), num_starts: 1, streams, load: 0, duration, lag })
    }

    fn channel(&self, from: Rank, to: Rank) -> usize {
        from.0 * self.hosts.world_size() + to.0
    }

    /// Returns how long a message occupies its link, and how much later it arrives, in seconds.
    fn seconds(&self, from: Rank, to: Rank, elements: usize) -> (f64, f64) {
        let is_within = self.hosts.host_of(from) == self.hosts.host_of(to);
        let link = if is_within { self.model.within } else { self.model.across };
        (elements as f64 * self.element_bytes * link.seconds_per_byte, link.latency_seconds)
    }
}
