use super::cost::{CostModel, LinkCost};
use super::{Action, Hosts, Outgoing, Step};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use trireme_base::Rank;

/// Seconds from the common start until the last rank has done its steps; `programs[r]` are those of rank `r`.
///
/// A message of `b` bytes takes `latency_seconds + b * seconds_per_byte`, and occupies its sender and its receiver all the
/// while (Hockney: "The communication challenge for MPP", 1994); a sender does not wait for its receiver. All ranks of a
/// host share one link to other hosts, which carries one message out and one in at a time. Reducing and copying take their
/// time by bytes.
///
/// # Panics
/// If there are not as many programs as ranks, or a rank waits for a message that is never sent.
pub fn simulate(programs: &[Vec<Step>], hosts: &Hosts, element_bytes: usize, model: &CostModel) -> f64 {
    assert_eq!(programs.len(), hosts.world_size(), "one program for each rank");
    let mut simulation = Simulation::new(programs, hosts, element_bytes, model);
    while let Some(Reverse((Seconds(now), rank))) = simulation.ready.pop() {
        simulation.begin_step(rank, now);
    }
    for (rank, state) in simulation.ranks.iter().enumerate() {
        let num_done = state.num_done;
        assert_eq!(num_done, programs[rank].len(), "rank {rank} waits for a message that is never sent");
    }
    simulation.ranks.iter().map(|state| state.since).fold(0.0, f64::max)
}

/// A point in time that can be compared.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Seconds(f64);

impl Eq for Seconds {}

impl PartialOrd for Seconds {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Seconds {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

struct Simulation<'a> {
    programs: &'a [Vec<Step>],
    hosts: &'a Hosts,
    element_bytes: f64,
    model: &'a CostModel,
    ranks: Vec<RankState>,
    /// When each message on its way arrives, for each sender and receiver.
    arrivals: Vec<VecDeque<f64>>,
    /// When the link of each host is free again, to send and to receive.
    links_out: Vec<f64>,
    links_in: Vec<f64>,
    /// Ranks that can begin a step, by time.
    ready: BinaryHeap<Reverse<(Seconds, usize)>>,
}

#[derive(Debug, Clone, Copy, Default)]
struct RankState {
    num_done: usize,
    /// When the step under way began.
    since: f64,
    /// When its message is sent.
    sent: f64,
    is_waiting: bool,
}

impl<'a> Simulation<'a> {
    fn new(programs: &'a [Vec<Step>], hosts: &'a Hosts, element_bytes: usize, model: &'a CostModel) -> Self {
        let world_size = programs.len();
        Simulation {
            programs,
            hosts,
            element_bytes: element_bytes as f64,
            model,
            ranks: vec![RankState::default(); world_size],
            arrivals: vec![VecDeque::new(); world_size * world_size],
            links_out: vec![0.0; hosts.num_hosts()],
            links_in: vec![0.0; hosts.num_hosts()],
            ready: (0..world_size).map(|rank| Reverse((Seconds(0.0), rank))).collect(),
        }
    }

    fn begin_step(&mut self, rank: usize, now: f64) {
        let programs = self.programs;
        let Some(step) = programs[rank].get(self.ranks[rank].num_done) else { return };
        match step {
            Step::Copy { from, .. } => {
                let seconds = self.bytes(from.range.len()) * self.model.copy_seconds_per_byte;
                self.end_step(rank, now + seconds);
            }
            Step::Exchange { send, receive } => {
                let sent = send.as_ref().map_or(now, |send| self.send(rank, send, now));
                self.ranks[rank].sent = sent;
                self.ranks[rank].is_waiting = receive.is_some();
                match send {
                    _ if receive.is_none() => self.end_step(rank, sent),
                    _ => self.try_receive(rank),
                }
                if let Some(send) = send {
                    self.try_receive(send.to.0);
                }
            }
        }
    }

    /// Puts a message on its way, and returns when it arrives.
    fn send(&mut self, rank: usize, send: &Outgoing, now: f64) -> f64 {
        let link = self.link(rank, send.to.0);
        let seconds = self.bytes(send.span.range.len()) * link.seconds_per_byte;
        let (from, to) = (self.hosts.host_of(Rank(rank)), self.hosts.host_of(send.to));
        let mut end = now + seconds;
        if from != to {
            end = now.max(self.links_out[from]).max(self.links_in[to]) + seconds;
            self.links_out[from] = end;
            self.links_in[to] = end;
        }
        let arrival = end + link.latency_seconds;
        self.arrivals[rank * self.programs.len() + send.to.0].push_back(arrival);
        arrival
    }

    /// Ends the step of a rank that waits for a message, if it is on its way.
    fn try_receive(&mut self, rank: usize) {
        let programs = self.programs;
        let RankState { num_done, since, sent, is_waiting } = self.ranks[rank];
        let Some(Step::Exchange { receive: Some(receive), .. }) = programs[rank].get(num_done) else {
            return;
        };
        let wire = &mut self.arrivals[receive.from.0 * programs.len() + rank];
        let Some(arrival) = is_waiting.then(|| wire.pop_front()).flatten() else { return };
        let link = self.link(receive.from.0, rank);
        let bytes = self.bytes(receive.span.range.len());
        let received = arrival.max(since + link.latency_seconds + bytes * link.seconds_per_byte);
        let reducing = match receive.action {
            Action::Copy => 0.0,
            Action::Reduce { .. } => bytes * self.model.reduce_seconds_per_byte,
        };
        self.end_step(rank, sent.max(received + reducing));
    }

    fn end_step(&mut self, rank: usize, now: f64) {
        let state = &mut self.ranks[rank];
        *state = RankState { num_done: state.num_done + 1, since: now, sent: now, is_waiting: false };
        self.ready.push(Reverse((Seconds(now), rank)));
    }

    fn link(&self, from: usize, to: usize) -> LinkCost {
        let is_within = self.hosts.host_of(Rank(from)) == self.hosts.host_of(Rank(to));
        if is_within { self.model.within } else { self.model.across }
    }

    fn bytes(&self, elements: usize) -> f64 {
        elements as f64 * self.element_bytes
    }
}
