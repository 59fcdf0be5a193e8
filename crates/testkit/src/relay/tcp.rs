use super::control::{ControlledThread, ThreadControl};
use super::flow::Flow;
use super::{Conditions, Direction};
use rustix::event::{PollFd, PollFlags};
use rustix::net::sockopt::set_socket_linger;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

/// Forwards TCP connections from a port of the loopback device to a target, on a thread of its own. The thread and the connections end when
/// this value is dropped.
///
/// The relay is a TCP endpoint towards each side. It acknowledges the bytes that it holds back, so neither side sees a failed keepalive or
/// retransmission. [`Link::cut`](crate::network::Link::cut) simulates a network that fails below TCP.
#[derive(Debug)]
pub struct TcpRelay {
    address: SocketAddr,
    forwarder: ControlledThread<State>,
}

#[derive(Debug, Default)]
struct State {
    is_cut: bool,
    is_reset: bool,
    corruptions: Vec<Corruption>,
}

#[derive(Debug)]
struct Corruption {
    connection: usize,
    towards: Direction,
    byte: u64,
}

struct Forwarder {
    listener: TcpListener,
    target: SocketAddr,
    conditions: Conditions,
    connections: Vec<Connection>,
    num_accepted: usize,
}

struct Connection {
    /// The sockets: `ends[direction]` is the destination of a direction.
    ends: [TcpStream; 2],
    flows: [Flow; 2],
    number: usize,
}

impl TcpRelay {
    /// Starts a relay that listens on a free port of 127.0.0.1.
    ///
    /// # Panics
    /// If the relay cannot listen.
    pub fn start(target: SocketAddr, conditions: Conditions) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        listener.set_nonblocking(true).expect("a mode that sockets have");
        let address = listener.local_addr().expect("a bound socket has an address");
        let forwarder = Forwarder { listener, target, conditions, connections: Vec::new(), num_accepted: 0 };
        TcpRelay { address, forwarder: ControlledThread::start(|steering| forwarder.run(steering)) }
    }

    /// Address to connect to, instead of the target.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// From the end of this call, forwards no bytes, no new connections and no ends of connections, without notice to either side.
    pub fn cut(&self) {
        self.forwarder.update(|orders| orders.is_cut = true);
    }

    /// Continues after [`cut`](TcpRelay::cut). No bytes are lost.
    pub fn restore(&self) {
        self.forwarder.update(|orders| orders.is_cut = false);
    }

    /// Ends all existing connections with a reset (RST) to both sides.
    pub fn reset(&self) {
        self.forwarder.update(|orders| orders.is_reset = true);
    }

    /// Inverts a byte that has not passed yet. Connections are numbered from 0, and so are the bytes of each direction of a connection.
    pub fn corrupt(&self, connection: usize, towards: Direction, byte: u64) {
        self.forwarder.update(|orders| orders.corruptions.push(Corruption { connection, towards, byte }));
    }
}

impl Forwarder {
    fn run(mut self, control: &ThreadControl<State>) {
        loop {
            // The lock is held until everything is forwarded, so that nothing passes after a call of `TcpRelay::cut` has returned.
            let mut held = control.state();
            let Some(state) = &mut *held else { return };
            if std::mem::take(&mut state.is_reset) {
                self.connections.drain(..).for_each(Connection::reset);
            }
            if state.is_cut {
                drop(held);
                control.wait(Vec::new(), None);
                continue;
            }
            self.accept();
            self.forward(&state.corruptions);
            drop(held);
            self.wait(control);
        }
    }

    fn accept(&mut self) {
        while let Ok((near, _)) = self.listener.accept() {
            // If the target cannot be reached, the connection is closed, which the client notices.
            self.connections.extend(Connection::new(near, self.target, self.num_accepted, self.conditions));
            self.num_accepted += 1;
        }
    }

    fn forward(&mut self, corruptions: &[Corruption]) {
        for mut connection in std::mem::take(&mut self.connections) {
            match connection.pass_on(corruptions) {
                Ok(()) if connection.has_ended() => {}
                Ok(()) => self.connections.push(connection),
                Err(_) => connection.reset(),
            }
        }
    }

    fn wait(&self, steering: &ThreadControl<State>) {
        let mut ready = vec![PollFd::new(&self.listener, PollFlags::IN)];
        for connection in &self.connections {
            for (towards, flow) in Direction::BOTH.into_iter().zip(&connection.flows) {
                if flow.can_read() {
                    ready.push(PollFd::new(&connection.ends[towards.source()], PollFlags::IN));
                }
                if flow.wants_to_write() {
                    ready.push(PollFd::new(&connection.ends[towards as usize], PollFlags::OUT));
                }
            }
        }
        let flows = self.connections.iter().flat_map(|connection| &connection.flows);
        steering.wait(ready, flows.filter_map(Flow::next_arrival).min());
    }
}

impl Connection {
    fn new(near: TcpStream, target: SocketAddr, number: usize, conditions: Conditions) -> io::Result<Self> {
        let ends = [near, TcpStream::connect(target)?];
        for end in &ends {
            end.set_nonblocking(true)?;
            end.set_nodelay(true)?;
        }
        Ok(Connection { ends, flows: [(); 2].map(|()| Flow::new(conditions)), number })
    }

    /// Reads and writes as much as possible without blocking. Fails if one of the sides has broken the connection.
    fn pass_on(&mut self, corruptions: &[Corruption]) -> io::Result<()> {
        for (towards, flow) in Direction::BOTH.into_iter().zip(&mut self.flows) {
            let is_here = |it: &&Corruption| it.connection == self.number && it.towards == towards;
            let corrupted = corruptions.iter().filter(is_here).map(|corruption| corruption.byte);
            flow.read(&self.ends[towards.source()], corrupted)?;
            flow.write(&self.ends[towards as usize])?;
        }
        Ok(())
    }

    fn has_ended(&self) -> bool {
        self.flows.iter().all(Flow::has_ended)
    }

    fn reset(self) {
        for end in &self.ends {
            let _ = set_socket_linger(end, Some(Duration::ZERO));
        }
    }
}
