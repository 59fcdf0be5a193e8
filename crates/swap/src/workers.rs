//! The threads that submit the queue's operations to the system.

use crate::queue::{Operation, Queue};
use crate::raw::Ring;
use crate::{Direction, SwapError};
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use trireme_base::spawn_thread;

/// Starts the threads that serve the queue: one for `ring` if present, or else `num_threads` that make blocking calls on `file`. The
/// threads end when the queue is closed or fails.
pub(crate) fn start(
    queue: &Arc<Queue>,
    file: File,
    ring: Option<Ring>,
    num_threads: usize,
) -> io::Result<Vec<JoinHandle<()>>> {
    if let Some(ring) = ring {
        return Ok(vec![spawn(queue, move |queue| serve_ring(queue, ring))?]);
    }
    let file = Arc::new(file);
    let start = |_| {
        let file = Arc::clone(&file);
        spawn(queue, move |queue| serve_blocking(queue, &file))
    };
    (0..num_threads).map(start).collect()
}

/// Starts a thread that runs `serve`. If `serve` fails or panics, the file fails.
fn spawn(
    queue: &Arc<Queue>,
    serve: impl FnOnce(&Queue) -> io::Result<()> + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    queue.add_worker();
    let worker = Worker(Arc::clone(queue));
    spawn_thread("swap", move || {
        let Worker(queue) = &worker;
        if let Err(source) = serve(queue) {
            queue.abort(SwapError::Ring { folder: queue.folder.clone(), source: Arc::new(source) });
        }
    })
}

/// Registers a thread with the queue until dropped.
struct Worker(Arc<Queue>);

impl Drop for Worker {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.abort(SwapError::Panicked { folder: self.0.folder.clone() });
        }
        self.0.remove_worker();
    }
}

/// Serves one operation at a time with blocking calls.
fn serve_blocking(queue: &Queue, file: &File) -> io::Result<()> {
    while let Some(mut operation) = queue.next() {
        let result = rustix::io::retry_on_intr(|| read_or_write(file, &mut operation));
        queue.end(operation, result.map_err(io::Error::from));
    }
    Ok(())
}

fn read_or_write(file: &File, operation: &mut Operation) -> rustix::io::Result<usize> {
    match operation.access.direction {
        Direction::Read => rustix::io::pread(file, &mut operation.part[..], operation.access.offset),
        Direction::Write => rustix::io::pwrite(file, &operation.part, operation.access.offset),
    }
}

/// Keeps as many operations in flight as the ring has room for. Checksums are computed while the device works on other operations.
///
/// A transfer that is issued while others are in flight starts when one of their parts has ended, because the thread waits only for
/// completions and not for new transfers. A part takes about a millisecond.
fn serve_ring(queue: &Queue, mut ring: Ring) -> io::Result<()> {
    let mut ended = Vec::with_capacity(ring.depth());
    loop {
        while ring.has_room()
            && let Some(operation) = queue.try_next()
        {
            ring.submit(operation)?;
        }
        for (operation, result) in ended.drain(..) {
            queue.end(operation, result);
        }
        if !ring.is_idle() {
            ring.wait(&mut ended)?;
        } else if let Some(operation) = queue.next() {
            ring.submit(operation)?;
        } else {
            return Ok(());
        }
    }
}
