//! Messages between the ranks of a schedule.
//!
//! If a send blocks until the receiver receives, a schedule whose data dependencies are satisfied may still deadlock. In 1F1B, two
//! neighbors send to each other at the same time, one its activation and the other its gradient. If each received only just before the
//! pass that needs the message, both would block in their sends. Therefore, a receive is placed where the sender sends. All passes and
//! messages are put into one global order by time, with a message at the end of the pass that produced it, and each rank executes its own
//! part of this order. The earliest event that has not been executed is then next on every rank that takes part in it, so it can always
//! run.

use super::pass::{Pass, PassKind};
use super::schedule::Schedule;
use super::timeline::Timeline;

/// An event of a rank: a pass or a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    /// A pass.
    Pass(Pass),
    /// Sends the result of a pass.
    Send(Pass),
    /// Receives the result of another rank's pass.
    Receive(Pass),
}

/// Returns each rank's passes with its messages among them, in the order of a timeline: a result is sent right after its pass, and received
/// at the same time. `timeline` is the timeline of the whole schedule ([`simulate`](super::simulate)). `tie` is a pair of stages: the
/// reader of tied parameters, and their owner. The reader sends its contribution to the owner's gradient as the result of its weight half,
/// after each microbatch for which `is_sent` holds.
///
/// Cost: sorting the messages, and linear in the passes.
pub(super) fn place_messages(
    schedule: &Schedule,
    timeline: &Timeline,
    tie: Option<(usize, usize)>,
    is_sent: impl Fn(usize) -> bool,
) -> Vec<Vec<Event>> {
    let ranks = &schedule.stage_ranks;
    let mut messages = Vec::new();
    for (passes, spans) in schedule.ranks.iter().zip(&timeline.ranks) {
        for (pass, span) in passes.iter().zip(spans) {
            let from = ranks[pass.stage];
            let to = pass.result_goes_to(schedule.num_stages()).map(|stage| ranks[stage]);
            let completes_gradient = matches!(pass.kind, PassKind::Backward | PassKind::BackwardWeight)
                && is_sent(pass.microbatch);
            let owner = tie.filter(|(reader, _)| *reader == pass.stage && completes_gradient);
            let gradient = Pass::backward_weight(pass.stage, pass.microbatch);
            let all = [(to, *pass), (owner.map(|(_, owner)| ranks[owner]), gradient)].into_iter();
            let to_others = all.filter_map(|(to, result_of)| Some((to.filter(|&to| to != from)?, result_of)));
            messages.extend(to_others.map(|(to, result_of)| (span.end, from, to, result_of)));
        }
    }
    // The order of two messages at the same time does not matter, if all ranks have the same.
    messages.sort_unstable();
    let mut events: Vec<Vec<Event>> = vec![Vec::new(); schedule.num_ranks()];
    let mut num_placed = vec![0; schedule.num_ranks()];
    let mut place_passes = |events: &mut Vec<Vec<Event>>, rank: usize, time: u64| {
        let (passes, spans) = (&schedule.ranks[rank], &timeline.ranks[rank]);
        let first = num_placed[rank];
        let is_earlier = |&(_, span): &(&Pass, &super::PassInterval)| span.start < time;
        let earlier = passes[first..].iter().zip(&spans[first..]).take_while(is_earlier);
        events[rank].extend(earlier.map(|(pass, _)| Event::Pass(*pass)).inspect(|_| num_placed[rank] += 1));
    };
    for (time, from, to, result_of) in messages {
        place_passes(&mut events, from, time);
        place_passes(&mut events, to, time);
        events[from].push(Event::Send(result_of));
        events[to].push(Event::Receive(result_of));
    }
    for rank in 0..schedule.num_ranks() {
        place_passes(&mut events, rank, u64::MAX);
    }
    events
}
