//! A disk that fails, fills up or hangs: the step fails with an error that says so.

use crate::common::{Layout, batches, executor_with_layout};
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use trireme_parallel::{GradNorm, ParallelError, StepPlan};
use trireme_schedule::{StateClass, StateLayout, Tier};
use trireme_swap::{Access, Direction, Interceptor, SwapOptions};
use trireme_testkit::{run_ranks, small_models};

/// Lets the first reads or writes succeed, and fails all later ones.
#[derive(Debug)]
struct Refuse {
    direction: Direction,
    num_passing: AtomicUsize,
    error: i32,
}

impl Interceptor for Refuse {
    fn result(&self, access: &Access, result: io::Result<usize>) -> io::Result<usize> {
        if access.direction != self.direction {
            return result;
        }
        let passes =
            self.num_passing.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        if passes.is_ok() { result } else { Err(io::Error::from_raw_os_error(self.error)) }
    }
}

/// Lets the first reads and writes succeed, and blocks all later reads until the test has ended.
#[derive(Debug)]
struct Hang {
    num_passing: AtomicUsize,
    released: Mutex<Receiver<()>>,
}

impl Interceptor for Hang {
    fn result(&self, access: &Access, result: io::Result<usize>) -> io::Result<usize> {
        let left =
            self.num_passing.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        if access.direction == Direction::Read && left.is_err() {
            let _ = self.released.lock().unwrap().recv();
        }
        result
    }
}

/// Runs steps until one fails. Returns the error with its causes.
fn first_failure(swap: SwapOptions) -> String {
    let folder = tempfile::tempdir().unwrap();
    let tiers = [Tier::Disk, Tier::Disk, Tier::Host, Tier::Disk];
    let classes = StateClass::ALL.into_iter().zip(tiers);
    let state = classes.fold(StateLayout::zero(3), |state, (class, tier)| state.with_tier(class, tier));
    let layout = Layout { state, folder: folder.path(), swap, ..Layout::default() };
    let config = &small_models()[0];
    let mut errors = run_ranks(1, |group| {
        let mut executor = executor_with_layout(config, group, 1, 1, &layout);
        let mut run = |step| {
            let batches = batches(&executor, 1, step);
            executor.run(
                StepPlan { step, lr: 1e-2, grad_norm: GradNorm::Measure, has_loss: true },
                &mut batches.into_iter(),
            )
        };
        let error: ParallelError =
            (1..100).find_map(|step| run(step).err()).expect("the disk fails some time");
        let mut text = error.to_string();
        let mut cause = std::error::Error::source(&error);
        while let Some(error) = cause {
            text += &format!(": {error}");
            cause = error.source();
        }
        text
    });
    let text = errors.remove(0);
    assert!(text.contains("cannot store state on disk"), "{text}");
    assert!(text.contains(&*folder.path().to_string_lossy()), "{text}");
    text
}

#[test]
fn reads_and_writes_that_the_system_refuses() {
    for (direction, number, what) in
        [(Direction::Read, 5, "Input/output error"), (Direction::Write, 28, "No space left")]
    {
        let refuse = Refuse { direction, num_passing: AtomicUsize::new(60), error: number };
        let text =
            first_failure(SwapOptions { interceptor: Some(Arc::new(refuse)), ..SwapOptions::default() });
        assert!(text.contains(what), "{text}");
    }
}

#[test]
fn a_disk_that_hangs() {
    let (release, released) = channel();
    let hang = Hang { num_passing: AtomicUsize::new(60), released: Mutex::new(released) };
    let timeout = Duration::from_millis(50);
    let text =
        first_failure(SwapOptions { interceptor: Some(Arc::new(hang)), timeout, ..SwapOptions::default() });
    assert!(text.contains("50ms") || text.contains("0.05"), "{text}");
    drop(release);
}
