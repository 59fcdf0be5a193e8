//! Relays that delay, lose, hold, cut and corrupt.

use crate::support::{connect, eventually, exchange, network, transfer};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;
use trireme_testkit::network::Network;
use trireme_testkit::or_skip;
use trireme_testkit::relay::{Conditions, Direction, FrameLoss, FrameRelay, TcpRelay};

/// Returns a network that can have relays, or skips the test.
fn network_with_relays() -> Option<Network> {
    or_skip("relays", FrameRelay::available())?;
    network()
}

fn counting_bytes(num_bytes: usize) -> Vec<u8> {
    (0..num_bytes).map(|index| index as u8).collect()
}

#[test]
fn loss_is_a_fraction_that_the_seed_decides() {
    let losses = |loss: FrameLoss, towards| {
        (0..10_000).map(move |index| loss.loses(towards, index)).collect::<Vec<_>>()
    };
    let loss = FrameLoss { fraction: 0.25, seed: 7 };
    let near = losses(loss, Direction::Near);
    let num_lost = near.iter().filter(|&&is_lost| is_lost).count();
    // Six standard deviations of 43.
    assert!(num_lost.abs_diff(2500) < 260, "{num_lost}");
    assert_eq!(near, losses(loss, Direction::Near));
    assert_ne!(near, losses(loss, Direction::Far));
    assert_ne!(near, losses(FrameLoss { seed: 8, ..loss }, Direction::Near));
    for (fraction, all) in [(0.0, false), (1.0, true)] {
        assert_eq!(losses(FrameLoss { fraction, ..loss }, Direction::Far), vec![all; 10_000]);
    }
}

#[test]
fn tcp_delivers_through_a_relay_that_loses_frames() {
    let Some(network) = network_with_relays() else { return };
    let loss = FrameLoss { fraction: 0.05, seed: 3 };
    let conditions = Conditions { delay: Duration::from_micros(200), bits_per_second: Some(200_000_000) };
    let near = network.add_host();
    let (far, relay) = network.add_host_with_relay(conditions, loss);
    for address in [IpAddr::from(far.ipv4()), far.ipv6().into()] {
        assert_eq!(transfer(&near, &far, address, 150_000), counting_bytes(150_000));
    }
    assert_eq!(transfer(&far, &near, near.ipv4().into(), 150_000), counting_bytes(150_000));
    for towards in [Direction::Near, Direction::Far] {
        let counted = relay.counts(towards);
        let expected = (0..counted.num_sent).filter(|&index| loss.loses(towards, index)).count() as u64;
        assert!(expected > 0 && counted.num_lost == expected, "{expected} of {counted:?}");
        assert_eq!(counted.num_overflowed, 0);
    }
    let is_rest_delivered = || {
        let counted = relay.counts(Direction::Near);
        far.link().traffic().received.num_packets == counted.num_sent - counted.num_lost
    };
    assert!(eventually(is_rest_delivered));
}

#[test]
fn a_relay_that_pauses_holds_what_is_sent() {
    let Some(network) = network_with_relays() else { return };
    let near = network.add_host();
    let (far, relay) = network.add_host_with_relay(Conditions::default(), FrameLoss::default());
    let address = SocketAddr::from((far.ipv4(), 4000));
    let listener = far.enter(|| TcpListener::bind(address)).unwrap();
    let mut stream = near.enter(|| TcpStream::connect(address)).unwrap();
    let (mut accepted, _) = listener.accept().unwrap();
    relay.pause();
    let before = near.link().traffic().sent;
    stream.write_all(b"hello").unwrap();
    assert!(eventually(|| near.link().traffic().sent.bytes >= before.bytes + 71));
    accepted.set_nonblocking(true).unwrap();
    assert_eq!(accepted.read(&mut [0; 9]).expect_err("nothing came").kind(), ErrorKind::WouldBlock);
    relay.resume();
    accepted.set_nonblocking(false).unwrap();
    accepted.read_exact(&mut [0; 5]).unwrap();
}

#[test]
fn a_relayed_link_can_be_shaped_and_cut_like_any_other() {
    let Some(network) = network_with_relays() else { return };
    let near = network.add_host();
    let (far, _relay) = network.add_host_with_relay(Conditions::default(), FrameLoss::default());
    far.link().shape(100_000_000);
    assert_eq!(transfer(&far, &near, near.ipv4().into(), 100_000), counting_bytes(100_000));
    far.link().unshape();
    far.link().cut();
    let address = SocketAddr::from((far.ipv4(), 4000));
    let _listener = far.enter(|| TcpListener::bind(address)).unwrap();
    let attempt = near.enter(|| TcpStream::connect_timeout(&address, Duration::from_millis(50)));
    assert_eq!(attempt.expect_err("nobody answers").kind(), ErrorKind::TimedOut);
    far.link().restore();
    near.enter(|| TcpStream::connect(address)).unwrap();
}

/// Starts a relay and connects through it. Returns the relay and both ends of the connection.
fn relayed(conditions: Conditions) -> (TcpRelay, TcpStream, TcpStream) {
    let target = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let relay = TcpRelay::start(target.local_addr().unwrap(), conditions);
    let near = connect(relay.address());
    (relay, near, target.accept().unwrap().0)
}

#[test]
fn a_tcp_relay_passes_on_all_bytes_and_both_ends() {
    for conditions in [
        Conditions::default(),
        Conditions { delay: Duration::from_millis(1), bits_per_second: Some(800_000_000) },
    ] {
        let target = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let relay = TcpRelay::start(target.local_addr().unwrap(), conditions);
        for num_bytes in [0, 1, 3_000_000] {
            let stream = connect(relay.address());
            let target = target.try_clone().unwrap();
            assert_eq!(exchange(stream, target, num_bytes), counting_bytes(num_bytes));
        }
    }
}

#[test]
fn a_tcp_relay_that_is_cut_is_silent_and_loses_nothing() {
    let (relay, mut near, mut far) = relayed(Conditions::default());
    relay.cut();
    near.write_all(b"hello").unwrap();
    near.shutdown(Shutdown::Write).unwrap();
    far.set_nonblocking(true).unwrap();
    assert_eq!(far.read(&mut [0; 9]).expect_err("nothing came").kind(), ErrorKind::WouldBlock);
    relay.restore();
    far.set_nonblocking(false).unwrap();
    let mut text = String::new();
    far.read_to_string(&mut text).unwrap();
    assert_eq!(text, "hello");
}

#[test]
fn a_tcp_relay_resets_both_sides() {
    let (relay, mut near, mut far) = relayed(Conditions::default());
    relay.reset();
    for end in [&mut near, &mut far] {
        assert_eq!(
            end.read(&mut [0; 1]).expect_err("no end in good order").kind(),
            ErrorKind::ConnectionReset
        );
    }
    // A reset by one side reaches the other side, too.
    let (_relay, near, mut far) = relayed(Conditions::default());
    rustix::net::sockopt::set_socket_linger(&near, Some(Duration::ZERO)).unwrap();
    drop(near);
    assert_eq!(far.read(&mut [0; 1]).expect_err("no end in good order").kind(), ErrorKind::ConnectionReset);
}

#[test]
fn a_tcp_relay_corrupts_the_given_byte() {
    let (relay, mut near, mut far) = relayed(Conditions::default());
    relay.corrupt(0, Direction::Far, 40_000);
    relay.corrupt(0, Direction::Near, 0);
    relay.corrupt(1, Direction::Far, 1);
    let sent = vec![7; 50_000];
    let mut received = vec![0; 50_000];
    std::thread::scope(|scope| {
        scope.spawn(|| near.write_all(&sent).unwrap());
        far.read_exact(&mut received).unwrap();
    });
    let wrong: Vec<_> = (0..50_000).filter(|&index| received[index] != 7).collect();
    assert_eq!((wrong, received[40_000]), (vec![40_000], !7));
    far.write_all(&[7, 7]).unwrap();
    let mut answer = [0; 2];
    near.read_exact(&mut answer).unwrap();
    assert_eq!(answer, [!7, 7]);
}

#[test]
fn a_tcp_relay_ends_its_connections_with_itself() {
    let (relay, mut near, mut far) = relayed(Conditions::default());
    let address = relay.address();
    drop(relay);
    for end in [&mut near, &mut far] {
        assert_eq!(end.read(&mut [0; 1]).unwrap(), 0);
    }
    // A process that another test spawns has a copy of the listening socket until it calls `exec`.
    let is_refused = |error: std::io::Error| error.kind() == ErrorKind::ConnectionRefused;
    assert!(eventually(|| TcpStream::connect(address).is_err_and(is_refused)));
    // A target that does not exist ends the connection, not the relay.
    let relay = TcpRelay::start(address, Conditions::default());
    for _ in 0..2 {
        assert!(!matches!(connect(relay.address()).read(&mut [0; 1]), Ok(1)));
    }
}
