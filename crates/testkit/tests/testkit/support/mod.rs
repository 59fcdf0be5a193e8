//! Bytes from host to host.
use std::io::{Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};
use trireme_testkit::network::{Host, Network};
use trireme_testkit::or_skip;

/// Far above what anything here takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// A network, or the reason why the test does without.
pub(crate) fn network() -> Option<Network> {
    or_skip("networks of hosts", Network::available()).map(|()| Network::new())
}

/// Sends this many bytes, which count, over a connection; what has come out at its other end.
pub(crate) fn transfer(from: &Host, to: &Host, address: IpAddr, num_bytes: usize) -> Vec<u8> {
    let listener = to.enter(|| TcpListener::bind((address, 0))).unwrap();
    let address = listener.local_addr().unwrap();
    let stream = from.enter(|| TcpStream::connect_timeout(&address, PATIENCE)).unwrap();
    exchange(stream, listener, num_bytes)
}

/// Sends this many bytes over `stream`; what the one that `listener` accepts receives.
pub(crate) fn exchange(mut stream: TcpStream, listener: TcpListener, num_bytes: usize) -> Vec<u8> {
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let bytes: Vec<u8> = (0..num_bytes).map(|index| index as u8).collect();
            stream.write_all(&bytes).unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
            // The end of the other side: until then what was sent may still be on its way.
            assert_eq!(stream.read(&mut [0]).unwrap(), 0);
        });
        let mut received = Vec::new();
        let (mut accepted, _) = listener.accept().unwrap();
        accepted.set_read_timeout(Some(PATIENCE)).unwrap();
        accepted.read_to_end(&mut received).unwrap();
        received
    })
}

/// Looks again and again until it is so; whether it ever was.
pub(crate) fn eventually(mut is_so: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        if Instant::now() > deadline {
            return false;
        }
        std::thread::yield_now();
    }
    true
}

/// A TCP connection to `address` from this machine itself.
pub(crate) fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}
