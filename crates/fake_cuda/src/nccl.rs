//! NCCL: communicators between processes or threads, over sockets.
//!
//! Sockets have abstract names, which vanish with their processes. A transfer is a job of a stream: it sends what it has to send when it
//! begins, and is done when everything that it receives has arrived. As with the real library, an operation whose peer is lost never ends
//! until it is aborted, and a communicator that is aborted or destroyed waits until its peers have done the same.

use crate::Out;
use crate::driver::{call, ordinal};
use crate::floats::{rounded, rounded_bf16, widened, widened_bf16};
use crate::stream::Job;
use cudarc::driver::sys::CUresult::{CUDA_ERROR_INVALID_VALUE, CUDA_SUCCESS};
use rustix::process::{Signal, getpid, kill_process};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::io::{self, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Names the rank and the number of an operation of any communicator, separated by a colon, at which the process of that rank is killed.
const KILLED_VARIABLE: &str = "FAKE_NCCL_KILLED";

/// As [`KILLED_VARIABLE`], for a process that stops.
const STOPPED_VARIABLE: &str = "FAKE_NCCL_STOPPED";

const SUCCESS: c_int = 0;
const INVALID_ARGUMENT: c_int = 4;
const INVALID_USAGE: c_int = 5;
const REMOTE_ERROR: c_int = 6;
const IN_PROGRESS: c_int = 7;

/// Time between two tries to connect.
const RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// The length of a frame that says that no other follows.
const GOODBYE: u64 = u64::MAX;

const ID_BYTES: usize = 128;

/// The state of a communicator, shared with the threads of its connections.
struct Communicator {
    rank: usize,
    world_size: usize,
    state: Mutex<State>,
}

struct State {
    /// The result of `ncclCommGetAsyncError`.
    status: c_int,
    is_aborted: bool,
    num_operations: u64,
    /// Number of peers that have not left.
    num_connected: usize,
    /// For each peer, the connection to send on. Empty until all are connected.
    peers: Vec<Option<UnixStream>>,
    /// For each peer, what has arrived from it.
    arrived: Vec<VecDeque<Vec<u8>>>,
}

impl Communicator {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_status(&self, status: c_int) {
        self.lock().status = status;
    }

    /// Connects all ranks. Runs on a thread of its own.
    fn connect(self: Arc<Self>, id: &str) {
        match self.try_connect(id) {
            Ok(peers) => {
                let mut readers = Vec::new();
                for (peer, socket) in peers.iter().enumerate() {
                    let Some(socket) = socket else { continue };
                    readers.push((peer, socket.try_clone().expect("file descriptors for sockets")));
                }
                let mut state = self.lock();
                (state.peers, state.status, state.num_connected) = (peers, SUCCESS, readers.len());
                drop(state);
                for (peer, socket) in readers {
                    let own = Arc::clone(&self);
                    std::thread::spawn(move || {
                        own.read_frames(peer, socket);
                        own.lock().num_connected -= 1;
                    });
                }
            }
            Err(error) => {
                let is_duplicate = error.kind() == io::ErrorKind::AlreadyExists;
                self.set_status(if is_duplicate { INVALID_USAGE } else { REMOTE_ERROR });
            }
        }
    }

    fn try_connect(&self, id: &str) -> io::Result<Vec<Option<UnixStream>>> {
        let address = |rank: usize| SocketAddr::from_abstract_name(format!("fake-nccl-{id}-{rank}"));
        let listener = UnixListener::bind_addr(&address(self.rank)?)?;
        listener.set_nonblocking(true)?;
        let own = [self.rank as u32, ordinal() as u32];
        let mut peers: Vec<Option<UnixStream>> = (0..self.world_size).map(|_| None).collect();
        let mut gpus = vec![own[1]];
        for (peer, place) in peers.iter_mut().enumerate().take(self.rank) {
            let mut socket = self.retry(|| UnixStream::connect_addr(&address(peer)?))?;
            let [_, gpu] = exchange_numbers(&mut socket, own)?;
            gpus.push(gpu);
            *place = Some(socket);
        }
        for _ in self.rank + 1..self.world_size {
            let (mut socket, _) = self.retry(|| listener.accept())?;
            socket.set_nonblocking(false)?;
            let [peer, gpu] = exchange_numbers(&mut socket, own)?;
            gpus.push(gpu);
            let place = peers.get_mut(peer as usize).filter(|place| place.is_none());
            *place.ok_or(io::ErrorKind::InvalidData)? = Some(socket);
        }
        gpus.sort_unstable();
        let has_duplicates = gpus.windows(2).any(|pair| pair[0] == pair[1]);
        if has_duplicates { Err(io::ErrorKind::AlreadyExists.into()) } else { Ok(peers) }
    }

    /// Calls a function until it succeeds, or until the communicator is aborted.
    fn retry<T>(&self, run: impl Fn() -> io::Result<T>) -> io::Result<T> {
        loop {
            match run() {
                Err(_) if !self.lock().is_aborted => std::thread::sleep(RETRY_INTERVAL),
                outcome => return outcome,
            }
        }
    }

    /// Reads what a peer sends until it leaves.
    fn read_frames(&self, peer: usize, mut socket: UnixStream) {
        loop {
            let mut len = [0; 8];
            let mut read = || {
                socket.read_exact(&mut len)?;
                let len = u64::from_le_bytes(len);
                let mut bytes = vec![0; if len == GOODBYE { 0 } else { len as usize }];
                socket.read_exact(&mut bytes)?;
                Ok::<_, io::Error>((len != GOODBYE).then_some(bytes))
            };
            match read() {
                Ok(Some(bytes)) => self.lock().arrived[peer].push_back(bytes),
                Ok(None) => {
                    // Until the peer closes the connection.
                    let _ = socket.read(&mut [0]);
                    return;
                }
                Err(_) => return self.set_status(REMOTE_ERROR),
            }
        }
    }

    /// Runs transfers as far as possible. Returns whether they are done. Calls `open` before it accesses device memory.
    fn run(&self, transfers: &mut Transfers, open: &mut dyn FnMut()) -> bool {
        let state = self.lock();
        if state.is_aborted {
            return true;
        }
        if state.peers.is_empty() {
            return false;
        }
        // Writing may block until a peer's thread reads, so the state is not locked meanwhile.
        let copy = |peer: &Option<UnixStream>| peer.as_ref().and_then(|peer| peer.try_clone().ok());
        let sockets: Vec<_> =
            if transfers.sent.is_empty() { Vec::new() } else { state.peers.iter().map(copy).collect() };
        drop(state);
        if !transfers.sent.is_empty() {
            open();
        }
        for (peer, bytes) in std::mem::take(&mut transfers.sent) {
            let bytes = bytes.read();
            // The peer's thread reads all the time. If the peer is lost, so is the operation.
            let mut socket = sockets[peer].as_ref().expect("no rank sends to itself");
            let _ =
                socket.write_all(&(bytes.len() as u64).to_le_bytes()).and_then(|()| socket.write_all(&bytes));
        }
        let mut state = self.lock();
        let mut needed = vec![0; self.world_size];
        transfers.received.iter().for_each(|peer| needed[*peer] += 1);
        if needed.iter().zip(&state.arrived).any(|(needed, arrived)| arrived.len() < *needed) {
            return false;
        }
        let frames = transfers.received.iter().map(|peer| state.arrived[*peer].pop_front());
        let mut frames = frames.collect::<Option<VecDeque<_>>>().expect("they have arrived");
        drop(state);
        open();
        transfers.ends.drain(..).for_each(|end| end(&mut frames));
        true
    }
}

fn exchange_numbers(socket: &mut UnixStream, own: [u32; 2]) -> io::Result<[u32; 2]> {
    let mut theirs = [[0; 4]; 2];
    for number in own {
        socket.write_all(&number.to_le_bytes())?;
    }
    for number in &mut theirs {
        socket.read_exact(number)?;
    }
    Ok(theirs.map(u32::from_le_bytes))
}

/// Bytes of device memory.
#[derive(Debug, Clone, Copy)]
struct Bytes {
    start: usize,
    len: usize,
}

impl Bytes {
    fn read(self) -> Vec<u8> {
        // SAFETY: `enqueue` has checked that these are device memory, which the stream may access while a job runs.
        unsafe { std::slice::from_raw_parts(self.start as *const u8, self.len) }.to_vec()
    }

    fn write(self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.len, "ranks send as much as others receive");
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start as *mut u8, self.len) };
    }
}

type End = Box<dyn FnOnce(&mut VecDeque<Vec<u8>>) + Send>;

/// Transfers that run together.
#[derive(Default)]
struct Transfers {
    /// All device memory that they access.
    used: Vec<Bytes>,
    sent: Vec<(usize, Bytes)>,
    /// The ranks from which frames are received, in this order.
    received: Vec<usize>,
    /// Functions that take the received frames, in this order.
    ends: Vec<End>,
}

impl Transfers {
    fn send(&mut self, bytes: Bytes, to: usize) {
        self.used.push(bytes);
        self.sent.push((to, bytes));
    }

    fn receive(&mut self, bytes: Bytes, from: usize) {
        self.used.push(bytes);
        self.received.push(from);
        self.ends.push(Box::new(move |frames| bytes.write(&frames.pop_front().expect("it has arrived"))));
    }

    /// Receives a frame of each other rank, and writes the reduction of these and of this rank's bytes.
    fn reduce(&mut self, comm: &Communicator, own: Bytes, to: Bytes, reduction: Reduction) {
        let (rank, world_size) = (comm.rank, comm.world_size);
        self.used.extend([own, to]);
        self.received.extend((0..world_size).filter(|peer| *peer != rank));
        self.ends.push(Box::new(move |frames| {
            let all: Vec<Vec<u8>> = (0..world_size)
                .map(
                    |peer| {
                        if peer == rank { own.read() } else { frames.pop_front().expect("it has arrived") }
                    },
                )
                .collect();
            to.write(&reduction.of(&all));
        }));
    }
}

/// A reduction, in an order that differs from the canonical one: from the last rank to the first.
#[derive(Debug, Clone, Copy)]
struct Reduction {
    dtype: c_int,
    op: c_int,
}

impl Reduction {
    fn new(dtype: c_int, op: c_int) -> Option<Self> {
        (matches!(dtype, 6 | 7 | 9) && (0..4).contains(&op)).then_some(Reduction { dtype, op })
    }

    fn size(self) -> usize {
        if self.dtype == 7 { 4 } else { 2 }
    }

    fn values(self, bytes: &[u8]) -> Vec<f32> {
        let half = |bytes: &[u8]| u16::from_le_bytes([bytes[0], bytes[1]]);
        let value = |bytes: &[u8]| match self.dtype {
            7 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
            6 => widened(half(bytes)),
            _ => widened_bf16(half(bytes)),
        };
        bytes.chunks(self.size()).map(value).collect()
    }

    fn bytes(self, value: f32) -> Vec<u8> {
        match self.dtype {
            7 => value.to_le_bytes().to_vec(),
            6 => rounded(value).to_le_bytes().to_vec(),
            _ => rounded_bf16(value).to_le_bytes().to_vec(),
        }
    }

    fn of(self, all: &[Vec<u8>]) -> Vec<u8> {
        let mut vectors = all.iter().rev().map(|bytes| self.values(bytes));
        let mut result = vectors.next().expect("a communicator has ranks");
        for values in vectors {
            for (result, value) in result.iter_mut().zip(values) {
                let reduced = match self.op {
                    0 => *result + value,
                    1 => *result * value,
                    2 => result.max(value),
                    _ => result.min(value),
                };
                let bytes = self.bytes(reduced);
                *result = self.values(&bytes)[0];
            }
        }
        result.iter().flat_map(|value| self.bytes(*value)).collect()
    }
}

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
    let state = State {
        status: IN_PROGRESS,
        is_aborted: false,
        num_operations: 0,
        num_connected: 0,
        peers: Vec::new(),
        arrived: (0..world_size).map(|_| VecDeque::new()).collect(),
    };
    let own = Arc::new(Communicator { rank: rank as usize, world_size, state: Mutex::new(state) });
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
    let own = communicator(comm);
    for mut peer in own.lock().peers.iter().flatten() {
        let _ = peer.write_all(&GOODBYE.to_le_bytes());
    }
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
    let mut state = own.lock();
    state.is_aborted = true;
    for peer in state.peers.drain(..).flatten() {
        let _ = peer.shutdown(std::net::Shutdown::Write);
    }
    drop(state);
    while own.lock().num_connected > 0 {
        std::thread::sleep(RETRY_INTERVAL);
    }
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
    let Some(reduction) = Reduction::new(dtype, op) else { return INVALID_ARGUMENT };
    let len = len * reduction.size();
    enqueue(comm, stream, |own, transfers| {
        for peer in (0..own.world_size).filter(|peer| *peer != own.rank) {
            transfers.send(Bytes { start: from, len }, peer);
        }
        transfers.reduce(own, Bytes { start: from, len }, Bytes { start: to, len }, reduction);
    })
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
    let Some(reduction) = Reduction::new(dtype, op) else { return INVALID_ARGUMENT };
    let len = len * reduction.size();
    enqueue(comm, stream, |own, transfers| {
        let block = |rank: usize| Bytes { start: from + rank * len, len };
        for peer in (0..own.world_size).filter(|peer| *peer != own.rank) {
            transfers.send(block(peer), peer);
        }
        transfers.reduce(own, block(own.rank), Bytes { start: to, len }, reduction);
    })
}
