//! Rank 0's side of the rendezvous: listens, and admits the ranks of its job.

use super::acceptor::Acceptor;
use super::channel::Channel;
use super::hello::Hello;
use super::join_context::JoinContext;
use super::message::Message;
use super::rank_address::RankAddress;
use super::refusals::Refusals;
use crate::{CommError, JoinOptions};
use std::collections::BTreeSet;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};
use trireme_base::{Rank, format_ranges};

/// How often rank 0 checks whether a joined rank has disconnected, or all ranks know of a failure.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);

/// Maximum time in which a failed rank must report its reason.
const REASON_MAX: Duration = Duration::from_secs(2);

/// How long a failed rank 0 reports its failure to ranks that connect.
const FAILURE_REPORT_DURATION: Duration = Duration::from_secs(10);

/// A rank that has joined.
pub(super) struct JoinedRank {
    pub(super) channel: Channel,
    pub(super) address: RankAddress,
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
pub(super) fn wait_for_ranks(
    joining: &JoinContext<'_>,
    listener: &TcpListener,
) -> Result<Vec<Option<JoinedRank>>, CommError> {
    let JoinContext { options, key, refusals, deadline, progress: waiting, .. } = *joining;
    let wrap = |source| CommError::rendezvous("waiting for the other ranks to join", source);
    let mut peers: Vec<Option<JoinedRank>> = (0..options.world_size).map(|_| None).collect();
    let mut acceptor = Acceptor::<Hello>::new(listener, key, refusals).map_err(wrap)?;
    while peers[1..].iter().any(Option::is_none) {
        let now = Instant::now();
        if now >= deadline {
            return Err(give_up(options, peers, listener, refusals));
        }
        let next_check = deadline.min(now + CHECK_INTERVAL);
        let peer = acceptor.next(next_check, |hello| objection(hello, &peers, options)).map_err(wrap)?;
        let Some(peer) = peer else {
            // Ranks that have disconnected may join again.
            peers.iter_mut().for_each(|peer| drop(peer.take_if(|peer| peer.channel.is_readable())));
            waiting.report(Instant::now(), || {
                let missing = missing(&peers);
                let (count, all) = (missing.len(), options.world_size);
                format!("waiting for {count} of {all} ranks to join: {}", format_ranges(missing))
            });
            continue;
        };
        let stream = TcpStream::from(peer.socket);
        stream.set_nodelay(true).map_err(wrap)?;
        let hello = peer.introduction;
        let rank = hello.rank as usize;
        let mut channel = Channel::at_root(stream, peer.key);
        if hello.has_failed() {
            let (rank, reason) = (Rank(rank), reason_of(&mut channel, options));
            let text = format!("rank {rank} failed before all ranks had joined: {reason}");
            let told = notify_joined(peers, &text).into_iter().chain([rank]).collect();
            return Err(CommError::RankFailed { rank, reason, informed: told });
        }
        peers[rank] = Some(JoinedRank { channel, address: hello.address });
    }
    Ok(peers)
}

fn objection(hello: &Hello, peers: &[Option<JoinedRank>], options: &JoinOptions) -> Option<String> {
    hello.objection(options).or_else(|| {
        let earlier = peers[hello.rank as usize].as_ref();
        let has_joined = earlier.is_some_and(|earlier| !earlier.channel.is_readable());
        has_joined.then(|| format!("rank {} has already joined", hello.rank))
    })
}

fn missing(peers: &[Option<JoinedRank>]) -> Vec<Rank> {
    let absent = peers.iter().enumerate().skip(1).filter(|(_, peer)| peer.is_none());
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
fn notify_joined(peers: Vec<Option<JoinedRank>>, reason: &str) -> Vec<Rank> {
    let joined = peers.into_iter().enumerate().filter_map(|(rank, peer)| Some((rank, peer?)));
    let told = joined.map(|(rank, mut peer)| {
        // Best effort: the rank may have disconnected.
        let _ = peer.channel.send(&Message::Refused(reason.to_owned()), Instant::now());
        Rank(rank)
    });
    told.collect()
}

/// Reports the failure to ranks that connect within a few seconds, because they would otherwise wait in vain. Returns early once all ranks
/// know of it. The ranks in `informed` know already.
pub(super) fn report_failure_to_joining(
    joining: &JoinContext<'_>,
    listener: &TcpListener,
    reason: &str,
    informed: &[Rank],
) {
    let JoinContext { options, key, deadline, .. } = *joining;
    // Without a secret or a job name, the ranks of other jobs would be notified.
    if options.secret.is_none() && options.job.is_empty() {
        return;
    }
    let refusals = Refusals::silent();
    let Ok(mut acceptor) = Acceptor::<Hello>::new(listener, key, &refusals) else { return };
    let until = deadline.min(Instant::now() + FAILURE_REPORT_DURATION);
    let mut told: BTreeSet<usize> = informed.iter().map(|rank| rank.0).collect();
    while (1..options.world_size).any(|rank| !told.contains(&rank)) {
        let now = Instant::now();
        if now >= until {
            return;
        }
        let refuse = |hello: &Hello| {
            // A rank 0 that could not read its job name notifies ranks of any job.
            let objection = if options.job.is_empty() { None } else { hello.objection(options) };
            // A failed rank ends with a failure of its own, and so need not receive this one.
            if objection.is_none() || hello.has_failed() {
                told.insert(hello.rank as usize);
            }
            Some(objection.unwrap_or_else(|| reason.to_owned()))
        };
        // `refuse` always objects, so no rank is admitted.
        if acceptor.next(until.min(now + CHECK_INTERVAL), refuse).is_err() {
            return;
        }
    }
}

/// Reports the missing ranks to the joined ones. Returns the error.
fn give_up(
    options: &JoinOptions,
    peers: Vec<Option<JoinedRank>>,
    listener: &TcpListener,
    refusals: &Refusals,
) -> CommError {
    let error = CommError::RanksMissing {
        missing: missing(&peers),
        address: listener.local_addr().map_or_else(|_| String::new(), |address| address.to_string()),
        waited: options.join_timeout,
        refused: refusals.texts(),
    };
    notify_joined(peers, &error.to_string());
    error
}

#[cfg(test)]
mod tests {
    use super::super::handshake::{HandshakeOutcome, introduce};
    use super::super::join_progress::JoinProgress;
    use super::super::key::Key;
    use super::*;
    use std::thread;
    use std::time::Duration;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    fn member(rank: usize) -> JoinOptions {
        JoinOptions { job: "a".to_owned(), ..JoinOptions::new(Rank(rank), 3) }
    }

    /// Runs rank 0 of a world of three in a thread, while `peers` acts as ranks 1 and 2.
    fn with_rank_0<T: Send>(
        host: impl FnOnce(&JoinContext<'_>, &TcpListener) -> T + Send,
        peers: impl FnOnce(SocketAddr),
    ) -> T {
        let listener = listen(&["127.0.0.1:0".parse().expect("an address")]).expect("a free port");
        let address = listener.local_addr().expect("an address");
        thread::scope(|scope| {
            let hosting = scope.spawn(move || {
                let options = member(0);
                let (key, refusals) = (Key::of(None), Refusals::new(&options));
                let waiting = JoinProgress::new(None, Instant::now());
                let joining = JoinContext {
                    options: &options,
                    addresses: &[address],
                    interface: None,
                    key: &key,
                    refusals: &refusals,
                    progress: &waiting,
                    deadline: soon(),
                };
                host(&joining, &listener)
            });
            peers(address);
            hosting.join().expect("no panic")
        })
    }

    fn introduced(address: SocketAddr, hello: &Hello) -> (TcpStream, HandshakeOutcome) {
        let stream = TcpStream::connect(address).expect("connected");
        let outcome = introduce(&stream, &hello.encode(), &Key::of(None), soon()).expect("heard");
        (stream, outcome)
    }

    fn join_as(address: SocketAddr, rank: usize) -> Channel {
        let place = RankAddress { host: 0, socket_id: 0, address };
        match introduced(address, &Hello::of(&member(rank), place)) {
            (stream, HandshakeOutcome::Welcome(key)) => Channel::to_root(stream, key),
            (_, HandshakeOutcome::Refused(reason)) => panic!("{reason}"),
        }
    }

    #[test]
    fn a_disconnected_rank_can_join_again() {
        let (sender, joined) = std::sync::mpsc::channel();
        let peers = with_rank_0(
            |joining, listener| wait_for_ranks(joining, listener).expect("all came"),
            |address| {
                drop(join_as(address, 1));
                for channel in [join_as(address, 1), join_as(address, 2)] {
                    sender.send(channel).expect("kept");
                }
            },
        );
        assert!(peers[0].is_none());
        for (peer, channel) in peers[1..].iter().zip(joined.iter()) {
            let at = peer.as_ref().expect("a joined rank").channel.stream.peer_addr().expect("an address");
            assert_eq!(at, channel.stream.local_addr().expect("an address"));
        }
    }

    #[test]
    fn a_failed_rank_ends_joined_and_joining_ranks() {
        let error = with_rank_0(
            |joining, listener| wait_for_ranks(joining, listener).err().expect("rank 2 has failed"),
            |address| {
                let mut early = join_as(address, 1);
                let failed = Hello::of_failed(&member(2));
                let (stream, outcome) = introduced(address, &failed);
                let HandshakeOutcome::Welcome(key) = outcome else {
                    panic!("a rank that has failed is heard")
                };
                let report = Message::Report(Err("no such folder".to_owned()));
                Channel::to_root(stream, key).send(&report, soon()).expect("sent");
                let told = early.receive(3, soon()).expect("told");
                assert!(matches!(told, Message::Refused(reason) if reason.contains("no such folder")));
            },
        );
        let CommError::RankFailed { rank: Rank(2), reason, informed: told } = &error else {
            panic!("{error}")
        };
        assert_eq!((reason.as_str(), &told[..]), ("no such folder", &[Rank(1), Rank(2)][..]));
        with_rank_0(
            |joining, listener| report_failure_to_joining(joining, listener, "rank 0 has failed", &[]),
            |address| {
                for rank in [2, 1] {
                    let place = RankAddress { host: 0, socket_id: 0, address };
                    let hello = Hello::of(&member(rank), place);
                    let (_, outcome) = introduced(address, &hello);
                    assert!(
                        matches!(outcome, HandshakeOutcome::Refused(reason) if reason == "rank 0 has failed")
                    );
                }
            },
        );
    }
}
