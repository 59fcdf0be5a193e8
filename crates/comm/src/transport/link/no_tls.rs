//! Replaces `tls` in a program built without TLS. The types have no values.

use super::{ConnectionSide, Interest};
use crate::{CommError, TlsOptions};
use rustix::event::PollFlags;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

#[derive(Clone)]
pub(crate) enum Tls {}

pub(crate) enum TlsLink {}

impl Tls {
    pub(crate) fn read(_: &TlsOptions) -> Result<Self, CommError> {
        Err(CommError::TlsUnavailable)
    }

    pub(crate) fn start(&self, _: OwnedFd, _: ConnectionSide) -> io::Result<TlsLink> {
        match *self {}
    }
}

impl TlsLink {
    pub(crate) fn continue_handshake(&mut self) -> io::Result<Option<Interest>> {
        match *self {}
    }

    pub(crate) fn export(&self) -> io::Result<[u8; 32]> {
        match *self {}
    }

    pub(crate) fn send(&mut self, _: &[u8], _: &[u8]) -> io::Result<usize> {
        match *self {}
    }

    pub(crate) fn receive(&mut self, _: &mut [u8]) -> io::Result<usize> {
        match *self {}
    }

    pub(crate) fn poll(&self, _: Interest) -> (BorrowedFd<'_>, PollFlags) {
        match *self {}
    }
}
