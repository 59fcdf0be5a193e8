//! The step programs of a pipeline in time.

use std::collections::BTreeMap;
use trireme_schedule::engine::{Actor, Entry, Interval, Job, Length, run};
use trireme_schedule::pipeline::Span;
use trireme_schedule::{Action, Message, Program, ProgramError, StateOf, Stream, validate_pipeline};

#[cfg(test)]
mod tests;

/// When the ranks of a pipeline do what their programs say. All times are in ticks, whatever a tick is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepTimeline {
    /// For each rank, when its actions run, in the program's order. A receive lasts from its line until the message is there.
    pub ranks: Vec<Vec<Span>>,
    /// When the last action ends.
    pub makespan: u64,
}

/// Runs the programs of all ranks of one pipeline in [simulated time](trireme_schedule::engine). `ticks` tells what an action of a
/// rank takes, at most [`TICKS_MAX`](trireme_schedule::pipeline::TICKS_MAX); of a send that is until its message is there, and a receive has none of its own.
///
/// What the device computes goes in the program's order. The other streams run beside it: an action of theirs begins when the
/// program comes to it and the one before it in its stream has ended; sends of a rank follow each other, and occupy no receiver.
/// A pass waits for the activation or gradient that it reads, for the parameters and for state that was fetched. The first
/// `STEP` waits until all ranks have come to theirs and all streams have ended, for the gradients' norm needs all of them.
///
/// # Errors
/// What is wrong with the programs ([`validate_pipeline`]).
///
/// Cost: O(n log n) for n actions. Sums of ticks are exact up to 2^53.
pub fn simulate(
    programs: &[Program],
    ticks: impl Fn(usize, Action) -> u64,
) -> Result<StepTimeline, ProgramError> {
    validate_pipeline(programs)?;
    let mut channels = Channels { messages: BTreeMap::new(), num_ranks: programs.len() };
    let ranks: Vec<RankEntries> = (programs.iter().enumerate())
        .map(|(rank, program)| RankEntries::new(rank, program, &|action| ticks(rank, action), &mut channels))
        .collect();
    // A host each: nothing shares one.
    let actors: Vec<Actor<'_>> = (ranks.iter().enumerate())
        .map(|(host, rank)| Actor { entries: &rank.entries, host, load: 1 })
        .collect();
    let found = run(&actors).expect("valid programs end");
    let span = |interval: Interval| Span { start: interval.start as u64, end: interval.end as u64 };
    let spans = |(rank, found): (&RankEntries, &Vec<Interval>)| -> Vec<Span> {
        rank.actions.iter().map(|&entry| span(found[entry])).collect()
    };
    let ranks: Vec<Vec<Span>> = ranks.iter().zip(&found).map(spans).collect();
    let makespan = ranks.iter().flatten().map(|span| span.end).max().unwrap_or(0);
    Ok(StepTimeline { ranks, makespan })
}

/// A channel for each message; the first ones are for what each rank does alone, and that on which all meet.
struct Channels {
    messages: BTreeMap<Message, usize>,
    num_ranks: usize,
}

const NUM_STREAMS: usize = 4;

impl Channels {
    fn own(&self, rank: usize, stream: Stream) -> usize {
        rank * NUM_STREAMS + stream as usize
    }

    fn meeting(&self) -> usize {
        self.num_ranks * NUM_STREAMS
    }

    fn message(&mut self, message: Message) -> usize {
        let next = self.meeting() + 1 + self.messages.len();
        *self.messages.entry(message).or_insert(next)
    }
}

#[derive(Default)]
struct RankEntries {
    entries: Vec<Entry>,
    /// The entry of each action.
    actions: Vec<usize>,
    /// Numbers under which the last of each was issued.
    gathered: BTreeMap<usize, usize>,
    fetched: BTreeMap<StateOf, usize>,
    received: BTreeMap<Message, usize>,
    /// The same of each stream.
    last: [Option<usize>; NUM_STREAMS],
    num_issued: usize,
}

impl RankEntries {
    fn new(rank: usize, program: &Program, ticks: &dyn Fn(Action) -> u64, channels: &mut Channels) -> Self {
        let mut made = RankEntries::default();
        let is_asynchronous = program.outline.asynchronous.is_some();
        let mut has_met = false;
        for &action in &program.actions {
            made.await_needs(program, action);
            let is_step = matches!(action, Action::Step { .. });
            if is_step && is_asynchronous {
                made.await_all();
            } else if is_step && !std::mem::replace(&mut has_met, true) {
                made.meet(channels);
            }
            made.actions.push(made.entries.len());
            let length = Length::Fixed(ticks(action) as f64);
            match action {
                _ if action.stream() == Stream::Compute => made.entries.push(Entry::Compute(length)),
                Action::Receive(message) => {
                    made.entries.push(Entry::Expect(made.num_issued, channels.message(message)));
                    made.received.insert(message, made.num_issued);
                    made.num_issued += 1;
                }
                Action::Send(message) => {
                    let stream = channels.own(rank, Stream::Pipeline);
                    let number = made.start(channels.message(message), stream, 1, length);
                    made.last[Stream::Pipeline as usize] = Some(number);
                }
                _ => {
                    let own = channels.own(rank, action.stream());
                    let number = made.start(own, own, 1, length);
                    made.last[action.stream() as usize] = Some(number);
                    match action {
                        Action::Unshard { unit } => drop(made.gathered.insert(unit, number)),
                        Action::Fetch(state) => drop(made.fetched.insert(state, number)),
                        _ => (),
                    }
                }
            }
        }
        if !has_met && !is_asynchronous {
            made.meet(channels);
        }
        made
    }

    fn start(&mut self, channel: usize, stream: usize, num_starts: usize, length: Length) -> usize {
        let lag = Length::Fixed(0.0);
        let job = Job { channel, num_starts, streams: vec![stream], load: 0, length, lag };
        self.entries.push(Entry::Start(self.num_issued, Box::new(job)));
        self.num_issued += 1;
        self.num_issued - 1
    }

    /// Waits for what an action reads.
    fn await_needs(&mut self, program: &Program, action: Action) {
        let outline = &program.outline;
        let gathered = outline.reads(action).filter_map(|unit| self.gathered.get(&unit));
        let fetched = action.uses().iter().filter_map(|&class| self.fetched.get(&action.state(class)));
        // A unit's own part of a gradient joins that of the unit which reads its parameters.
        let tied = action.completed_gradient().map(|(unit, batch)| Message::tied_gradient(unit, batch));
        let messages = action.awaited_message().into_iter().chain(tied);
        let received = messages.filter_map(|message| self.received.get(&message));
        let awaited: Vec<usize> = gathered.chain(fetched).chain(received).copied().collect();
        self.entries.extend(awaited.into_iter().map(Entry::Await));
    }

    /// Waits until all streams of this rank have ended.
    fn await_all(&mut self) {
        self.entries.extend(self.last.into_iter().flatten().map(Entry::Await));
    }

    /// Waits until all streams of all ranks have ended.
    fn meet(&mut self, channels: &Channels) {
        self.await_all();
        let channel = channels.meeting();
        let number = self.start(channel, channel, channels.num_ranks, Length::Fixed(0.0));
        self.entries.push(Entry::Await(number));
    }
}
