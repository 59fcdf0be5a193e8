//! Loom models of a group's threads: `cargo test -p trireme-comm --features loom --lib loom_`.
//!
//! The queue is compiled here a second time, against loom's locks, and loom runs each test with every interleaving of its threads. A lost
//! wake-up is a deadlock, which loom reports. The engine is the real one, of a group of one rank, with a transport that moves no data. The
//! code for shared memory has models of its own in `transport::shm`.

#[path = "queue.rs"]
#[expect(clippy::duplicate_mod, dead_code, reason = "a second time, for the models, which use a part of it")]
mod queue;

use crate::call::{Call, Payload};
use crate::control::Control;
use crate::engine::Engine;
use crate::messages::{MessageQueue, Messenger};
use crate::recorder::{FlightRecorder, GroupRecorder};
use crate::transport::Transport;
use crate::transport::device::DeviceResources;
use crate::{CommError, GroupOptions, Operation};
use loom::sync::{Condvar, Mutex};
use loom::thread;
use queue::{Queue, Ticket};
use std::sync::Arc;
use std::time::Duration;
use trireme_base::{DType, Rank};
use trireme_schedule::collective::CollectiveKind;

/// Explores all interleavings of a model's threads with at most this many preemptions.
pub(crate) fn explore(num_preemptions_max: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(num_preemptions_max);
    builder.check(model);
}

/// Loom's locks, and a clock that the tests set.
mod sync {
    pub(super) use loom::sync::{Mutex, MutexGuard};
    use std::cell::Cell;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    /// A condition variable whose first wait with a timeout times out at once, and later ones never: the queue must not depend on timeouts.
    pub(super) struct Condvar {
        inner: loom::sync::Condvar,
        has_timed_out: AtomicBool,
    }

    pub(super) struct WaitTimeoutResult(bool);

    impl WaitTimeoutResult {
        pub(super) fn timed_out(&self) -> bool {
            self.0
        }
    }

    impl Condvar {
        pub(super) fn new() -> Self {
            Condvar { inner: loom::sync::Condvar::new(), has_timed_out: AtomicBool::new(false) }
        }

        pub(super) fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> Result<MutexGuard<'a, T>, ()> {
            self.inner.wait(guard).map_err(drop)
        }

        pub(super) fn wait_timeout<'a, T>(
            &self,
            guard: MutexGuard<'a, T>,
            _: Duration,
        ) -> Result<(MutexGuard<'a, T>, WaitTimeoutResult), ()> {
            if self.has_timed_out.swap(true, Ordering::Relaxed) {
                Ok((self.wait(guard)?, WaitTimeoutResult(false)))
            } else {
                Ok((guard, WaitTimeoutResult(true)))
            }
        }

        pub(super) fn notify_one(&self) {
            self.inner.notify_one();
        }

        pub(super) fn notify_all(&self) {
            self.inner.notify_all();
        }
    }

    thread_local! {
        /// The elapsed time that every [`Instant`] reports. Loom runs all threads of a model on one system thread.
        pub(super) static ELAPSED: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    }

    pub(super) struct Instant;

    impl Instant {
        pub(super) fn now() -> Self {
            Instant
        }

        pub(super) fn elapsed(&self) -> Duration {
            ELAPSED.get()
        }
    }
}

/// A counter of executed operations or called callbacks, and the condition variable for its changes.
#[derive(Default)]
struct Executed {
    num: Mutex<usize>,
    grown: Condvar,
}

/// A transport that checks that operations arrive in the order of the numbers that [`submit`] gives them. Operation `failing` fails.
struct OrderCheckingTransport {
    executed: Arc<Executed>,
    failing: Option<usize>,
}

impl Transport for OrderCheckingTransport {
    fn execute(&mut self, call: &Call, _: &mut Payload, _: &mut Control) -> Result<(), CommError> {
        let (_, number) = call.operation.elements();
        let mut num_executed = self.executed.num.lock().unwrap();
        assert_eq!(*num_executed, number, "operations are executed in the order of issue");
        *num_executed += 1;
        self.executed.grown.notify_one();
        if self.failing == Some(number) { Err(call.timed_out(Vec::new())) } else { Ok(()) }
    }

    fn abandon(&mut self, _: &mut Payload) {}
}

fn recorder() -> GroupRecorder {
    FlightRecorder::new(Rank(0), 1).group("world".to_owned(), Rank(0), vec![Rank(0)])
}

/// Starts a queue and its communication thread. Returns them with the count of executed operations.
fn start_queue(
    queue: &Arc<MessageQueue>,
    failing: Option<usize>,
) -> (Arc<Queue>, thread::JoinHandle<()>, Arc<Executed>) {
    let recorder = recorder();
    let control = Control::new(vec![None], recorder.clone()).expect("a control");
    let executed = Arc::new(Executed::default());
    let transport = Box::new(OrderCheckingTransport { executed: Arc::clone(&executed), failing });
    let engine = Engine::new(control, transport, Duration::from_secs(60), recorder.clone());
    let queue = Arc::new(Queue::new(engine, Arc::clone(queue), recorder));
    let served = Arc::clone(&queue);
    (queue, thread::spawn(move || served.serve()), executed)
}

fn submit(queue: &Arc<Queue>, number: usize) -> Ticket {
    let operation = Operation::of(CollectiveKind::Broadcast.with_root(Rank(0), number), DType::U8);
    queue.submit(operation, Payload::Nothing)
}

/// Explores a model in which `elapsed` has passed since the last operation was issued.
fn explore_after(elapsed: Duration, model: impl Fn(&Arc<MessageQueue>) + Send + Sync + 'static) {
    sync::ELAPSED.set(elapsed);
    let messenger = Messenger::start(
        Rank(0),
        vec![None],
        DeviceResources::default(),
        &GroupOptions::default(),
        recorder(),
    );
    let messenger = messenger.expect("a messenger without peers");
    let queue = Arc::clone(&messenger.message_queue);
    explore(4, move || model(&queue));
}

/// Explores a model with a communication thread that polls the queue, and with one that must be woken.
fn explore_both(model: impl Fn(&Arc<MessageQueue>) + Copy + Send + Sync + 'static) {
    explore_after(Duration::ZERO, model);
    explore_after(Duration::MAX, model);
}

#[test]
fn loom_each_waiting_thread_gets_its_result() {
    explore_both(|queue| {
        let (queue, serving, _) = start_queue(queue, None);
        let (first, second) = (submit(&queue, 0), submit(&queue, 1));
        let waiting = thread::spawn(move || assert!(second.wait().is_ok()));
        assert!(first.wait().is_ok());
        waiting.join().unwrap();
        queue.close();
        serving.join().unwrap();
    });
}

#[test]
fn loom_an_operation_is_executed_in_the_background() {
    explore_after(Duration::MAX, |queue| {
        let (queue, serving, executed) = start_queue(queue, None);
        let ticket = submit(&queue, 0);
        let mut num_executed = executed.num.lock().unwrap();
        while *num_executed == 0 {
            num_executed = executed.grown.wait(num_executed).unwrap();
        }
        drop(num_executed);
        assert!(ticket.wait().is_ok());
        queue.close();
        serving.join().unwrap();
    });
}

#[test]
fn loom_operations_without_a_waiter_are_executed_before_the_end() {
    explore_both(|queue| {
        let (queue, serving, _) = start_queue(queue, None);
        drop(submit(&queue, 0));
        let last = submit(&queue, 1);
        queue.close();
        serving.join().unwrap();
        assert!(last.is_done());
    });
}

#[test]
fn loom_a_failure_reaches_all_waiting_threads() {
    explore_both(|queue| {
        let (queue, serving, _) = start_queue(queue, Some(1));
        let [first, second, third] = [0, 1, 2].map(|number| submit(&queue, number));
        let waiting = thread::spawn(move || assert!(third.wait().is_err()));
        assert!(first.wait().is_ok());
        assert!(second.wait().is_err());
        waiting.join().unwrap();
        serving.join().unwrap();
    });
}

#[test]
fn loom_a_callback_gets_the_result_from_any_executing_thread() {
    explore_both(|queue| {
        let (queue, serving, _) = start_queue(queue, Some(1));
        let called = Arc::new(Executed::default());
        let [first, second, third] = [0, 1, 2].map(|number| submit(&queue, number));
        for (number, ticket) in [first, second].into_iter().enumerate() {
            let called = Arc::clone(&called);
            ticket.on_done(Box::new(move |result| {
                assert_eq!(result.is_ok(), number == 0);
                *called.num.lock().unwrap() += 1;
                called.grown.notify_one();
            }));
        }
        let waiting = thread::spawn(move || assert!(third.wait().is_err()));
        let mut num_called = called.num.lock().unwrap();
        while *num_called < 2 {
            num_called = called.grown.wait(num_called).unwrap();
        }
        drop(num_called);
        waiting.join().unwrap();
        serving.join().unwrap();
    });
}

#[test]
fn loom_an_abort_reaches_waiting_threads() {
    explore_both(|queue| {
        let (queue, serving, _) = start_queue(queue, None);
        let ticket = submit(&queue, 0);
        let waiting = thread::spawn(move || drop(ticket.wait()));
        queue.abort(CommError::Panicked);
        waiting.join().unwrap();
        serving.join().unwrap();
    });
}
