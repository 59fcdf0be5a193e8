//! The step programs of a pipeline in time.

use std::collections::{BTreeMap, VecDeque};
use trireme_schedule::pipeline::Span;
use trireme_schedule::{
    Action, Message, MessageKind, Outline, Program, ProgramError, StateOf, Stream, validate_pipeline,
};

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

/// Runs the programs of all ranks of one pipeline in simulated time. `ticks` tells what an action of a rank takes, at most
/// [`TICKS_MAX`](trireme_schedule::pipeline::TICKS_MAX); of a send that is until its message is there, and a receive has none of its own.
///
/// What the device computes goes in the program's order. The other streams run beside it: an action of theirs begins when the
/// program comes to it and the one before it in its stream has ended; sends of a rank follow each other, and occupy no receiver.
/// A pass waits for the activation or gradient that it reads, for the parameters and for state that was fetched. The first
/// `STEP` waits until all ranks have come to theirs and all streams have ended, for the gradients' norm needs all of them.
///
/// # Errors
/// What is wrong with the programs ([`validate_pipeline`]).
///
/// Cost: linear in the actions, but for looking up state that moves.
pub fn simulate(
    programs: &[Program],
    ticks: impl Fn(usize, Action) -> u64,
) -> Result<StepTimeline, ProgramError> {
    validate_pipeline(programs)?;
    let mut clock = Clock::new(programs, ticks);
    while let Some(rank) = clock.awake.pop_front() {
        clock.advance(rank);
    }
    let ranks: Vec<Vec<Span>> = clock.ranks.into_iter().map(|rank| rank.spans).collect();
    let makespan = ranks.iter().flatten().map(|span| span.end).max().unwrap_or(0);
    Ok(StepTimeline { ranks, makespan })
}

/// No time: not done yet.
const NEVER: u64 = u64::MAX;

/// What actions bring about for a unit and a microbatch.
#[derive(Clone, Copy)]
enum Fact {
    /// What may be sent lies where it was made.
    Made,
    /// It has travelled.
    Sent,
    /// It lies where it is needed.
    Arrived,
}

/// Of all that may be sent: when each fact came about, by what it is, unit and microbatch.
struct Times {
    num_units: usize,
    num_microbatches: usize,
    facts: [Vec<u64>; 3],
}

impl Times {
    fn of(programs: &[Program]) -> Times {
        let sizes = |size: fn(&Outline) -> usize| {
            programs.iter().map(|program| size(&program.outline)).max().unwrap_or(0)
        };
        let num_units = sizes(|outline| outline.chain.num_units);
        let num_microbatches = sizes(|outline| outline.num_microbatches);
        let never = vec![NEVER; MessageKind::ALL.len() * num_units * num_microbatches];
        Times { num_units, num_microbatches, facts: [never.clone(), never.clone(), never] }
    }

    fn at(&mut self, fact: Fact, Message { kind, unit, microbatch }: Message) -> &mut u64 {
        let row = kind as usize * self.num_units + unit;
        &mut self.facts[fact as usize][row * self.num_microbatches + microbatch]
    }
}

/// How far a rank has come.
struct RankClock {
    spans: Vec<Span>,
    /// When each stream has done what was issued.
    streams: [u64; 4],
    /// When what was gathered or fetched last is at hand: parameters by unit, and state.
    whole: BTreeMap<usize, u64>,
    fetched: BTreeMap<StateOf, u64>,
    /// When all streams are done, once it has come to its first `STEP` or to its end.
    is_reduced: Option<u64>,
}

struct Clock<'a, Ticks> {
    programs: &'a [Program],
    ticks: Ticks,
    times: Times,
    ranks: Vec<RankClock>,
    /// Ranks that may be able to continue.
    awake: VecDeque<usize>,
}

impl<'a, Ticks: Fn(usize, Action) -> u64> Clock<'a, Ticks> {
    fn new(programs: &'a [Program], ticks: Ticks) -> Self {
        let rank = |program: &Program| RankClock {
            spans: Vec::with_capacity(program.actions.len()),
            streams: [0; 4],
            whole: BTreeMap::new(),
            fetched: BTreeMap::new(),
            is_reduced: None,
        };
        Clock {
            programs,
            ticks,
            times: Times::of(programs),
            ranks: programs.iter().map(rank).collect(),
            awake: (0..programs.len()).collect(),
        }
    }

    /// Does what the rank can do.
    fn advance(&mut self, rank: usize) {
        while let Some(&action) = self.programs[rank].actions.get(self.ranks[rank].spans.len()) {
            let Some(ready) = self.ready(rank, action) else { return };
            let streams = &mut self.ranks[rank].streams;
            let now = streams[Stream::Compute as usize];
            let span = if matches!(action, Action::Receive(_)) {
                Span { start: now, end: now.max(ready) }
            } else {
                let stream = &mut streams[action.stream() as usize];
                let start = now.max(ready).max(*stream);
                *stream = start + (self.ticks)(rank, action);
                Span { start, end: *stream }
            };
            self.ranks[rank].spans.push(span);
            self.note(rank, action, span.end);
        }
        self.reduce(rank);
    }

    /// When all that an action works with is at hand, if that is known.
    fn ready(&mut self, rank: usize, action: Action) -> Option<u64> {
        let outline = &self.programs[rank].outline;
        let where_made = |unit| if outline.holds(unit) { Fact::Made } else { Fact::Arrived };
        let result = match action {
            Action::Forward { unit, microbatch, .. } if unit > 0 => {
                *self.times.at(where_made(unit - 1), Message::activation(unit - 1, microbatch))
            }
            Action::Backward { unit, microbatch } | Action::BackwardInput { unit, microbatch }
                if unit + 1 < outline.chain.num_units =>
            {
                *self.times.at(where_made(unit + 1), Message::gradient(unit + 1, microbatch))
            }
            Action::Receive(message) => *self.times.at(Fact::Sent, message),
            // A rank that does not drain waits for its own reductions.
            Action::Step { .. } if outline.asynchronous.is_some() => {
                self.ranks[rank].streams.into_iter().max()?
            }
            Action::Step { .. } => {
                self.reduce(rank);
                self.ranks.iter().map(|rank| rank.is_reduced.unwrap_or(NEVER)).max()?
            }
            _ => 0,
        };
        // A unit's own part of a gradient joins that of the unit which reads its parameters.
        let tied = action.completed_gradient().and_then(|(unit, microbatch)| {
            let reader = outline.reader_of(unit)?;
            Some(*self.times.at(where_made(reader), Message::tied_gradient(unit, microbatch)))
        });
        let clock = &self.ranks[rank];
        let whole = outline.reads(action).filter_map(|unit| clock.whole.get(&unit));
        let fetched = action.uses().iter().filter_map(|&class| clock.fetched.get(&action.state(class)));
        let ready = whole.chain(fetched).copied().fold(result.max(tied.unwrap_or(0)), u64::max);
        (ready != NEVER).then_some(ready)
    }

    /// Notes what an action has brought about at `end`, and wakes who waits for it.
    fn note(&mut self, rank: usize, action: Action, end: u64) {
        let Clock { programs, times, ranks, awake, .. } = self;
        let outline = &programs[rank].outline;
        if let Some((reader, microbatch)) = action.completed_gradient()
            && let Some(&(_, owner)) = outline.chain.ties.iter().find(|(unit, _)| *unit == reader)
        {
            *times.at(Fact::Made, Message::tied_gradient(owner, microbatch)) = end;
        }
        match action {
            Action::Forward { unit, microbatch, .. } => {
                *times.at(Fact::Made, Message::activation(unit, microbatch)) = end;
            }
            Action::Backward { unit, microbatch } | Action::BackwardInput { unit, microbatch } => {
                *times.at(Fact::Made, Message::gradient(unit, microbatch)) = end;
            }
            Action::Send(message) => {
                *times.at(Fact::Sent, message) = end;
                awake.extend(outline.peer(action));
            }
            Action::Receive(message) => *times.at(Fact::Arrived, message) = end,
            Action::Unshard { unit } => drop(ranks[rank].whole.insert(unit, end)),
            Action::Fetch(state) => drop(ranks[rank].fetched.insert(state, end)),
            _ => (),
        }
    }

    /// The rank has come to its first `STEP`, or to its end: the last one to do so wakes all.
    fn reduce(&mut self, rank: usize) {
        if self.ranks[rank].is_reduced.is_none() {
            self.ranks[rank].is_reduced = self.ranks[rank].streams.iter().copied().max();
            if self.ranks.iter().all(|rank| rank.is_reduced.is_some()) {
                self.awake.extend(0..self.ranks.len());
            }
        }
    }
}
