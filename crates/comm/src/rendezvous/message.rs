//! What rank 0 and the others tell each other after the hello: a header of three words (magic, kind, length
//! of the body), then the body.

use super::hello::Place;
use super::wire::{invalid, ip_to_words, receive_exact, send_all, words_to_ip};
use crate::words;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::Instant;

const MAGIC: u64 = u64::from_le_bytes(*b"TRIRMSG1");
const HEADER_BYTES: usize = 24;
const PLACE_BYTES: usize = 48;
/// Longer texts are cut.
const TEXT_BYTES_MAX: usize = 4096;

/// Who is where, and how they shall connect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Table {
    /// Random number of this world, by which its members know each other's connections.
    pub(super) session: u64,
    /// Whether to try shared memory first.
    pub(super) tries_shm: bool,
    /// One place per rank.
    pub(super) places: Vec<Place>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Message {
    /// Rank 0 ends the rendezvous for the receiver.
    TurnedAway(String),
    Table(Table),
    /// A phase succeeded, or why not.
    Report(Result<(), String>),
}

impl Message {
    pub(super) fn send(&self, socket: impl AsFd, deadline: Instant) -> io::Result<()> {
        let (kind, body) = match self {
            Message::TurnedAway(reason) => (1, text_body(reason)),
            Message::Table(table) => (2, table.encode()),
            Message::Report(Ok(())) => (3, Vec::new()),
            Message::Report(Err(reason)) => (4, text_body(reason)),
        };
        let header: [u8; HEADER_BYTES] = words::to_bytes([MAGIC, kind, body.len() as u64]);
        send_all(&socket, &header, deadline)?;
        send_all(&socket, &body, deadline)
    }

    /// Receives a message in a world of `world_size`, which bounds its length.
    pub(super) fn receive(socket: impl AsFd, world_size: usize, deadline: Instant) -> io::Result<Self> {
        let mut header = [0; HEADER_BYTES];
        receive_exact(&socket, &mut header, deadline)?;
        let [magic, kind, length] = words::from_bytes(&header);
        let table_bytes = 16 + PLACE_BYTES * world_size;
        if magic != MAGIC || length > TEXT_BYTES_MAX.max(table_bytes) as u64 {
            return Err(invalid("what answers there does not speak this program's rendezvous protocol"));
        }
        let mut body = vec![0; length as usize];
        receive_exact(&socket, &mut body, deadline)?;
        let text = || String::from_utf8_lossy(&body).into_owned();
        match kind {
            1 => Ok(Message::TurnedAway(text())),
            2 if body.len() == table_bytes => Table::decode(&body).map(Message::Table),
            3 if body.is_empty() => Ok(Message::Report(Ok(()))),
            4 => Ok(Message::Report(Err(text()))),
            _ => Err(invalid(format!("a rendezvous message of kind {kind} and {length} bytes"))),
        }
    }
}

fn text_body(text: &str) -> Vec<u8> {
    text.as_bytes()[..text.len().min(TEXT_BYTES_MAX)].to_vec()
}

impl Table {
    fn encode(&self) -> Vec<u8> {
        let mut body = words::to_bytes::<2, 16>([self.session, u64::from(self.tries_shm)]).to_vec();
        for place in &self.places {
            let [ip_high, ip_low] = ip_to_words(place.address.ip());
            let port = u64::from(place.address.port());
            let host = [(place.host >> 64) as u64, place.host as u64];
            let words = [host[0], host[1], place.meeting, ip_high, ip_low, port];
            body.extend(words::to_bytes::<6, PLACE_BYTES>(words));
        }
        body
    }

    fn decode(body: &[u8]) -> io::Result<Self> {
        let (head, rest) = body.split_first_chunk::<16>().ok_or_else(|| invalid("a table without a head"))?;
        let [session, tries_shm] = words::from_bytes(head);
        let mut places = Vec::with_capacity(rest.len() / PLACE_BYTES);
        let (chunks, []) = rest.as_chunks::<PLACE_BYTES>() else {
            return Err(invalid("a table with a part of a place"));
        };
        for chunk in chunks {
            let [host_high, host_low, meeting, ip_high, ip_low, port] = words::from_bytes(chunk);
            let port = u16::try_from(port).map_err(|_| invalid("a table with a port that is none"))?;
            let address = SocketAddr::new(words_to_ip([ip_high, ip_low]), port);
            places.push(Place { host: u128::from(host_high) << 64 | u128::from(host_low), meeting, address });
        }
        Ok(Table { session, tries_shm: tries_shm == 1, places })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    #[test]
    fn messages_arrive_as_they_were_sent() {
        let place = |meeting| Place {
            host: u128::MAX - 1,
            meeting,
            address: "[2001:db8::1]:4000".parse().expect("an address"),
        };
        let table = Table { session: 77, tries_shm: true, places: vec![place(1), place(2)] };
        let long = "é".repeat(TEXT_BYTES_MAX);
        let messages = [
            Message::TurnedAway("because".to_owned()),
            Message::Table(table),
            Message::Report(Ok(())),
            Message::Report(Err("no".to_owned())),
        ];
        let (one, other) = UnixStream::pair().expect("sockets");
        for message in &messages {
            message.send(&one, soon()).expect("sent");
            assert_eq!(Message::receive(&other, 2, soon()).expect("received"), *message);
        }
        Message::TurnedAway(long).send(&one, soon()).expect("sent");
        let Message::TurnedAway(cut) = Message::receive(&other, 2, soon()).expect("received") else {
            panic!("another message");
        };
        assert_eq!(cut.len(), TEXT_BYTES_MAX);
    }

    #[test]
    fn a_huge_length_is_refused_before_anything_is_allocated() {
        let (mut one, other) = UnixStream::pair().expect("sockets");
        let header: [u8; HEADER_BYTES] = words::to_bytes([MAGIC, 4, u64::MAX]);
        one.write_all(&header).expect("sent");
        let refused = Message::receive(&other, 2, soon()).expect_err("refused");
        assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn another_protocol_is_refused() {
        let (mut one, other) = UnixStream::pair().expect("sockets");
        one.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").expect("sent");
        let refused = Message::receive(&other, 2, soon()).expect_err("refused");
        assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
    }
}
