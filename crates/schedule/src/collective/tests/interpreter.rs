//! Executes the steps of all ranks, with and without message queues.

use super::super::*;
use std::collections::VecDeque;

/// The memories of one rank.
#[derive(Debug, Clone, Default)]
pub(super) struct Memories {
    pub(super) vector: Vec<f64>,
    pub(super) input: Vec<f64>,
    pub(super) scratch: Vec<f64>,
}

impl Memories {
    pub(super) fn in_place(vector: Vec<f64>) -> Self {
        Memories { vector, ..Memories::default() }
    }

    fn of(&mut self, span: &Span) -> &mut [f64] {
        let memory = match span.memory {
            Memory::Vector => &mut self.vector,
            Memory::Input => &mut self.input,
            Memory::Scratch => &mut self.scratch,
        };
        &mut memory[span.range.clone()]
    }
}

/// Number of elements sent from each rank to each rank.
pub(super) struct Traffic(Vec<Vec<usize>>);

impl Traffic {
    pub(super) fn sent_by(&self, rank: usize) -> usize {
        self.0[rank].iter().sum()
    }

    pub(super) fn received_by(&self, rank: usize) -> usize {
        self.0.iter().map(|sent| sent[rank]).sum()
    }

    pub(super) fn total(&self) -> usize {
        self.0.iter().flatten().sum()
    }

    /// Returns the elements that a rank sends to other hosts.
    pub(super) fn across_by(&self, rank: usize, hosts: &Hosts) -> usize {
        let is_across = |to: usize| hosts.host_of(Rank(to)) != hosts.host_of(Rank(rank));
        self.0[rank].iter().enumerate().filter(|&(to, _)| is_across(to)).map(|(_, sent)| sent).sum()
    }
}

pub(super) fn parts(step: &Step) -> (Option<&Outgoing>, Option<&Incoming>) {
    match step {
        Step::Exchange { send, receive } => (send.as_ref(), receive.as_ref()),
        Step::Copy { .. } => (None, None),
    }
}

pub(super) fn programs(world_size: usize, make: impl Fn(Rank, &mut Vec<Step>)) -> Vec<Vec<Step>> {
    let program = |rank| {
        let mut steps = Vec::new();
        make(Rank(rank), &mut steps);
        steps
    };
    (0..world_size).map(program).collect()
}

/// Runs the steps of all ranks with message queues of unbounded length. Scratch begins as NaN. Panics if a rank waits for a message that is
/// never sent, or if a message is left over.
pub(super) fn interpret(
    programs: &[Vec<Step>],
    memories: &mut [Memories],
    combine: impl Fn(f64, f64) -> f64,
) -> Traffic {
    let world_size = programs.len();
    let mut wires = vec![VecDeque::<Vec<f64>>::new(); world_size * world_size];
    let mut next = vec![0; world_size];
    let mut sent_already = vec![false; world_size];
    let mut traffic = Traffic(vec![vec![0; world_size]; world_size]);
    for (memories, steps) in memories.iter_mut().zip(programs) {
        memories.scratch = vec![f64::NAN; scratch_len(steps)];
    }
    let mut has_moved = true;
    while std::mem::take(&mut has_moved) {
        for rank in 0..world_size {
            let Some(step) = programs[rank].get(next[rank]) else { continue };
            let own = &mut memories[rank];
            let (send, receive) = parts(step);
            if let (Some(send), false) = (send, sent_already[rank]) {
                assert_ne!(send.to.0, rank, "a message to oneself");
                traffic.0[rank][send.to.0] += send.span.range.len();
                wires[rank * world_size + send.to.0].push_back(own.of(&send.span).to_vec());
                sent_already[rank] = true;
                has_moved = true;
            }
            if let Some(receive) = receive {
                let Some(message) = wires[receive.from.0 * world_size + rank].pop_front() else { continue };
                apply_message(own.of(&receive.span), &message, receive.action, &combine);
            }
            if let Step::Copy { from, to } = step {
                let overlap = from.range.start < to.range.end && to.range.start < from.range.end;
                assert!(from.memory != to.memory || !overlap, "rank {rank}: {step:?}");
                let copied = own.of(from).to_vec();
                own.of(to).copy_from_slice(&copied);
            }
            next[rank] += 1;
            sent_already[rank] = false;
            has_moved = true;
        }
    }
    for rank in 0..world_size {
        assert_eq!(next[rank], programs[rank].len(), "rank {rank} waits for a message that is never sent");
    }
    assert!(wires.iter().all(VecDeque::is_empty), "a message was sent that nobody receives");
    traffic
}

fn apply_message(
    target: &mut [f64],
    message: &[f64],
    action: ReceiveAction,
    combine: &impl Fn(f64, f64) -> f64,
) {
    assert_eq!(message.len(), target.len(), "both ends of a message have one length");
    for (own, &other) in target.iter_mut().zip(message) {
        *own = match action {
            ReceiveAction::Copy => other,
            ReceiveAction::Reduce { own_side: Side::Right } => combine(other, *own),
            ReceiveAction::Reduce { own_side: Side::Left } => combine(*own, other),
        };
    }
}

/// Checks that steps proceed even if a send blocks until its receiver waits for the message. A rank continues when its partners are at the
/// matching steps.
pub(super) fn assert_needs_no_queue(programs: &[Vec<Step>]) {
    let mut next = vec![0; programs.len()];
    let mut done = vec![(false, false); programs.len()];
    let mut has_moved = true;
    while std::mem::take(&mut has_moved) {
        for rank in 0..programs.len() {
            let Some(step) = programs[rank].get(next[rank]) else { continue };
            if let (Some(send), false) = (parts(step).0, done[rank].0) {
                let to = send.to.0;
                let waiting = programs[to].get(next[to]).and_then(|step| parts(step).1);
                if waiting.is_some_and(|receive| receive.from.0 == rank) && !done[to].1 {
                    done[rank].0 = true;
                    done[to].1 = true;
                    has_moved = true;
                }
            }
        }
        for rank in 0..programs.len() {
            let Some(step) = programs[rank].get(next[rank]) else { continue };
            let (send, receive) = parts(step);
            if done[rank] == (send.is_some(), receive.is_some()) {
                next[rank] += 1;
                done[rank] = (false, false);
                has_moved = true;
            }
        }
    }
    for (rank, program) in programs.iter().enumerate() {
        assert_eq!(next[rank], program.len(), "rank {rank} is stuck without queues");
    }
}
