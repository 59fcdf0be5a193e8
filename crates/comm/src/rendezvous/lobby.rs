//! Rank 0's side: listens, hears everyone out, and lets in who belongs.

use super::hello::{HELLO_BYTES, HELLO_MAGIC, Hello, Place};
use super::message::Message;
use crate::{CommError, JoinOptions};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};
use trireme_base::Rank;

/// A connection that says nothing for this long is closed.
const SILENCE_MAX: Duration = Duration::from_secs(5);
/// Connections that have not introduced themselves; above it the oldest is closed.
const NUM_VISITORS_MAX: usize = 256;
/// Refusals kept for the error message.
const NUM_REFUSALS_MAX: usize = 16;

/// A rank that has been let in.
pub(super) struct Guest {
    pub(super) stream: TcpStream,
    pub(super) place: Place,
}

/// A connection that has not said who it is.
struct Visitor {
    stream: TcpStream,
    address: SocketAddr,
    received: [u8; HELLO_BYTES],
    num_received: usize,
    since: Instant,
}

/// What came of listening to a visitor.
enum Verdict {
    /// Not everything has been said yet.
    Listening,
    Spoken(Hello),
    Refused(String),
}

struct Lobby<'a> {
    options: &'a JoinOptions,
    listener: TcpListener,
    visitors: Vec<Visitor>,
    /// One per rank; rank 0 is at home.
    guests: Vec<Option<Guest>>,
    refused: Vec<String>,
}

/// Opens the rendezvous at the first of `addresses` that this host has.
pub(super) fn listen(addresses: &[SocketAddr]) -> Result<TcpListener, CommError> {
    let mut failure = None;
    for address in addresses {
        match TcpListener::bind(address) {
            Ok(listener) => return Ok(listener),
            Err(source) => {
                let is_taken = source.kind() == io::ErrorKind::AddrInUse;
                failure = Some(CommError::Listen { address: address.to_string(), source: Arc::new(source) });
                // The others would look for rank 0 here first, and find another program.
                if is_taken {
                    break;
                }
            }
        }
    }
    Err(failure.expect("a resolved name has an address"))
}

/// Waits until every rank from 1 on has come; in rank order, `None` for rank 0.
pub(super) fn gather(
    options: &JoinOptions,
    listener: TcpListener,
    deadline: Instant,
) -> Result<Vec<Option<Guest>>, CommError> {
    let wrap = |source| CommError::Rendezvous {
        doing: "waiting for the other ranks to join".to_owned(),
        source: Arc::new(source),
    };
    listener.set_nonblocking(true).map_err(wrap)?;
    let mut lobby = Lobby {
        options,
        listener,
        visitors: Vec::new(),
        guests: (0..options.world_size).map(|_| None).collect(),
        refused: Vec::new(),
    };
    while !lobby.missing().is_empty() {
        if Instant::now() >= deadline {
            return Err(lobby.give_up());
        }
        lobby.sleep(deadline).map_err(wrap)?;
        lobby.admit().map_err(wrap)?;
        lobby.hear();
    }
    Ok(lobby.guests)
}

impl Lobby<'_> {
    fn missing(&self) -> Vec<Rank> {
        let absent = self.guests.iter().enumerate().skip(1).filter(|(_, guest)| guest.is_none());
        absent.map(|(rank, _)| Rank(rank)).collect()
    }

    fn sleep(&self, deadline: Instant) -> io::Result<()> {
        let patience = self.visitors.iter().map(|visitor| visitor.since + SILENCE_MAX);
        let until = patience.fold(deadline, Instant::min);
        let left = until.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
        let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
        let mut polled = Vec::from([PollFd::new(&self.listener, PollFlags::IN)]);
        polled.extend(self.visitors.iter().map(|visitor| PollFd::new(&visitor.stream, PollFlags::IN)));
        match poll(&mut polled, Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Accepts whoever knocks.
    fn admit(&mut self) -> io::Result<()> {
        loop {
            match self.listener.accept() {
                Ok((stream, address)) => {
                    if self.visitors.len() == NUM_VISITORS_MAX {
                        self.visitors.remove(0);
                    }
                    let (received, num_received, since) = ([0; HELLO_BYTES], 0, Instant::now());
                    self.visitors.push(Visitor { stream, address, received, num_received, since });
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted
                    ) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Listens to all visitors; those who have said enough are let in or turned away.
    fn hear(&mut self) {
        for mut visitor in std::mem::take(&mut self.visitors) {
            match visitor.listen() {
                Verdict::Listening => self.visitors.push(visitor),
                Verdict::Refused(reason) => self.turn_away(visitor, reason),
                Verdict::Spoken(hello) => self.receive(visitor, hello),
            }
        }
    }

    fn receive(&mut self, visitor: Visitor, hello: Hello) {
        if let Some(objection) = hello.objection(self.options) {
            return self.turn_away(visitor, objection);
        }
        let guest = &mut self.guests[hello.rank as usize];
        if guest.as_ref().is_some_and(|earlier| !has_gone(&earlier.stream)) {
            return self.turn_away(visitor, format!("rank {} has already joined", hello.rank));
        }
        *guest = Some(Guest { stream: visitor.stream, place: hello.place });
    }

    fn turn_away(&mut self, visitor: Visitor, reason: String) {
        // Best effort: who was refused may not be listening.
        let _ = Message::TurnedAway(reason.clone()).send(&visitor.stream, Instant::now());
        if self.refused.len() < NUM_REFUSALS_MAX {
            self.refused.push(format!("{}: {reason}", visitor.address));
        }
    }

    /// Tells those who came who did not.
    fn give_up(self) -> CommError {
        let address =
            self.listener.local_addr().map_or_else(|_| String::new(), |address| address.to_string());
        let error = CommError::RanksMissing {
            missing: self.missing(),
            address,
            waited: self.options.join_timeout,
            refused: self.refused,
        };
        for guest in self.guests.iter().flatten() {
            let _ = Message::TurnedAway(error.to_string()).send(&guest.stream, Instant::now());
        }
        error
    }
}

impl Visitor {
    fn listen(&mut self) -> Verdict {
        match recv(&self.stream, &mut self.received[self.num_received..], RecvFlags::DONTWAIT) {
            Ok((_, 0)) => return Verdict::Refused("it hung up without a hello".to_owned()),
            Ok((_, num_read)) => self.num_received += num_read,
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => return Verdict::Refused(format!("its connection broke: {error}")),
        }
        let num_magic_bytes = self.num_received.min(HELLO_MAGIC.len());
        let refuse =
            || Verdict::Refused("it does not speak this version of the rendezvous protocol".to_owned());
        if self.received[..num_magic_bytes] != HELLO_MAGIC[..num_magic_bytes] {
            return refuse();
        }
        if self.num_received == HELLO_BYTES {
            return Hello::decode(&self.received).map_or_else(refuse, Verdict::Spoken);
        }
        if self.since.elapsed() > SILENCE_MAX {
            return Verdict::Refused("it said nothing".to_owned());
        }
        Verdict::Listening
    }
}

/// Whether the other side has closed the connection.
fn has_gone(stream: &TcpStream) -> bool {
    let mut byte = [0];
    let peeked = recv(stream, &mut byte, RecvFlags::DONTWAIT | RecvFlags::PEEK);
    !matches!(peeked, Err(Errno::AGAIN | Errno::INTR))
}

#[cfg(test)]
mod tests {
    use super::super::hello::fingerprint;
    use super::*;
    use std::io::Write;

    #[test]
    fn a_rank_that_has_gone_can_come_again() {
        let options = JoinOptions::new(Rank(0), 3);
        let listener = listen(&["127.0.0.1:0".parse().expect("an address")]).expect("a free port");
        let address = listener.local_addr().expect("an address");
        let come = |rank| {
            let mut stream = TcpStream::connect(address).expect("connected");
            let place = Place { host: 0, meeting: 0, address };
            let hello = Hello { rank, world_size: 3, job: fingerprint(&options), place };
            stream.write_all(&hello.encode()).expect("sent");
            stream
        };
        drop(come(1));
        let streams = [come(1), come(2)];
        let guests = gather(&options, listener, Instant::now() + Duration::from_secs(20)).expect("all came");
        assert!(guests[0].is_none());
        for (guest, stream) in guests[1..].iter().zip(&streams) {
            let guest = guest.as_ref().expect("a guest");
            let at = guest.stream.peer_addr().expect("an address");
            assert_eq!(at, stream.local_addr().expect("an address"));
        }
    }
}
