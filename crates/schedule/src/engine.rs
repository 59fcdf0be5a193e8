//! The discrete-event engine: ranks that compute, and jobs beside them, in simulated time.
//!
//! A rank goes through its [entries](Entry) in order. It computes, starts jobs on streams and waits for jobs. A job may need
//! several ranks to come to it, as a collective does; jobs of a stream follow each other. What shares a host may be slower
//! the more of it there is: a [`Length`] says how long something takes under each load.

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BinaryHeap, VecDeque};

/// How long something takes, in any unit of time, for each load of its host.
#[derive(Debug, Clone, PartialEq)]
pub struct Length(Vec<f64>);

impl Length {
    /// The same under any load.
    pub fn fixed(time: f64) -> Self {
        Length(vec![time])
    }

    /// One time for each load from 1 on; loads beyond take as long in proportion as the last one.
    ///
    /// # Panics
    /// Without a time.
    pub fn by_load(times: Vec<f64>) -> Self {
        assert!(!times.is_empty(), "a length has a time");
        Length(times)
    }

    /// The time under a load.
    pub fn at(&self, load: usize) -> f64 {
        let last = self.0.len();
        match self.0.get(load.max(1) - 1) {
            Some(time) => *time,
            None if last == 1 => self.0[0],
            None => self.0[last - 1] * load as f64 / last as f64,
        }
    }

    fn depends_on_load(&self) -> bool {
        self.0.len() > 1
    }
}

/// What goes on beside ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    /// Identifies the job across ranks: the n-th job that each rank joins on a channel is the same one.
    pub channel: usize,
    /// How many ranks must have started it before it begins.
    pub num_starts: usize,
    /// What it occupies: it begins when the job before it there has ended.
    pub stream: usize,
    /// What it adds to the load of its host.
    pub load: usize,
    /// How long it takes. What the last rank says that starts it counts.
    pub length: Length,
}

/// What a rank does.
#[derive(Debug, Clone, PartialEq)]
pub enum Entry {
    /// Computes.
    Compute(Length),
    /// Starts a job, under a number that is the rank's own.
    Start(usize, Job),
    /// Joins a job that others start, such as a message that it receives: a number as above, and the channel.
    Expect(usize, usize),
    /// Waits until the job of this number has ended.
    Await(usize),
}

/// A rank.
#[derive(Debug, Clone, Copy)]
pub struct Actor<'a> {
    /// What it does.
    pub entries: &'a [Entry],
    /// Its host.
    pub host: usize,
    /// What it adds to the load of its host while it computes.
    pub load: usize,
}

/// When something began and ended.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Interval {
    /// When it began.
    pub start: f64,
    /// When it ended.
    pub end: f64,
}

/// A rank waits for a job that never ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("rank {rank} waits at entry {entry} for a job that never ends")]
pub struct Stuck {
    /// The rank.
    pub rank: usize,
    /// Where it waits.
    pub entry: usize,
}

/// When each rank does each of its entries. Of a job that a rank starts, this is when the job runs; of one that it expects, from when it
/// joins until the job has ended.
///
/// # Errors
/// If a rank waits for ever.
///
/// Cost: O(log n) for each entry, and if lengths depend on loads, O(n) for each change of a host's load, where n things run.
pub fn run(actors: &[Actor<'_>]) -> Result<Vec<Vec<Interval>>, Stuck> {
    let mut engine = Engine::new(actors);
    (0..actors.len()).for_each(|rank| engine.advance(rank));
    while engine.end_next() {}
    let stuck = engine.ranks.iter().enumerate().find(|(rank, state)| state.at < actors[*rank].entries.len());
    if let Some((rank, state)) = stuck {
        return Err(Stuck { rank, entry: state.at });
    }
    for (rank, state) in engine.ranks.iter_mut().enumerate() {
        for (entry, job) in std::mem::take(&mut state.issued_at) {
            let found = &mut engine.found[rank][entry];
            let is_start = matches!(actors[rank].entries[entry], Entry::Start(..));
            *found = match (is_start, engine.jobs[job].ran) {
                (true, ran) => ran,
                (false, ran) => Interval { start: found.start, end: ran.end.max(found.start) },
            };
        }
    }
    Ok(engine.found)
}

/// Something that runs.
struct Running {
    what: What,
    host: usize,
    load: usize,
    length: Length,
    end: f64,
}

#[derive(Clone, Copy)]
enum What {
    Rank(usize),
    Job(usize),
}

/// A point in time, the first of which comes first; and what ends then, if that has not been changed.
#[derive(PartialEq)]
struct End {
    time: f64,
    /// Of two at a time, that which began first.
    order: usize,
    slot: usize,
}

impl Eq for End {}

impl PartialOrd for End {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for End {
    fn cmp(&self, other: &Self) -> Ordering {
        self.time.total_cmp(&other.time).then(self.order.cmp(&other.order))
    }
}

struct RankState {
    at: usize,
    has_begun_entry: bool,
    /// Jobs by the rank's numbers.
    jobs: BTreeMap<usize, usize>,
    /// Entries that issued jobs.
    issued_at: Vec<(usize, usize)>,
    /// How often it has come to each channel.
    visits: BTreeMap<usize, usize>,
}

#[derive(Default)]
struct JobState {
    /// As the last rank says that has started it, with that rank's host.
    job: Option<(Job, usize)>,
    num_started: usize,
    has_begun: bool,
    ran: Interval,
    has_ended: bool,
    /// Ranks that wait for it.
    awaited_by: Vec<usize>,
}

struct Engine<'a> {
    actors: &'a [Actor<'a>],
    now: f64,
    ranks: Vec<RankState>,
    jobs: Vec<JobState>,
    /// Jobs of each channel.
    channels: BTreeMap<usize, Vec<usize>>,
    /// Jobs of each stream that have not ended, in order.
    streams: BTreeMap<usize, VecDeque<usize>>,
    running: Vec<Option<Running>>,
    free_slots: Vec<usize>,
    /// The load of each host.
    loads: Vec<usize>,
    ends: BinaryHeap<Reverse<End>>,
    /// Whether lengths depend on loads.
    has_loads: bool,
    num_ends: usize,
    found: Vec<Vec<Interval>>,
}

impl<'a> Engine<'a> {
    fn new(actors: &'a [Actor<'a>]) -> Self {
        let rank = |_: &Actor<'_>| RankState {
            at: 0,
            has_begun_entry: false,
            jobs: BTreeMap::new(),
            issued_at: Vec::new(),
            visits: BTreeMap::new(),
        };
        let num_hosts = actors.iter().map(|actor| actor.host + 1).max().unwrap_or(0);
        Engine {
            actors,
            now: 0.0,
            ranks: actors.iter().map(rank).collect(),
            jobs: Vec::new(),
            channels: BTreeMap::new(),
            streams: BTreeMap::new(),
            running: Vec::new(),
            free_slots: Vec::new(),
            loads: vec![0; num_hosts],
            ends: BinaryHeap::new(),
            has_loads: false,
            num_ends: 0,
            found: actors.iter().map(|actor| vec![Interval::default(); actor.entries.len()]).collect(),
        }
    }

    /// Does what a rank can do now.
    fn advance(&mut self, rank: usize) {
        while let Some(entry) = self.actors[rank].entries.get(self.ranks[rank].at) {
            let at = self.ranks[rank].at;
            let has_begun_entry = std::mem::replace(&mut self.ranks[rank].has_begun_entry, true);
            if !has_begun_entry {
                self.found[rank][at].start = self.now;
            }
            match entry {
                Entry::Compute(_) if has_begun_entry => return,
                Entry::Compute(length) => {
                    let Actor { host, load, .. } = self.actors[rank];
                    self.run(What::Rank(rank), host, load, length.clone());
                    return;
                }
                Entry::Start(number, job) => {
                    let index = self.join(rank, at, *number, job.channel);
                    self.start(rank, index, job);
                }
                Entry::Expect(number, channel) => {
                    self.join(rank, at, *number, *channel);
                }
                Entry::Await(number) => {
                    // What nobody issued never ends.
                    let Some(&job) = self.ranks[rank].jobs.get(number) else { return };
                    if !self.jobs[job].has_ended {
                        self.jobs[job].awaited_by.push(rank);
                        return;
                    }
                    self.found[rank][at].end = self.now;
                }
            }
            self.ranks[rank].has_begun_entry = false;
            self.ranks[rank].at += 1;
        }
    }

    /// The job that a rank joins at an entry.
    fn join(&mut self, rank: usize, at: usize, number: usize, channel: usize) -> usize {
        let state = &mut self.ranks[rank];
        let visits = state.visits.entry(channel).or_default();
        let visit = std::mem::replace(visits, *visits + 1);
        let of_channel = self.channels.entry(channel).or_default();
        if visit == of_channel.len() {
            of_channel.push(self.jobs.len());
            self.jobs.push(JobState::default());
        }
        state.jobs.insert(number, of_channel[visit]);
        state.issued_at.push((at, of_channel[visit]));
        of_channel[visit]
    }

    fn start(&mut self, rank: usize, index: usize, job: &Job) {
        let state = &mut self.jobs[index];
        state.num_started += 1;
        state.job = Some((job.clone(), self.actors[rank].host));
        if state.num_started == 1 {
            self.streams.entry(job.stream).or_default().push_back(index);
        }
        self.start_first(job.stream);
    }

    /// Begins the first job of a stream, if all ranks have started it.
    fn start_first(&mut self, stream: usize) {
        let Some(&index) = self.streams.get(&stream).and_then(VecDeque::front) else { return };
        let state = &mut self.jobs[index];
        let (job, host) = state.job.as_ref().expect("a job in a stream was started");
        if state.num_started == job.num_starts && !state.has_begun {
            let (host, load, length) = (*host, job.load, job.length.clone());
            (state.has_begun, state.ran.start) = (true, self.now);
            self.run(What::Job(index), host, load, length);
        }
    }

    fn run(&mut self, what: What, host: usize, load: usize, length: Length) {
        self.change_load(host, |before| before + load);
        self.has_loads |= length.depends_on_load();
        let end = self.now + length.at(self.loads[host]);
        let running = Some(Running { what, host, load, length, end });
        let slot = match self.free_slots.pop() {
            Some(slot) => {
                self.running[slot] = running;
                slot
            }
            None => {
                self.running.push(running);
                self.running.len() - 1
            }
        };
        self.push_end(end, slot);
    }

    fn push_end(&mut self, time: f64, slot: usize) {
        self.num_ends += 1;
        self.ends.push(Reverse(End { time, order: self.num_ends, slot }));
    }

    /// What runs on a host and depends on its load goes on at another speed.
    fn change_load(&mut self, host: usize, change: impl Fn(usize) -> usize) {
        let (before, after) = (self.loads[host], change(self.loads[host]));
        self.loads[host] = after;
        if before == after || !self.has_loads {
            return;
        }
        for slot in 0..self.running.len() {
            let Some(running) = &mut self.running[slot] else { continue };
            if running.host == host && running.length.depends_on_load() {
                let ratio = running.length.at(after) / running.length.at(before).max(f64::MIN_POSITIVE);
                running.end = self.now + (running.end - self.now) * ratio;
                let end = running.end;
                self.push_end(end, slot);
            }
        }
    }

    /// Goes on to the next end of something; whether there was any.
    fn end_next(&mut self) -> bool {
        let Some(Reverse(End { time, slot, .. })) = self.ends.pop() else { return false };
        if self.running[slot].as_ref().is_none_or(|running| running.end != time) {
            return true;
        }
        let Running { what, host, load, .. } = self.running[slot].take().expect("it runs");
        self.free_slots.push(slot);
        self.now = time;
        self.change_load(host, |before| before - load);
        match what {
            What::Rank(rank) => {
                let state = &mut self.ranks[rank];
                self.found[rank][state.at].end = time;
                state.has_begun_entry = false;
                state.at += 1;
                self.advance(rank);
            }
            What::Job(index) => {
                let job = &mut self.jobs[index];
                (job.ran.end, job.has_ended) = (time, true);
                let stream = job.job.as_ref().expect("it ran").0.stream;
                let awaited_by = std::mem::take(&mut job.awaited_by);
                self.streams.get_mut(&stream).expect("its stream is known").pop_front();
                self.start_first(stream);
                awaited_by.into_iter().for_each(|rank| self.advance(rank));
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(channel: usize, num_starts: usize, length: Length) -> Job {
        Job { channel, num_starts, stream: channel, load: 1, length }
    }

    fn actors<'a>(entries: &'a [Vec<Entry>]) -> Vec<Actor<'a>> {
        entries.iter().map(|entries| Actor { entries, host: 0, load: 1 }).collect()
    }

    fn spans(entries: &[Vec<Entry>]) -> Vec<Vec<(f64, f64)>> {
        let found = run(&actors(entries)).unwrap();
        let pair = |span: &Interval| (span.start, span.end);
        found.iter().map(|rank| rank.iter().map(pair).collect()).collect()
    }

    #[test]
    fn a_job_begins_when_all_have_come_and_the_one_before_has_ended() {
        let compute = |time| Entry::Compute(Length::fixed(time));
        let meet = |number, time| Entry::Start(number, job(0, 2, Length::fixed(time)));
        let entries = [
            vec![meet(0, 5.0), compute(1.0), meet(1, 2.0), Entry::Await(1)],
            vec![compute(3.0), meet(7, 5.0), meet(8, 2.0), Entry::Await(7), compute(1.0)],
        ];
        let expected = [
            vec![(3.0, 8.0), (0.0, 1.0), (8.0, 10.0), (1.0, 10.0)],
            vec![(0.0, 3.0), (3.0, 8.0), (8.0, 10.0), (3.0, 8.0), (8.0, 9.0)],
        ];
        assert_eq!(spans(&entries), expected);
    }

    #[test]
    fn who_receives_waits_for_who_sends_and_not_the_other_way() {
        let message = job(0, 1, Length::fixed(4.0));
        let entries = [
            vec![Entry::Compute(Length::fixed(2.0)), Entry::Start(0, message), Entry::Await(0)],
            vec![Entry::Expect(0, 0), Entry::Await(0)],
        ];
        assert_eq!(spans(&entries), [vec![(0.0, 2.0), (2.0, 6.0), (2.0, 6.0)], vec![(0.0, 6.0), (0.0, 6.0)]]);
    }

    #[test]
    fn what_shares_a_host_is_slower_while_it_does() {
        let shared = |time| Entry::Compute(Length::by_load(vec![time, 2.0 * time]));
        // Both at half speed until the shorter one ends; 6 of the longer one's 8 are left then.
        let found = spans(&[vec![shared(2.0)], vec![shared(8.0)], vec![]]);
        assert_eq!(found, [vec![(0.0, 4.0)], vec![(0.0, 10.0)], vec![]]);
        assert_eq!(Length::by_load(vec![1.0, 3.0]).at(4), 6.0);
    }

    #[test]
    fn who_waits_for_ever_is_told() {
        let alone = [vec![Entry::Start(0, job(0, 2, Length::fixed(1.0))), Entry::Await(0)]];
        let stuck = run(&actors(&alone)).unwrap_err();
        assert_eq!(stuck.to_string(), "rank 0 waits at entry 1 for a job that never ends");
        assert_eq!(run(&actors(&[vec![Entry::Await(3)]])), Err(Stuck { rank: 0, entry: 0 }));
    }
}
