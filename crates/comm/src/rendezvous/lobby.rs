//! Rank 0's side: listens, and lets in who belongs.

use super::channel::{Channel, End};
use super::doorway::Doorway;
use super::hello::{Hello, Place};
use super::key::Key;
use super::message::Message;
use super::refusals::Refusals;
use crate::{CommError, JoinOptions};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Instant;
use trireme_base::Rank;

/// A rank that has been let in.
pub(super) struct Guest {
    pub(super) channel: Channel,
    pub(super) place: Place,
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
    listener: &TcpListener,
    key: &Key,
    refusals: &Refusals,
    deadline: Instant,
) -> Result<Vec<Option<Guest>>, CommError> {
    let wrap = |source| CommError::Rendezvous {
        doing: "waiting for the other ranks to join".to_owned(),
        source: Arc::new(source),
    };
    let mut guests: Vec<Option<Guest>> = (0..options.world_size).map(|_| None).collect();
    let mut doorway = Doorway::<Hello>::new(listener, key, refusals).map_err(wrap)?;
    while guests[1..].iter().any(Option::is_none) {
        let guest = doorway.next(deadline, |hello| objection(hello, &guests, options)).map_err(wrap)?;
        let Some(guest) = guest else {
            return Err(give_up(options, guests, listener, refusals));
        };
        let stream = TcpStream::from(guest.socket);
        stream.set_nodelay(true).map_err(wrap)?;
        let Hello { rank, place, .. } = guest.introduction;
        guests[rank as usize] = Some(Guest { channel: Channel::new(stream, guest.key, End::Center), place });
    }
    Ok(guests)
}

fn objection(hello: &Hello, guests: &[Option<Guest>], options: &JoinOptions) -> Option<String> {
    hello.objection(options).or_else(|| {
        let earlier = guests[hello.rank as usize].as_ref();
        let has_joined = earlier.is_some_and(|earlier| !earlier.channel.has_gone());
        has_joined.then(|| format!("rank {} has already joined", hello.rank))
    })
}

/// Tells those who came who did not.
fn give_up(
    options: &JoinOptions,
    guests: Vec<Option<Guest>>,
    listener: &TcpListener,
    refusals: &Refusals,
) -> CommError {
    let absent = guests.iter().enumerate().skip(1).filter(|(_, guest)| guest.is_none());
    let error = CommError::RanksMissing {
        missing: absent.map(|(rank, _)| Rank(rank)).collect(),
        address: listener.local_addr().map_or_else(|_| String::new(), |address| address.to_string()),
        waited: options.join_timeout,
        refused: refusals.texts(),
    };
    for mut guest in guests.into_iter().flatten() {
        // Best effort: a guest may have gone.
        let _ = guest.channel.send(&Message::TurnedAway(error.to_string()), Instant::now());
    }
    error
}

#[cfg(test)]
mod tests {
    use super::super::handshake::{Reception, introduce};
    use super::*;
    use std::thread;
    use std::time::Duration;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    #[test]
    fn a_rank_that_has_gone_can_come_again() {
        let options = JoinOptions::new(Rank(0), 3);
        let (key, refusals) = (Key::of(None), Refusals::new(&options));
        let listener = listen(&["127.0.0.1:0".parse().expect("an address")]).expect("a free port");
        let address = listener.local_addr().expect("an address");
        let come = |rank| {
            let stream = TcpStream::connect(address).expect("connected");
            let place = Place { host: 0, meeting: 0, address };
            let hello = Hello::of(&JoinOptions { rank: Rank(rank), ..options.clone() }, place);
            let reception = introduce(&stream, &hello.encode(), &key, soon()).expect("heard");
            assert!(matches!(reception, Reception::Welcome(_)));
            stream
        };
        thread::scope(|scope| {
            let gathering = scope.spawn(|| gather(&options, &listener, &key, &refusals, soon()));
            drop(come(1));
            let streams = [come(1), come(2)];
            let guests = gathering.join().expect("no panic").expect("all came");
            assert!(guests[0].is_none());
            for (guest, stream) in guests[1..].iter().zip(&streams) {
                let guest = guest.as_ref().expect("a guest");
                let at = guest.channel.stream().peer_addr().expect("an address");
                assert_eq!(at, stream.local_addr().expect("an address"));
            }
        });
    }
}
