//! Authentication of connections between the members of a world, once they have the table of all ranks' addresses.

use super::acceptor::Acceptor;
use super::handshake::{HandshakeOutcome, Introduction, introduce};
use super::key::{Key, Nonce};
use super::refusals::Refusals;
use super::wait_limit::WaitLimit;
use crate::words;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;
use trireme_base::Rank;

/// One rank's membership in a world.
///
/// The key of a session is derived from the job's secret and the nonce in rank 0's table. An eavesdropper who has the table but not the
/// secret cannot derive it, and an earlier world of the same job has another key.
pub(super) struct Session<'a> {
    key: Key,
    rank: Rank,
    world_size: usize,
    refusals: &'a Refusals,
}

pub(super) struct Accepted {
    pub(super) socket: OwnedFd,
    pub(super) from: Rank,
    /// The purpose of the connection, given by the connecting side.
    pub(super) purpose: u64,
    /// The key of this connection only.
    pub(super) key: Key,
}

const WORDS: usize = 4;

/// The introduction of one member to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PeerHello {
    pub(super) from: u64,
    pub(super) to: u64,
    pub(super) purpose: u64,
}

impl Introduction for PeerHello {
    const MAGIC: [u8; 8] = *b"TRIRMSH2";
    const BYTES: usize = 8 * WORDS;

    fn decode(bytes: &[u8]) -> Option<Self> {
        let [magic, from, to, purpose] = words::from_bytes::<WORDS, { 8 * WORDS }>(bytes.try_into().ok()?);
        (magic == u64::from_le_bytes(Self::MAGIC)).then_some(PeerHello { from, to, purpose })
    }
}

impl PeerHello {
    pub(super) fn encode(&self) -> [u8; Self::BYTES] {
        words::to_bytes([u64::from_le_bytes(Self::MAGIC), self.from, self.to, self.purpose])
    }
}

impl<'a> Session<'a> {
    /// The session of the world whose table has the nonce `nonce`. `job` is the job's key.
    pub(super) fn new(
        job: &Key,
        nonce: &Nonce,
        rank: Rank,
        world_size: usize,
        refusals: &'a Refusals,
    ) -> Self {
        Session { key: job.derive("trireme: key of the session", &[nonce]), rank, world_size, refusals }
    }

    /// Introduces this rank on a connection to rank `to`, verifies that the peer is a member, and returns the key of this connection.
    ///
    /// # Errors
    /// Any error of the connection; `ConnectionRefused` if the peer refused this rank; `PermissionDenied` if the peer is not a member.
    pub(super) fn introduce<'p>(
        &self,
        socket: impl AsFd,
        to: Rank,
        purpose: u64,
        limit: impl Into<WaitLimit<'p>>,
    ) -> io::Result<Key> {
        let hello = PeerHello { from: self.rank.0 as u64, to: to.0 as u64, purpose };
        match introduce(socket, &hello.encode(), &self.key, limit)? {
            HandshakeOutcome::Welcome(key) => Ok(key),
            HandshakeOutcome::Refused(reason) => {
                let why = format!("rank {to} rejected the connection: {reason}");
                Err(io::Error::new(io::ErrorKind::ConnectionRefused, why))
            }
        }
    }

    /// Accepts connections of other members on `listener`, a TCP or Unix socket, which becomes non-blocking.
    pub(super) fn accept<'b>(&'b self, listener: &'b impl AsFd) -> io::Result<MemberAcceptor<'b>> {
        Ok(MemberAcceptor { session: self, acceptor: Acceptor::new(listener, &self.key, self.refusals)? })
    }
}

/// Accepts connections of other members. Strangers are refused and do not delay members.
pub(super) struct MemberAcceptor<'a> {
    session: &'a Session<'a>,
    acceptor: Acceptor<'a, PeerHello>,
}

impl MemberAcceptor<'_> {
    /// Returns the next connection with an expected rank and purpose, or fails with `TimedOut` at the deadline. Refuses other connections.
    pub(super) fn next(
        &mut self,
        deadline: Instant,
        mut is_expected: impl FnMut(Rank, u64) -> bool,
    ) -> io::Result<Accepted> {
        let (own, world_size) = (self.session.rank, self.session.world_size);
        let accepted = self.acceptor.next(deadline, |hello| {
            if hello.to != own.0 as u64 || hello.from >= world_size as u64 || hello.from == hello.to {
                return Some(format!(
                    "it is rank {} and wants rank {}, but this is rank {own} of a world of {world_size}",
                    hello.from, hello.to
                ));
            }
            let is_expected = is_expected(Rank(hello.from as usize), hello.purpose);
            (!is_expected).then(|| {
                format!("no connection from rank {} for purpose {} is expected", hello.from, hello.purpose)
            })
        })?;
        let accepted = accepted.ok_or(io::ErrorKind::TimedOut)?;
        let PeerHello { from, purpose, .. } = accepted.introduction;
        Ok(Accepted { socket: accepted.socket, from: Rank(from as usize), purpose, key: accepted.key })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::message::Message;
    use crate::rendezvous::socket_io::{receive_exact, send_all};
    use crate::{JoinOptions, Secret};
    use std::net::{TcpListener, TcpStream};
    use std::thread;
    use std::time::Duration;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    fn job() -> Key {
        Key::of(Some(&Secret::new("0123456789abcdef").expect("long enough")))
    }

    #[test]
    fn members_connect_and_strangers_are_refused() {
        let refusals = Refusals::new(&JoinOptions::new(Rank(0), 3));
        let session = |key: &Key, number, rank| Session::new(key, &[number; 32], Rank(rank), 3, &refusals);
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("an address");
        let call = |session: Session<'_>, to| {
            let stream = TcpStream::connect(address).expect("connected");
            session.introduce(&stream, Rank(to), 5, soon())
        };
        thread::scope(|scope| {
            let accepting = scope.spawn(|| {
                let session = session(&job(), 1, 1);
                let mut acceptor = session.accept(&listener).expect("a listener");
                acceptor.next(soon(), |from, purpose| from == Rank(2) && purpose == 5).expect("a member")
            });
            let silent = TcpStream::connect(address).expect("connected");
            let kind = |outcome: io::Result<Key>| outcome.err().expect("turned away").kind();
            let refused = io::ErrorKind::ConnectionRefused;
            assert_eq!(kind(call(session(&Key::of(None), 1, 2), 1)), refused, "without the secret");
            assert_eq!(kind(call(session(&job(), 2, 2), 1)), refused, "another session");
            assert_eq!(kind(call(session(&job(), 1, 2), 0)), refused, "another rank was meant");
            assert_eq!(kind(call(session(&job(), 1, 0), 1)), refused, "not expected");
            call(session(&job(), 1, 2), 1).expect("a member");
            let accepted = accepting.join().expect("no panic");
            assert_eq!((accepted.from, accepted.purpose), (Rank(2), 5));
            drop(silent);
        });
        assert_eq!(refusals.texts().len(), 4);
    }

    #[test]
    fn a_reflected_proof_is_refused() {
        let refusals = Refusals::new(&JoinOptions::new(Rank(0), 2));
        let session = Session::new(&job(), &[1; 32], Rank(1), 2, &refusals);
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        thread::scope(|scope| {
            scope.spawn(|| {
                // Reflects the connecting side's own proof.
                let (stream, _) = listener.accept().expect("a connection");
                let mut opening = [0; PeerHello::BYTES + 32];
                receive_exact(&stream, &mut opening, soon()).expect("an opening");
                let say = |message: Message| {
                    send_all(&stream, &message.encode(), soon()).expect("sent");
                };
                say(Message::Challenge([9; 32]));
                let mut proof = [0; 32];
                receive_exact(&stream, &mut proof, soon()).expect("a proof");
                say(Message::Welcome(proof));
            });
            let stream = TcpStream::connect(listener.local_addr().expect("an address")).expect("connected");
            let outcome = session.introduce(&stream, Rank(0), 0, soon());
            assert_eq!(outcome.err().expect("no member").kind(), io::ErrorKind::PermissionDenied);
        });
    }
}
