//! Messages after an introduction: a header of three words (magic, kind, length of the body), followed by the body.

use super::key::{NONCE_BYTES, Nonce, Tag};
use super::rank_address::{RANK_ADDRESS_WORDS, RankAddress};
use super::socket_io::{invalid, receive_exact};
use super::wait_limit::WaitLimit;
use crate::words;
use std::io;
use std::os::fd::AsFd;

const MAGIC: u64 = u64::from_le_bytes(*b"TRIRMSG2");
pub(super) const HEADER_BYTES: usize = 24;
/// Message kind of a report that a phase failed.
const FAILURE: u64 = 4;
const RANK_ADDRESS_BYTES: usize = 8 * RANK_ADDRESS_WORDS;
const TABLE_HEAD_BYTES: usize = NONCE_BYTES + 8;
/// Maximum length of a text. Longer texts are truncated.
pub(super) const TEXT_BYTES_MAX: usize = 4096;

/// The addresses of all ranks, and how the ranks must connect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Table {
    /// Nonce of this world, from which its members derive the key of their connections.
    pub(super) session: Nonce,
    /// Whether to try shared memory first.
    pub(super) tries_shm: bool,
    pub(super) rank_addresses: Vec<RankAddress>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Message {
    /// The receiver is refused, with the reason.
    Refused(String),
    Table(Table),
    /// The result of a phase: success or the reason of a failure.
    Report(Result<(), String>),
    /// The receiver must prove that it has the key.
    Challenge(Nonce),
    /// The sender's proof that it has the key.
    Welcome(Tag),
}

impl Message {
    pub(super) fn encode(&self) -> Vec<u8> {
        let (kind, body) = match self {
            Message::Refused(reason) => (1, text_body(reason)),
            Message::Table(table) => (2, table.encode()),
            Message::Report(Ok(())) => (3, Vec::new()),
            Message::Report(Err(reason)) => (FAILURE, text_body(reason)),
            Message::Challenge(challenge) => (5, challenge.to_vec()),
            Message::Welcome(proof) => (6, proof.to_vec()),
        };
        let mut bytes = words::to_bytes::<3, HEADER_BYTES>([MAGIC, kind, body.len() as u64]).to_vec();
        bytes.extend(body);
        bytes
    }

    /// Decodes a complete message. A table must have the addresses of `world_size` ranks.
    pub(super) fn decode(bytes: &[u8], world_size: usize) -> io::Result<Self> {
        let (header, body) =
            bytes.split_first_chunk().ok_or_else(|| invalid("a message without a header"))?;
        if body.len() != body_bytes(header, world_size)? {
            return Err(invalid("a message whose length differs from its header"));
        }
        let [_, kind, length] = words::from_bytes(header);
        let wrong = || invalid(format!("a rendezvous message of kind {kind} with {length} bytes"));
        match kind {
            1 => Ok(Message::Refused(text(body))),
            2 if body.len() == table_bytes(world_size) => {
                Table::decode(body).map(Message::Table).ok_or_else(wrong)
            }
            3 if body.is_empty() => Ok(Message::Report(Ok(()))),
            FAILURE => Ok(Message::Report(Err(text(body)))),
            5 => body.try_into().map(Message::Challenge).map_err(|_| wrong()),
            6 => body.try_into().map(Message::Welcome).map_err(|_| wrong()),
            _ => Err(wrong()),
        }
    }

    pub(super) fn is_failure(header: &[u8; HEADER_BYTES]) -> bool {
        let [_, kind, _] = words::from_bytes(header);
        kind == FAILURE
    }

    /// Receives a message other than a table.
    pub(super) fn receive<'a>(socket: impl AsFd, limit: impl Into<WaitLimit<'a>>) -> io::Result<Self> {
        Message::decode(&receive_bytes(socket, 0, limit)?, 0)
    }
}

/// Receives the bytes of a message. `world_size` bounds their number.
pub(super) fn receive_bytes<'a>(
    socket: impl AsFd,
    world_size: usize,
    limit: impl Into<WaitLimit<'a>>,
) -> io::Result<Vec<u8>> {
    let limit = limit.into();
    let mut header = [0; HEADER_BYTES];
    receive_exact(&socket, &mut header, limit)?;
    let mut bytes = vec![0; HEADER_BYTES + body_bytes(&header, world_size)?];
    let (start, body) = bytes.split_at_mut(HEADER_BYTES);
    start.copy_from_slice(&header);
    receive_exact(&socket, body, limit)?;
    Ok(bytes)
}

/// The length of the body after a header. An error if it is out of bounds.
pub(super) fn body_bytes(header: &[u8; HEADER_BYTES], world_size: usize) -> io::Result<usize> {
    let [magic, _, length] = words::from_bytes(header);
    if magic != MAGIC || length > TEXT_BYTES_MAX.max(table_bytes(world_size)) as u64 {
        return Err(invalid("the other side does not speak this program's rendezvous protocol"));
    }
    Ok(length as usize)
}

fn table_bytes(world_size: usize) -> usize {
    TABLE_HEAD_BYTES + RANK_ADDRESS_BYTES * world_size
}

fn text_body(text: &str) -> Vec<u8> {
    text.as_bytes()[..text.len().min(TEXT_BYTES_MAX)].to_vec()
}

/// The text without control characters, which could manipulate a terminal.
fn text(body: &[u8]) -> String {
    String::from_utf8_lossy(body).chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

impl Table {
    fn encode(&self) -> Vec<u8> {
        let mut body = self.session.to_vec();
        body.extend(u64::from(self.tries_shm).to_le_bytes());
        for place in &self.rank_addresses {
            body.extend(words::to_bytes::<RANK_ADDRESS_WORDS, RANK_ADDRESS_BYTES>(place.to_words()));
        }
        body
    }

    fn decode(body: &[u8]) -> Option<Self> {
        let (session, rest) = body.split_first_chunk()?;
        let (tries_shm, rest) = rest.split_first_chunk()?;
        let (chunks, []) = rest.as_chunks::<RANK_ADDRESS_BYTES>() else { return None };
        let places = chunks.iter().map(|chunk| RankAddress::from_words(words::from_bytes(chunk)));
        let tries_shm = u64::from_le_bytes(*tries_shm) == 1;
        Some(Table { session: *session, tries_shm, rank_addresses: places.collect::<Option<_>>()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::socket_io::send_all;
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::time::{Duration, Instant};

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    fn table() -> Table {
        let place = |socket_id| RankAddress {
            host: u128::MAX - 1,
            socket_id,
            address: "[2001:db8::1]:4000".parse().expect("an address"),
        };
        Table { session: [77; 32], tries_shm: true, rank_addresses: vec![place(1), place(2)] }
    }

    #[test]
    fn messages_read_back() {
        let messages = [
            Message::Refused("because".to_owned()),
            Message::Table(table()),
            Message::Report(Ok(())),
            Message::Report(Err("no".to_owned())),
            Message::Challenge([1; 32]),
            Message::Welcome([2; 32]),
        ];
        for message in &messages {
            assert_eq!(Message::decode(&message.encode(), 2).expect("a message"), *message);
        }
        let refused = Message::decode(&Message::Table(table()).encode(), 3).expect_err("another world's");
        assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn texts_are_truncated_and_have_no_control_characters() {
        let (one, other) = UnixStream::pair().expect("sockets");
        let say = |text: String| {
            send_all(&one, &Message::Refused(text).encode(), soon()).expect("sent");
            match Message::receive(&other, soon()).expect("received") {
                Message::Refused(text) => text,
                message => panic!("{message:?}"),
            }
        };
        assert_eq!(say("é".repeat(TEXT_BYTES_MAX)).len(), TEXT_BYTES_MAX);
        assert_eq!(say("a\x1b[2J\r\nb".to_owned()), "a [2J  b");
    }

    #[test]
    fn a_huge_length_is_refused_before_anything_is_allocated() {
        let (mut one, other) = UnixStream::pair().expect("sockets");
        let header: [u8; HEADER_BYTES] = words::to_bytes([MAGIC, 4, u64::MAX]);
        one.write_all(&header).expect("sent");
        let refused = receive_bytes(&other, 2, soon()).expect_err("refused");
        assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn another_protocol_is_refused() {
        let (mut one, other) = UnixStream::pair().expect("sockets");
        one.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").expect("sent");
        let refused = Message::receive(&other, soon()).expect_err("refused");
        assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
    }
}
