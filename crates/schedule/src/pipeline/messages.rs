//! Messages between the ranks of a schedule.
//!
//! If a rank that sends waits until the other one receives, a schedule whose data would flow may still stop: in 1F1B
//! two neighbours send to each other at the same time, one its activation, the other its gradient, and if both
//! receive only just before the pass that needs the message, neither ever does. So the sender decides where the
//! receiver receives. All passes and messages are put into one order in time, a message at the end of the pass that
//! made it, and each rank does what of it is its own. The first thing of that order that has not been done is then
//! always next on all ranks that take part in it.

use super::clock;
use super::error::{Place, ScheduleError, Wait, Waiting};
use super::pass::{Pass, PassKind};
use super::schedule::Schedule;
use super::timeline::Timeline;

/// What a rank does, messages among it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// A pass.
    Pass(Pass),
    /// Sends the result of a pass.
    Send {
        /// The pass.
        result_of: Pass,
        /// To which rank.
        to: usize,
    },
    /// Receives the result of another rank's pass.
    Receive {
        /// The pass.
        result_of: Pass,
        /// From which rank.
        from: usize,
    },
}

/// Two stages of which one reads parameters of the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tie {
    /// The stage that reads.
    pub reader: usize,
    /// The stage whose parameters they are.
    pub owner: usize,
}

/// Each rank's passes with its messages among them, in the order of a timeline: a result is sent right after its
/// pass, and received at that time, too. `timeline` is that of the whole schedule ([`simulate`](super::simulate)). With a `tie`,
/// the reader sends what it has for the owner's gradient as the result of its weight half.
///
/// Cost: that of sorting the passes.
pub fn place(schedule: &Schedule, timeline: &Timeline, tie: Option<Tie>) -> Vec<Vec<Event>> {
    let ranks = &schedule.stage_ranks;
    let mut messages = Vec::new();
    for (passes, spans) in schedule.ranks.iter().zip(&timeline.ranks) {
        for (pass, span) in passes.iter().zip(spans) {
            let from = ranks[pass.stage];
            let to = pass.result_goes_to(schedule.num_stages()).map(|stage| ranks[stage]);
            let owner = tie.filter(|tie| tie.reader == pass.stage && pass.kind.completes_gradients());
            let gradient = Pass::backward_weight(pass.stage, pass.microbatch);
            let all = [(to, *pass), (owner.map(|tie| ranks[tie.owner]), gradient)].into_iter();
            let to_others = all.filter_map(|(to, result_of)| Some((to.filter(|&to| to != from)?, result_of)));
            messages.extend(to_others.map(|(to, result_of)| (span.end, from, to, result_of)));
        }
    }
    // Which of two messages at the same time is first does not matter, if it is on all ranks.
    messages.sort_unstable();
    let mut events: Vec<Vec<Event>> = vec![Vec::new(); schedule.num_ranks()];
    let mut num_placed = vec![0; schedule.num_ranks()];
    let mut place_passes = |events: &mut Vec<Vec<Event>>, rank: usize, time: u64| {
        let (passes, spans) = (&schedule.ranks[rank], &timeline.ranks[rank]);
        let first = num_placed[rank];
        let is_earlier = |&(_, span): &(&Pass, &super::Span)| span.start < time;
        let earlier = passes[first..].iter().zip(&spans[first..]).take_while(is_earlier);
        events[rank].extend(earlier.map(|(pass, _)| Event::Pass(*pass)).inspect(|_| num_placed[rank] += 1));
    };
    for (time, from, to, result_of) in messages {
        place_passes(&mut events, from, time);
        place_passes(&mut events, to, time);
        events[from].push(Event::Send { result_of, to });
        events[to].push(Event::Receive { result_of, from });
    }
    for rank in 0..schedule.num_ranks() {
        place_passes(&mut events, rank, u64::MAX);
    }
    events
}

/// Proves that all ranks come to the end of their events if a rank that sends or receives waits until the other one
/// does so, too, and that no pass runs before the messages that it needs.
///
/// Cost: linear in the events.
pub fn check(events: &[Vec<Event>], schedule: &Schedule) -> Result<(), ScheduleError> {
    let mut meeting = Meeting::new(events, schedule);
    let mut awake: Vec<usize> = (0..events.len()).collect();
    while let Some(rank) = awake.pop() {
        while let Some(other) = meeting.advance(rank)? {
            awake.push(other);
        }
    }
    match clock::ring(events.len(), |rank| meeting.wait(rank)) {
        Some(ring) => Err(ScheduleError::Deadlock(ring)),
        None => Ok(()),
    }
}

/// Ranks that go through their events, and meet for each message.
struct Meeting<'a> {
    events: &'a [Vec<Event>],
    schedule: &'a Schedule,
    num_done: Vec<usize>,
    num_passes: Vec<usize>,
    /// By stage and microbatch: whether its input, and the gradient of its result, are on its rank.
    has_input: Vec<bool>,
    has_gradient: Vec<bool>,
}

impl<'a> Meeting<'a> {
    fn new(events: &'a [Vec<Event>], schedule: &'a Schedule) -> Self {
        let absent = vec![false; schedule.num_stages() * schedule.num_microbatches_in_all()];
        Meeting {
            events,
            schedule,
            num_done: vec![0; events.len()],
            num_passes: vec![0; events.len()],
            has_input: absent.clone(),
            has_gradient: absent,
        }
    }

    fn next_of(&self, rank: usize) -> Option<Event> {
        self.events.get(rank)?.get(self.num_done[rank]).copied()
    }

    /// Does passes of a rank until a message; if the other rank is there, too, both go on, and the other one is
    /// returned.
    fn advance(&mut self, rank: usize) -> Result<Option<usize>, ScheduleError> {
        while let Some(Event::Pass(pass)) = self.next_of(rank) {
            self.take(rank, pass)?;
            self.num_done[rank] += 1;
            self.num_passes[rank] += 1;
        }
        let (other, counterpart, result_of) = match self.next_of(rank) {
            Some(Event::Send { result_of, to }) => (to, Event::Receive { result_of, from: rank }, result_of),
            Some(Event::Receive { result_of, from }) => {
                (from, Event::Send { result_of, to: rank }, result_of)
            }
            _ => return Ok(None),
        };
        if self.next_of(other) != Some(counterpart) {
            return Ok(None);
        }
        self.num_done[rank] += 1;
        self.num_done[other] += 1;
        self.deliver(result_of);
        Ok(Some(other))
    }

    fn take(&mut self, rank: usize, pass: Pass) -> Result<(), ScheduleError> {
        let Pass { kind, stage, microbatch } = pass;
        let index = self.index(stage, microbatch);
        let (is_there, missing) = match kind {
            PassKind::Forward if stage > 0 => (self.has_input[index], Pass::forward(stage - 1, microbatch)),
            PassKind::Backward | PassKind::BackwardInput if stage + 1 < self.schedule.num_stages() => {
                (self.has_gradient[index], Pass::backward(stage + 1, microbatch))
            }
            _ => (true, pass),
        };
        if !is_there {
            let place = Place { rank, index: self.num_passes[rank] };
            return Err(ScheduleError::TooEarly { place, pass, missing });
        }
        let to = pass.result_goes_to(self.schedule.num_stages());
        if to.is_some_and(|to| self.schedule.stage_ranks[to] == rank) {
            self.deliver(pass);
        }
        Ok(())
    }

    /// The result of a pass is on the rank that needs it.
    fn deliver(&mut self, pass: Pass) {
        let Some(stage) = pass.result_goes_to(self.schedule.num_stages()) else { return };
        let index = self.index(stage, pass.microbatch);
        let table = if pass.kind == PassKind::Forward { &mut self.has_input } else { &mut self.has_gradient };
        table[index] = true;
    }

    fn index(&self, stage: usize, microbatch: usize) -> usize {
        stage * self.schedule.num_microbatches_in_all() + microbatch
    }

    fn wait(&self, rank: usize) -> Option<Wait> {
        let (next, for_rank) = match self.next_of(rank)? {
            Event::Pass(_) => return None,
            Event::Send { result_of, to } => (Waiting::Send(result_of), to),
            Event::Receive { result_of, from } => (Waiting::Receive(result_of), from),
        };
        let place = Place { rank, index: self.num_passes[rank] };
        Some(Wait { place, next, for_rank })
    }
}
