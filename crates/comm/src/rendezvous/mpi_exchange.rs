//! Exchanges the ranks' addresses in MPI's world over their control connections.

use super::socket_io::{receive_exact, send_all};
use super::wait_limit::WaitLimit;
use crate::transport::Purpose;
use crate::transport::link::Connection;
use crate::transport::mpi::{MpiAddress, MpiAddresses, MpiProcess};
use crate::{CommError, words};
use std::io;

const ADDRESS_BYTES: usize = 16;

/// Reserves an address in MPI for this rank, and receives the addresses of its peers. `rows` are the group's connections.
pub(super) fn exchange(
    rows: &[Vec<Option<Connection>>; 3],
    limit: WaitLimit<'_>,
) -> Result<MpiAddresses, CommError> {
    let process = MpiProcess::of_this_process()?;
    let own = process.reserve_address()?;
    let connections = &rows[Purpose::Control as usize];
    let exchanging = |source| CommError::rendezvous("announcing this rank's place in MPI's world", source);
    let peers = exchange_addresses(own, connections, limit).map_err(exchanging)?;
    process.addresses(own, peers)
}

fn exchange_addresses(
    own: MpiAddress,
    connections: &[Option<Connection>],
    limit: WaitLimit<'_>,
) -> io::Result<Vec<Option<MpiAddress>>> {
    let bytes: [u8; ADDRESS_BYTES] = words::to_bytes([u64::from(own.process), u64::from(own.tag)]);
    for connection in connections.iter().flatten() {
        send_all(connection.socket(), &bytes, limit)?;
    }
    let receive = |connection: &Connection| {
        let mut bytes = [0; ADDRESS_BYTES];
        receive_exact(connection.socket(), &mut bytes, limit)?;
        let [process, tag] = words::from_bytes(&bytes).map(u32::try_from);
        match (process, tag) {
            (Ok(process), Ok(tag)) => Ok(MpiAddress { process, tag }),
            _ => Err(super::socket_io::invalid("no place in MPI's world")),
        }
    };
    connections.iter().map(|connection| connection.as_ref().map(receive).transpose()).collect()
}
