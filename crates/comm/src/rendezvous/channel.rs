use super::key::{Key, TAG_BYTES};
use super::message::{HEADER_BYTES, Message, receive_bytes};
use super::socket_io::{receive_exact, send_all};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use std::io;
use std::net::TcpStream;
use std::time::Instant;

/// A connection between rank 0 and another rank after their handshake. Each message is followed by an authentication tag of its bytes,
/// number and direction, so that no third party can change, repeat, omit or reflect a message.
pub(super) struct Channel {
    pub(super) stream: TcpStream,
    key: Key,
    /// Purposes of the tags on messages that this end sends, and on messages that it receives.
    purposes: &'static [&'static str; 2],
    num_sent: u64,
    num_received: u64,
}

/// The purposes of the tags on messages.
const FROM_ROOT: &str = "trireme: message from rank 0";
const TO_ROOT: &str = "trireme: message to rank 0";

impl Channel {
    /// Rank 0's end of a connection whose handshake derived `key`.
    pub(super) fn at_root(stream: TcpStream, key: Key) -> Self {
        Channel { stream, key, purposes: &[FROM_ROOT, TO_ROOT], num_sent: 0, num_received: 0 }
    }

    /// Another rank's end of a connection whose handshake derived `key`.
    pub(super) fn to_root(stream: TcpStream, key: Key) -> Self {
        Channel { stream, key, purposes: &[TO_ROOT, FROM_ROOT], num_sent: 0, num_received: 0 }
    }

    pub(super) fn send(&mut self, message: &Message, deadline: Instant) -> io::Result<()> {
        let mut bytes = message.encode();
        let tag = self.key.tag(self.purposes[0], &[&self.num_sent.to_le_bytes(), &bytes]);
        bytes.extend(tag);
        self.num_sent += 1;
        send_all(&self.stream, &bytes, deadline)
    }

    /// Receives a message. `world_size` bounds its length.
    pub(super) fn receive(&mut self, world_size: usize, deadline: Instant) -> io::Result<Message> {
        let bytes = receive_bytes(&self.stream, world_size, deadline)?;
        let mut tag = [0; TAG_BYTES];
        receive_exact(&self.stream, &mut tag, deadline)?;
        let parts: [&[u8]; 2] = [&self.num_received.to_le_bytes(), &bytes];
        if !self.key.verify(self.purposes[1], &parts, &tag) {
            let why = "a message was altered on the way";
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        self.num_received += 1;
        Message::decode(&bytes, world_size)
    }

    /// Whether a message has arrived or the connection has ended. A caller that expects no message takes either for a disconnection.
    pub(super) fn is_readable(&self) -> bool {
        let peeked = recv(&self.stream, &mut [0], RecvFlags::DONTWAIT | RecvFlags::PEEK);
        !matches!(peeked, Err(Errno::AGAIN | Errno::INTR))
    }

    /// Whether the peer has closed the connection, or its next message reports a failure.
    pub(super) fn has_failure_next(&self) -> bool {
        let mut header = [0; HEADER_BYTES];
        match recv(&self.stream, &mut header, RecvFlags::DONTWAIT | RecvFlags::PEEK) {
            Ok((_, HEADER_BYTES)) => Message::is_failure(&header),
            Ok((_, num_read)) => num_read == 0,
            Err(error) => !matches!(error, Errno::AGAIN | Errno::INTR),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::time::Duration;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    fn streams() -> [TcpStream; 2] {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let one = TcpStream::connect(listener.local_addr().expect("an address")).expect("connected");
        [one, listener.accept().expect("a connection").0]
    }

    /// The bytes of a message that `end` sends as number `index`.
    fn sealed(message: &Message, end: fn(TcpStream, Key) -> Channel, index: u64) -> Vec<u8> {
        let [one, mut other] = streams();
        let mut channel = end(one, Key::of(None));
        channel.num_sent = index;
        channel.send(message, soon()).expect("sent");
        drop(channel);
        let mut bytes = Vec::new();
        other.read_to_end(&mut bytes).expect("received");
        bytes
    }

    fn is_accepted(wire: &[u8]) -> bool {
        let [mut one, other] = streams();
        one.write_all(wire).expect("sent");
        match Channel::at_root(other, Key::of(None)).receive(4, soon()) {
            Ok(_) => true,
            Err(error) => {
                let kinds = [io::ErrorKind::PermissionDenied, io::ErrorKind::InvalidData];
                assert!(kinds.contains(&error.kind()), "{error}");
                false
            }
        }
    }

    #[test]
    fn messages_arrive_in_order_and_from_the_other_end_only() {
        let message = Message::Report(Err("why".to_owned()));
        let wire = sealed(&message, Channel::to_root, 0);
        assert!(is_accepted(&wire));
        assert!(!is_accepted(&sealed(&message, Channel::to_root, 1)), "one was left out");
        assert!(!is_accepted(&sealed(&message, Channel::at_root, 0)), "an own message came back");
        let [mut one, other] = streams();
        one.write_all(&[wire.clone(), wire].concat()).expect("sent");
        let mut channel = Channel::at_root(other, Key::of(None));
        assert_eq!(channel.receive(4, soon()).expect("the first"), message);
        assert!(channel.receive(4, soon()).is_err(), "the same again");
    }

    #[test]
    fn no_bit_can_be_changed() {
        let wire = sealed(&Message::Report(Err("why".to_owned())), Channel::to_root, 0);
        // Bits of the length are not flipped: the receiver would wait for a longer message.
        for bit in (0..8 * 16).chain(8 * 24..8 * wire.len()) {
            let mut changed = wire.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(!is_accepted(&changed), "{bit}");
        }
    }
}
