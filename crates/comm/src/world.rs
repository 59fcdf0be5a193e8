//! Where groups begin: a world of one, of threads, or of processes that join each other.

use crate::recorder::FlightRecorder;
use crate::rendezvous::{self, Home};
use crate::transport::Parts;
use crate::transport::link::Connection;
use crate::{CommError, Group, GroupOptions, JoinOptions};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use trireme_base::Rank;
use trireme_schedule::collective::Hosts;

/// Tells the ranks that join a world with these options, except `told`, that this one has failed and why, so that they do not wait.
/// Without a job (it could not be read), ranks of any job with the same secret listen. Best effort, 10 s at most.
pub fn report_failure(options: &JoinOptions, reason: &str, told: &[Rank]) {
    if options.world_size > 1 && rendezvous::check_options(options).is_ok() {
        rendezvous::report_failure(options, reason, told);
    }
}

/// A world of one rank: every operation completes at once, and no thread is started.
pub fn single() -> Group {
    let recorder = FlightRecorder::new(Rank::ROOT, 1);
    Group::alone(None, Home::inproc(), &GroupOptions::default(), recorder)
}

/// A world whose ranks are threads of this process: one group per rank, in rank order.
///
/// # Panics
/// If `world_size` is 0, the options are out of bounds, or the process has no file descriptors (three per pair
/// of ranks and rank) or threads left.
pub fn inproc_world_with(world_size: usize, options: &GroupOptions) -> Vec<Group> {
    inproc_world_on(&vec![0; world_size], options)
}

/// As [`inproc_world_with`], with each rank on one of these (arbitrarily numbered) hosts, for the choice of algorithms and groups.
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
        let parts = Parts {
            rank: Rank(rank),
            hosts: hosts.clone(),
            rows: [collectives, messages, control],
            memory: None,
            seats: None,
            is_inproc: true,
        };
        let recorder = FlightRecorder::new(Rank(rank), world_size);
        let world = recorder.group("world".to_owned(), Rank(rank), (0..world_size).map(Rank).collect());
        Group::start(parts, Home::inproc(), Arc::default(), options, world)
            .expect("memory, file descriptors and a thread")
    })
    .collect()
}

/// One connected pair of sockets for each pair of ranks; row `r` holds the ends of rank `r`.
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

/// Joins the world that `options` describe: meets the other ranks at rank 0's address and returns when all are connected.
///
/// # Errors
/// Options out of bounds; an address that does not resolve, is foreign or taken; a rank 0 that is not reached or refuses this rank;
/// ranks that do not come in time; a transport that cannot be had.
pub fn join(options: &JoinOptions) -> Result<Group, CommError> {
    rendezvous::check_options(options)?;
    if options.world_size == 1 {
        return Ok(single());
    }
    let group = rendezvous::join(options)?;
    group.measure_costs()?;
    Ok(group)
}
