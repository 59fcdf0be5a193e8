//! A bounded thread pool that runs the tasks of one kernel at a time.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, TryLockError};
use std::thread::JoinHandle;
use trireme_base::spawn_thread;

/// Number of spins of an idle thread before it sleeps: some tens of microseconds, enough for the gap between two kernels, but not for a
/// wait for another rank.
const SPINS_BEFORE_SLEEP: usize = 4_000;

/// Called with the thread index and the task index.
type Task<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// Threads that run the tasks of a kernel. The calling thread is one of them: a pool of size one starts no thread and runs everything in
/// place.
pub(crate) struct ThreadPool {
    /// Locked while a kernel runs.
    running: Mutex<()>,
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    num_threads: usize,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// Wakes sleeping workers when a job is posted or the pool is dropped.
    job_posted: Condvar,
    /// Wakes the caller when the last worker has left the job.
    workers_done: Condvar,
    /// Number of posted jobs. Workers spin on it without the lock.
    num_jobs: AtomicU64,
    /// Next task of the current job.
    next_task: AtomicUsize,
}

#[derive(Default)]
struct State {
    job: Option<Job>,
    /// Number of workers in the current job.
    num_active: usize,
    /// Number of sleeping workers, which must be notified of a job.
    num_sleeping: usize,
    panic: Option<Box<dyn Any + Send>>,
    closed: bool,
}

#[derive(Clone, Copy)]
struct Job {
    task: *const Task<'static>,
    num_tasks: usize,
}

// SAFETY: the task is `Sync`, and `ThreadPool::run` keeps it alive until no worker is in the job.
unsafe impl Send for Job {}

impl ThreadPool {
    pub(crate) const SIZE_MAX: usize = 1 << 12;

    /// Creates a pool of `num_threads`, including the caller. Fails if the system cannot start a thread.
    pub(crate) fn new(num_threads: usize) -> std::io::Result<Self> {
        let mut pool = ThreadPool::unstarted(num_threads);
        for index in 1..num_threads {
            let shared = Arc::clone(&pool.shared);
            pool.workers.push(spawn_thread(&format!("kernel-{index}"), move || shared.work(index))?);
        }
        Ok(pool)
    }

    /// Creates a pool without starting its threads. Only its size may be used: [`run`](ThreadPool::run) panics.
    pub(crate) fn unstarted(num_threads: usize) -> Self {
        ThreadPool { running: Mutex::new(()), shared: Arc::default(), workers: Vec::new(), num_threads }
    }

    pub(crate) fn num_threads(&self) -> usize {
        self.num_threads
    }

    /// Runs `task(0) … task(num_tasks - 1)`, each once, in any order and on any thread. Returns when all have ended. Propagates a panic of
    /// a task. Does not allocate. Panics if another kernel is running: tasks must not call `run`, and a device serves one thread at a time.
    pub(crate) fn run(&self, num_tasks: usize, task: &(dyn Fn(usize) + Sync + '_)) {
        self.run_on_threads(num_tasks, &|_, index| task(index));
    }

    /// Like [`ThreadPool::run`], for tasks that use scratch memory of their thread: `task(thread, index)` with `thread` less than
    /// [`ThreadPool::num_threads`]. No two concurrent tasks have the same thread index.
    pub(crate) fn run_on_threads(&self, num_tasks: usize, task: &Task<'_>) {
        let _running = match self.running.try_lock() {
            Ok(running) => running,
            // An earlier call has propagated a task's panic.
            Err(TryLockError::Poisoned(running)) => running.into_inner(),
            Err(TryLockError::WouldBlock) => panic!("kernels of one device run one at a time"),
        };
        assert_eq!(self.workers.len() + 1, self.num_threads, "a device that only counts runs no kernel");
        if self.workers.is_empty() || num_tasks <= 1 {
            (0..num_tasks).for_each(|index| task(0, index));
            return;
        }
        // SAFETY: only the lifetime is erased; this function ends after the last worker has left the job.
        let task: *const Task<'static> = unsafe { std::mem::transmute::<*const Task<'_>, _>(task) };
        let job = Job { task, num_tasks };
        self.shared.next_task.store(0, Ordering::Relaxed);
        {
            let mut state = self.shared.lock();
            state.job = Some(job);
            self.shared.num_jobs.fetch_add(1, Ordering::Release);
            if state.num_sleeping > 0 {
                self.shared.job_posted.notify_all();
            }
        }
        let outcome = catch_unwind(AssertUnwindSafe(|| self.shared.run_tasks(job, 0)));

        let mut state = self.shared.lock();
        state.job = None;
        let mut spins = 0;
        while state.num_active > 0 {
            if spins < SPINS_BEFORE_SLEEP {
                drop(state);
                std::hint::spin_loop();
                spins += 1;
                state = self.shared.lock();
            } else {
                state =
                    self.shared.workers_done.wait(state).expect("no thread panics while it holds the lock");
            }
        }
        let panic = state.panic.take();
        drop(state);
        if let Err(payload) = outcome {
            resume_unwind(payload);
        }
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread panics while it holds the lock")
    }

    /// Takes tasks until none is left.
    fn run_tasks(&self, job: Job, thread: usize) {
        // SAFETY: the caller is in the job, so `ThreadPool::run` has not returned.
        let task = unsafe { &*job.task };
        loop {
            let index = self.next_task.fetch_add(1, Ordering::Relaxed);
            if index >= job.num_tasks {
                return;
            }
            task(thread, index);
        }
    }

    fn work(&self, thread: usize) {
        let mut num_seen = 0;
        while let Some(job) = self.enter(&mut num_seen) {
            let outcome = catch_unwind(AssertUnwindSafe(|| self.run_tasks(job, thread)));
            let mut state = self.lock();
            if let Err(payload) = outcome {
                state.panic.get_or_insert(payload);
            }
            state.num_active -= 1;
            if state.num_active == 0 {
                drop(state);
                self.workers_done.notify_one();
            }
        }
    }

    /// Waits for a new job and enters it. Returns `None` when the pool is dropped.
    fn enter(&self, num_seen: &mut u64) -> Option<Job> {
        loop {
            let mut spins = 0;
            while self.num_jobs.load(Ordering::Acquire) == *num_seen && spins < SPINS_BEFORE_SLEEP {
                std::hint::spin_loop();
                spins += 1;
            }
            let mut state = self.lock();
            while self.num_jobs.load(Ordering::Acquire) == *num_seen && !state.closed {
                state.num_sleeping += 1;
                state = self.job_posted.wait(state).expect("no thread panics while it holds the lock");
                state.num_sleeping -= 1;
            }
            if state.closed {
                return None;
            }
            *num_seen = self.num_jobs.load(Ordering::Acquire);
            // The other threads may have finished the job before this worker woke.
            if let Some(job) = state.job {
                state.num_active += 1;
                return Some(job);
            }
        }
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        {
            let mut state = self.shared.lock();
            state.closed = true;
            // Ends spinning.
            self.shared.num_jobs.fetch_add(1, Ordering::Release);
        }
        self.shared.job_posted.notify_all();
        for worker in self.workers.drain(..) {
            // `run` has already propagated a worker's panic.
            let _ = worker.join();
        }
    }
}

impl fmt::Debug for ThreadPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThreadPool").field("num_threads", &self.num_threads()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once() {
        for num_threads in [1, 2, 5] {
            let pool = ThreadPool::new(num_threads).unwrap();
            for num_tasks in [0, 1, 2, 3, 100] {
                let runs: Vec<AtomicUsize> = (0..num_tasks).map(|_| AtomicUsize::new(0)).collect();
                for round in 1..=50 {
                    pool.run(num_tasks, &|index| {
                        runs[index].fetch_add(1, Ordering::Relaxed);
                    });
                    assert!(runs.iter().all(|runs| runs.load(Ordering::Relaxed) == round));
                }
            }
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = ThreadPool::new(3).unwrap();
        for culprit in [0, 7] {
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                pool.run(8, &|index| assert_ne!(index, culprit, "task failed"))
            }));
            assert!(outcome.is_err());
        }
        pool.run(8, &|_| ());
    }

    #[test]
    fn a_kernel_within_a_kernel_is_refused() {
        for num_threads in [1, 2] {
            let pool = ThreadPool::new(num_threads).unwrap();
            let nested = || pool.run(2, &|_| pool.run(2, &|_| ()));
            assert!(catch_unwind(AssertUnwindSafe(nested)).is_err());
            pool.run(2, &|_| ());
        }
    }
}
