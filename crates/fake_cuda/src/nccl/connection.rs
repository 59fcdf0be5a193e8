//! Connections between the ranks of a communicator.

use super::transfers::Transfers;
use crate::driver::ordinal;
use std::collections::VecDeque;
use std::ffi::c_int;
use std::io::{self, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

// Results of functions, as `ncclResult_t` numbers them.
pub(super) const SUCCESS: c_int = 0;
pub(super) const INVALID_ARGUMENT: c_int = 4;
pub(super) const INVALID_USAGE: c_int = 5;
pub(super) const REMOTE_ERROR: c_int = 6;
pub(super) const IN_PROGRESS: c_int = 7;

/// Time between two tries to connect.
const RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// The length of a frame that says that no other follows.
const GOODBYE: u64 = u64::MAX;

/// The state of a communicator, shared with the threads of its connections.
pub(super) struct Communicator {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) state: Mutex<State>,
}

pub(super) struct State {
    /// The result of `ncclCommGetAsyncError`.
    pub(super) status: c_int,
    pub(super) is_aborted: bool,
    pub(super) num_operations: u64,
    /// Number of peers that have not left.
    pub(super) num_connected: usize,
    /// For each peer, the connection to send on. Empty until all are connected.
    pub(super) peers: Vec<Option<UnixStream>>,
    /// For each peer, what has arrived from it.
    pub(super) arrived: Vec<VecDeque<Vec<u8>>>,
}

impl Communicator {
    /// A communicator that is not [connected](Communicator::connect).
    pub(super) fn new(rank: usize, world_size: usize) -> Self {
        let state = State {
            status: IN_PROGRESS,
            is_aborted: false,
            num_operations: 0,
            num_connected: 0,
            peers: Vec::new(),
            arrived: (0..world_size).map(|_| VecDeque::new()).collect(),
        };
        Communicator { rank, world_size, state: Mutex::new(state) }
    }

    /// Tells the peers that nothing follows.
    pub(super) fn finish(&self) {
        for mut peer in self.lock().peers.iter().flatten() {
            let _ = peer.write_all(&GOODBYE.to_le_bytes());
        }
    }

    /// Closes the connections, and waits until all peers have closed theirs.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.is_aborted = true;
        for peer in state.peers.drain(..).flatten() {
            let _ = peer.shutdown(std::net::Shutdown::Write);
        }
        drop(state);
        while self.lock().num_connected > 0 {
            std::thread::sleep(RETRY_INTERVAL);
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_status(&self, status: c_int) {
        self.lock().status = status;
    }

    /// Connects all ranks. Runs on a thread of its own.
    pub(super) fn connect(self: Arc<Self>, id: &str) {
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
    pub(super) fn run(&self, transfers: &mut Transfers, open: &mut dyn FnMut()) -> bool {
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

pub(super) fn exchange_numbers(socket: &mut UnixStream, own: [u32; 2]) -> io::Result<[u32; 2]> {
    let mut theirs = [[0; 4]; 2];
    for number in own {
        socket.write_all(&number.to_le_bytes())?;
    }
    for number in &mut theirs {
        socket.read_exact(number)?;
    }
    Ok(theirs.map(u32::from_le_bytes))
}
