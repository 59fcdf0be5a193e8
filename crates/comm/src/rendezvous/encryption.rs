//! Encrypts a connection between two authenticated members.
//!
//! Both ends have completed the handshake, so strangers never get this far. To exclude a man in the middle that has a certificate of the
//! same authority, each side proves that it knows the handshake's key: it sends a tag of keying material that TLS exports (RFC 5705), which
//! only the two ends of the TLS session can derive.

use super::key::{Key, TAG_BYTES};
use super::socket_io::wait_for;
use super::wait_limit::WaitLimit;
use crate::transport::link::{ConnectionSide, Interest, Tls, TlsLink};
use std::io;
use std::os::fd::OwnedFd;

/// The purpose of the tag that `side` sends.
fn purpose(side: ConnectionSide) -> &'static str {
    match side {
        ConnectionSide::Connecting => "trireme: encryption of the side that connects",
        ConnectionSide::Accepting => "trireme: encryption of the side that accepts",
    }
}

/// Encrypts a connection whose handshake derived `key`.
pub(super) fn encrypt(
    socket: OwnedFd,
    tls: &Tls,
    side: ConnectionSide,
    key: &Key,
    limit: WaitLimit<'_>,
) -> io::Result<TlsLink> {
    let mut link = tls.start(socket, side)?;
    while let Some(interest) = link.continue_handshake()? {
        wait(&link, interest, limit)?;
    }
    let exported = link.export()?;
    send_all(&mut link, &key.tag(purpose(side), &[&exported]), limit)?;
    let mut tag = [0; TAG_BYTES];
    receive_exact(&mut link, &mut tag, limit)?;
    let other = match side {
        ConnectionSide::Connecting => ConnectionSide::Accepting,
        ConnectionSide::Accepting => ConnectionSide::Connecting,
    };
    if key.verify(purpose(other), &[&exported], &tag) {
        return Ok(link);
    }
    Err(io::Error::new(
        io::ErrorKind::PermissionDenied,
        "another process is intercepting the encrypted connection",
    ))
}

fn wait(link: &TlsLink, interest: Interest, limit: WaitLimit<'_>) -> io::Result<()> {
    let (socket, flags) = link.poll(interest);
    wait_for(socket, flags, limit)
}

fn send_all(link: &mut TlsLink, mut bytes: &[u8], limit: WaitLimit<'_>) -> io::Result<()> {
    while !bytes.is_empty() {
        match link.send(bytes, &[])? {
            0 => wait(link, Interest::Send, limit)?,
            num_sent => bytes = &bytes[num_sent..],
        }
    }
    Ok(())
}

fn receive_exact(link: &mut TlsLink, mut bytes: &mut [u8], limit: WaitLimit<'_>) -> io::Result<()> {
    while !bytes.is_empty() {
        match link.receive(bytes)? {
            0 => wait(link, Interest::Receive, limit)?,
            num_read => bytes = &mut bytes[num_read..],
        }
    }
    Ok(())
}

#[cfg(all(test, feature = "tls"))]
mod tests {
    use super::*;
    use crate::TlsOptions;
    use rustix::net::{RecvFlags, recv};
    use std::os::fd::AsFd;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixStream;
    use std::path::Path;
    use std::thread;
    use std::time::{Duration, Instant};

    fn soon() -> WaitLimit<'static> {
        WaitLimit::from(Instant::now() + Duration::from_secs(20))
    }

    /// The TLS configuration of a holder of one of the test certificates.
    fn tls(holder: &str) -> Tls {
        let folder = tempfile::tempdir().expect("a folder");
        let given = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/certificates");
        let key = folder.path().join("key");
        std::fs::copy(given.join(format!("{holder}.key")), &key).expect("a copy");
        std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).expect("an own file");
        let certificate = given.join(format!("{holder}.pem"));
        let authority = given.join("authority.pem");
        Tls::read(&TlsOptions { certificate, key, authority, name: "trireme".to_owned() }).expect("files")
    }

    /// Encrypts both ends, with the certificates of two holders and the keys that their handshakes derived.
    fn ends(holders: [&str; 2], keys: [&Key; 2]) -> [io::Result<TlsLink>; 2] {
        let (one, other) = UnixStream::pair().expect("sockets");
        let [connecting, accepting] = holders.map(tls);
        thread::scope(|scope| {
            let accepting =
                scope.spawn(|| encrypt(other.into(), &accepting, ConnectionSide::Accepting, keys[1], soon()));
            let connecting = encrypt(one.into(), &connecting, ConnectionSide::Connecting, keys[0], soon());
            [connecting, accepting.join().expect("no panic")]
        })
    }

    fn keys() -> [Key; 2] {
        ["one", "other"].map(|name| Key::of(None).derive(name, &[]))
    }

    #[test]
    fn bytes_arrive_both_ways_encrypted() {
        let [key, _] = keys();
        let [one, other] = ends(["worker"; 2], [&key; 2]).map(|end| end.expect("encrypted"));
        let sent: Vec<u8> = (0..1_000_000_u32).map(|i| (i % 251) as u8).collect();
        thread::scope(|scope| {
            let each = [one, other].map(|mut end| {
                let sent = &sent;
                scope.spawn(move || {
                    let (mut num_sent, mut received) = (0, vec![0; sent.len()]);
                    let mut num_received = 0;
                    while num_sent < sent.len() || num_received < sent.len() {
                        let (header, payload) = sent[num_sent..].split_at(40.min(sent.len() - num_sent));
                        let sending = end.send(header, payload).expect("sent");
                        num_sent += sending;
                        let receiving = if num_received < sent.len() {
                            end.receive(&mut received[num_received..]).expect("received")
                        } else {
                            0
                        };
                        num_received += receiving;
                        if sending + receiving == 0 {
                            thread::yield_now();
                        }
                    }
                    (end, received)
                })
            });
            let [(mut one, first), (other, second)] = each.map(|end| end.join().expect("no panic"));
            assert!(first == sent && second == sent);
            assert_eq!(one.send(&[b'x'; 100], &[b'x'; 100]).expect("sent"), 200);
            let mut raw = [0; 1000];
            let (_, num_read) =
                recv(other.poll(Interest::Receive).0.as_fd(), &mut raw, RecvFlags::PEEK).expect("a record");
            assert!(num_read > 200 && !raw[..num_read].windows(4).any(|window| window == b"xxxx"));
        });
    }

    #[test]
    fn both_sides_need_a_certificate_of_the_authority_and_the_name() {
        let [key, _] = keys();
        for holders in [["worker", "stranger"], ["stranger", "worker"], ["worker", "elsewhere"]] {
            let [connecting, accepting] = ends(holders, [&key; 2]);
            assert!(connecting.is_err() && accepting.is_err(), "{holders:?}");
        }
    }

    #[test]
    fn a_man_in_the_middle_is_detected() {
        let [one, other] = keys();
        let [connecting, accepting] = ends(["worker"; 2], [&one, &other]);
        for end in [connecting, accepting] {
            let kind = end.err().expect("another key").kind();
            // The side that detects it first closes the connection.
            assert!(matches!(kind, io::ErrorKind::PermissionDenied | io::ErrorKind::UnexpectedEof), "{kind}");
        }
    }
}
