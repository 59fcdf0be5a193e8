//! Mutual authentication of the two ends of a new connection: each proves to the other that it has the same key, without sending it.
//!
//! 1. The connecting side sends an introduction, which says who it is, and a nonce.
//! 2. The accepting side answers with a nonce of its own, the challenge.
//! 3. The connecting side sends its proof: a tag of all bytes exchanged so far, which can be computed only with the key.
//! 4. The accepting side sends a welcome with another such tag, or refuses the connection with a reason.
//!
//! The nonces make every handshake unique, so a recorded proof fits no other handshake. The two proofs have different purposes, so neither
//! can be reflected as the other. (ISO/IEC 9798-4, mutual authentication in three passes, plus one pass in which the connecting side speaks
//! first: strangers get no tag with which to test guesses of the secret.)

use super::key::{Key, NONCE_BYTES, Nonce, TAG_BYTES, Tag, nonce};
use super::message::Message;
use super::socket_io::{invalid, send_all};
use super::wait_limit::WaitLimit;
use std::io;
use std::os::fd::AsFd;

const CONNECTING: &str = "trireme: proof of the side that connects";
const ACCEPTING: &str = "trireme: proof of the side that accepts";
const CONNECTION: &str = "trireme: key of the connection";

/// An introduction of the connecting side: a message of fixed length that starts with a magic word.
pub(super) trait Introduction: Sized {
    /// The first bytes of the message.
    const MAGIC: [u8; 8];
    const BYTES: usize;

    /// Decodes an introduction. `None` if the bytes are not a valid one.
    fn decode(bytes: &[u8]) -> Option<Self>;
}

/// The accepting side's response to a handshake.
pub(super) enum HandshakeOutcome {
    /// Both sides have the same key. Holds the derived key of this connection only.
    Welcome(Key),
    Refused(String),
}

/// Runs the connecting side of a handshake: introduces this process, and verifies that the peer has the key.
pub(super) fn introduce<'a>(
    stream: impl AsFd,
    introduction: &[u8],
    key: &Key,
    limit: impl Into<WaitLimit<'a>>,
) -> io::Result<HandshakeOutcome> {
    let limit = limit.into();
    let opening = [introduction, &nonce()?].concat();
    send_all(&stream, &opening, limit)?;
    let challenge = match Message::receive(&stream, limit)? {
        Message::Challenge(challenge) => challenge,
        Message::Refused(reason) => return Ok(HandshakeOutcome::Refused(reason)),
        _ => return Err(invalid("expected a challenge, but something else came")),
    };
    let transcript: [&[u8]; 2] = [&opening, &challenge];
    send_all(&stream, &proof(key, &opening, &challenge), limit)?;
    match Message::receive(&stream, limit)? {
        Message::Welcome(proof) if key.verify(ACCEPTING, &transcript, &proof) => {
            Ok(HandshakeOutcome::Welcome(key.derive(CONNECTION, &transcript)))
        }
        Message::Refused(reason) => Ok(HandshakeOutcome::Refused(reason)),
        _ => {
            let why = "the other side does not know the secret of this job";
            Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
        }
    }
}

/// The proof by which the connecting side answers a challenge.
pub(super) fn proof(key: &Key, opening: &[u8], challenge: &Nonce) -> Tag {
    key.tag(CONNECTING, &[opening, challenge])
}

/// The accepting side of a handshake, as a state machine that handles one message at a time. Does no I/O, so it can be tested with millions
/// of inputs.
pub(super) struct HandshakeAcceptor<I> {
    key: Key,
    challenge: Nonce,
    /// The connecting side's first message, once it has arrived.
    opened: Option<(I, Vec<u8>)>,
}

/// The result of handling one message.
pub(super) enum HandshakeStep<I> {
    /// Send this message, and handle the next one.
    Answer(Message),
    Authenticated(AuthenticatedPeer<I>),
    Refused(&'static str),
}

/// A peer that has proved that it has the key.
pub(super) struct AuthenticatedPeer<I> {
    pub(super) introduction: I,
    pub(super) welcome: Tag,
    /// The key of this connection only.
    pub(super) key: Key,
}

const NO_MEMBER: &str = "it does not know the secret of this job, which all workers need";
const NO_PROTOCOL: &str = "it does not speak this version of the rendezvous protocol";

impl<I: Introduction> HandshakeAcceptor<I> {
    pub(super) fn new(key: Key, challenge: Nonce) -> Self {
        HandshakeAcceptor { key, challenge, opened: None }
    }

    pub(super) fn message_bytes(&self) -> usize {
        match self.opened {
            None => I::BYTES + NONCE_BYTES,
            Some(_) => TAG_BYTES,
        }
    }

    /// Fails if no valid message starts with these bytes, so that the rest need not be awaited.
    pub(super) fn check_prefix(&self, bytes: &[u8]) -> Result<(), &'static str> {
        let num_bytes = bytes.len().min(I::MAGIC.len());
        let is_possible = self.opened.is_some() || bytes[..num_bytes] == I::MAGIC[..num_bytes];
        if is_possible { Ok(()) } else { Err(NO_PROTOCOL) }
    }

    /// Handles a message of [`message_bytes`](Self::message_bytes) bytes. `Authenticated` and `Refused` end the handshake.
    pub(super) fn handle(&mut self, message: &[u8]) -> HandshakeStep<I> {
        let Some((introduction, opening)) = self.opened.take() else {
            let introduction = message.get(..I::BYTES).and_then(I::decode);
            let Some(introduction) = introduction.filter(|_| message.len() == self.message_bytes()) else {
                return HandshakeStep::Refused(NO_PROTOCOL);
            };
            self.opened = Some((introduction, message.to_vec()));
            return HandshakeStep::Answer(Message::Challenge(self.challenge));
        };
        let transcript: [&[u8]; 2] = [&opening, &self.challenge];
        match message.try_into() {
            Ok(proof) if self.key.verify(CONNECTING, &transcript, proof) => {
                HandshakeStep::Authenticated(AuthenticatedPeer {
                    introduction,
                    welcome: self.key.tag(ACCEPTING, &transcript),
                    key: self.key.derive(CONNECTION, &transcript),
                })
            }
            _ => HandshakeStep::Refused(NO_MEMBER),
        }
    }
}
