//! Entry points: creates a world of one rank, of threads, or of processes that join each other.

use crate::recorder::FlightRecorder;
use crate::rendezvous::{self, SplitContext};
use crate::transport::GroupConnections;
use crate::transport::device::DeviceResources;
use crate::transport::link::Connection;
use crate::{CommError, Group, GroupOptions, JoinOptions};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use trireme_base::Rank;
use trireme_schedule::collective::Hosts;

/// Reports that this rank failed, and why, to the ranks that join a world with these options, so that they do not wait for it. The ranks in
/// `informed` know already. If the job name is empty, because it could not be read, ranks of every job with the same secret accept the
/// report. Best effort; takes at most 10 s.
pub fn report_failure(options: &JoinOptions, reason: &str, informed: &[Rank]) {
    if options.world_size > 1 && rendezvous::check_options(options).is_ok() {
        rendezvous::report_failure(options, reason, informed);
    }
}

/// Creates a world of one rank. Every operation completes when it is issued, and no thread is started.
pub fn single() -> Group {
    let recorder = FlightRecorder::new(Rank::ROOT, 1);
    Group::single_rank(None, SplitContext::inproc(), &GroupOptions::default(), recorder)
}

/// Creates a world whose ranks are threads of this process. Returns one group per rank, in rank order.
///
/// # Panics
/// If `world_size` is 0, the options are out of bounds, or the process has no more file descriptors (six per pair of ranks, plus two per
/// rank) or threads.
pub fn inproc_world_with(world_size: usize, options: &GroupOptions) -> Vec<Group> {
    inproc_world_on(&vec![0; world_size], options)
}

/// Like [`inproc_world_with`], with rank `r` assigned to host `hosts[r]`. The assignment affects only [`Group::hosts`] and the choice and
/// steps of algorithms. Host numbers are arbitrary.
///
/// # Panics
/// As [`inproc_world_with`].
pub fn inproc_world_on(hosts: &[usize], options: &GroupOptions) -> Vec<Group> {
    let (world_size, hosts) = (hosts.len(), Hosts::new(hosts));
    rendezvous::check_group_options(options).expect("options within their bounds");
    if world_size == 1 {
        return Vec::from([single()]);
    }
    let [collectives, messages, control] = [0, 1, 2].map(|_| socket_pairs(world_size));
    let rows = collectives.into_iter().zip(messages).zip(control).enumerate();
    rows.map(|(rank, ((collectives, messages), control))| {
        let parts = GroupConnections {
            rank: Rank(rank),
            hosts: hosts.clone(),
            connections_by_purpose: [collectives, messages, control],
            memory: None,
            mpi_addresses: None,
            is_inproc: true,
        };
        let recorder = FlightRecorder::new(Rank(rank), world_size);
        let world = recorder.group("world".to_owned(), Rank(rank), (0..world_size).map(Rank).collect());
        Group::start(
            parts,
            SplitContext::inproc(),
            Arc::default(),
            DeviceResources::default(),
            options,
            world,
        )
        .expect("memory, file descriptors and a thread")
    })
    .collect()
}

/// Creates one connected socket pair per pair of ranks. Row `r` holds the ends of rank `r`, indexed by peer.
fn socket_pairs(world_size: usize) -> Vec<Vec<Option<Connection>>> {
    let mut ends: Vec<Vec<Option<Connection>>> =
        (0..world_size).map(|_| (0..world_size).map(|_| None).collect()).collect();
    for second in 1..world_size {
        let (lower, upper) = ends.split_at_mut(second);
        for (first, row) in lower.iter_mut().enumerate() {
            let (one, other) = UnixStream::pair().expect("file descriptors for a pair of sockets");
            row[second] = Some(Connection::Plain(one.into()));
            upper[0][first] = Some(Connection::Plain(other.into()));
        }
    }
    ends
}

/// Joins the world that `options` describe: connects to rank 0 at its address, and returns when all ranks are connected.
///
/// # Errors
/// If options are out of bounds, an address does not resolve, is not this host's or is in use, rank 0 cannot be reached or refuses this
/// rank, ranks do not join within [`JoinOptions::join_timeout`], or a requested transport is unavailable.
pub fn join(options: &JoinOptions) -> Result<Group, CommError> {
    rendezvous::check_options(options)?;
    if options.world_size == 1 {
        return Ok(single());
    }
    let group = rendezvous::join(options)?;
    group.measure_costs()?;
    Ok(group)
}
