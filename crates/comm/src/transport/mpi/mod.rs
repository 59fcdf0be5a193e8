//! MPI as what carries data, so that it takes the fabric that a cluster's MPI library knows.
//!
//! MPI's ranks and those of a group need not be the same. What is sent to a rank carries a tag that the receiver has
//! chosen, a new one for each group and purpose, so neither groups nor messages and collective operations meet.
//!
//! # Lent memory
//! A message is sent from and received into the memory of the operation itself, and MPI has that memory until the message
//! has ended, which may be after the call that began it. Nothing that MPI offers ends a message early for certain. So
//! whoever uses a [`MpiLink`] passes the same memory again until the link says that it is done with it; and when an
//! operation fails, [`MpiLink::abandon`] tells whether there is memory that MPI still has, which then must never be freed.

#[cfg_attr(not(feature = "mpi"), path = "no_library.rs")]
mod library;
mod link;

pub(crate) use link::{MpiLink, NAP};

use crate::CommError;
use crate::transport::Purpose;
use library::{Communicator, Library};
use std::sync::atomic::{AtomicU32, Ordering};
use trireme_base::Rank;

/// This process as one of MPI's.
#[derive(Clone, Copy)]
pub(crate) struct MpiProcess {
    mpi: &'static Library,
}

/// Where MPI finds a rank of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Seat {
    /// Its rank in MPI's world.
    pub(crate) process: u32,
    /// The first of its tags for this group: one for each purpose with data.
    pub(crate) tag: u32,
}

/// Where MPI finds the ranks of a group.
pub(crate) struct Seats {
    communicator: &'static Communicator,
    own: Seat,
    /// In rank order, `None` for this rank.
    peers: Vec<Option<Seat>>,
}

/// What two ranks send each other by.
#[derive(Clone, Copy)]
struct Route {
    communicator: &'static Communicator,
    peer: u32,
    outgoing_tag: u32,
    incoming_tag: u32,
}

const TAGS_PER_SEAT: u32 = 2;

impl MpiProcess {
    /// Starts MPI in this process, if it has not been. The process must be `rank` of `world_size` for MPI, too.
    pub(crate) fn start(rank: Rank, world_size: usize) -> Result<Self, CommError> {
        let process = Self::of_this_process()?;
        let (own, size) = (process.mpi.rank(), process.mpi.size());
        if (own as usize, size as usize) != (rank.0, world_size) {
            return Err(unavailable(format!(
                "this process is rank {own} of {size} in MPI, but rank {rank} of {world_size} in the job; start all \
                 workers with one command of MPI's own launcher (mpirun, or srun --mpi=pmix)"
            )));
        }
        Ok(process)
    }

    /// This process, if MPI can be used.
    pub(crate) fn of_this_process() -> Result<Self, CommError> {
        Ok(MpiProcess { mpi: Library::start().map_err(unavailable)? })
    }

    /// Takes a seat in a new group. The first time, all processes of MPI's world call it and wait for each other.
    pub(crate) fn take_seat(self) -> Result<Seat, CommError> {
        static NEXT_TAG: AtomicU32 = AtomicU32::new(0);
        let communicator = self.mpi.communicator().map_err(unavailable)?;
        let tag = NEXT_TAG.fetch_add(TAGS_PER_SEAT, Ordering::Relaxed);
        if tag > communicator.tag_max() - TAGS_PER_SEAT {
            return Err(unavailable(format!(
                "this process has been part of {} groups, and MPI has no tags for more",
                tag / TAGS_PER_SEAT
            )));
        }
        Ok(Seat { process: self.mpi.rank(), tag })
    }

    /// The group whose other ranks have the seats `peers`.
    pub(crate) fn seats(self, own: Seat, peers: Vec<Option<Seat>>) -> Result<Seats, CommError> {
        let communicator = self.mpi.communicator().map_err(unavailable)?;
        let is_fit = |seat: &Seat| {
            seat.process < self.mpi.size() && seat.tag <= communicator.tag_max() - TAGS_PER_SEAT
        };
        if let Some(rank) = peers.iter().position(|peer| peer.as_ref().is_some_and(|seat| !is_fit(seat))) {
            return Err(unavailable(format!("rank {rank} announced a place that MPI does not have")));
        }
        Ok(Seats { communicator, own, peers })
    }
}

impl Seats {
    /// What this rank and a peer send each other by.
    ///
    /// # Panics
    /// If `peer` is this rank, or `purpose` has no data.
    fn route(&self, peer: Rank, purpose: Purpose) -> Route {
        let offset = match purpose {
            Purpose::Collectives => 0,
            Purpose::Messages => 1,
            Purpose::Control => unreachable!("notices go over sockets"),
        };
        let seat = self.peers[peer.0].expect("no algorithm sends to oneself");
        Route {
            communicator: self.communicator,
            peer: seat.process,
            outgoing_tag: seat.tag + offset,
            incoming_tag: self.own.tag + offset,
        }
    }
}

fn unavailable(reason: String) -> CommError {
    CommError::MpiUnavailable { reason }
}
