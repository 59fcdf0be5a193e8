//! Streams and events: jobs that run late, in any order that events allow.

use crate::block::Blocks;
use crate::gpu::{Gpus, variable};
use crate::launch::{Kernel, Launch};
use crate::memory::DeviceMemory;
use crate::module::Module;
use crate::random::Random;
use cudarc::driver::sys::CUresult::{self, *};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::thread::ThreadId;

/// Probabilities, in eighths, that a call of the driver runs one job although nothing waits for it. The seed chooses one.
const EAGERNESS: [usize; 4] = [0, 1, 5, 8];

/// A function that is called until it returns that it is done. It calls its argument before it accesses device memory.
pub(crate) type Poll = Box<dyn FnMut(&mut dyn FnMut()) -> bool + Send>;

/// Work of a stream.
pub(crate) enum Job {
    Launch(Box<Launch>),
    /// Copies bytes on the device, to host memory, or from pinned host memory, which it reads when it runs.
    Copy {
        from: usize,
        to: usize,
        num_bytes: usize,
    },
    /// Copies bytes of pageable host memory, which were read when the copy was issued.
    Write {
        bytes: Vec<u8>,
        to: usize,
    },
    Fill {
        to: usize,
        num_bytes: usize,
        byte: u8,
    },
    /// Completes a recording of an event.
    Record {
        event: u64,
        recording: u64,
    },
    /// Work of another library, such as a matmul, and the milliseconds that it takes on the driver's clock.
    Run(Arc<dyn Fn() + Send + Sync>, u32),
    /// Work of another library that waits for other processes.
    Poll(Poll),
    /// Waits for a recording of an event.
    Wait {
        event: u64,
        recording: u64,
    },
}

impl Job {
    /// Returns the job once more if a graph can have it. Copies from and to the host change what they copy.
    fn again(&self, memory: &DeviceMemory) -> Option<Job> {
        Some(match self {
            Job::Launch(launch) => Job::Launch(launch.clone()),
            &Job::Copy { from, to, num_bytes }
                if memory.contains(from, num_bytes) && memory.contains(to, num_bytes) =>
            {
                Job::Copy { from, to, num_bytes }
            }
            &Job::Fill { to, num_bytes, byte } => Job::Fill { to, num_bytes, byte },
            Job::Run(run, milliseconds) => Job::Run(Arc::clone(run), *milliseconds),
            _ => return None,
        })
    }
}

/// The jobs of a stream that are captured instead of being run.
struct Capture {
    jobs: Vec<Job>,
    thread: ThreadId,
    is_valid: bool,
}

impl Capture {
    /// Makes the capture invalid. Returns the error of the call that has done so.
    fn refuse(&mut self) -> Result<(), CUresult> {
        self.is_valid = false;
        Err(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
    }
}

/// An event: how often it was recorded, and which recordings are complete.
#[derive(Debug, Default)]
struct EventState {
    num_recorded: u64,
    num_completed: u64,
    has_time: bool,
    /// The time at which the last recording was complete.
    completed_at: u32,
}

/// The outcome of an attempt to run a job.
enum Progress {
    Ran,
    /// The job waits for other processes.
    Waits,
    /// No job is ready.
    Nothing,
}

/// The state of the driver.
pub(crate) struct Driver {
    pub(crate) gpus: Gpus,
    /// The GPU that the program uses.
    pub(crate) ordinal: i32,
    num_launches: u64,
    pub(crate) is_initialized: bool,
    pub(crate) memory: DeviceMemory,
    pub(crate) modules: BTreeMap<u64, &'static Module>,
    pub(crate) functions: BTreeMap<u64, (String, Kernel)>,
    streams: BTreeMap<u64, VecDeque<Job>>,
    /// The streams whose jobs are captured.
    captures: BTreeMap<u64, Capture>,
    graphs: BTreeMap<u64, Vec<Job>>,
    /// Graphs that were instantiated.
    launchable_graphs: BTreeMap<u64, Vec<Job>>,
    events: BTreeMap<u64, EventState>,
    /// Pinned memory of the host: start and size. Copies read it when they run.
    pub(crate) pinned: BTreeMap<usize, usize>,
    /// Memory that is not mapped by the program: addresses, with the size and the handle.
    pub(crate) allocations: BTreeMap<usize, (usize, u64)>,
    /// Milliseconds since the start. Only matmuls take time.
    clock: u32,
    num_handles: u64,
    blocks: Blocks,
    random: Random,
    eagerness: usize,
    /// The stream that runs as long as it can.
    preferred: u64,
    /// The failure of a job, after which every call fails, as with a GPU.
    pub(crate) failure: Option<CUresult>,
}

impl Driver {
    /// Returns the memory of a GPU that nothing uses.
    pub(crate) fn free_bytes(&self) -> usize {
        let used = self.memory.used_bytes() + self.gpus.others_bytes;
        self.gpus.memory_bytes.saturating_sub(used)
    }

    pub(crate) fn new() -> Self {
        Self::with_seed(variable("FAKE_CUDA_SEED", 0))
    }

    /// Creates the state with a seed for the order of threads, blocks and streams.
    pub(crate) fn with_seed(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let eagerness = EAGERNESS[random.below(EAGERNESS.len())];
        Driver {
            gpus: Gpus::from_environment(),
            ordinal: 0,
            num_launches: 0,
            is_initialized: false,
            memory: DeviceMemory::default(),
            modules: BTreeMap::new(),
            functions: BTreeMap::new(),
            streams: BTreeMap::new(),
            captures: BTreeMap::new(),
            graphs: BTreeMap::new(),
            launchable_graphs: BTreeMap::new(),
            events: BTreeMap::new(),
            pinned: BTreeMap::new(),
            allocations: BTreeMap::new(),
            clock: 0,
            num_handles: 0,
            blocks: Blocks::default(),
            random,
            eagerness,
            preferred: 0,
            failure: None,
        }
    }

    /// Returns a number that no other object has.
    pub(crate) fn handle(&mut self) -> u64 {
        self.num_handles += 1;
        // Not aligned to a page, so that a handle that is taken for an address is found.
        self.num_handles * 16 + 8
    }

    pub(crate) fn create_stream(&mut self) -> u64 {
        let handle = self.handle();
        self.streams.insert(handle, VecDeque::new());
        handle
    }

    pub(crate) fn destroy_stream(&mut self, stream: u64) -> Result<(), CUresult> {
        self.synchronize_stream(stream)?;
        self.streams.remove(&stream).map(drop).ok_or(CUDA_ERROR_INVALID_HANDLE)
    }

    pub(crate) fn create_event(&mut self, has_time: bool) -> u64 {
        let handle = self.handle();
        self.events.insert(handle, EventState { has_time, ..EventState::default() });
        handle
    }

    pub(crate) fn destroy_event(&mut self, event: u64) -> Result<(), CUresult> {
        self.events.remove(&event).map(drop).ok_or(CUDA_ERROR_INVALID_HANDLE)
    }

    /// Begins to capture the jobs of a stream.
    pub(crate) fn begin_capture(&mut self, stream: u64) -> Result<(), CUresult> {
        if !self.streams.contains_key(&stream) {
            return Err(CUDA_ERROR_INVALID_HANDLE);
        }
        if self.captures.contains_key(&stream) {
            return Err(CUDA_ERROR_ILLEGAL_STATE);
        }
        let thread = std::thread::current().id();
        self.captures.insert(stream, Capture { jobs: Vec::new(), thread, is_valid: true });
        Ok(())
    }

    /// Ends the capture of a stream, on the thread that has begun it. Returns the graph.
    pub(crate) fn end_capture(&mut self, stream: u64) -> Result<u64, CUresult> {
        let Capture { jobs, thread, is_valid } =
            self.captures.remove(&stream).ok_or(CUDA_ERROR_ILLEGAL_STATE)?;
        if thread != std::thread::current().id() {
            return Err(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
        }
        if !is_valid {
            return Err(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        }
        let handle = self.handle();
        self.graphs.insert(handle, jobs);
        Ok(handle)
    }

    /// Refuses a call that this thread must not make while it captures jobs, and that makes the capture invalid.
    pub(crate) fn refuse_during_capture(&mut self) -> Result<(), CUresult> {
        let thread = std::thread::current().id();
        let mut own = self.captures.values_mut().filter(|capture| capture.thread == thread);
        own.next().map_or(Ok(()), |capture| capture.refuse())
    }

    /// Returns a graph that can be launched.
    pub(crate) fn instantiate(&mut self, graph: u64) -> Result<u64, CUresult> {
        if !self.gpus.has_graphs {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        let jobs = self.jobs_again(self.graphs.get(&graph))?;
        let handle = self.handle();
        self.launchable_graphs.insert(handle, jobs);
        Ok(handle)
    }

    pub(crate) fn destroy_graph(&mut self, graph: u64) -> Result<(), CUresult> {
        self.graphs.remove(&graph).map(drop).ok_or(CUDA_ERROR_INVALID_HANDLE)
    }

    pub(crate) fn destroy_launchable_graph(&mut self, graph: u64) -> Result<(), CUresult> {
        self.launchable_graphs.remove(&graph).map(drop).ok_or(CUDA_ERROR_INVALID_HANDLE)
    }

    /// Returns an error if a graph cannot be launched on a stream.
    pub(crate) fn check_graph(&self, graph: u64, stream: u64) -> Result<(), CUresult> {
        let exist = self.launchable_graphs.contains_key(&graph) && self.streams.contains_key(&stream);
        exist.then_some(()).ok_or(CUDA_ERROR_INVALID_HANDLE)
    }

    pub(crate) fn launch_graph(&mut self, graph: u64, stream: u64) -> Result<(), CUresult> {
        let jobs = self.jobs_again(self.launchable_graphs.get(&graph))?;
        jobs.into_iter().try_for_each(|job| self.push(stream, job))
    }

    fn jobs_again(&self, jobs: Option<&Vec<Job>>) -> Result<Vec<Job>, CUresult> {
        let jobs = jobs.ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        jobs.iter().map(|job| job.again(&self.memory).ok_or(CUDA_ERROR_ILLEGAL_ADDRESS)).collect()
    }

    pub(crate) fn push(&mut self, stream: u64, job: Job) -> Result<(), CUresult> {
        if let Some(capture) = self.captures.get_mut(&stream) {
            return match job.again(&self.memory) {
                Some(job) => {
                    capture.jobs.push(job);
                    Ok(())
                }
                None => capture.refuse(),
            };
        }
        if let Job::Launch(_) = job {
            self.num_launches += 1;
            if self.gpus.lost == Some((self.ordinal, self.num_launches)) {
                self.failure = Some(CUDA_ERROR_DEVICE_UNAVAILABLE);
            }
        }
        self.streams.get_mut(&stream).ok_or(CUDA_ERROR_INVALID_HANDLE)?.push_back(job);
        if self.random.below(8) < self.eagerness {
            self.run_one();
            self.memory.set_open(false);
        }
        self.failure.map_or(Ok(()), Err)
    }

    pub(crate) fn record(&mut self, event: u64, stream: u64) -> Result<(), CUresult> {
        let state = self.events.get_mut(&event).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        state.num_recorded += 1;
        let recording = state.num_recorded;
        self.push(stream, Job::Record { event, recording })
    }

    pub(crate) fn wait_event(&mut self, stream: u64, event: u64) -> Result<(), CUresult> {
        let recording = self.events.get(&event).ok_or(CUDA_ERROR_INVALID_HANDLE)?.num_recorded;
        self.push(stream, Job::Wait { event, recording })
    }

    fn is_recorded(&self, event: u64, recording: u64) -> bool {
        // A destroyed event holds back no stream.
        self.events.get(&event).is_none_or(|state| state.num_completed >= recording)
    }

    /// As [`try_synchronize_stream`](Driver::try_synchronize_stream), until an event is recorded.
    pub(crate) fn try_synchronize_event(&mut self, event: u64) -> Result<bool, CUresult> {
        let recording = self.events.get(&event).ok_or(CUDA_ERROR_INVALID_HANDLE)?.num_recorded;
        self.try_run_until(|driver| driver.is_recorded(event, recording))
    }

    /// Returns whether an event has been reached as often as it was recorded.
    pub(crate) fn query_event(&self, event: u64) -> Result<bool, CUresult> {
        let recording = self.events.get(&event).ok_or(CUDA_ERROR_INVALID_HANDLE)?.num_recorded;
        Ok(self.is_recorded(event, recording))
    }

    /// Returns the milliseconds between two events, which must have been recorded with their times.
    pub(crate) fn elapsed(&self, start: u64, end: u64) -> Result<f32, CUresult> {
        let time = |event: u64| {
            let state = self.events.get(&event).filter(|state| state.has_time && state.num_recorded > 0);
            let state = state.ok_or(CUDA_ERROR_INVALID_HANDLE)?;
            let is_complete = state.num_completed == state.num_recorded;
            is_complete.then_some(state.completed_at).ok_or(CUDA_ERROR_NOT_READY)
        };
        Ok((time(end)? - time(start)?) as f32)
    }

    /// Issues a copy from host memory to the device. Pageable memory is read at once. Memory of which only a part is pinned is refused.
    ///
    /// # Safety
    /// `from` is the address of `num_bytes` of host memory.
    pub(crate) unsafe fn copy_from_host(
        &mut self,
        stream: u64,
        from: usize,
        to: usize,
        num_bytes: usize,
    ) -> Result<(), CUresult> {
        let end = from + num_bytes;
        let overlaps = |(start, len): &(&usize, &usize)| **start < end && from < **start + **len;
        if let Some((&start, &len)) = self.pinned.iter().find(overlaps) {
            let is_within = start <= from && end <= start + len;
            return if is_within {
                self.push(stream, Job::Copy { from, to, num_bytes })
            } else {
                Err(CUDA_ERROR_INVALID_VALUE)
            };
        }
        // SAFETY: by the caller's promise.
        let bytes = unsafe { std::slice::from_raw_parts(from as *const u8, num_bytes) }.to_vec();
        self.push(stream, Job::Write { bytes, to })
    }

    /// Unpins host memory. Fails the device if a queued copy still reads it.
    pub(crate) fn unpin(&mut self, start: usize) -> Result<(), CUresult> {
        let num_bytes = self.pinned.remove(&start).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let pinned = start..start + num_bytes;
        let reads = |job: &Job| matches!(job, Job::Copy { from, .. } if pinned.contains(from));
        // Copies of a device that has failed never run.
        if self.failure.is_none() && self.streams.values().flatten().any(reads) {
            eprintln!("fake CUDA: host memory is unpinned before a copy that reads it has run");
            self.failure = Some(CUDA_ERROR_ILLEGAL_ADDRESS);
        }
        self.failure.map_or(Ok(()), Err)
    }

    /// Runs all jobs.
    pub(crate) fn synchronize(&mut self) -> Result<(), CUresult> {
        self.run_until(|driver| driver.streams.values().all(VecDeque::is_empty))
    }

    pub(crate) fn synchronize_stream(&mut self, stream: u64) -> Result<(), CUresult> {
        while !self.try_synchronize_stream(stream)? {}
        Ok(())
    }

    /// Runs jobs until a stream is empty. Returns false if a job waits for other processes, so that other threads may issue what these
    /// need.
    pub(crate) fn try_synchronize_stream(&mut self, stream: u64) -> Result<bool, CUresult> {
        if let Some(capture) = self.captures.get_mut(&stream) {
            capture.refuse()?;
        }
        if !self.streams.contains_key(&stream) {
            return Err(CUDA_ERROR_INVALID_HANDLE);
        }
        self.try_run_until(|driver| driver.streams[&stream].is_empty())
    }

    /// Returns whether a stream is empty, after some job.
    pub(crate) fn query_stream(&mut self, stream: u64) -> Result<bool, CUresult> {
        if let Some(capture) = self.captures.get_mut(&stream) {
            capture.refuse()?;
        }
        self.streams.get(&stream).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        self.run_one();
        self.memory.set_open(false);
        self.failure.map_or(Ok(self.streams[&stream].is_empty()), Err)
    }

    /// Runs jobs until a condition holds.
    fn run_until(&mut self, is_done: impl Fn(&Driver) -> bool) -> Result<(), CUresult> {
        while !self.try_run_until(&is_done)? {}
        Ok(())
    }

    /// Runs jobs until a condition holds. Returns false if a job waits for other processes.
    fn try_run_until(&mut self, is_done: impl Fn(&Driver) -> bool) -> Result<bool, CUresult> {
        let mut waits = false;
        while self.failure.is_none() && !waits && !is_done(self) {
            match self.run_one() {
                Progress::Ran => {}
                Progress::Waits => waits = true,
                Progress::Nothing => {
                    eprintln!("fake CUDA: all streams wait for events that nothing completes");
                    self.failure = Some(CUDA_ERROR_LAUNCH_TIMEOUT);
                }
            }
        }
        self.memory.set_open(false);
        self.failure.map_or(Ok(!waits), Err)
    }

    /// Runs the next job of a random stream. Device memory stays accessible.
    fn run_one(&mut self) -> Progress {
        let is_ready = |jobs: &VecDeque<Job>| match jobs.front() {
            Some(Job::Wait { event, recording }) => self.is_recorded(*event, *recording),
            other => other.is_some(),
        };
        let ready: Vec<u64> =
            self.streams.iter().filter(|(_, jobs)| is_ready(jobs)).map(|(stream, _)| *stream).collect();
        if ready.is_empty() || self.failure.is_some() {
            return Progress::Nothing;
        }
        // Long runs of one stream expose missing events.
        if self.random.below(16) == 0 || !ready.contains(&self.preferred) {
            self.preferred = ready[self.random.below(ready.len())];
        }
        let job = self.streams.get_mut(&self.preferred).and_then(VecDeque::pop_front);
        match job.expect("the stream is ready") {
            Job::Poll(mut poll) => {
                if !poll(&mut || self.memory.set_open(true)) {
                    let jobs = self.streams.get_mut(&self.preferred).expect("it has had a job");
                    jobs.push_front(Job::Poll(poll));
                    self.preferred = 0;
                    return Progress::Waits;
                }
            }
            job => self.run(job),
        }
        Progress::Ran
    }

    fn run(&mut self, job: Job) {
        match job {
            Job::Wait { .. } => {}
            Job::Poll(_) => unreachable!("`run_one` runs it"),
            Job::Record { event, recording } => {
                if let Some(state) = self.events.get_mut(&event) {
                    state.num_completed = state.num_completed.max(recording);
                    state.completed_at = self.clock;
                }
            }
            Job::Run(run, milliseconds) => {
                self.memory.set_open(true);
                run();
                self.clock += milliseconds;
            }
            Job::Launch(launch) => {
                self.memory.set_open(true);
                if let Err(cause) = self.blocks.run(&launch, &self.memory, &mut self.random) {
                    eprintln!("fake CUDA: kernel {}: {cause}", launch.name);
                    self.failure = Some(CUDA_ERROR_LAUNCH_FAILED);
                }
            }
            Job::Copy { from, to, num_bytes } => {
                self.memory.set_open(true);
                // SAFETY: `driver` has checked that device memory has these bytes. Host memory is borrowed until the copy has run.
                unsafe { std::ptr::copy(from as *const u8, to as *mut u8, num_bytes) };
            }
            Job::Write { bytes, to } => {
                self.memory.set_open(true);
                // SAFETY: `driver` has checked that the bytes are device memory.
                unsafe { std::ptr::copy(bytes.as_ptr(), to as *mut u8, bytes.len()) };
            }
            Job::Fill { to, num_bytes, byte } => {
                self.memory.set_open(true);
                // SAFETY: as above.
                unsafe { std::ptr::write_bytes(to as *mut u8, byte, num_bytes) };
            }
        }
    }
}
