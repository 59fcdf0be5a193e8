//! Transfers between hosts.
use std::io::{Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};
use trireme_testkit::network::{Host, Network};
use trireme_testkit::or_skip;

/// Timeout, far above the time that anything here takes.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Returns a network, or skips the test.
pub(crate) fn network() -> Option<Network> {
    or_skip("networks of hosts", Network::available()).map(|()| Network::new())
}

/// Sends `num_bytes` bytes of a counting sequence over a connection, and returns the bytes received at its other end.
pub(crate) fn transfer(from: &Host, to: &Host, address: IpAddr, num_bytes: usize) -> Vec<u8> {
    let listener = to.enter(|| TcpListener::bind((address, 0))).unwrap();
    let address = listener.local_addr().unwrap();
    let stream = from.enter(|| TcpStream::connect_timeout(&address, TIMEOUT)).unwrap();
    exchange(stream, listener, num_bytes)
}

/// Sends `num_bytes` bytes of a counting sequence over `stream`, and returns the bytes received by the connection that `listener` accepts.
pub(crate) fn exchange(mut stream: TcpStream, listener: TcpListener, num_bytes: usize) -> Vec<u8> {
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let bytes: Vec<u8> = (0..num_bytes).map(|index| index as u8).collect();
            stream.write_all(&bytes).unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
            // Waits for the other side to close, because until then the bytes may still be in flight.
            assert_eq!(stream.read(&mut [0]).unwrap(), 0);
        });
        let mut received = Vec::new();
        let (mut accepted, _) = listener.accept().unwrap();
        accepted.set_read_timeout(Some(TIMEOUT)).unwrap();
        accepted.read_to_end(&mut received).unwrap();
        received
    })
}

/// Polls until `condition` returns true. Returns false if it does not within the timeout.
pub(crate) fn eventually(mut condition: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + TIMEOUT;
    while !condition() {
        if Instant::now() > deadline {
            return false;
        }
        std::thread::yield_now();
    }
    true
}

/// Opens a TCP connection to `address` from this machine itself.
pub(crate) fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream
}
