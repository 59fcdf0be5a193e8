//! Splits a group into subgroups.

use super::{Dry, Group};
use crate::{CommError, GroupOptions, TransportKind, rendezvous};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use trireme_base::Rank;
use trireme_schedule::collective::Hosts;

impl Group {
    /// Splits the group: ranks that pass the same `color` form one new group, ordered by `key` and then by their rank here. Ranks that pass
    /// no color get `None`. All ranks call it at the same place in their sequence of operations. Each group has its own communication
    /// thread, so operations of several groups run concurrently.
    ///
    /// The groups share memory, so each may use the others' buffers. Reports name a group by the number of the split and the color, such as
    /// `world/0.1`.
    ///
    /// # Errors
    /// [`CommError::Split`] on all ranks if one of them cannot connect, and any failure that ends a group.
    pub fn split(&self, color: Option<u64>, key: u64) -> Result<Option<Group>, CommError> {
        let name = format!("{}.{}", self.num_splits.load(Ordering::Relaxed), color.unwrap_or(0));
        self.split_named(&name, color, key, &self.options)
    }

    /// Like [`split`](Group::split), with the colors given by a function that is the same on all ranks. Ranks keep their order, and the
    /// groups are called `name`.
    ///
    /// # Errors
    /// As [`split`](Group::split).
    pub fn split_by(&self, name: &str, color: impl Fn(Rank) -> u64) -> Result<Group, CommError> {
        self.split_with(name, color, &self.options)
    }

    /// Like [`split_by`](Group::split_by), into groups that always [keep the canonical order](GroupOptions::keeps_order).
    ///
    /// # Errors
    /// As [`split`](Group::split).
    pub fn split_keeping_order(&self, name: &str, color: impl Fn(Rank) -> u64) -> Result<Group, CommError> {
        self.split_with(name, color, &GroupOptions { keeps_order: true, ..self.options.clone() })
    }

    fn split_with(
        &self,
        name: &str,
        color: impl Fn(Rank) -> u64,
        options: &GroupOptions,
    ) -> Result<Group, CommError> {
        if self.is_dry() {
            return Ok(self.dry_split(color, options));
        }
        let group = self.split_named(name, Some(color(self.rank)), self.rank.0 as u64, options)?;
        Ok(group.expect("a rank that gives a color gets a group"))
    }

    fn split_named(
        &self,
        name: &str,
        color: Option<u64>,
        key: u64,
        options: &GroupOptions,
    ) -> Result<Option<Group>, CommError> {
        assert!(!self.is_dry(), "a dry group splits by a function that tells the colors of all ranks");
        self.num_splits.fetch_add(1, Ordering::Relaxed);
        match (&self.executor, color) {
            (Some(executor), _) => {
                let name = format!("{}/{name}", executor.recorder.name());
                rendezvous::split(self, name, color, key, options)
            }
            (None, Some(_)) => Ok(Some(self.singleton_with(options))),
            (None, None) => Ok(None),
        }
    }

    /// The dry group of all ranks with this rank's color.
    fn dry_split(&self, color: impl Fn(Rank) -> u64, options: &GroupOptions) -> Group {
        let own = color(self.rank);
        let members: Vec<Rank> = (0..self.world_size).map(Rank).filter(|&rank| color(rank) == own).collect();
        let place = members.iter().position(|&rank| rank == self.rank).expect("it has its own color");
        let hosts: Vec<usize> = members.iter().map(|&rank| self.hosts.host_of(rank)).collect();
        let hosts = Hosts::new(&hosts);
        let transport = match self.transport {
            TransportKind::Shm | TransportKind::ShmAndTcp if hosts.num_hosts() == 1 => TransportKind::Shm,
            TransportKind::Shm | TransportKind::ShmAndTcp => TransportKind::ShmAndTcp,
            transport => transport,
        };
        let dry = self.dry.as_ref().expect("a dry group splits into dry groups");
        let members = members.iter().map(|rank| dry.members[rank.0]).collect();
        let dry = Dry { journal: Arc::clone(&dry.journal), members };
        let group = self.singleton_with(options).into_dry(Rank(place), hosts, transport, dry);
        Group { devices: self.devices.for_split_group(), ..group }
    }
}
