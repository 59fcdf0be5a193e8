//! The connections between rank 0 and everyone else, over which they agree how to connect.

use super::hello::{Hello, Place, fingerprint};
use super::lobby::{self, Guest};
use super::message::{Message, Table};
use super::wire::{invalid, send_all};
use crate::{CommError, JoinOptions, TransportChoice};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};
use trireme_base::Rank;

/// Between two attempts to reach rank 0.
const RETRY_PAUSE: Duration = Duration::from_millis(20);
/// One attempt to reach rank 0 lasts at most this long.
const ATTEMPT_MAX: Duration = Duration::from_secs(5);
/// Rank 0 has listened for longer than the others have known it, so it gives up first and can say why.
const COURTESY: Duration = Duration::from_secs(5);

pub(super) enum Star {
    /// Rank 0, with the streams to ranks 1, 2 …
    Center { streams: Vec<TcpStream> },
    /// Another rank.
    Ray { center: TcpStream, address: SocketAddr, rank: Rank, world_size: usize },
}

/// What a rank has when it is in: the star, the table, and its own listener for the mesh.
pub(super) struct Meeting {
    pub(super) star: Star,
    pub(super) table: Table,
    pub(super) listener: TcpListener,
}

fn broken(doing: impl Into<String>, source: io::Error) -> CommError {
    CommError::Rendezvous { doing: doing.into(), source: Arc::new(source) }
}

/// Rank 0: waits for everyone and gives them the table.
pub(super) fn host(
    options: &JoinOptions,
    addresses: &[SocketAddr],
    place_at: impl Fn(SocketAddr) -> Place,
    session: u64,
    deadline: Instant,
) -> Result<Meeting, CommError> {
    let master = lobby::listen(addresses)?;
    let setting_up = |source| broken("setting up rank 0", source);
    let ip = master.local_addr().map_err(setting_up)?.ip();
    let listener = TcpListener::bind((ip, 0)).map_err(setting_up)?;
    let own = place_at(listener.local_addr().map_err(setting_up)?);

    let guests: Vec<Guest> = lobby::gather(options, master, deadline)?.into_iter().flatten().collect();
    let mut places = Vec::from([own]);
    places.extend(guests.iter().map(|guest| guest.place));
    let share_a_host = own.host != 0 && places.iter().all(|place| place.host == own.host);
    let tries_shm = match options.transport {
        TransportChoice::Shm => true,
        TransportChoice::Tcp => false,
        TransportChoice::Auto => share_a_host,
    };
    let table = Table { session, tries_shm, places };
    let streams: Vec<_> = guests.into_iter().map(|guest| guest.stream).collect();
    let mut star = Star::Center { streams };
    star.tell_all(&Message::Table(table.clone()), deadline)?;
    Ok(Meeting { star, table, listener })
}

/// Another rank: reaches rank 0, introduces itself and gets the table.
pub(super) fn visit(
    options: &JoinOptions,
    addresses: &[SocketAddr],
    place_at: impl Fn(SocketAddr) -> Place,
    deadline: Instant,
) -> Result<Meeting, CommError> {
    let (center, address) = reach(options, addresses, deadline)?;
    let ip = center.local_addr().map_err(|source| broken("asking for the own address", source))?.ip();
    let listening = |source| broken(format!("listening on {ip} for the other ranks"), source);
    let listener = TcpListener::bind((ip, 0)).map_err(listening)?;
    let hello = Hello {
        rank: options.rank.0 as u64,
        world_size: options.world_size as u64,
        job: fingerprint(options),
        place: place_at(listener.local_addr().map_err(listening)?),
    };
    let joining = |source| broken(format!("joining rank 0 at {address}"), source);
    center.set_nodelay(true).map_err(joining)?;
    send_all(&center, &hello.encode(), deadline).map_err(joining)?;

    let (rank, world_size) = (options.rank, options.world_size);
    let mut star = Star::Ray { center, address, rank, world_size };
    let patience = Instant::now() + options.join_timeout + COURTESY;
    match star.hear_center("waiting for the other ranks to join", patience)? {
        Message::Table(table) => Ok(Meeting { star, table, listener }),
        _ => Err(broken("waiting for the table of ranks", invalid("rank 0 sent something else"))),
    }
}

/// Connects to rank 0, as soon as it listens.
fn reach(
    options: &JoinOptions,
    addresses: &[SocketAddr],
    deadline: Instant,
) -> Result<(TcpStream, SocketAddr), CommError> {
    loop {
        let mut last = None;
        for address in addresses {
            let left = deadline.saturating_duration_since(Instant::now());
            match connect(address, left.clamp(Duration::from_millis(1), ATTEMPT_MAX)) {
                Ok(stream) => return Ok((stream, *address)),
                Err(source) => last = Some((address, source)),
            }
        }
        let (address, source) = last.expect("a resolved name has an address");
        if Instant::now() + RETRY_PAUSE > deadline {
            return Err(CommError::Unreachable {
                rank: options.rank,
                address: address.to_string(),
                waited: options.join_timeout,
                source: Arc::new(source),
            });
        }
        std::thread::sleep(RETRY_PAUSE);
    }
}

fn connect(address: &SocketAddr, timeout: Duration) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(address, timeout)?;
    // Without a listener, a connection to a port of this host can meet itself.
    if stream.local_addr()? == *address {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    Ok(stream)
}

impl Star {
    /// Each rank says whether it succeeded; all learn whether everyone did, and if not, why.
    pub(super) fn agree(
        &mut self,
        doing: &str,
        own: Result<(), String>,
        deadline: Instant,
    ) -> Result<Result<(), String>, CommError> {
        match self {
            Star::Ray { center, .. } => {
                Message::Report(own).send(&*center, deadline).map_err(|source| broken(doing, source))?;
                match self.hear_center(doing, deadline + COURTESY)? {
                    Message::Report(outcome) => Ok(outcome),
                    _ => Err(broken(doing, invalid("rank 0 sent something else"))),
                }
            }
            Star::Center { streams } => {
                let world_size = streams.len() + 1;
                let mut reasons: Vec<String> =
                    own.err().map(|reason| format!("rank 0: {reason}")).into_iter().collect();
                for (index, stream) in streams.iter().enumerate() {
                    let reason = match Message::receive(stream, world_size, deadline) {
                        Ok(Message::Report(Ok(()))) => continue,
                        Ok(Message::Report(Err(reason))) => reason,
                        Ok(_) => "sent something else than its report".to_owned(),
                        Err(error) => format!("gave no report: {error}"),
                    };
                    reasons.push(format!("rank {}: {reason}", index + 1));
                }
                let outcome = if reasons.is_empty() { Ok(()) } else { Err(reasons.join("; ")) };
                self.tell_all(&Message::Report(outcome.clone()), deadline)?;
                Ok(outcome)
            }
        }
    }

    fn hear_center(&mut self, doing: &str, deadline: Instant) -> Result<Message, CommError> {
        let Star::Ray { center, address, rank, world_size } = self else {
            unreachable!("rank 0 does not wait for itself");
        };
        match Message::receive(&*center, *world_size, deadline).map_err(|source| broken(doing, source))? {
            Message::TurnedAway(reason) => {
                Err(CommError::Refused { rank: *rank, address: address.to_string(), reason })
            }
            message => Ok(message),
        }
    }

    fn tell_all(&mut self, message: &Message, deadline: Instant) -> Result<(), CommError> {
        let Star::Center { streams } = self else {
            unreachable!("only rank 0 tells everyone");
        };
        for (index, stream) in streams.iter().enumerate() {
            message
                .send(stream, deadline)
                .map_err(|source| broken(format!("telling rank {}", index + 1), source))?;
        }
        Ok(())
    }
}
