//! How the two ends of a new connection convince each other that they have the same key, which does not travel.
//!
//! 1. The side that connects sends an introduction, which says who it is, and a random number.
//! 2. The side that accepts answers with a random number of its own, the challenge.
//! 3. The side that connects sends its proof: a tag of all that was said, which only the key can make.
//! 4. The side that accepts welcomes it with another such tag, or turns it away and says why.
//!
//! The random numbers make every handshake another one, so that a recorded proof fits no other; the two proofs have
//! different purposes, so that neither can be sent back as the other. (ISO/IEC 9798-4, mutual authentication in three
//! passes, with one more in which the challenged side speaks first: strangers get no tag to try guesses on.)

use super::key::{Key, NONCE_BYTES, Nonce, TAG_BYTES, Tag, nonce};
use super::message::Message;
use super::wait_limit::WaitLimit;
use super::wire::{invalid, send_all};
use std::io;
use std::os::fd::AsFd;

const CONNECTING: &str = "trireme: proof of the side that connects";
const ACCEPTING: &str = "trireme: proof of the side that accepts";
const CONNECTION: &str = "trireme: key of the connection";

/// Who connects, in a message of fixed length that begins with a magic word.
pub(super) trait Introduction: Sized {
    /// How the message begins.
    const MAGIC: [u8; 8];
    const BYTES: usize;

    /// Reads an introduction; `None` if the bytes are none.
    fn decode(bytes: &[u8]) -> Option<Self>;
}

/// How the side that accepts has received the one that connects.
pub(super) enum Reception {
    /// Both have the same key, and now also one for this connection alone.
    Welcome(Key),
    TurnedAway(String),
}

/// Connects: introduces this process and makes sure that the other one has the key.
pub(super) fn introduce<'a>(
    stream: impl AsFd,
    introduction: &[u8],
    key: &Key,
    limit: impl Into<WaitLimit<'a>>,
) -> io::Result<Reception> {
    let limit = limit.into();
    let opening = [introduction, &nonce()?].concat();
    send_all(&stream, &opening, limit)?;
    let challenge = match Message::receive(&stream, limit)? {
        Message::Challenge(challenge) => challenge,
        Message::TurnedAway(reason) => return Ok(Reception::TurnedAway(reason)),
        _ => return Err(invalid("expected a challenge, but something else came")),
    };
    let said: [&[u8]; 2] = [&opening, &challenge];
    send_all(&stream, &proof(key, &opening, &challenge), limit)?;
    match Message::receive(&stream, limit)? {
        Message::Welcome(proof) if key.verify(ACCEPTING, &said, &proof) => {
            Ok(Reception::Welcome(key.derive(CONNECTION, &said)))
        }
        Message::TurnedAway(reason) => Ok(Reception::TurnedAway(reason)),
        _ => {
            let why = "the other side does not know the secret of this job";
            Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
        }
    }
}

/// What the side that connects answers to a challenge.
pub(super) fn proof(key: &Key, opening: &[u8], challenge: &Nonce) -> Tag {
    key.tag(CONNECTING, &[opening, challenge])
}

/// Accepts: hears one turn of the other side after the other. It reads no sockets, so that it can be tested by the million.
pub(super) struct Examination<I> {
    key: Key,
    challenge: Nonce,
    /// The first turn, once it has been heard.
    opened: Option<(I, Vec<u8>)>,
}

/// What follows from a turn of the other side.
pub(super) enum Finding<I> {
    /// It shall be answered and heard again.
    Answer(Message),
    Member(Member<I>),
    Refused(&'static str),
}

/// Somebody who has proved to have the key.
pub(super) struct Member<I> {
    pub(super) introduction: I,
    pub(super) welcome: Tag,
    /// The key for this connection alone.
    pub(super) key: Key,
}

const NO_MEMBER: &str = "it does not know the secret of this job, which all workers need";
const NO_PROTOCOL: &str = "it does not speak this version of the rendezvous protocol";

impl<I: Introduction> Examination<I> {
    pub(super) fn new(key: Key, challenge: Nonce) -> Self {
        Examination { key, challenge, opened: None }
    }

    pub(super) fn turn_bytes(&self) -> usize {
        match self.opened {
            None => I::BYTES + NONCE_BYTES,
            Some(_) => TAG_BYTES,
        }
    }

    /// Whether a turn can begin with these bytes; if not, nobody needs to wait for the rest.
    pub(super) fn can_begin(&self, bytes: &[u8]) -> Result<(), &'static str> {
        let num_bytes = bytes.len().min(I::MAGIC.len());
        let is_possible = self.opened.is_some() || bytes[..num_bytes] == I::MAGIC[..num_bytes];
        if is_possible { Ok(()) } else { Err(NO_PROTOCOL) }
    }

    /// Hears a turn of [`turn_bytes`](Self::turn_bytes) bytes. After a member or a refusal the examination is over.
    pub(super) fn hear(&mut self, turn: &[u8]) -> Finding<I> {
        let Some((introduction, opening)) = self.opened.take() else {
            let introduction = turn.get(..I::BYTES).and_then(I::decode);
            let Some(introduction) = introduction.filter(|_| turn.len() == self.turn_bytes()) else {
                return Finding::Refused(NO_PROTOCOL);
            };
            self.opened = Some((introduction, turn.to_vec()));
            return Finding::Answer(Message::Challenge(self.challenge));
        };
        let said: [&[u8]; 2] = [&opening, &self.challenge];
        match turn.try_into() {
            Ok(proof) if self.key.verify(CONNECTING, &said, proof) => Finding::Member(Member {
                introduction,
                welcome: self.key.tag(ACCEPTING, &said),
                key: self.key.derive(CONNECTION, &said),
            }),
            _ => Finding::Refused(NO_MEMBER),
        }
    }
}
