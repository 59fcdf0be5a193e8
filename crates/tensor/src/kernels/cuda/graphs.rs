//! Queued jobs of the compute stream, and the graphs that repeat them.
//!
//! To launch a kernel takes the host several microseconds, longer than a small kernel runs. Jobs are therefore queued, and issued when a
//! part of a program ends ([`Backend::submit`](crate::kernels::backend::Backend::submit)), and before anything that depends on them: an
//! event, a copy, a read by the host. When the same jobs with the same arguments are queued for the second time, as those of each step of a
//! training with fixed shapes are, they are captured in a CUDA graph, which one call launches from then on. A job whose arguments differ
//! from step to step, such as a random key, is issued on its own, so that the jobs before and after it repeat.

use super::api::call;
use super::blas::Blas;
use super::context::Context;
use super::error::CudaError;
use super::job::Job;
use cudarc::driver::sys as cuda;
use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Smallest number of jobs of a graph.
const JOBS_MIN: usize = 4;

/// Largest number of jobs that are queued.
const JOBS_MAX: usize = 512;

/// Maximum number of jobs of all graphs. Each takes some 250 bytes of the host's memory, and the driver's memory for it.
const CAPTURED_JOBS_MAX: usize = 1 << 14;

/// Maximum number of runs of jobs that are remembered without a graph.
const SEEN_MAX: usize = 1 << 14;

/// Jobs of the compute stream that are not issued yet, and the graphs of those that repeat.
#[derive(Debug)]
pub(super) struct JobQueue {
    context: Arc<Context>,
    /// The compute stream.
    stream: cuda::CUstream,
    /// The stream in which jobs are captured. Nothing runs on it.
    capture_stream: cuda::CUstream,
    state: Mutex<State>,
}

// SAFETY: handles of the driver may be used on any thread that has entered the context. Graphs, which no two threads may use at once, are
// behind the lock.
unsafe impl Send for JobQueue {}
// SAFETY: as above.
unsafe impl Sync for JobQueue {}

#[derive(Debug, Default)]
struct State {
    jobs: Vec<Job>,
    /// Hashes of the runs of jobs that were issued once.
    seen: HashSet<u64>,
    graphs: HashMap<Vec<Job>, Graph, BuildHasherDefault<DefaultHasher>>,
    num_captured: usize,
    /// Whether jobs are captured. Not while kernels are timed, and not after the driver has refused to.
    has_graphs: bool,
}

impl JobQueue {
    /// Creates an empty queue of the compute stream `stream`. Without `has_graphs`, all jobs are issued one by one.
    pub(super) fn new(
        context: &Arc<Context>,
        stream: cuda::CUstream,
        has_graphs: bool,
    ) -> Result<Self, CudaError> {
        let mut capture_stream = std::ptr::null_mut();
        let flags = cuda::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes a handle, which `drop` destroys.
        unsafe { call!(context.installation.driver, cuStreamCreate(&mut capture_stream, flags))? };
        let state = Mutex::new(State { has_graphs, ..State::default() });
        Ok(JobQueue { context: Arc::clone(context), stream, capture_stream, state })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Issues jobs one by one from now on, or no longer. Returns whether graphs were used before.
    pub(super) fn use_graphs(&self, has_graphs: bool) -> bool {
        std::mem::replace(&mut self.lock().has_graphs, has_graphs)
    }

    /// Queues a job, to be issued after those that are queued.
    pub(super) fn push(&self, job: Job, blas: &Blas) -> Result<(), CudaError> {
        let mut state = self.lock();
        state.jobs.push(job);
        if state.jobs.len() < JOBS_MAX { Ok(()) } else { self.issue_all(&mut state, blas) }
    }

    /// Issues the jobs that are queued.
    pub(super) fn issue(&self, blas: &Blas) -> Result<(), CudaError> {
        self.issue_all(&mut self.lock(), blas)
    }

    /// Issues a job whose arguments differ from step to step, after those that are queued.
    pub(super) fn issue_alone(&self, job: &Job, blas: &Blas) -> Result<(), CudaError> {
        let mut state = self.lock();
        self.issue_all(&mut state, blas)?;
        job.issue(&self.context, blas, self.stream)
    }

    fn issue_all(&self, state: &mut State, blas: &Blas) -> Result<(), CudaError> {
        if state.jobs.is_empty() {
            return Ok(());
        }
        let jobs = std::mem::take(&mut state.jobs);
        let driver = &self.context.installation.driver;
        // SAFETY: a graph and a stream of this context. Operands outlive the jobs (see `kernels::operand`).
        let launch = |graph: &Graph| unsafe { call!(driver, cuGraphLaunch(graph.handle, self.stream)) };
        if let Some(graph) = state.graphs.get(&jobs).filter(|_| state.has_graphs) {
            return launch(graph);
        }
        if state.has_graphs && jobs.len() >= JOBS_MIN && state.num_captured + jobs.len() <= CAPTURED_JOBS_MAX
        {
            if state.seen.len() >= SEEN_MAX {
                state.seen.clear();
            }
            if !state.seen.insert(state.graphs.hasher().hash_one(&jobs)) {
                match self.capture(&jobs, blas) {
                    Ok(graph) => {
                        state.num_captured += jobs.len();
                        return launch(state.graphs.entry(jobs).or_insert(graph));
                    }
                    // The jobs are issued one by one, which fails as well if the GPU has failed.
                    Err(_) => state.has_graphs = false,
                }
            }
        }
        jobs.iter().try_for_each(|job| job.issue(&self.context, blas, self.stream))
    }

    /// Captures jobs in a graph, with the memory that it needs on the GPU.
    fn capture(&self, jobs: &[Job], blas: &Blas) -> Result<Graph, CudaError> {
        let driver = &self.context.installation.driver;
        let mode = cuda::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        let (mut graph, mut handle) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: streams of this context; writes handles. A capture that has begun is ended.
        unsafe {
            call!(driver, cuStreamBeginCapture_v2(self.capture_stream, mode))?;
            let issued = jobs.iter().try_for_each(|job| job.issue(&self.context, blas, self.capture_stream));
            let ended = call!(driver, cuStreamEndCapture(self.capture_stream, &mut graph));
            let instantiated = issued
                .and(ended)
                .and_then(|()| call!(driver, cuGraphInstantiateWithFlags(&mut handle, graph, 0)));
            if !graph.is_null() {
                let _ = (driver.cuGraphDestroy)(graph);
            }
            instantiated?;
            let graph = Graph { context: Arc::clone(&self.context), handle };
            call!(driver, cuGraphUpload(handle, self.stream))?;
            Ok(graph)
        }
    }
}

impl Drop for JobQueue {
    fn drop(&mut self) {
        let _ = self.context.enter();
        // SAFETY: created by `new`, and no code uses it any more.
        let _ = unsafe { (self.context.installation.driver.cuStreamDestroy_v2)(self.capture_stream) };
    }
}

/// Jobs that one call launches.
#[derive(Debug)]
struct Graph {
    context: Arc<Context>,
    handle: cuda::CUgraphExec,
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _ = self.context.enter();
        // SAFETY: instantiated by `capture`. The driver destroys it when it has run.
        let _ = unsafe { (self.context.installation.driver.cuGraphExecDestroy)(self.handle) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Operand;
    use crate::kernels::backend::Backend;
    use crate::kernels::cuda::{Cuda, CudaFolders, CudaInstallation, CudaOptions, DeviceAddresses};
    use std::ptr::NonNull;
    use trireme_base::DType;

    /// Opens a stand-in for a GPU; `None` on a machine that has none.
    fn open() -> Option<(Cuda, DeviceAddresses)> {
        let folder = trireme_testkit::fake_cuda_folder()?;
        let cache = folder.join("trireme").join("cuda");
        let folders = CudaFolders { cache, first: Some(folder.to_owned()), others: Vec::new() };
        let installation = Some(CudaInstallation::load(&folders).unwrap());
        Some(Cuda::open(CudaOptions { installation, ..CudaOptions::default() }).unwrap())
    }

    /// Launches of graphs and of single jobs give the same bytes in the same order.
    #[test]
    fn runs_of_jobs_that_repeat_become_graphs() {
        const LEN: usize = 16;
        let Some((cuda, addresses)) = open() else { return };
        addresses.make_accessible(0..2 * LEN).unwrap();
        let start = addresses.start();
        let bytes = |start: usize| {
            let array = NonNull::new(start as *mut u8).unwrap();
            let operand = Operand::new(array, LEN, ([LEN].into(), DType::U8), true);
            let mut bytes = [0; LEN];
            cuda.download(operand, &mut bytes).unwrap();
            bytes
        };
        // Adds a byte to the first half, and copies it to the second. The graph must keep the order.
        let run = |byte: u8, num_jobs: usize| {
            cuda.queue(Job::Fill { to: start, num_bytes: LEN, byte: 0 });
            for index in 2..num_jobs {
                cuda.queue(Job::Fill { to: start + index, num_bytes: 1, byte });
            }
            cuda.queue(Job::Copy { from: start, to: start + LEN, num_bytes: LEN });
            cuda.submit();
            let expected = std::array::from_fn(|index| if (2..num_jobs).contains(&index) { byte } else { 0 });
            assert_eq!([bytes(start), bytes(start + LEN)], [expected; 2]);
        };
        let num_graphs = || cuda.jobs.lock().graphs.len();
        for (byte, num_jobs, expected) in [
            (7, JOBS_MIN, 0),
            (7, JOBS_MIN, 1),
            (7, JOBS_MIN, 1),
            (8, JOBS_MIN, 1),
            (8, JOBS_MIN + 1, 1),
            (8, JOBS_MIN, 2),
            (7, JOBS_MIN, 2),
            (7, JOBS_MIN - 1, 2),
            (7, JOBS_MIN - 1, 2),
        ] {
            run(byte, num_jobs);
            assert_eq!(num_graphs(), expected, "{num_jobs} jobs with {byte}");
        }
        // A job whose arguments change is in no graph, and separates the jobs around it.
        for _ in 0..2 {
            for byte in 0..JOBS_MIN as u8 {
                cuda.jobs.issue_alone(&Job::Fill { to: start, num_bytes: LEN, byte }, &cuda.blas).unwrap();
                cuda.queue(Job::Copy { from: start, to: start + LEN, num_bytes: LEN });
            }
            assert_eq!(bytes(start + LEN), [JOBS_MIN as u8 - 1; LEN]);
        }
        assert_eq!(num_graphs(), 2);
    }
}
