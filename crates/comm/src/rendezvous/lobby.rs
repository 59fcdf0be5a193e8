//! Rank 0's side of the rendezvous: listens, and admits the ranks of its job.

use super::channel::Channel;
use super::doorway::Doorway;
use super::hello::Hello;
use super::joining::Joining;
use super::message::Message;
use super::place::Place;
use super::refusals::Refusals;
use crate::{CommError, JoinOptions};
use std::collections::BTreeSet;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};
use trireme_base::{Rank, ranges};

/// How often rank 0 checks whether a joined rank has disconnected, or all ranks know of a failure.
const LOOK: Duration = Duration::from_millis(200);

/// Maximum time in which a failed rank must report its reason.
const REASON_MAX: Duration = Duration::from_secs(2);

/// How long a failed rank 0 reports its failure to ranks that connect.
const DISMISSAL: Duration = Duration::from_secs(10);

/// A rank that has joined.
pub(super) struct Guest {
    pub(super) channel: Channel,
    pub(super) place: Place,
}

/// Listens on the first of `addresses` that is an address of this host.
pub(super) fn listen(addresses: &[SocketAddr]) -> Result<TcpListener, CommError> {
    let mut failure = None;
    for address in addresses {
        match TcpListener::bind(address) {
            Ok(listener) => return Ok(listener),
            Err(source) => {
                let is_taken = source.kind() == io::ErrorKind::AddrInUse;
                failure = Some(CommError::Listen { address: address.to_string(), source: Arc::new(source) });
                // Ranks would try this address first, and find another program.
                if is_taken {
                    break;
                }
            }
        }
    }
    Err(failure.expect("a resolved name has an address"))
}

/// Waits until all ranks from 1 on have joined. Returns them in rank order, with `None` for rank 0.
pub(super) fn gather(joining: &Joining<'_>, listener: &TcpListener) -> Result<Vec<Option<Guest>>, CommError> {
    let Joining { options, key, refusals, deadline, waiting, .. } = *joining;
    let wrap = |source| CommError::rendezvous("waiting for the other ranks to join", source);
    let mut guests: Vec<Option<Guest>> = (0..options.world_size).map(|_| None).collect();
    let mut doorway = Doorway::<Hello>::new(listener, key, refusals).map_err(wrap)?;
    while guests[1..].iter().any(Option::is_none) {
        let now = Instant::now();
        if now >= deadline {
            return Err(give_up(options, guests, listener, refusals));
        }
        let look = deadline.min(now + LOOK);
        let guest = doorway.next(look, |hello| objection(hello, &guests, options)).map_err(wrap)?;
        let Some(guest) = guest else {
            // Ranks that have disconnected may join again.
            guests.iter_mut().for_each(|guest| drop(guest.take_if(|guest| guest.channel.has_gone())));
            waiting.tell(Instant::now(), || {
                let missing = missing(&guests);
                let (count, all) = (missing.len(), options.world_size);
                format!("waiting for {count} of {all} ranks to join: {}", ranges(missing))
            });
            continue;
        };
        let stream = TcpStream::from(guest.socket);
        stream.set_nodelay(true).map_err(wrap)?;
        let hello = guest.introduction;
        let rank = hello.rank as usize;
        let mut channel = Channel::at_root(stream, guest.key);
        if hello.has_failed() {
            let (rank, reason) = (Rank(rank), reason_of(&mut channel, options));
            let text = format!("rank {rank} failed before all ranks had joined: {reason}");
            let told = tell_guests(guests, &text).into_iter().chain([rank]).collect();
            return Err(CommError::RankFailed { rank, reason, told });
        }
        guests[rank] = Some(Guest { channel, place: hello.place });
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

fn missing(guests: &[Option<Guest>]) -> Vec<Rank> {
    let absent = guests.iter().enumerate().skip(1).filter(|(_, guest)| guest.is_none());
    absent.map(|(rank, _)| Rank(rank)).collect()
}

/// Receives the reason why a rank cannot join.
fn reason_of(channel: &mut Channel, options: &JoinOptions) -> String {
    match channel.receive(options.world_size, Instant::now() + REASON_MAX) {
        Ok(Message::Report(Err(reason))) => reason,
        _ => "it did not say why".to_owned(),
    }
}

/// Notifies the joined ranks that the world will not start. Returns these ranks.
fn tell_guests(guests: Vec<Option<Guest>>, reason: &str) -> Vec<Rank> {
    let came = guests.into_iter().enumerate().filter_map(|(rank, guest)| Some((rank, guest?)));
    let told = came.map(|(rank, mut guest)| {
        // Best effort: the rank may have disconnected.
        let _ = guest.channel.send(&Message::TurnedAway(reason.to_owned()), Instant::now());
        Rank(rank)
    });
    told.collect()
}

/// For a few seconds, reports the failure to ranks that connect, except those in `told`, because they would wait in vain.
pub(super) fn dismiss(joining: &Joining<'_>, listener: &TcpListener, reason: &str, told: &[Rank]) {
    let Joining { options, key, deadline, .. } = *joining;
    // Without a secret or a job name, the ranks of other jobs would be notified.
    if options.secret.is_none() && options.job.is_empty() {
        return;
    }
    let refusals = Refusals::silent();
    let Ok(mut doorway) = Doorway::<Hello>::new(listener, key, &refusals) else { return };
    let until = deadline.min(Instant::now() + DISMISSAL);
    let mut told: BTreeSet<usize> = told.iter().map(|rank| rank.0).collect();
    while (1..options.world_size).any(|rank| !told.contains(&rank)) {
        let now = Instant::now();
        if now >= until {
            return;
        }
        let refuse = |hello: &Hello| {
            // A rank 0 that could not read its job name notifies ranks of any job.
            let objection = if options.job.is_empty() { None } else { hello.objection(options) };
            // A failed rank has a reason of its own.
            if objection.is_none() || hello.has_failed() {
                told.insert(hello.rank as usize);
            }
            Some(objection.unwrap_or_else(|| reason.to_owned()))
        };
        // `refuse` always objects, so no rank is admitted.
        if doorway.next(until.min(now + LOOK), refuse).is_err() {
            return;
        }
    }
}

/// Reports the missing ranks to the joined ones. Returns the error.
fn give_up(
    options: &JoinOptions,
    guests: Vec<Option<Guest>>,
    listener: &TcpListener,
    refusals: &Refusals,
) -> CommError {
    let error = CommError::RanksMissing {
        missing: missing(&guests),
        address: listener.local_addr().map_or_else(|_| String::new(), |address| address.to_string()),
        waited: options.join_timeout,
        refused: refusals.texts(),
    };
    tell_guests(guests, &error.to_string());
    error
}

#[cfg(test)]
mod tests {
    use super::super::handshake::{Reception, introduce};
    use super::super::key::Key;
    use super::super::waiting::Waiting;
    use super::*;
    use std::thread;
    use std::time::Duration;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    fn member(rank: usize) -> JoinOptions {
        JoinOptions { job: "a".to_owned(), ..JoinOptions::new(Rank(rank), 3) }
    }

    /// Runs rank 0 of a world of three in a thread, while `guests` acts as ranks 1 and 2.
    fn with_rank_0<T: Send>(
        host: impl FnOnce(&Joining<'_>, &TcpListener) -> T + Send,
        guests: impl FnOnce(SocketAddr),
    ) -> T {
        let listener = listen(&["127.0.0.1:0".parse().expect("an address")]).expect("a free port");
        let address = listener.local_addr().expect("an address");
        thread::scope(|scope| {
            let hosting = scope.spawn(move || {
                let options = member(0);
                let (key, refusals) = (Key::of(None), Refusals::new(&options));
                let waiting = Waiting::new(None, Instant::now());
                let joining = Joining {
                    options: &options,
                    addresses: &[address],
                    interface: None,
                    key: &key,
                    refusals: &refusals,
                    waiting: &waiting,
                    deadline: soon(),
                };
                host(&joining, &listener)
            });
            guests(address);
            hosting.join().expect("no panic")
        })
    }

    fn introduced(address: SocketAddr, hello: &Hello) -> (TcpStream, Reception) {
        let stream = TcpStream::connect(address).expect("connected");
        let reception = introduce(&stream, &hello.encode(), &Key::of(None), soon()).expect("heard");
        (stream, reception)
    }

    fn come(address: SocketAddr, rank: usize) -> Channel {
        let place = Place { host: 0, meeting: 0, address };
        match introduced(address, &Hello::of(&member(rank), place)) {
            (stream, Reception::Welcome(key)) => Channel::to_root(stream, key),
            (_, Reception::TurnedAway(reason)) => panic!("{reason}"),
        }
    }

    #[test]
    fn a_rank_that_has_gone_can_come_again() {
        let (sender, came) = std::sync::mpsc::channel();
        let guests = with_rank_0(
            |joining, listener| gather(joining, listener).expect("all came"),
            |address| {
                drop(come(address, 1));
                for channel in [come(address, 1), come(address, 2)] {
                    sender.send(channel).expect("kept");
                }
            },
        );
        assert!(guests[0].is_none());
        for (guest, channel) in guests[1..].iter().zip(came.iter()) {
            let at = guest.as_ref().expect("a guest").channel.stream.peer_addr().expect("an address");
            assert_eq!(at, channel.stream.local_addr().expect("an address"));
        }
    }

    #[test]
    fn a_rank_that_fails_ends_those_who_came_and_those_who_come() {
        let error = with_rank_0(
            |joining, listener| gather(joining, listener).err().expect("rank 2 has failed"),
            |address| {
                let mut early = come(address, 1);
                let failed = Hello::of_failed(&member(2));
                let (stream, reception) = introduced(address, &failed);
                let Reception::Welcome(key) = reception else { panic!("a rank that has failed is heard") };
                let report = Message::Report(Err("no such folder".to_owned()));
                Channel::to_root(stream, key).send(&report, soon()).expect("sent");
                let told = early.receive(3, soon()).expect("told");
                assert!(matches!(told, Message::TurnedAway(reason) if reason.contains("no such folder")));
            },
        );
        let CommError::RankFailed { rank: Rank(2), reason, told } = &error else { panic!("{error}") };
        assert_eq!((reason.as_str(), &told[..]), ("no such folder", &[Rank(1), Rank(2)][..]));
        with_rank_0(
            |joining, listener| dismiss(joining, listener, "rank 0 has failed", &[]),
            |address| {
                for rank in [2, 1] {
                    let place = Place { host: 0, meeting: 0, address };
                    let hello = Hello::of(&member(rank), place);
                    let (_, reception) = introduced(address, &hello);
                    assert!(
                        matches!(reception, Reception::TurnedAway(reason) if reason == "rank 0 has failed")
                    );
                }
            },
        );
    }
}
