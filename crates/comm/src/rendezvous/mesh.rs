//! Establishes the connections between all pairs of a group's members. In each pair, the higher rank connects and introduces itself.

use super::encryption::encrypt;
use super::key::Key;
use super::local::{check_user, connect_local, receive_arena, send_arena};
use super::rank_address::RankAddress;
use super::session::{MemberAcceptor, Session};
use super::socket_io::{ATTEMPT_MAX, has_hung_up, invalid, sleep_before_retry};
use super::wait_limit::{AnotherFailed, WaitLimit};
use crate::transport::Purpose;
use crate::transport::link::{Connection, ConnectionSide, Tls};
use crate::transport::shm::{Arena, PeerArena};
use rustix::net::sockopt::{
    set_socket_keepalive, set_tcp_keepidle, set_tcp_keepintvl, set_tcp_nodelay, set_tcp_user_timeout,
};
use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};
use trireme_base::Rank;
use trireme_schedule::collective::Hosts;

/// Identifies one of the connections between two members.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ConnectionId {
    purpose: Purpose,
    /// Index among the connections for the same purpose.
    index: usize,
}

impl ConnectionId {
    fn to_word(self) -> u64 {
        (self.index as u64) << 8 | self.purpose as u64
    }

    /// Decodes the word of [`to_word`](ConnectionId::to_word). `None` if it is not valid.
    fn of(word: u64) -> Option<Self> {
        let purpose = Purpose::ALL.into_iter().find(|&known| known as u64 == word & 0xff)?;
        Some(ConnectionId { purpose, index: usize::try_from(word >> 8).ok()? })
    }
}

/// The kind of connection between two members.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SocketKind {
    /// Unix sockets within a host.
    Local,
    Tcp,
}

/// The kind of the sockets between rank `own` and each rank: `within` for ranks of its host, TCP for others.
pub(super) fn socket_kinds(hosts: &Hosts, own: Rank, within: SocketKind) -> Vec<SocketKind> {
    let route = |rank| if hosts.host_of(Rank(rank)) == hosts.host_of(own) { within } else { SocketKind::Tcp };
    (0..hosts.world_size()).map(route).collect()
}

/// The sockets on which a rank accepts connections of its peers.
pub(crate) struct Listeners {
    pub(crate) tcp: Option<TcpListener>,
    pub(crate) local: UnixListener,
}

/// The members to connect, and how.
pub(super) struct MeshConfig<'a> {
    /// Index of this rank among the members.
    pub(super) own: Rank,
    pub(super) addresses: &'a [RankAddress],
    pub(super) socket_kinds: &'a [SocketKind],
    /// This rank's arena, if arenas are exchanged with the members of this host.
    pub(super) arena: Option<&'a Arena>,
    /// Minimum size of an arena in bytes.
    pub(super) arena_bytes_min: usize,
    /// Encrypts data connections over TCP.
    pub(super) tls: Option<&'a Tls>,
    /// How long the network may be interrupted before an unreachable member counts as lost.
    pub(super) network_pause: Duration,
    /// Number of TCP connections to each member for collectives, and for messages.
    pub(super) sockets_per_peer: usize,
}

impl MeshConfig<'_> {
    fn num_connections(&self, member: usize, purpose: Purpose) -> usize {
        match (self.socket_kinds[member], purpose) {
            _ if member == self.own.0 => 0,
            (SocketKind::Tcp, Purpose::Collectives | Purpose::Messages) => self.sockets_per_peer,
            _ => 1,
        }
    }
}

/// One row of connections per purpose, in member order, with `None` for this rank.
pub(super) struct Mesh {
    pub(super) connections_by_purpose: [Vec<Option<Connection>>; 3],
    /// The arenas of the members on this host, if they were exchanged.
    pub(super) arenas: Vec<Option<PeerArena>>,
}

/// Connects to all other members. Stops early if a member is known to have failed: then some members never connect.
pub(super) fn connect(
    session: &Session<'_>,
    members: &MeshConfig<'_>,
    listeners: &Listeners,
    limit: WaitLimit<'_>,
) -> io::Result<Mesh> {
    let num_members = members.addresses.len();
    let row = |purpose| {
        let cell = |member| (0..members.num_connections(member, purpose)).map(|_| None).collect();
        (0..num_members).map(cell).collect()
    };
    let (connections_by_purpose, arenas) = (Purpose::ALL.map(row), (0..num_members).map(|_| None).collect());
    let mut builder = MeshBuilder { session, members, limit, connections_by_purpose, arenas };
    for lower in 0..members.own.0 {
        for purpose in Purpose::ALL {
            for index in 0..members.num_connections(lower, purpose) {
                builder
                    .connect_to(lower, ConnectionId { purpose, index })
                    .map_err(|error| in_context(error, format!("connecting to rank {lower}")))?;
            }
        }
    }
    for route in [SocketKind::Local, SocketKind::Tcp] {
        let awaited =
            (members.own.0 + 1..num_members).filter(|&higher| members.socket_kinds[higher] == route);
        if awaited.clone().next().is_none() {
            continue;
        }
        let mut acceptor = match (route, &listeners.tcp) {
            (SocketKind::Local, _) => session.accept(&listeners.local)?,
            (SocketKind::Tcp, Some(listener)) => session.accept(listener)?,
            (SocketKind::Tcp, None) => return Err(invalid("this rank does not listen for TCP connections")),
        };
        while let Some(absent) = awaited.clone().find(|&higher| builder.is_missing(higher)) {
            builder
                .accept_next(&mut acceptor, route)
                .map_err(|error| in_context(error, format!("waiting for rank {absent} to connect")))?;
        }
    }
    Ok(builder.finish())
}

/// A mesh that is being established.
struct MeshBuilder<'a> {
    session: &'a Session<'a>,
    members: &'a MeshConfig<'a>,
    limit: WaitLimit<'a>,
    connections_by_purpose: [Vec<Vec<Option<Connection>>>; 3],
    arenas: Vec<Option<PeerArena>>,
}

impl MeshBuilder<'_> {
    /// The slot of a connection, if there is such a connection.
    fn slot(&mut self, member: usize, id: ConnectionId) -> Option<&mut Option<Connection>> {
        self.connections_by_purpose[id.purpose as usize][member].get_mut(id.index)
    }

    /// Whether a connection to a member is missing.
    fn is_missing(&self, member: usize) -> bool {
        self.connections_by_purpose.iter().any(|row| row[member].iter().any(Option::is_none))
    }

    fn finish(self) -> Mesh {
        let joined = |connections: Vec<Option<Connection>>| {
            let mut connections: Vec<Connection> = connections.into_iter().flatten().collect();
            if connections.len() > 1 { Some(Connection::Striped(connections)) } else { connections.pop() }
        };
        Mesh {
            connections_by_purpose: self
                .connections_by_purpose
                .map(|row| row.into_iter().map(joined).collect()),
            arenas: self.arenas,
        }
    }

    /// Establishes one connection to a member of lower rank.
    fn connect_to(&mut self, lower: usize, id: ConnectionId) -> io::Result<()> {
        let (socket, key) = self.reach(lower, id)?;
        self.establish(lower, id, ConnectionSide::Connecting, socket, &key)
    }

    /// Connects to a member of lower rank, and introduces this rank.
    fn reach(&self, lower: usize, id: ConnectionId) -> io::Result<(OwnedFd, Key)> {
        let (place, limit) = (&self.members.addresses[lower], self.limit);
        loop {
            let socket: OwnedFd = match self.members.socket_kinds[lower] {
                SocketKind::Tcp => {
                    let left = limit.deadline.saturating_duration_since(Instant::now());
                    let left = left.clamp(Duration::from_millis(1), ATTEMPT_MAX);
                    let at = |error| in_context(error, format!("at {}", place.address));
                    match TcpStream::connect_timeout(&place.address, left) {
                        Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                            limit.check().map_err(at)?;
                            continue;
                        }
                        connected => connected.map_err(at)?.into(),
                    }
                }
                SocketKind::Local => {
                    let socket = match connect_local(place.socket_id, limit.next_check()) {
                        Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                            limit.check()?;
                            continue;
                        }
                        connected => connected?,
                    };
                    check_user(&socket)?;
                    socket
                }
            };
            match self.session.introduce(&socket, Rank(lower), id.to_word(), limit) {
                // The peer may have closed the connection to make room for others.
                Err(error) if has_hung_up(&error) && sleep_before_retry(limit.deadline) => {}
                introduced => return Ok((socket, introduced?)),
            }
        }
    }

    /// Accepts and establishes the next connection from a member of higher rank.
    fn accept_next(&mut self, acceptor: &mut MemberAcceptor<'_>, route: SocketKind) -> io::Result<()> {
        let (members, limit) = (self.members, self.limit);
        let mut is_expected = |from: Rank, word: u64| {
            ConnectionId::of(word).is_some_and(|id| {
                from > members.own
                    && members.socket_kinds[from.0] == route
                    && self.slot(from.0, id).is_some_and(|place| place.is_none())
            })
        };
        let accepted = loop {
            match acceptor.next(limit.next_check(), &mut is_expected) {
                Err(error) if error.kind() == io::ErrorKind::TimedOut => limit.check()?,
                accepted => break accepted?,
            }
        };
        if route == SocketKind::Local {
            check_user(&accepted.socket)?;
        }
        let id = ConnectionId::of(accepted.purpose).expect("only known connections are accepted");
        self.establish(accepted.from.0, id, ConnectionSide::Accepting, accepted.socket, &accepted.key)
    }

    /// Establishes a connection from a socket whose handshake derived `key`. Data connections over TCP are encrypted if TLS is configured.
    /// Control connections are not: notices reveal only the operations, groups and program lines of ranks.
    fn establish(
        &mut self,
        member: usize,
        id: ConnectionId,
        side: ConnectionSide,
        socket: OwnedFd,
        key: &Key,
    ) -> io::Result<()> {
        let (members, limit, purpose) = (self.members, self.limit, id.purpose);
        let connection = match members.socket_kinds[member] {
            SocketKind::Tcp => {
                let socket = tuned(socket, purpose, members.network_pause)?;
                match members.tls.filter(|_| purpose != Purpose::Control) {
                    Some(tls) => Connection::Encrypted(Box::new(encrypt(socket, tls, side, key, limit)?)),
                    None => Connection::Plain(socket),
                }
            }
            SocketKind::Local => {
                if let (Purpose::Control, Some(arena)) = (purpose, members.arena) {
                    if side == ConnectionSide::Connecting {
                        send_arena(&socket, arena)?;
                    }
                    let memory = receive_arena(&socket, limit)?;
                    if side == ConnectionSide::Accepting {
                        send_arena(&socket, arena)?;
                    }
                    self.arenas[member] = Some(PeerArena::map(&memory, members.arena_bytes_min)?);
                }
                Connection::Plain(socket)
            }
        };
        *self.slot(member, id).expect("it is one of the connections to be made") = Some(connection);
        Ok(())
    }
}

/// Sets socket options: low latency for small messages, and detection of a dead host a few seconds after the network pause.
fn tuned(socket: OwnedFd, purpose: Purpose, network_pause: Duration) -> io::Result<OwnedFd> {
    set_tcp_nodelay(&socket, true)?;
    // Only for control connections: a full data connection may be blocked for longer than this.
    if purpose == Purpose::Control {
        set_socket_keepalive(&socket, true)?;
        set_tcp_keepidle(&socket, Duration::from_secs(1))?;
        set_tcp_keepintvl(&socket, Duration::from_secs(1))?;
        // With this timeout, the number of keepalive probes has no effect (tcp(7), TCP_USER_TIMEOUT).
        set_tcp_user_timeout(&socket, network_pause.as_millis() as u32)?;
    }
    Ok(socket)
}

fn in_context(error: io::Error, doing: String) -> io::Error {
    // Another rank's failure is not a failure of this rank's action.
    if error.get_ref().is_some_and(|inner| inner.is::<AnotherFailed>()) {
        return error;
    }
    io::Error::new(error.kind(), format!("{doing}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::refusals::Refusals;

    /// Simulates a rank that closes the oldest unauthenticated connection for lack of room.
    #[test]
    fn a_disconnected_member_retries() {
        let refusals = Refusals::silent();
        let session = |rank| Session::new(&Key::of(None), &[1; 32], Rank(rank), 2, &refusals);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let place = RankAddress { host: 0, socket_id: 0, address: listener.local_addr().unwrap() };
        let members = MeshConfig {
            own: Rank(1),
            addresses: &[place, place],
            socket_kinds: &[SocketKind::Tcp; 2],
            arena: None,
            arena_bytes_min: 0,
            tls: None,
            network_pause: Duration::from_secs(30),
            sockets_per_peer: 1,
        };
        let id = ConnectionId { purpose: Purpose::Messages, index: 0 };
        let deadline = Instant::now() + Duration::from_secs(20);
        std::thread::scope(|scope| {
            let reached = scope.spawn(|| {
                let (session, limit) = (&session(1), deadline.into());
                let (connections_by_purpose, arenas) = (Default::default(), Vec::new());
                MeshBuilder { session, members: &members, limit, connections_by_purpose, arenas }
                    .reach(0, id)
                    .map(drop)
            });
            drop(listener.accept().unwrap());
            let accepting = scope.spawn(|| {
                let session = session(0);
                let mut acceptor = session.accept(&listener).unwrap();
                acceptor.next(Instant::now() + Duration::from_secs(2), |_, _| true).map(|member| member.from)
            });
            reached.join().unwrap().unwrap();
            assert_eq!(accepting.join().unwrap().unwrap(), Rank(1));
        });
    }
}
