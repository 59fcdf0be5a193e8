//! The connections between rank 0 and all other ranks, over which they agree how to connect.

use super::channel::Channel;
use super::handshake::{HandshakeOutcome, introduce};
use super::hello::Hello;
use super::join_context::{JoinContext, check_secret, look_up};
use super::key::nonce;
use super::message::{Message, Table};
use super::ports::listen_at;
use super::rank_address::RankAddress;
use super::root_rendezvous::{self, JoinedRank};
use super::socket_io::{ATTEMPT_MAX, has_hung_up, invalid, sleep_before_retry, wait_for_any};
use crate::{CommError, JoinOptions, TransportChoice};
use rustix::event::{PollFd, PollFlags};
use std::borrow::Cow;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};
use trireme_base::Rank;

/// Time after which the name of rank 0's host is resolved again.
const RESOLVE_INTERVAL: Duration = Duration::from_secs(5);
/// Time after which an unanswered introduction is retried.
const INTRODUCTION_MAX: Duration = Duration::from_secs(30);
/// How much longer than rank 0 the other ranks wait. So rank 0 times out first, and can report to them why.
const ROOT_TIMEOUT_MARGIN: Duration = Duration::from_secs(5);

pub(super) enum RootExchange {
    /// Rank 0, with the channels to ranks 1, 2, ….
    Root {
        channels: Vec<Channel>,
    },
    Peer {
        root_channel: Channel,
        address: SocketAddr,
        rank: Rank,
        world_size: usize,
    },
}

/// The state of a joined rank: the connections to rank 0, the table, and its own listener for the mesh.
pub(super) struct Joined {
    pub(super) root_exchange: RootExchange,
    pub(super) table: Table,
    pub(super) listener: TcpListener,
    /// Address at which the other ranks reach that listener.
    pub(super) own: SocketAddr,
    /// Address at which this rank reaches rank 0; on rank 0, the address on which it listens.
    pub(super) root: SocketAddr,
}

impl JoinContext<'_> {
    /// Runs rank 0: waits for all ranks and sends them the table.
    pub(super) fn join_as_root(
        &self,
        place_at: impl Fn(SocketAddr) -> RankAddress,
    ) -> Result<Joined, CommError> {
        let setting_up = |source| CommError::rendezvous("setting up rank 0", source);
        let master = self.listen_as_root()?;
        let at = master.local_addr().map_err(setting_up)?;
        let listener = self.listen(at)?;
        let mut own = listener.local_addr().map_err(setting_up)?;

        let joined_ranks = root_rendezvous::wait_for_ranks(self, &master)?;
        let joined_ranks: Vec<JoinedRank> = joined_ranks.into_iter().flatten().collect();
        if own.ip().is_unspecified() {
            // The local address of a connection from another rank. The address in `master_addr` may belong to a service that forwards only
            // the rendezvous port.
            let reached = joined_ranks[0].channel.stream.local_addr().map_err(setting_up)?;
            own = SocketAddr::new(reached.ip().to_canonical(), own.port());
        }
        let mut places = Vec::from([place_at(own)]);
        places.extend(joined_ranks.iter().map(|joined_rank| joined_rank.address.with_scope_of(at)));
        let share_a_host = places.iter().enumerate().any(|(rank, place)| {
            place.host != 0 && places[..rank].iter().any(|other| other.host == place.host)
        });
        let tries_shm = match self.options.transport {
            TransportChoice::Shm => true,
            TransportChoice::Tcp | TransportChoice::Mpi => false,
            TransportChoice::Auto => share_a_host,
        };
        let table = Table { session: nonce().map_err(setting_up)?, tries_shm, rank_addresses: places };
        let mut channels: Vec<Channel> =
            joined_ranks.into_iter().map(|joined_rank| joined_rank.channel).collect();
        send_to_all(&mut channels, &Message::Table(table.clone()), self.deadline)?;
        Ok(Joined { root_exchange: RootExchange::Root { channels }, table, listener, own, root: at })
    }

    fn listen_as_root(&self) -> Result<TcpListener, CommError> {
        match self.options.listen {
            Some(ip) => root_rendezvous::listen(&[SocketAddr::new(ip, self.options.master_port)]),
            None => root_rendezvous::listen(self.addresses),
        }
    }

    /// Runs another rank: connects to rank 0, introduces itself and receives the table.
    pub(super) fn join_as_peer(
        &self,
        place_at: impl Fn(SocketAddr) -> RankAddress,
    ) -> Result<Joined, CommError> {
        let JoinOptions { rank, world_size, join_timeout, .. } = *self.options;
        let (root_channel, root, listener) = self.introduce_to_root(place_at)?;
        let mut root_exchange = RootExchange::Peer { root_channel, address: root, rank, world_size };
        let deadline = Instant::now() + join_timeout + ROOT_TIMEOUT_MARGIN;
        match root_exchange.receive_from_root("waiting for the other ranks to join", deadline)? {
            Message::Table(mut table) => {
                table.rank_addresses.iter_mut().for_each(|place| *place = place.with_scope_of(root));
                let waiting = |source| CommError::rendezvous("waiting for the table of ranks", source);
                let own = listener.local_addr().map_err(waiting)?;
                Ok(Joined { root_exchange, table, listener, own, root })
            }
            _ => Err(CommError::rendezvous(
                "waiting for the table of ranks",
                invalid("rank 0 sent an unexpected message"),
            )),
        }
    }

    fn introduce_to_root(
        &self,
        place_at: impl Fn(SocketAddr) -> RankAddress,
    ) -> Result<(Channel, SocketAddr, TcpListener), CommError> {
        loop {
            let (stream, address) = self.reach()?;
            let joining = |source| CommError::rendezvous(format!("joining rank 0 at {address}"), source);
            stream.set_nodelay(true).map_err(joining)?;
            let listener = self.listen(stream.local_addr().map_err(joining)?)?;
            let hello = Hello::of(self.options, place_at(listener.local_addr().map_err(joining)?));
            let deadline = self.deadline.min(Instant::now() + INTRODUCTION_MAX);
            match introduce(&stream, &hello.encode(), self.key, deadline) {
                Ok(HandshakeOutcome::Welcome(key)) => {
                    return Ok((Channel::to_root(stream, key), address, listener));
                }
                Ok(HandshakeOutcome::Refused(reason)) => {
                    let (rank, address) = (self.options.rank, address.to_string());
                    return Err(CommError::Refused { rank, address, reason });
                }
                // Rank 0 may have closed the connection to make room for others, or another program forwards the port before rank 0
                // listens.
                Err(error) if is_retriable(&error) && sleep_before_retry(self.deadline) => {
                    self.progress
                        .report(Instant::now(), || format!("waiting for rank 0 at {address} ({error})"));
                }
                Err(error) => return Err(joining(error)),
            }
        }
    }

    /// Reports to the other ranks that this rank cannot join, and why. Ranks in `informed` know it already. Best effort, until the
    /// deadline.
    pub(super) fn report_failure(&self, reason: &str, informed: &[Rank]) {
        if self.options.rank == Rank::ROOT {
            if let Ok(master) = self.listen_as_root() {
                root_rendezvous::report_failure_to_joining(
                    self,
                    &master,
                    &format!("rank 0 has failed: {reason}"),
                    informed,
                );
            }
            return;
        }
        let Ok((stream, _)) = self.reach() else { return };
        let hello = Hello::of_failed(self.options);
        if let Ok(HandshakeOutcome::Welcome(key)) =
            introduce(&stream, &hello.encode(), self.key, self.deadline)
        {
            let mut channel = Channel::to_root(stream, key);
            let _ = channel.send(&Message::Report(Err(reason.to_owned())), self.deadline);
        }
    }

    /// Connects to rank 0, with retries until it listens.
    fn reach(&self) -> Result<(TcpStream, SocketAddr), CommError> {
        let JoinContext { options, deadline, progress: waiting, .. } = *self;
        let mut addresses = Cow::Borrowed(self.addresses);
        let mut resolved = Instant::now();
        loop {
            let mut last = None;
            for address in addresses.iter() {
                let left = deadline.saturating_duration_since(Instant::now());
                match connect(address, left.clamp(Duration::from_millis(1), ATTEMPT_MAX)) {
                    Ok(stream) => return Ok((stream, *address)),
                    Err(source) => last = Some((*address, source)),
                }
            }
            let (address, source) = last.expect("a resolved name has an address");
            waiting.report(Instant::now(), || format!("waiting for rank 0 at {address} ({source})"));
            if !sleep_before_retry(deadline) {
                return Err(CommError::Unreachable {
                    rank: options.rank,
                    address: address.to_string(),
                    waited: options.join_timeout,
                    source: Arc::new(source),
                });
            }
            // Rank 0 may have been restarted elsewhere under the same name.
            if resolved.elapsed() > RESOLVE_INTERVAL
                && let Ok(found) = look_up(options)
                && check_secret(options, found.iter().map(SocketAddr::ip)).is_ok()
            {
                (addresses, resolved) = (Cow::Owned(found), Instant::now());
            }
        }
    }

    /// Listens for the peers, on the chosen interface or else on `address`. The port of `address` is ignored.
    fn listen(&self, address: SocketAddr) -> Result<TcpListener, CommError> {
        let address = self.interface.map_or(address, |ip| SocketAddr::new(ip, 0));
        let listening = |source| CommError::ListenForPeers { ip: address.ip(), source: Arc::new(source) };
        listen_at(address, self.options.ports.as_ref()).map_err(listening)
    }
}

fn is_retriable(error: &io::Error) -> bool {
    has_hung_up(error) || error.kind() == io::ErrorKind::TimedOut
}

fn connect(address: &SocketAddr, timeout: Duration) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(address, timeout)?;
    // Without a listener, a connection to a port of this host can connect to itself.
    if stream.local_addr()? == *address {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    Ok(stream)
}

impl RootExchange {
    /// Renumbers the ranks: `order[new]` is the old rank.
    pub(super) fn reorder(&mut self, own: Rank, order: &[usize]) {
        match self {
            RootExchange::Peer { rank, .. } => *rank = own,
            RootExchange::Root { channels } => {
                let mut by_old_rank: Vec<Option<Channel>> = channels.drain(..).map(Some).collect();
                let ordered = order.iter().filter(|&&old_rank| old_rank != 0);
                channels.extend(ordered.filter_map(|&old_rank| by_old_rank[old_rank - 1].take()));
            }
        }
    }

    /// Whether a rank is known to have failed in the current phase.
    pub(super) fn knows_of_failure(&self) -> bool {
        match self {
            // Rank 0 sends a message before this rank has reported only if a rank has failed.
            RootExchange::Peer { root_channel, .. } => root_channel.is_readable(),
            RootExchange::Root { channels } => channels.iter().any(Channel::has_failure_next),
        }
    }

    /// Ends a phase. Each rank reports success, a reason, or an empty reason if another rank's failure stopped it. All ranks receive the
    /// outcome, as soon as the first reason is known. A failed phase ends when all ranks have reported, so that a rank of the next phase
    /// cannot connect to a rank that is still in this one.
    pub(super) fn agree(
        &mut self,
        doing: &str,
        own: Result<(), String>,
        deadline: Instant,
    ) -> Result<Result<(), String>, CommError> {
        match self {
            RootExchange::Peer { root_channel, .. } => {
                root_channel
                    .send(&Message::Report(own), deadline)
                    .map_err(|source| CommError::rendezvous(doing, source))?;
                match self.receive_from_root(doing, deadline + ROOT_TIMEOUT_MARGIN)? {
                    Message::Report(outcome) => {
                        if outcome.is_err() {
                            // The same outcome again, when all ranks have reported. Without it, the next phase fails.
                            let _ = self.receive_from_root(doing, deadline + ROOT_TIMEOUT_MARGIN);
                        }
                        Ok(outcome)
                    }
                    _ => Err(CommError::rendezvous(doing, invalid("rank 0 sent an unexpected message"))),
                }
            }
            RootExchange::Root { channels } => collect(channels, own, deadline),
        }
    }

    fn receive_from_root(&mut self, doing: &str, deadline: Instant) -> Result<Message, CommError> {
        let RootExchange::Peer { root_channel, address, rank, world_size } = self else {
            unreachable!("rank 0 does not wait for itself");
        };
        match root_channel
            .receive(*world_size, deadline)
            .map_err(|source| CommError::rendezvous(doing, source))?
        {
            Message::Refused(reason) => {
                Err(CommError::Refused { rank: *rank, address: address.to_string(), reason })
            }
            message => Ok(message),
        }
    }
}

/// Collects the reports of all ranks and sends all of them the outcome. A failure is sent as soon as its reason is known, and again when
/// all ranks have reported.
fn collect(
    channels: &mut [Channel],
    own: Result<(), String>,
    deadline: Instant,
) -> Result<Result<(), String>, CommError> {
    let world_size = channels.len() + 1;
    let mut failures: Vec<(usize, String)> = own.err().map(|reason| (0, reason)).into_iter().collect();
    let mut awaited: Vec<usize> = (1..world_size).collect();
    let mut sent_outcome = None;
    loop {
        if sent_outcome.is_none()
            && let Some(outcome) = outcome_of(&failures, awaited.is_empty())
        {
            let sent = send_to_all(channels, &Message::Report(outcome.clone()), deadline);
            // The failed rank may be unreachable, which is part of its failure.
            if outcome.is_ok() {
                sent?;
            }
            sent_outcome = Some(outcome);
        }
        if let Some(outcome) = sent_outcome.take_if(|_| awaited.is_empty()) {
            if outcome.is_err() {
                let deadline = deadline.max(Instant::now() + ROOT_TIMEOUT_MARGIN);
                let _ = send_to_all(channels, &Message::Report(outcome.clone()), deadline);
            }
            return Ok(outcome);
        }
        let sockets = awaited.iter().map(|rank| &channels[rank - 1].stream);
        let mut polled: Vec<_> = sockets.map(|socket| PollFd::new(socket, PollFlags::IN)).collect();
        // After the deadline, no rank is waited for; ranks without a report fail below.
        let is_over = wait_for_any(&mut polled, deadline).is_err();
        awaited.retain(|&rank| {
            let channel = &mut channels[rank - 1];
            if !channel.is_readable() && !is_over {
                return true;
            }
            match channel.receive(world_size, deadline) {
                Ok(Message::Report(Ok(()))) => {}
                Ok(Message::Report(Err(reason))) => failures.push((rank, reason)),
                Ok(_) => failures.push((rank, "sent an unexpected message instead of its report".to_owned())),
                Err(error) => failures.push((rank, format!("sent no report: {error}"))),
            }
            false
        });
    }
}

/// The outcome of the reports, if it is known: all reports have arrived, or one has a reason.
fn outcome_of(failures: &[(usize, String)], are_all_there: bool) -> Option<Result<(), String>> {
    let reasons = failures.iter().filter(|(_, reason)| !reason.is_empty());
    let reasons: Vec<String> = reasons.map(|(rank, reason)| format!("rank {rank}: {reason}")).collect();
    match () {
        () if !reasons.is_empty() => Some(Err(reasons.join("; "))),
        () if !are_all_there => None,
        () if failures.is_empty() => Some(Ok(())),
        () => Some(Err("no rank says why".to_owned())),
    }
}

/// Sends a message to all other ranks, even if one cannot be reached.
fn send_to_all(channels: &mut [Channel], message: &Message, deadline: Instant) -> Result<(), CommError> {
    let told = channels.iter_mut().enumerate().map(|(index, channel)| {
        let telling = |source| CommError::rendezvous(format!("telling rank {}", index + 1), source);
        channel.send(message, deadline).map_err(telling)
    });
    told.fold(Ok(()), Result::and)
}

#[cfg(test)]
mod tests {
    use super::super::key::Key;
    use super::*;
    use std::thread;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    /// Rank 0's end and the ends of two other ranks.
    fn root_exchanges() -> (RootExchange, [RootExchange; 2]) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("an address");
        let mut channels = Vec::new();
        let peers = [1, 2].map(|rank| {
            let stream = TcpStream::connect(address).expect("connected");
            let accepted = listener.accept().expect("a connection").0;
            channels.push(Channel::at_root(accepted, Key::of(None)));
            let root = Channel::to_root(stream, Key::of(None));
            RootExchange::Peer { root_channel: root, address, rank: Rank(rank), world_size: 3 }
        });
        (RootExchange::Root { channels }, peers)
    }

    /// The report of a rank that stops as soon as it knows of another rank's failure.
    fn stopped(root_exchange: &RootExchange) -> Result<(), String> {
        while !root_exchange.knows_of_failure() {
            assert!(sleep_before_retry(soon()));
        }
        Err(String::new())
    }

    #[test]
    fn a_failed_phase_ends_when_all_ranks_have_reported() {
        let (mut root, [mut first, second]) = root_exchanges();
        let RootExchange::Peer { root_channel: mut second, .. } = second else { panic!("a peer") };
        thread::scope(|scope| {
            let root = scope.spawn(move || root.agree("failing", Err("why".to_owned()), soon()));
            // The second rank learns of the failure, but has not reported.
            assert!(matches!(second.receive(3, soon()), Ok(Message::Report(Err(_)))));
            let first = scope.spawn(move || first.agree("failing", Err(String::new()), soon()));
            assert!(!second.is_readable());
            second.send(&Message::Report(Err(String::new())), soon()).expect("a report");
            assert!(matches!(second.receive(3, soon()), Ok(Message::Report(Err(_)))));
            for rank in [root, first] {
                assert!(rank.join().expect("no panic").expect("all are there").is_err());
            }
        });
    }

    #[test]
    fn all_learn_of_a_failure_while_they_are_busy() {
        for failing in 0..3 {
            let (root_channel, [first, second]) = root_exchanges();
            let mut outcomes = Vec::new();
            thread::scope(|scope| {
                let ranks = [root_channel, first, second].into_iter().enumerate().map(|(rank, mut star)| {
                    scope.spawn(move || {
                        let report = if rank == failing { Err("why".to_owned()) } else { stopped(&star) };
                        let failed = star.agree("failing", report, soon()).expect("all are there");
                        // The next agreement is not confused with this one.
                        let next = star.agree("trying again", Ok(()), soon()).expect("all are there");
                        (failed, next)
                    })
                });
                let ranks: Vec<_> = ranks.collect();
                outcomes.extend(ranks.into_iter().map(|rank| rank.join().expect("no panic")));
            });
            assert_eq!(outcomes, vec![(Err(format!("rank {failing}: why")), Ok(())); 3]);
        }
    }
}
