//! MPI as a transport, to use the network fabric that a cluster's MPI library supports.
//!
//! Ranks in MPI and ranks of a group may differ. A message carries a tag that its receiver chose, a new one for each group and purpose. So
//! messages of different groups, and messages and collectives of one group, cannot be confused.
//!
//! # Lent memory
//! A message is sent from and received into the memory of the operation itself. MPI uses that memory until the message has completed, which
//! may be after the call that started it. MPI has no call that reliably cancels a message. So the user of an [`MpiLink`] must pass the same
//! memory again until the link reports that it is done. When an operation fails, [`MpiLink::abandon`] returns whether MPI still has memory,
//! which then must never be freed.

#[cfg_attr(not(feature = "mpi"), path = "no_library.rs")]
mod library;
mod link;

pub(crate) use link::{MpiLink, POLL_INTERVAL};

use crate::CommError;
use crate::transport::Purpose;
use library::{Communicator, Library};
use std::sync::atomic::{AtomicU32, Ordering};
use trireme_base::Rank;

/// This process as a process of MPI's world.
#[derive(Clone, Copy)]
pub(crate) struct MpiProcess {
    mpi: &'static Library,
}

/// The address of a rank of a group in MPI.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MpiAddress {
    /// Rank in MPI's world.
    pub(crate) process: u32,
    /// First of the rank's tags for this group. Each purpose with data has one.
    pub(crate) tag: u32,
}

/// The addresses of a group's ranks in MPI.
pub(crate) struct MpiAddresses {
    communicator: &'static Communicator,
    own: MpiAddress,
    /// In rank order, `None` for this rank.
    peers: Vec<Option<MpiAddress>>,
}

/// Communicator, peer and tags of the messages between two ranks.
#[derive(Clone, Copy)]
struct Route {
    communicator: &'static Communicator,
    peer: u32,
    outgoing_tag: u32,
    incoming_tag: u32,
}

const TAGS_PER_ADDRESS: u32 = 2;

impl MpiProcess {
    /// Initializes MPI in this process, unless it is initialized already. The process must have the same rank and world size in MPI.
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

    /// This process, if MPI is available.
    pub(crate) fn of_this_process() -> Result<Self, CommError> {
        Ok(MpiProcess { mpi: Library::start().map_err(unavailable)? })
    }

    /// Reserves this rank's address in a new group. The first call is collective: all processes of MPI's world make it and wait for each
    /// other.
    pub(crate) fn reserve_address(self) -> Result<MpiAddress, CommError> {
        static NEXT_TAG: AtomicU32 = AtomicU32::new(0);
        let communicator = self.mpi.communicator().map_err(unavailable)?;
        let tag = NEXT_TAG.fetch_add(TAGS_PER_ADDRESS, Ordering::Relaxed);
        if tag > communicator.tag_max() - TAGS_PER_ADDRESS {
            return Err(unavailable(format!(
                "this process has been part of {} groups, and MPI has no tags for more",
                tag / TAGS_PER_ADDRESS
            )));
        }
        Ok(MpiAddress { process: self.mpi.rank(), tag })
    }

    /// Creates the addresses of a group from this rank's and its peers'.
    pub(crate) fn addresses(
        self,
        own: MpiAddress,
        peers: Vec<Option<MpiAddress>>,
    ) -> Result<MpiAddresses, CommError> {
        let communicator = self.mpi.communicator().map_err(unavailable)?;
        let is_fit = |address: &MpiAddress| {
            address.process < self.mpi.size() && address.tag <= communicator.tag_max() - TAGS_PER_ADDRESS
        };
        if let Some(rank) =
            peers.iter().position(|peer| peer.as_ref().is_some_and(|address| !is_fit(address)))
        {
            return Err(unavailable(format!("rank {rank} announced a place that MPI does not have")));
        }
        Ok(MpiAddresses { communicator, own, peers })
    }
}

impl MpiAddresses {
    /// The route between this rank and a peer.
    ///
    /// # Panics
    /// If `peer` is this rank, or `purpose` is `Control`.
    fn route(&self, peer: Rank, purpose: Purpose) -> Route {
        let offset = match purpose {
            Purpose::Collectives => 0,
            Purpose::Messages => 1,
            Purpose::Control => unreachable!("notices go over sockets"),
        };
        let address = self.peers[peer.0].expect("no algorithm sends to oneself");
        Route {
            communicator: self.communicator,
            peer: address.process,
            outgoing_tag: address.tag + offset,
            incoming_tag: self.own.tag + offset,
        }
    }
}

fn unavailable(reason: String) -> CommError {
    CommError::MpiUnavailable { reason }
}
