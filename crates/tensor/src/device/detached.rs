//! A CPU device that behaves like an accelerator: kernels run asynchronously on another thread, in any order that streams and events allow,
//! and the host can neither read nor write the device's memory.
//!
//! It tests the host–device boundary. Access to device memory without a transfer traps. Code that assumes that a kernel has run, or that a
//! copy has completed, without waiting for it gets different bits for some seed. New memory holds NaN.
//!
//! A kernel that does not wait for a copy of its operands panics: vector clocks of the streams show which jobs precede it.
//! `parallel/tests/parallel/detached.rs` trains with many seeds, and then skips each wait in turn; some seed must then give other bits.
//! `[training] device = "detached"` trains on such a device.

use crate::kernels::backend::{Backend, DeviceSide, HostCopy, Stream, WaitSite};
use crate::kernels::call::{Access, Call, Operands};
use crate::kernels::cpu::Cpu;
use crate::kernels::{Operand, OperandMut};
use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use trireme_base::{Event, EventCompleter, Random, RandomKey, spawn_thread};

const NUM_STREAMS: usize = 3;

/// Probabilities, in eighths, that an issued job lets the device run one more job although no thread waits for it. The seed picks one.
const EAGERNESS: [u32; 4] = [0, 1, 5, 8];

/// Options of a detached device.
#[derive(Debug, Clone, Copy, Default)]
pub struct DetachedOptions {
    /// Seed of the order and the time of jobs.
    pub seed: u64,
    /// A wait site to skip, so that a test can show that the wait is necessary.
    pub ignored_wait: Option<WaitSite>,
}

enum Job {
    /// A kernel or a copy.
    Run(Box<dyn FnOnce(&Cpu) + Send>),
    Wait(Event),
    Complete(Arc<EventCompleter>),
}

/// The streams of a device and the thread that runs them.
pub(crate) struct Detached {
    queue: Arc<Queue>,
    thread: Option<JoinHandle<()>>,
}

/// Jobs that were issued and have not run.
struct Queue {
    state: Mutex<State>,
    /// Signals that jobs became due or ready, or that the device was closed.
    changed: Condvar,
    options: DetachedOptions,
    weak_self: Weak<Queue>,
}

/// A vector clock: a number of jobs per stream.
type Clock = [u64; NUM_STREAMS];

/// A copy that may still be pending.
struct PendingCopy {
    stream: Stream,
    /// Position among the jobs of the stream, counted from 1.
    position: u64,
    /// The copied device memory.
    operand: Operand,
    until: Event,
    /// Set when the copy has run, before its event completes.
    has_run: Arc<AtomicBool>,
}

struct State {
    streams: [VecDeque<Job>; NUM_STREAMS],
    copies: Vec<PendingCopy>,
    /// The vector clock of each stream: how many jobs of every stream precede the next job issued to it.
    clocks: [Clock; NUM_STREAMS],
    /// Events of this device that may still be awaited, each with the clock of its stream when it was recorded.
    events: Vec<(Event, Clock)>,
    /// Number of jobs that may run although no thread waits for them.
    num_eager_jobs: usize,
    /// Set while the host or another device waits: every ready job runs.
    is_demanded: bool,
    is_closed: bool,
    /// The first failure. No job runs after it.
    failure: Option<String>,
    random: Random,
    eagerness: u32,
    /// The stream that runs as long as it has ready jobs.
    preferred_stream: usize,
    sites: Vec<WaitSite>,
}

impl Detached {
    /// Starts a thread that runs kernels on `cpu`. Fails if the system cannot start it.
    pub(crate) fn start(cpu: Cpu, options: DetachedOptions) -> std::io::Result<Self> {
        let mut random = Random::new(RandomKey::new(options.seed, "order of streams"), 0);
        let eagerness = EAGERNESS[random.below(EAGERNESS.len() as u64) as usize];
        let state = State {
            streams: Default::default(),
            copies: Vec::new(),
            clocks: Default::default(),
            events: Vec::new(),
            num_eager_jobs: 0,
            is_demanded: false,
            is_closed: false,
            failure: None,
            eagerness,
            preferred_stream: 0,
            random,
            sites: Vec::new(),
        };
        let queue = Arc::new_cyclic(|own| Queue {
            state: Mutex::new(state),
            changed: Condvar::new(),
            options,
            weak_self: Weak::clone(own),
        });
        let served = Arc::clone(&queue);
        let thread = spawn_thread("device", move || served.serve(&cpu))?;
        Ok(Detached { queue, thread: Some(thread) })
    }
}

impl Backend for Detached {
    /// Panics if the kernel races with a copy: one of them writes memory that the other accesses, and the kernel does not wait for the
    /// copy.
    fn run(&self, call: Call) {
        self.queue.check_races(call.name(), &call);
        self.queue.push(Stream::Compute, Job::Run(Box::new(move |cpu| cpu.run(call))));
    }

    fn upload(&self, from: &[u8], mut to: OperandMut) {
        self.queue.check_races("upload", &to);
        let bytes = from.to_vec();
        self.queue.copy(Stream::Compute, move |cpu| to.bytes(cpu).copy_from_slice(&bytes));
    }

    fn download(&self, from: Operand, to: &mut [u8]) -> Result<(), String> {
        self.queue.check_races("download", &from);
        let copied = Arc::new(Mutex::new(Vec::new()));
        let shared = Arc::clone(&copied);
        self.queue.copy(Stream::Compute, move |cpu| {
            *shared.lock().unwrap_or_else(PoisonError::into_inner) = from.bytes(cpu).to_vec();
        });
        self.record().outcome()?;
        to.copy_from_slice(&copied.lock().unwrap_or_else(PoisonError::into_inner));
        Ok(())
    }

    fn copy(&self, HostCopy { mut device, mut host, after }: HostCopy) -> Event {
        let queue = &self.queue;
        let (stream, operand) = match &device {
            DeviceSide::From(operand) => (Stream::ToHost, *operand),
            DeviceSide::To(operand) => (Stream::FromHost, operand.as_operand()),
        };
        queue.wait(stream, &self.record(), Location::caller());
        queue.wait(stream, &after, Location::caller());
        let has_run = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&has_run);
        let position = queue.copy(stream, move |cpu| {
            device.copy(cpu, host.bytes());
            // Set first: once the host memory is returned, its owner may issue kernels before the event completes.
            ended.store(true, Ordering::Release);
            host.return_to_owner();
        });
        let event = queue.record(stream);
        queue.record_copy(stream, position, operand, has_run, &event);
        event
    }

    fn record(&self) -> Event {
        self.queue.record(Stream::Compute)
    }

    fn wait_for(&self, event: &Event, caller: &'static Location<'static>) {
        self.queue.wait(Stream::Compute, event, caller);
    }

    /// Also fills the memory with NaN.
    fn reuse(&self, mut memory: OperandMut) {
        let copies = self.queue.copies_of(&memory.as_operand());
        copies.iter().for_each(|event| self.queue.wait(Stream::Compute, event, Location::caller()));
        self.queue.copy(Stream::Compute, move |cpu| memory.bytes(cpu).fill(u8::MAX));
    }

    fn wait_sites(&self) -> Vec<WaitSite> {
        self.queue.lock().sites.clone()
    }
}

impl Drop for Detached {
    fn drop(&mut self) {
        self.queue.lock().is_closed = true;
        self.queue.changed.notify_all();
        // A kernel's panic was already passed to the waiting threads.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl Queue {
    fn check_races(&self, name: &str, operands: &impl Operands) {
        let state = self.lock();
        // If a wait is ignored, a race is expected: a test compares the resulting bits. After a failure, no job runs.
        if self.options.ignored_wait.is_some() || state.failure.is_some() {
            return;
        }
        operands.for_each_operand(&mut |operand, access| {
            let races = |copy: &PendingCopy| {
                let is_awaited =
                    state.clocks[Stream::Compute as usize][copy.stream as usize] >= copy.position;
                let conflicts = access == Access::Write || copy.stream == Stream::FromHost;
                let has_run = copy.has_run.load(Ordering::Acquire);
                conflicts && !is_awaited && !has_run && copy.operand.overlaps(operand)
            };
            let has_race = state.copies.iter().any(races);
            assert!(!has_race, "{name} does not wait for a copy of its memory");
        });
    }

    /// Issues a copy. Returns its position among the jobs of the stream.
    fn copy(&self, stream: Stream, copy: impl FnOnce(&Cpu) + Send + 'static) -> u64 {
        self.push(stream, Job::Run(Box::new(copy)))[stream as usize]
    }

    /// Returns an event that completes when all jobs issued to the stream so far have run.
    fn record(&self, stream: Stream) -> Event {
        let own = Weak::clone(&self.weak_self);
        let completer = EventCompleter::new(move || {
            if let Some(queue) = own.upgrade() {
                // Without this check, devices that wait for each other would wake each other endlessly.
                let was_demanded = std::mem::replace(&mut queue.lock().is_demanded, true);
                if !was_demanded {
                    queue.changed.notify_all();
                }
            }
        });
        let event = completer.event();
        let clock = self.push(stream, Job::Complete(completer));
        let mut state = self.lock();
        state.events.retain(|(event, _)| event.is_shared());
        state.events.push((event.clone(), clock));
        drop(state);
        event
    }

    /// Makes jobs that are issued to the stream from now on wait for `event`.
    fn wait(&self, stream: Stream, event: &Event, caller: &'static Location<'static>) {
        let site = WaitSite(stream, caller);
        let mut state = self.lock();
        if !state.sites.contains(&site) {
            state.sites.push(site);
        }
        state.await_event(stream, event);
        drop(state);
        // A failed event is still queued, so that the failure propagates in stream order.
        let has_succeeded = event.is_done() && event.failure().is_none();
        if self.options.ignored_wait == Some(site) || has_succeeded {
            return;
        }
        self.push(stream, Job::Wait(event.clone()));
        let own = Weak::clone(&self.weak_self);
        event.on_done(move || {
            if let Some(queue) = own.upgrade() {
                // Taking the lock ensures that the thread either waits already or will see the completed event.
                drop(queue.lock());
                queue.changed.notify_all();
            }
        });
    }

    /// Records that the copy at `position` of a stream uses `operand` until it sets `has_run` and its event completes.
    fn record_copy(
        &self,
        stream: Stream,
        position: u64,
        operand: Operand,
        has_run: Arc<AtomicBool>,
        until: &Event,
    ) {
        let mut state = self.lock();
        state.copies.retain(|copy| !copy.until.is_done());
        state.copies.push(PendingCopy { stream, position, operand, until: until.clone(), has_run });
    }

    /// Returns the events of the copies that may still use `memory`.
    fn copies_of(&self, memory: &Operand) -> Vec<Event> {
        let state = self.lock();
        let copies = state.copies.iter().filter(|copy| copy.operand.overlaps(memory));
        copies.map(|copy| copy.until.clone()).collect()
    }

    /// Appends a job to a stream. Returns the stream's clock after the job.
    fn push(&self, stream: Stream, job: Job) -> Clock {
        let mut state = self.lock();
        if let Some(cause) = &state.failure {
            let (cause, clock) = (cause.clone(), state.clocks[stream as usize]);
            drop(state);
            job.fail(cause);
            return clock;
        }
        state.streams[stream as usize].push_back(job);
        state.clocks[stream as usize][stream as usize] += 1;
        let clock = state.clocks[stream as usize];
        if state.random.below(8) < u64::from(state.eagerness) {
            state.num_eager_jobs += 1;
        }
        let is_due = state.is_due();
        drop(state);
        // Otherwise the thread would wake up only to wait again.
        if is_due {
            self.changed.notify_all();
        }
        clock
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs jobs until the device is closed and no job is ready.
    fn serve(&self, cpu: &Cpu) {
        while let Some(job) = self.next() {
            let run = match job {
                Job::Run(run) => run,
                Job::Wait(event) => {
                    if let Some(cause) = event.failure() {
                        self.fail(cause);
                    }
                    continue;
                }
                Job::Complete(completer) => {
                    completer.complete(Ok(()));
                    continue;
                }
            };
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| run(cpu))) {
                self.fail(message(&*panic));
            }
        }
        self.fail("the device was closed".to_owned());
    }

    fn next(&self) -> Option<Job> {
        let (mut state, mut has_demanded) = (self.lock(), false);
        loop {
            if let Some(stream) = state.choose() {
                return state.streams[stream].pop_front();
            }
            let is_empty = state.streams.iter().all(VecDeque::is_empty);
            if is_empty {
                state.is_demanded = false;
            }
            // Streams may wait for events of another device.
            let awaited: Vec<Event> = state.awaited().cloned().collect();
            if state.is_demanded && !has_demanded && !awaited.is_empty() {
                drop(state);
                awaited.iter().for_each(Event::demand);
                (has_demanded, state) = (true, self.lock());
                continue;
            }
            has_demanded = false;
            // On close, jobs that wait for other devices are dropped.
            if state.is_closed && (is_empty || !state.can_run()) {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Records a failure. Pending events fail with its cause, and no job runs any more.
    fn fail(&self, cause: String) {
        let mut state = self.lock();
        let cause = state.failure.get_or_insert(cause).clone();
        let streams = std::mem::take(&mut state.streams);
        drop(state);
        streams.into_iter().flatten().for_each(|job| job.fail(cause.clone()));
    }
}

impl Job {
    fn fail(self, cause: String) {
        if let Job::Complete(completer) = self {
            completer.complete(Err(cause));
        }
    }
}

impl State {
    /// Orders all jobs that are issued to `stream` from now on after `event` and after every job that precedes the event. An event that is
    /// not in `events`, such as an event of a process group, is assumed to follow every job issued so far, although it completes early if
    /// its exchange fails. [`Event::DONE`] follows no job.
    fn await_event(&mut self, stream: Stream, event: &Event) {
        if event.is_same(&Event::DONE) {
            return;
        }
        let of_event = self.events.iter().find(|(known, _)| known.is_same(event)).map(|(_, clock)| *clock);
        let all_issued = || std::array::from_fn(|stream| self.clocks[stream][stream]);
        let of_event = of_event.unwrap_or_else(all_issued);
        let own = &mut self.clocks[stream as usize];
        own.iter_mut().zip(of_event).for_each(|(own, of_event)| *own = (*own).max(of_event));
    }

    fn is_ready(&self, stream: usize) -> bool {
        match self.streams[stream].front() {
            Some(Job::Run(_) | Job::Complete(_)) => true,
            Some(Job::Wait(event)) => event.is_done(),
            None => false,
        }
    }

    /// Returns the pending events that the next jobs of streams wait for.
    fn awaited(&self) -> impl Iterator<Item = &Event> {
        self.streams.iter().filter_map(|jobs| match jobs.front() {
            Some(Job::Wait(event)) if !event.is_done() => Some(event),
            _ => None,
        })
    }

    fn can_run(&self) -> bool {
        (0..NUM_STREAMS).any(|stream| self.is_ready(stream))
    }

    /// Returns whether ready jobs should run now: a thread waits for them, the device is closed, or the seed lets some run early.
    fn is_due(&self) -> bool {
        self.is_demanded || self.is_closed || self.num_eager_jobs > 0
    }

    /// Chooses the stream whose next job runs.
    fn choose(&mut self) -> Option<usize> {
        if !self.is_due() || !self.can_run() {
            return None;
        }
        self.num_eager_jobs = self.num_eager_jobs.saturating_sub(1);
        // Long runs of one stream expose missing synchronization with the others.
        if self.random.below(16) == 0 || !self.is_ready(self.preferred_stream) {
            self.preferred_stream = self.random.below(NUM_STREAMS as u64) as usize;
        }
        let streams = (0..NUM_STREAMS).map(|offset| (self.preferred_stream + offset) % NUM_STREAMS);
        streams.into_iter().find(|&stream| self.is_ready(stream))
    }
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "a kernel panicked".to_owned())
}

impl fmt::Debug for Detached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Detached").field("options", &self.queue.options).finish_non_exhaustive()
    }
}
