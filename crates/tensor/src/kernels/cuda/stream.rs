//! Streams of a GPU, and the events that order them.

use super::api::call;
use super::context::Context;
use super::error::CudaError;
use crate::kernels::Operand;
use crate::kernels::backend::{HostSide, Stream};
use cudarc::driver::sys as cuda;
use std::fmt;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;
use trireme_base::{Event, EventCompleter, spawn_thread};

const STREAMS: [Stream; 3] = [Stream::Compute, Stream::ToHost, Stream::FromHost];

/// The streams of a device. Each has a thread that waits for the events that the host has asked for. One more thread waits for events of
/// the streams of communicators.
pub(super) struct Streams {
    shared: Arc<Shared>,
    waiters: Vec<Waiter>,
}

struct Waiter {
    /// Sends the id of an event to wait for, or `None` to end the thread.
    sender: Sender<Option<u64>>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    context: Arc<Context>,
    handles: [cuda::CUstream; STREAMS.len()],
    state: Mutex<State>,
    /// The first failure, with which all later events fail. Read without the lock of `state`, which may be held while the driver blocks.
    failure: OnceLock<String>,
}

// SAFETY: handles of the driver may be used on any thread that has entered the context.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

#[derive(Default)]
struct State {
    pending: Vec<PendingEvent>,
    /// Events of the driver that are not in use.
    unused: Vec<cuda::CUevent>,
    num_events: u64,
}

/// An event that was recorded and has not completed.
struct PendingEvent {
    id: u64,
    stream: cuda::CUstream,
    /// Number of the thread that waits for the event.
    waiter: usize,
    handle: cuda::CUevent,
    completer: Arc<EventCompleter>,
    copy: Option<PendingCopy>,
    /// Whether the thread of the stream was told to wait for the event.
    is_demanded: bool,
}

/// The memory of a copy: of the host, which is returned to its owner before the event completes, and of the device.
pub(super) type PendingCopy = (Box<dyn HostSide>, Operand);

impl fmt::Debug for Streams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Streams").field("context", &self.shared.context).finish_non_exhaustive()
    }
}

impl Streams {
    pub(super) fn start(context: &Arc<Context>) -> Result<Self, CudaError> {
        context.enter()?;
        let driver = &context.installation.driver;
        let mut handles = [std::ptr::null_mut(); STREAMS.len()];
        for handle in &mut handles {
            // SAFETY: writes a handle, which `drop` destroys. The flag excludes the order of the default stream, which other code may use.
            unsafe {
                call!(driver, cuStreamCreate(handle, cuda::CUstream_flags::CU_STREAM_NON_BLOCKING as u32))?
            };
        }
        let shared = Arc::new(Shared {
            context: Arc::clone(context),
            handles,
            state: Mutex::default(),
            failure: OnceLock::new(),
        });
        let mut streams = Streams { shared, waiters: Vec::new() };
        for _ in 0..=STREAMS.len() {
            let (sender, receiver) = channel();
            let shared = Arc::clone(&streams.shared);
            let thread = spawn_thread("cuda", move || shared.complete_events(&receiver))
                .map_err(|source| CudaError::Thread { source })?;
            streams.waiters.push(Waiter { sender, thread: Some(thread) });
        }
        Ok(streams)
    }

    /// Returns the driver's stream for kernels.
    pub(super) fn handle(&self, stream: Stream) -> cuda::CUstream {
        self.shared.handles[stream as usize]
    }

    /// Returns the cause of the first failure.
    pub(super) fn failure(&self) -> Option<String> {
        self.shared.failure.get().cloned()
    }

    /// Records a failure. Events fail with its cause from now on, also those that are pending.
    pub(super) fn fail(&self, error: &CudaError) {
        self.shared.fail(error);
    }

    /// As [`fail`](Streams::fail), with a cause.
    pub(super) fn fail_with(&self, cause: String) {
        self.shared.fail_with(cause);
    }

    /// Returns the events of the copies that may still use `memory`.
    pub(super) fn copies_of(&self, memory: &Operand) -> Vec<Event> {
        let state = self.shared.lock();
        let uses = |pending: &&PendingEvent| {
            pending.copy.as_ref().is_some_and(|(_, operand)| operand.overlaps(memory))
        };
        state.pending.iter().filter(uses).map(|pending| pending.completer.event()).collect()
    }

    /// Returns an event that completes when all jobs that were issued to the stream so far have run. `copy` is the memory of the last job
    /// if it is a copy.
    pub(super) fn record(&self, stream: Stream, copy: Option<PendingCopy>) -> Event {
        self.record_with(self.handle(stream), stream as usize, copy)
    }

    /// As [`record`](Streams::record), of a stream of this GPU that is not among its streams for kernels and copies.
    pub(super) fn record_on(&self, stream: cuda::CUstream) -> Event {
        self.record_with(stream, STREAMS.len(), None)
    }

    fn record_with(&self, stream: cuda::CUstream, waiter: usize, copy: Option<PendingCopy>) -> Event {
        let shared = &self.shared;
        let mut state = shared.lock();
        let unused = shared.discard_unused(&mut state, &self.waiters);
        let id = state.num_events;
        state.num_events += 1;
        let sender = self.waiters[waiter].sender.clone();
        let own = Arc::downgrade(shared);
        let completer = EventCompleter::new(move || {
            if let Some(shared) = Weak::upgrade(&own) {
                shared.demand(id, &sender);
            }
        });
        let event = completer.event();
        if let Some(cause) = shared.failure.get() {
            // The GPU may still write to the memory of a copy.
            std::mem::forget(copy);
            completer.complete(Err(cause.clone()));
            return event;
        }
        match shared.record_handle(&mut state, stream) {
            Ok(handle) => {
                let is_demanded = false;
                state.pending.push(PendingEvent { id, stream, waiter, handle, completer, copy, is_demanded });
            }
            Err(error) => {
                drop(state);
                std::mem::forget(copy);
                shared.fail(&error);
                completer.complete(self.failure().map_or(Ok(()), Err));
            }
        }
        drop(unused);
        event
    }

    /// Makes jobs that are issued to the stream from now on wait for an event. Blocks until the event is done if it belongs to another
    /// device or to a group.
    pub(super) fn wait(&self, stream: Stream, event: &Event) {
        if let Some(cause) = event.failure() {
            return self.shared.fail_with(cause);
        }
        if event.is_done() {
            return;
        }
        let state = self.shared.lock();
        let own = state.pending.iter().find(|pending| pending.completer.event().is_same(event));
        let Some(own) = own else {
            drop(state);
            return event.outcome().unwrap_or_else(|cause| self.shared.fail_with(cause));
        };
        if own.stream == self.handle(stream) {
            return;
        }
        let driver = &self.shared.context.installation.driver;
        // SAFETY: handles of this context; the event is pending, so its handle is not in use for another one.
        let waited =
            self.shared.context.enter().and_then(|()| unsafe {
                call!(driver, cuStreamWaitEvent(self.handle(stream), own.handle, 0))
            });
        drop(state);
        if let Err(error) = waited {
            self.fail(&error);
        }
    }
}

impl PendingEvent {
    fn demand(&mut self, sender: &Sender<Option<u64>>) {
        if !std::mem::replace(&mut self.is_demanded, true) {
            // The thread ends only when the device is dropped.
            let _ = sender.send(Some(self.id));
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records an event of the driver on a stream.
    fn record_handle(&self, state: &mut State, stream: cuda::CUstream) -> Result<cuda::CUevent, CudaError> {
        self.context.enter()?;
        let driver = &self.context.installation.driver;
        let mut handle = state.unused.pop().unwrap_or(std::ptr::null_mut());
        // SAFETY: handles of this context. The flag says that no times are measured, which is faster.
        unsafe {
            if handle.is_null() {
                let flags = cuda::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
                call!(driver, cuEventCreate(&mut handle, flags))?;
            }
            call!(driver, cuEventRecord(handle, stream))?;
        }
        Ok(handle)
    }

    /// Removes pending events that no code can wait for any more. Returns them, to be dropped without the lock. The memory of a copy for
    /// whose event no code waits is returned when the copy has run.
    fn discard_unused(&self, state: &mut State, waiters: &[Waiter]) -> Vec<PendingEvent> {
        // The completer is shared with each clone of the event.
        let is_awaited = |pending: &PendingEvent| Arc::strong_count(&pending.completer) > 1;
        for pending in &mut state.pending {
            if pending.copy.is_some() && !pending.is_demanded && !is_awaited(pending) {
                pending.demand(&waiters[pending.waiter].sender);
            }
        }
        let is_unused = |pending: &mut PendingEvent| !pending.is_demanded && !is_awaited(pending);
        let unused: Vec<PendingEvent> = state.pending.extract_if(.., is_unused).collect();
        state.unused.extend(unused.iter().map(|pending| pending.handle));
        unused
    }

    /// Tells the thread of the event's stream that the host waits for the event.
    fn demand(&self, id: u64, sender: &Sender<Option<u64>>) {
        let mut state = self.lock();
        let pending = state.pending.iter_mut().find(|pending| pending.id == id);
        if let Some(pending) = pending {
            pending.demand(sender);
        }
    }

    /// Waits for events in the order of demand.
    fn complete_events(&self, demanded: &Receiver<Option<u64>>) {
        while let Ok(Some(id)) = demanded.recv() {
            let state = self.lock();
            let handle = state.pending.iter().find(|pending| pending.id == id).map(|pending| pending.handle);
            drop(state);
            let Some(handle) = handle else { continue };
            let driver = &self.context.installation.driver;
            // SAFETY: the event is demanded, so its handle is in use until this thread completes it.
            let waited =
                self.context.enter().and_then(|()| unsafe { call!(driver, cuEventSynchronize(handle)) });
            if let Err(error) = waited {
                self.fail(&error);
                continue;
            }
            self.complete_until(id);
        }
    }

    /// Completes an event, and the events that precede it on its stream.
    fn complete_until(&self, id: u64) {
        let state = self.lock();
        let stream = state.pending.iter().find(|pending| pending.id == id).map(|pending| pending.stream);
        drop(state);
        if let Some(stream) = stream {
            self.complete(|pending| pending.stream == stream && pending.id <= id);
        }
    }

    /// Completes the pending events for which `is_done` returns true.
    fn complete(&self, is_done: impl Fn(&PendingEvent) -> bool) {
        let mut state = self.lock();
        let done: Vec<PendingEvent> = state.pending.extract_if(.., |pending| is_done(pending)).collect();
        state.unused.extend(done.iter().map(|pending| pending.handle));
        drop(state);
        for PendingEvent { completer, copy, .. } in done {
            if let Some((host, _)) = copy {
                host.return_to_owner();
            }
            completer.complete(Ok(()));
        }
    }

    /// As [`fail_with`](Shared::fail_with), with an error of this GPU.
    fn fail(&self, error: &CudaError) {
        let advice = match error {
            CudaError::Call { .. } | CudaError::Kernel { .. } => {
                "; see whether `nvidia-smi -q` and `dmesg` report errors of the hardware"
            }
            _ => "",
        };
        self.fail_with(format!("{}: {error}{advice}", self.context.describe()));
    }

    /// Records a failure, and fails all pending events with the first one. The memory of pending copies is lost.
    fn fail_with(&self, cause: String) {
        // Before the lock is taken: an event that does not see the failure is pending by then.
        let cause = self.failure.get_or_init(|| cause);
        let pending = std::mem::take(&mut self.lock().pending);
        for PendingEvent { completer, copy, .. } in pending {
            // The GPU may still write to the memory.
            std::mem::forget(copy);
            completer.complete(Err(cause.clone()));
        }
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        let Shared { context, handles, .. } = &*self.shared;
        let driver = &context.installation.driver;
        let synchronized = context.enter().and_then(|()| {
            // SAFETY: streams of this context.
            handles.iter().try_for_each(|&stream| unsafe { call!(driver, cuStreamSynchronize(stream)) })
        });
        match synchronized {
            Ok(()) => self.shared.complete(|_| true),
            Err(error) => self.shared.fail(&error),
        }
        for waiter in &mut self.waiters {
            let _ = waiter.sender.send(None);
            let _ = waiter.thread.take().map(JoinHandle::join);
        }
        let unused = std::mem::take(&mut self.shared.lock().unused);
        // SAFETY: handles of this context that no code uses any more.
        unsafe {
            for event in unused {
                let _ = (driver.cuEventDestroy_v2)(event);
            }
            for &stream in handles {
                let _ = (driver.cuStreamDestroy_v2)(stream);
            }
        }
    }
}
