//! A discrete-event simulation of ranks that compute, and of jobs that run concurrently with them.
//!
//! A rank executes its [entries](Entry) in order: it computes, starts jobs on streams and waits for jobs. A job such as a collective begins
//! when several ranks have started it. The jobs of a stream run one after another. A job may free its streams before it arrives at the
//! ranks that wait for it ([`Job::lag`]), as with the latency of a message. A host may be slower under load: a [`TaskDuration`] has a time
//! for each load.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// A duration, in any unit of time.
#[derive(Debug, Clone, PartialEq)]
pub enum TaskDuration {
    /// The same time under any load of the host.
    Fixed(f64),
    /// One time for each load from 1 on. For higher loads, the last time grows in proportion to the load.
    ByLoad(Vec<f64>),
}

impl TaskDuration {
    /// Returns the time under a load. A load of 0 counts as 1.
    ///
    /// # Panics
    /// If [`TaskDuration::ByLoad`] has no times.
    pub fn at(&self, load: usize) -> f64 {
        match self {
            TaskDuration::Fixed(time) => *time,
            TaskDuration::ByLoad(times) => {
                let known = load.clamp(1, times.len());
                times[known - 1] * load.max(1) as f64 / known as f64
            }
        }
    }
}

/// A job that runs concurrently with the ranks, such as a message or a collective. Channels and streams are numbered from 0.
#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    /// Identifies the job across ranks: the n-th job that each rank joins on a channel is the same job.
    pub channel: usize,
    /// Number of ranks that must have started the job before it begins.
    pub num_starts: usize,
    /// The streams that the job occupies. It begins when all earlier jobs of these streams have ended.
    pub streams: Vec<usize>,
    /// The load that the job adds to its host.
    pub load: usize,
    /// Duration of the job, as given by the last rank that starts it.
    pub duration: TaskDuration,
    /// Time from the end of the job until the ranks that wait for it continue.
    pub lag: TaskDuration,
}

/// An entry of a rank's program.
#[derive(Debug, Clone, PartialEq)]
pub enum Entry {
    /// Computes.
    Compute(TaskDuration),
    /// Starts a job. The number identifies the job within this rank. Numbers count from 0.
    Start(usize, Box<Job>),
    /// Joins a job that other ranks start, such as a message to receive. Holds this rank's number for the job, and the channel of the job.
    Expect(usize, usize),
    /// Waits until the job with this number has arrived. A job arrives [`Job::lag`] after its end.
    Await(usize),
}

/// A rank and its entries.
#[derive(Debug, Clone, Copy)]
#[expect(missing_docs, reason = "the names say it")]
pub struct RankProgram<'a> {
    pub entries: &'a [Entry],
    pub host: usize,
    /// The load that the rank adds to its host while it computes.
    pub load: usize,
}

/// The simulated start and end of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Interval {
    pub start: f64,
    pub end: f64,
}

/// A deadlock: a rank waits for a job that never ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("rank {rank} waits at entry {entry} for a job that never ends")]
#[expect(missing_docs, reason = "the names say it")]
pub struct Deadlock {
    pub rank: usize,
    pub entry: usize,
}

/// Simulates all ranks and returns the interval of each entry of each rank. The interval of a started job is the time in which the job
/// runs. The interval of an expected job begins when the rank joins the job, and ends when the job ends. It does not include the lag.
///
/// Cost: O(log n + r) for each entry, where n computations and jobs are running, and r ranks have joined the entry's channel. If durations
/// depend on loads, each change of a host's load costs O(n).
///
/// # Errors
/// [`Deadlock`] if a rank waits forever.
pub fn run(actors: &[RankProgram<'_>]) -> Result<Vec<Vec<Interval>>, Deadlock> {
    let mut engine = Engine::new(actors);
    (0..actors.len()).for_each(|rank| engine.advance(rank));
    while engine.end_next() {}
    let stuck = engine
        .ranks
        .iter()
        .enumerate()
        .find(|(rank, state)| state.current_entry < actors[*rank].entries.len());
    if let Some((rank, state)) = stuck {
        return Err(Deadlock { rank, entry: state.current_entry });
    }
    for (rank, state) in engine.ranks.iter_mut().enumerate() {
        for (entry, job) in std::mem::take(&mut state.jobs_by_entry) {
            let found = &mut engine.intervals[rank][entry];
            let is_start = matches!(actors[rank].entries[entry], Entry::Start(..));
            *found = match (is_start, engine.jobs[job].interval) {
                (true, ran) => ran,
                (false, ran) => Interval { start: found.start, end: ran.end.max(found.start) },
            };
        }
    }
    Ok(engine.intervals)
}

/// The way in which a rank joins the jobs of a channel. Starts and expectations are counted separately, so a rank may expect a job that it
/// starts: a message to itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum JoinKind {
    #[default]
    Starts,
    Expects,
}

struct RunningActivity<'a> {
    activity: Activity,
    host: usize,
    load: usize,
    duration: &'a TaskDuration,
    end: f64,
}

#[derive(Clone, Copy)]
enum Activity {
    Rank(usize),
    Job(usize),
    /// A job that has left its streams and has not arrived.
    Lag(usize),
}

#[derive(Default)]
struct RankState {
    /// Index of the entry that the rank is at.
    current_entry: usize,
    has_begun_entry: bool,
    /// Jobs by the rank's own numbers.
    jobs: Vec<Option<usize>>,
    /// Pairs of an entry and the job that it started or joined.
    jobs_by_entry: Vec<(usize, usize)>,
}

#[derive(Default)]
struct JobState<'a> {
    /// The job as described by the last rank that has started it, and the host of that rank.
    job: Option<(&'a Job, usize)>,
    num_started: usize,
    has_begun: bool,
    interval: Interval,
    has_arrived: bool,
    awaited_by: Vec<usize>,
}

#[derive(Default)]
struct Channel {
    jobs: Vec<usize>,
    /// Ranks that have joined, and the number of times that each has joined.
    joins: Vec<((usize, JoinKind), usize)>,
}

#[derive(Default)]
struct Engine<'a> {
    actors: &'a [RankProgram<'a>],
    now: f64,
    ranks: Vec<RankState>,
    jobs: Vec<JobState<'a>>,
    channels: Vec<Channel>,
    /// Jobs of each stream that have not ended, in order.
    streams: Vec<VecDeque<usize>>,
    running: Vec<Option<RunningActivity<'a>>>,
    free_slots: Vec<usize>,
    loads: Vec<usize>,
    /// The ends of running computations and jobs: the bits of the time, a sequence number and the slot. Times are not negative, so their
    /// bits sort like the times. The sequence number puts equal times in the order in which they were pushed. An end that changes leaves a
    /// stale element.
    ends: BinaryHeap<Reverse<(u64, usize, usize)>>,
    has_loads: bool,
    num_pushed: usize,
    intervals: Vec<Vec<Interval>>,
}

/// Returns the element at `index`. Extends the list with defaults if needed.
fn get_or_extend<T: Default>(list: &mut Vec<T>, index: usize) -> &mut T {
    if index >= list.len() {
        list.resize_with(index + 1, T::default);
    }
    &mut list[index]
}

impl<'a> Engine<'a> {
    fn new(actors: &'a [RankProgram<'a>]) -> Self {
        let num_hosts = actors.iter().map(|actor| actor.host + 1).max().unwrap_or(0);
        Engine {
            actors,
            ranks: actors.iter().map(|_| RankState::default()).collect(),
            loads: vec![0; num_hosts],
            intervals: actors.iter().map(|actor| vec![Interval::default(); actor.entries.len()]).collect(),
            ..Engine::default()
        }
    }

    fn advance(&mut self, rank: usize) {
        let entries = self.actors[rank].entries;
        while let Some(entry) = entries.get(self.ranks[rank].current_entry) {
            let at = self.ranks[rank].current_entry;
            let has_begun_entry = std::mem::replace(&mut self.ranks[rank].has_begun_entry, true);
            if !has_begun_entry {
                self.intervals[rank][at].start = self.now;
            }
            match entry {
                Entry::Compute(_) if has_begun_entry => return,
                Entry::Compute(length) => {
                    let RankProgram { host, load, .. } = self.actors[rank];
                    self.run(Activity::Rank(rank), host, load, length);
                    return;
                }
                Entry::Start(number, job) => {
                    let index = self.join((rank, JoinKind::Starts), at, *number, job.channel);
                    self.start(rank, index, job);
                }
                Entry::Expect(number, channel) => {
                    self.join((rank, JoinKind::Expects), at, *number, *channel);
                }
                Entry::Await(number) => {
                    // A job that was never issued never ends.
                    let Some(&Some(job)) = self.ranks[rank].jobs.get(*number) else { return };
                    if !self.jobs[job].has_arrived {
                        self.jobs[job].awaited_by.push(rank);
                        return;
                    }
                    self.intervals[rank][at].end = self.now;
                }
            }
            self.ranks[rank].has_begun_entry = false;
            self.ranks[rank].current_entry += 1;
        }
    }

    /// Returns the job that a rank joins at an entry. The first rank to join creates it.
    fn join(&mut self, joiner: (usize, JoinKind), at: usize, number: usize, channel: usize) -> usize {
        let channel = get_or_extend(&mut self.channels, channel);
        let joins = &mut channel.joins;
        let place = joins.iter().position(|(other, _)| *other == joiner).unwrap_or(joins.len());
        let visits = get_or_extend(joins, place);
        let num_joins = visits.1;
        *visits = (joiner, num_joins + 1);
        if num_joins == channel.jobs.len() {
            channel.jobs.push(self.jobs.len());
            self.jobs.push(JobState::default());
        }
        let (state, job) = (&mut self.ranks[joiner.0], channel.jobs[num_joins]);
        *get_or_extend(&mut state.jobs, number) = Some(job);
        state.jobs_by_entry.push((at, job));
        job
    }

    fn start(&mut self, rank: usize, index: usize, job: &'a Job) {
        let state = &mut self.jobs[index];
        state.num_started += 1;
        state.job = Some((job, self.actors[rank].host));
        if state.num_started == 1 {
            job.streams.iter().for_each(|&stream| get_or_extend(&mut self.streams, stream).push_back(index));
        }
        self.begin(index);
    }

    /// Begins a job if all ranks have started it and it is the first in its streams.
    fn begin(&mut self, index: usize) {
        let state = &self.jobs[index];
        let Some((job, host)) = state.job else { return };
        let is_first = |stream: &usize| self.streams[*stream].front() == Some(&index);
        if state.num_started == job.num_starts && !state.has_begun && job.streams.iter().all(is_first) {
            let state = &mut self.jobs[index];
            (state.has_begun, state.interval.start) = (true, self.now);
            self.run(Activity::Job(index), host, job.load, &job.duration);
        }
    }

    fn run(&mut self, activity: Activity, host: usize, load: usize, duration: &'a TaskDuration) {
        self.change_load(host, |before| before + load);
        self.has_loads |= matches!(duration, TaskDuration::ByLoad(_));
        let end = self.now + duration.at(self.loads[host]);
        let slot = self.free_slots.pop().unwrap_or(self.running.len());
        *get_or_extend(&mut self.running, slot) =
            Some(RunningActivity { activity, host, load, duration, end });
        self.push_end(end, slot);
    }

    fn push_end(&mut self, time: f64, slot: usize) {
        self.num_pushed += 1;
        self.ends.push(Reverse((time.to_bits(), self.num_pushed, slot)));
    }

    /// Changes the load of a host, and updates the ends of the computations and jobs on it whose durations depend on the load.
    fn change_load(&mut self, host: usize, change: impl Fn(usize) -> usize) {
        let (before, after) = (self.loads[host], change(self.loads[host]));
        self.loads[host] = after;
        if before == after || !self.has_loads {
            return;
        }
        for slot in 0..self.running.len() {
            let Some(running) = &mut self.running[slot] else { continue };
            if running.host == host && matches!(running.duration, TaskDuration::ByLoad(_)) {
                let ratio = running.duration.at(after) / running.duration.at(before).max(f64::MIN_POSITIVE);
                running.end = self.now + (running.end - self.now) * ratio;
                let end = running.end;
                self.push_end(end, slot);
            }
        }
    }

    /// Advances to the next end. Returns `false` if there is none.
    fn end_next(&mut self) -> bool {
        let Some(Reverse((time, _, slot))) = self.ends.pop() else { return false };
        let time = f64::from_bits(time);
        if self.running[slot].as_ref().is_none_or(|running| running.end != time) {
            return true;
        }
        let RunningActivity { activity, host, load, .. } = self.running[slot].take().expect("it runs");
        self.free_slots.push(slot);
        self.now = time;
        self.change_load(host, |before| before - load);
        match activity {
            Activity::Rank(rank) => {
                let state = &mut self.ranks[rank];
                self.intervals[rank][state.current_entry].end = time;
                state.has_begun_entry = false;
                state.current_entry += 1;
                self.advance(rank);
            }
            Activity::Job(index) => {
                self.jobs[index].interval.end = time;
                let (job, host) = self.jobs[index].job.expect("it ran");
                for stream in &job.streams {
                    let waiting = &mut self.streams[*stream];
                    waiting.pop_front();
                    if let Some(&next) = waiting.front() {
                        self.begin(next);
                    }
                }
                match job.lag {
                    TaskDuration::Fixed(0.0) => self.arrive(index),
                    _ => self.run(Activity::Lag(index), host, 0, &job.lag),
                }
            }
            Activity::Lag(index) => self.arrive(index),
        }
        true
    }

    /// Marks a job as arrived, and continues the ranks that wait for it.
    fn arrive(&mut self, index: usize) {
        let job = &mut self.jobs[index];
        job.has_arrived = true;
        let awaited_by = std::mem::take(&mut job.awaited_by);
        awaited_by.into_iter().for_each(|rank| self.advance(rank));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(channel: usize, num_starts: usize, duration: TaskDuration) -> Box<Job> {
        Box::new(Job {
            channel,
            num_starts,
            streams: vec![channel],
            load: 1,
            duration,
            lag: TaskDuration::Fixed(0.0),
        })
    }

    fn actors<'a>(entries: &'a [Vec<Entry>]) -> Vec<RankProgram<'a>> {
        entries.iter().map(|entries| RankProgram { entries, host: 0, load: 1 }).collect()
    }

    fn spans(entries: &[Vec<Entry>]) -> Vec<Vec<(f64, f64)>> {
        let found = run(&actors(entries)).unwrap();
        let pair = |span: &Interval| (span.start, span.end);
        found.iter().map(|rank| rank.iter().map(pair).collect()).collect()
    }

    #[test]
    fn a_job_begins_when_all_ranks_have_started_it_and_its_stream_is_free() {
        let compute = |time| Entry::Compute(TaskDuration::Fixed(time));
        let meet = |number, time| Entry::Start(number, job(0, 2, TaskDuration::Fixed(time)));
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
    fn receivers_wait_for_senders_and_senders_for_no_rank() {
        let message = job(0, 1, TaskDuration::Fixed(4.0));
        let entries = [
            vec![Entry::Compute(TaskDuration::Fixed(2.0)), Entry::Start(0, message), Entry::Await(0)],
            vec![Entry::Expect(0, 0), Entry::Await(0)],
        ];
        assert_eq!(spans(&entries), [vec![(0.0, 2.0), (2.0, 6.0), (2.0, 6.0)], vec![(0.0, 6.0), (0.0, 6.0)]]);
    }

    #[test]
    fn computations_on_one_host_slow_each_other_down() {
        let shared = |time| Entry::Compute(TaskDuration::ByLoad(vec![time, 2.0 * time]));
        // Both computations run at half speed until the shorter one ends at 4. At that time, 6 of the longer one's 8 are left.
        let found = spans(&[vec![shared(2.0)], vec![shared(8.0)], vec![]]);
        assert_eq!(found, [vec![(0.0, 4.0)], vec![(0.0, 10.0)], vec![]]);
        assert_eq!(TaskDuration::ByLoad(vec![1.0, 3.0]).at(4), 6.0);
    }

    #[test]
    fn a_deadlock_is_an_error() {
        let alone = [vec![Entry::Start(0, job(0, 2, TaskDuration::Fixed(1.0))), Entry::Await(0)]];
        let stuck = run(&actors(&alone)).unwrap_err();
        assert_eq!(stuck.to_string(), "rank 0 waits at entry 1 for a job that never ends");
        assert_eq!(run(&actors(&[vec![Entry::Await(3)]])), Err(Deadlock { rank: 0, entry: 0 }));
    }
}
