//! Simulates when the actions of a pipeline's step programs run.

use std::collections::BTreeMap;
use trireme_schedule::engine::{Entry, Interval, Job, RankProgram, TaskDuration, run};
use trireme_schedule::pipeline::PassInterval;
use trireme_schedule::{Action, Message, Program, ProgramError, StateKey, Stream, validate_pipeline};

#[cfg(test)]
mod tests;

/// Start and end of every action of the ranks of a pipeline, in ticks. The caller chooses the unit of a tick.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepTimeline {
    /// Spans of each rank's actions, in the program's order. A receive lasts from the time when the program reaches it until the message
    /// has arrived.
    pub ranks: Vec<Vec<PassInterval>>,
    /// The end of the last action.
    pub makespan: u64,
}

/// Runs the programs of all ranks of one pipeline in [simulated time](trireme_schedule::engine). `ticks` returns the duration of an action
/// of a rank, at most [`TICKS_MAX`](trireme_schedule::pipeline::TICKS_MAX). The duration of a send is the time until its message arrives; a
/// receive has no duration of its own.
///
/// Actions that compute on the device run in the program's order. The other streams run concurrently: an action starts when the program
/// reaches it and the previous action of its stream has ended. Sends of a rank follow each other, and do not occupy the receiver. A pass
/// waits for the activation or gradient that it reads, for its parameters and for fetched state. The first `STEP` waits until all ranks
/// have reached their first `STEP` and all streams are idle, because the gradient norm needs all gradients. In asynchronous programs, a
/// `STEP` waits only for the streams of its rank.
///
/// Cost: O(n log n) for n actions. Sums of ticks are exact up to 2^53.
///
/// # Errors
/// The error of [`validate_pipeline`] if the programs are not valid.
#[expect(clippy::missing_panics_doc, reason = "valid programs do not deadlock")]
pub fn simulate(
    programs: &[Program],
    ticks: impl Fn(usize, Action) -> u64,
) -> Result<StepTimeline, ProgramError> {
    validate_pipeline(programs)?;
    let mut channels = Channels { messages: BTreeMap::new(), num_ranks: programs.len() };
    let ranks: Vec<RankEntries> = (programs.iter().enumerate())
        .map(|(rank, program)| RankEntries::new(rank, program, &|action| ticks(rank, action), &mut channels))
        .collect();
    // Each rank is on its own host, so ranks do not slow each other down.
    let actors: Vec<RankProgram<'_>> = (ranks.iter().enumerate())
        .map(|(host, rank)| RankProgram { entries: &rank.entries, host, load: 1 })
        .collect();
    let found = run(&actors).expect("valid programs end");
    let span = |interval: Interval| PassInterval { start: interval.start as u64, end: interval.end as u64 };
    let spans = |(rank, found): (&RankEntries, &Vec<Interval>)| -> Vec<PassInterval> {
        rank.actions.iter().map(|&entry| span(found[entry])).collect()
    };
    let ranks: Vec<Vec<PassInterval>> = ranks.iter().zip(&found).map(spans).collect();
    let makespan = ranks.iter().flatten().map(|span| span.end).max().unwrap_or(0);
    Ok(StepTimeline { ranks, makespan })
}

/// Assigns channel numbers: one to each stream of each rank, then one to the synchronization of all ranks, then one to each message.
struct Channels {
    messages: BTreeMap<Message, usize>,
    num_ranks: usize,
}

const NUM_STREAMS: usize = 4;

impl Channels {
    fn stream(&self, rank: usize, stream: Stream) -> usize {
        rank * NUM_STREAMS + stream as usize
    }

    fn barrier(&self) -> usize {
        self.num_ranks * NUM_STREAMS
    }

    fn message(&mut self, message: Message) -> usize {
        let next = self.barrier() + 1 + self.messages.len();
        *self.messages.entry(message).or_insert(next)
    }
}

#[derive(Default)]
struct RankEntries {
    entries: Vec<Entry>,
    /// Index of each action's entry.
    actions: Vec<usize>,
    /// Job number of the most recent gather of each unit.
    gathered: BTreeMap<usize, usize>,
    /// Job number of the most recent fetch of each piece of state.
    fetched: BTreeMap<StateKey, usize>,
    /// Job number of each received message.
    received: BTreeMap<Message, usize>,
    /// Number of the last job of each stream.
    last: [Option<usize>; NUM_STREAMS],
    num_issued: usize,
}

impl RankEntries {
    fn new(rank: usize, program: &Program, ticks: &dyn Fn(Action) -> u64, channels: &mut Channels) -> Self {
        let mut rank_entries = RankEntries::default();
        let is_asynchronous = program.header.asynchronous.is_some();
        let mut has_synchronized = false;
        for &action in &program.actions {
            rank_entries.await_needs(program, action);
            let is_step = matches!(action, Action::Step { .. });
            if is_step && is_asynchronous {
                rank_entries.await_all();
            } else if is_step && !std::mem::replace(&mut has_synchronized, true) {
                rank_entries.synchronize_ranks(channels);
            }
            rank_entries.actions.push(rank_entries.entries.len());
            let length = TaskDuration::Fixed(ticks(action) as f64);
            match action {
                _ if action.stream() == Stream::Compute => rank_entries.entries.push(Entry::Compute(length)),
                Action::Receive(message) => {
                    rank_entries
                        .entries
                        .push(Entry::Expect(rank_entries.num_issued, channels.message(message)));
                    rank_entries.received.insert(message, rank_entries.num_issued);
                    rank_entries.num_issued += 1;
                }
                Action::Send(message) => {
                    let stream = channels.stream(rank, Stream::Pipeline);
                    let number = rank_entries.start(channels.message(message), stream, 1, length);
                    rank_entries.last[Stream::Pipeline as usize] = Some(number);
                }
                _ => {
                    let own = channels.stream(rank, action.stream());
                    let number = rank_entries.start(own, own, 1, length);
                    rank_entries.last[action.stream() as usize] = Some(number);
                    match action {
                        Action::Unshard { unit } => drop(rank_entries.gathered.insert(unit, number)),
                        Action::Fetch(state) => drop(rank_entries.fetched.insert(state, number)),
                        _ => (),
                    }
                }
            }
        }
        if !has_synchronized && !is_asynchronous {
            rank_entries.synchronize_ranks(channels);
        }
        rank_entries
    }

    fn start(&mut self, channel: usize, stream: usize, num_starts: usize, duration: TaskDuration) -> usize {
        let lag = TaskDuration::Fixed(0.0);
        let job = Job { channel, num_starts, streams: vec![stream], load: 0, duration, lag };
        self.entries.push(Entry::Start(self.num_issued, Box::new(job)));
        self.num_issued += 1;
        self.num_issued - 1
    }

    /// Adds waits for the parameters, the state and the messages that an action reads.
    fn await_needs(&mut self, program: &Program, action: Action) {
        let header = &program.header;
        let gathered = header.reads(action).filter_map(|unit| self.gathered.get(&unit));
        let fetched = action.uses().iter().filter_map(|&class| self.fetched.get(&action.state(class)));
        // The gradient of a tied parameter completes only after the gradient from the other rank has arrived.
        let tied = action.completed_gradient().map(|(unit, batch)| Message::tied_gradient(unit, batch));
        let messages = action.awaited_message().into_iter().chain(tied);
        let received = messages.filter_map(|message| self.received.get(&message));
        let awaited: Vec<usize> = gathered.chain(fetched).chain(received).copied().collect();
        self.entries.extend(awaited.into_iter().map(Entry::Await));
    }

    /// Adds waits for the most recent job of each stream of this rank.
    fn await_all(&mut self) {
        self.entries.extend(self.last.into_iter().flatten().map(Entry::Await));
    }

    /// Adds a wait until all ranks have reached this point and their streams are idle.
    fn synchronize_ranks(&mut self, channels: &Channels) {
        self.await_all();
        let channel = channels.barrier();
        let number = self.start(channel, channel, channels.num_ranks, TaskDuration::Fixed(0.0));
        self.entries.push(Entry::Await(number));
    }
}
