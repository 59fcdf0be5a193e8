//! NCCL: communicators between processes or threads, over sockets.
//!
//! Sockets have abstract names, which vanish with their processes. A transfer is a job of a stream: it sends what it has to send when it
//! begins, and is done when everything that it receives has arrived. As with the real library, an operation whose peer is lost never ends
//! until it is aborted, and a communicator that is aborted or destroyed waits until its peers have done the same.

mod connection;
mod transfers;

use crate::Out;
use crate::driver::call;
use crate::stream::Job;
use connection::{Communicator, IN_PROGRESS, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, SUCCESS};
use cudarc::driver::sys::CUresult::{CUDA_ERROR_INVALID_VALUE, CUDA_SUCCESS};
use rustix::process::{Signal, getpid, kill_process};
use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::io::Read;
use std::sync::Arc;
use transfers::{Bytes, Reduction, Transfers};

/// Names the rank and the number of an operation of any communicator, separated by a colon, at which the process of that rank is killed.
const KILLED_VARIABLE: &str = "FAKE_NCCL_KILLED";

/// As [`KILLED_VARIABLE`], for a process that stops.
const STOPPED_VARIABLE: &str = "FAKE_NCCL_STOPPED";

const ID_BYTES: usize = 128;

/// A communicator of the caller.
type Handle = *const Communicator;

/// The operations of a group that this thread has started.
#[derive(Default)]
struct Group {
    depth: usize,
    transfers: Vec<(Handle, u64, Transfers)>,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

/// Borrows the communicator of a handle.
fn communicator(handle: Handle) -> Arc<Communicator> {
    // SAFETY: the caller passes a handle of `ncclCommInitRankConfig` that it has not given up.
    unsafe {
        Arc::increment_strong_count(handle);
        Arc::from_raw(handle)
    }
}

/// Issues transfers to a stream, or adds them to the group of this thread.
fn enqueue(handle: Handle, stream: u64, fill: impl FnOnce(&Communicator, &mut Transfers)) -> c_int {
    let own = communicator(handle);
    let mut transfers = Transfers::default();
    fill(&own, &mut transfers);
    GROUP.with_borrow_mut(|group| {
        if group.depth == 0 {
            return issue(own, stream, transfers);
        }
        match group.transfers.iter_mut().find(|(other, ..)| *other == handle) {
            Some((_, _, together)) => {
                together.used.append(&mut transfers.used);
                together.sent.append(&mut transfers.sent);
                together.received.append(&mut transfers.received);
                together.ends.append(&mut transfers.ends);
            }
            None => group.transfers.push((handle, stream, transfers)),
        }
        SUCCESS
    })
}

fn issue(own: Arc<Communicator>, stream: u64, mut transfers: Transfers) -> c_int {
    let mut state = own.lock();
    state.num_operations += 1;
    let place = format!("{}:{}", own.rank, state.num_operations);
    let [is_killed, is_stopped] = [KILLED_VARIABLE, STOPPED_VARIABLE]
        .map(|variable| std::env::var(variable).is_ok_and(|at| at == place));
    drop(state);
    let issued = call(|driver| {
        if !transfers.used.iter().all(|bytes| driver.memory.contains(bytes.start, bytes.len)) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let job = move |open: &mut dyn FnMut()| {
            if is_killed {
                // Ends the process as the system does, without a destructor.
                std::process::abort();
            }
            if is_stopped {
                let _ = kill_process(getpid(), Signal::STOP);
            }
            own.run(&mut transfers, open)
        };
        driver.push(stream, Job::Poll(Box::new(job)))
    });
    if issued == CUDA_SUCCESS { SUCCESS } else { INVALID_ARGUMENT }
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetVersion(version: Out<'_, c_int>) -> c_int {
    version.write(22_703);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetErrorString(status: c_int) -> *const c_char {
    let text = match status {
        SUCCESS => c"no error",
        INVALID_ARGUMENT => c"invalid argument",
        INVALID_USAGE => c"invalid usage",
        REMOTE_ERROR => c"remote process exited or there was a network error",
        IN_PROGRESS => c"in progress",
        _ => c"unknown result code",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetUniqueId(id: Out<'_, [u8; ID_BYTES]>) -> c_int {
    let mut random = [0_u8; 16];
    let read = std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut random));
    let text: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    let mut bytes = [0; ID_BYTES];
    bytes[..text.len()].copy_from_slice(text.as_bytes());
    id.write(bytes);
    read.map_or(INVALID_USAGE, |()| SUCCESS)
}

/// An identifier, which is passed by value.
#[repr(C)]
struct Id([u8; ID_BYTES]);

#[unsafe(no_mangle)]
extern "C" fn ncclCommInitRankConfig(
    comm: Out<'_, Handle>,
    world_size: c_int,
    id: Id,
    rank: c_int,
    _config: *mut c_void,
) -> c_int {
    let Ok(id) = CStr::from_bytes_until_nul(&id.0) else { return INVALID_ARGUMENT };
    let (id, world_size) = (id.to_string_lossy().into_owned(), world_size as usize);
    let own = Arc::new(Communicator::new(rank as usize, world_size));
    let connecting = Arc::clone(&own);
    std::thread::spawn(move || connecting.connect(&id));
    comm.write(Arc::into_raw(own));
    IN_PROGRESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommGetAsyncError(comm: Handle, status: Out<'_, c_int>) -> c_int {
    status.write(communicator(comm).lock().status);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommFinalize(comm: Handle) -> c_int {
    communicator(comm).finish();
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommDestroy(comm: Handle) -> c_int {
    ncclCommAbort(comm)
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommAbort(comm: Handle) -> c_int {
    // SAFETY: a handle that the caller gives up.
    let own = unsafe { Arc::from_raw(comm) };
    own.close();
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclGroupStart() -> c_int {
    GROUP.with_borrow_mut(|group| group.depth += 1);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclGroupEnd() -> c_int {
    let transfers = GROUP.with_borrow_mut(|group| {
        group.depth -= 1;
        if group.depth == 0 { std::mem::take(&mut group.transfers) } else { Vec::new() }
    });
    let issue = |(handle, stream, transfers)| issue(communicator(handle), stream, transfers);
    transfers.into_iter().map(issue).find(|status| *status != SUCCESS).unwrap_or(SUCCESS)
}

/// Returns the size of a dtype of the library; `None` if it is not known.
fn size_of_dtype(dtype: c_int) -> Option<usize> {
    Some(match dtype {
        0 | 1 => 1,
        6 | 9 => 2,
        2 | 3 | 7 => 4,
        4 | 5 | 8 => 8,
        _ => return None,
    })
}

#[unsafe(no_mangle)]
extern "C" fn ncclSend(
    from: usize,
    len: usize,
    dtype: c_int,
    peer: c_int,
    comm: Handle,
    stream: u64,
) -> c_int {
    let Some(size) = size_of_dtype(dtype) else { return INVALID_ARGUMENT };
    enqueue(comm, stream, |_, transfers| {
        transfers.send(Bytes { start: from, len: len * size }, peer as usize)
    })
}

#[unsafe(no_mangle)]
extern "C" fn ncclRecv(to: usize, len: usize, dtype: c_int, peer: c_int, comm: Handle, stream: u64) -> c_int {
    let Some(size) = size_of_dtype(dtype) else { return INVALID_ARGUMENT };
    enqueue(comm, stream, |_, transfers| {
        transfers.receive(Bytes { start: to, len: len * size }, peer as usize)
    })
}

#[unsafe(no_mangle)]
extern "C" fn ncclBroadcast(
    from: usize,
    to: usize,
    len: usize,
    dtype: c_int,
    root: c_int,
    comm: Handle,
    stream: u64,
) -> c_int {
    let Some(size) = size_of_dtype(dtype) else { return INVALID_ARGUMENT };
    let (root, len) = (root as usize, len * size);
    enqueue(comm, stream, |own, transfers| {
        if own.rank != root {
            return transfers.receive(Bytes { start: to, len }, root);
        }
        for peer in (0..own.world_size).filter(|peer| *peer != root) {
            transfers.send(Bytes { start: from, len }, peer);
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn ncclAllGather(
    from: usize,
    to: usize,
    len: usize,
    dtype: c_int,
    comm: Handle,
    stream: u64,
) -> c_int {
    let Some(size) = size_of_dtype(dtype) else { return INVALID_ARGUMENT };
    let len = len * size;
    enqueue(comm, stream, |own, transfers| {
        assert_eq!(from, to + own.rank * len, "only in place");
        for peer in (0..own.world_size).filter(|peer| *peer != own.rank) {
            transfers.send(Bytes { start: from, len }, peer);
            transfers.receive(Bytes { start: to + peer * len, len }, peer);
        }
    })
}

/// Enqueues a reduction of `len` elements. `start_for` returns the address of this rank's operand for the result of a rank, from the number
/// of that rank and the size of its result in bytes.
fn enqueue_reduction(
    (dtype, op): (c_int, c_int),
    len: usize,
    to: usize,
    (comm, stream): (Handle, u64),
    start_for: impl Fn(usize, usize) -> usize,
) -> c_int {
    let Some(reduction) = Reduction::new(dtype, op) else { return INVALID_ARGUMENT };
    let len = len * reduction.size();
    enqueue(comm, stream, |own, transfers| {
        let part_for = |rank: usize| Bytes { start: start_for(rank, len), len };
        for peer in (0..own.world_size).filter(|peer| *peer != own.rank) {
            transfers.send(part_for(peer), peer);
        }
        let ranks = (own.rank, own.world_size);
        transfers.reduce(ranks, part_for(own.rank), Bytes { start: to, len }, reduction);
    })
}

#[unsafe(no_mangle)]
extern "C" fn ncclAllReduce(
    from: usize,
    to: usize,
    len: usize,
    dtype: c_int,
    op: c_int,
    comm: Handle,
    stream: u64,
) -> c_int {
    enqueue_reduction((dtype, op), len, to, (comm, stream), |_, _| from)
}

#[unsafe(no_mangle)]
extern "C" fn ncclReduceScatter(
    from: usize,
    to: usize,
    len: usize,
    dtype: c_int,
    op: c_int,
    comm: Handle,
    stream: u64,
) -> c_int {
    enqueue_reduction((dtype, op), len, to, (comm, stream), |rank, num_bytes| from + rank * num_bytes)
}
