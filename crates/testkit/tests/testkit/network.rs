//! Hosts in namespaces: the traffic between them, its isolation, and the cleanup.

use crate::support::{network, transfer};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;
use trireme_testkit::network::{Host, IPV4_TCP_HEADER_BYTES, IPV6_TCP_HEADER_BYTES, Network};

const PORT: u16 = 4000;

#[test]
fn hosts_reach_each_other_and_nothing_else() {
    let Some(network) = network() else { return };
    let [a, b, c] = [(); 3].map(|()| network.add_host());
    for (from, to) in [(&a, &b), (&b, &c), (&c, &a)] {
        for address in [IpAddr::from(to.ipv4()), IpAddr::from(to.ipv6())] {
            let received = transfer(from, to, address, 100_000);
            assert!(received.iter().enumerate().all(|(index, &byte)| byte == index as u8));
            assert_eq!(received.len(), 100_000);
        }
    }
    let elsewhere = SocketAddr::from(([192, 0, 2, 1], PORT));
    let error = a.enter(|| TcpStream::connect(elsewhere)).expect_err("no route leaves the network");
    assert_eq!(error.kind(), ErrorKind::NetworkUnreachable);
}

#[test]
fn a_command_runs_on_its_host() {
    let Some(network) = network() else { return };
    let host = network.add_host();
    let output = host.command("cat").arg("/proc/self/net/fib_trie").env("A", "B").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.contains(&host.ipv4().to_string()), "{text}");
    let child = host.command("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
    let id = child.id();
    assert!(crate::support::eventually(
        || std::fs::read_to_string(format!("/proc/{id}/comm")).unwrap() == "cat\n"
    ));
    assert!(child.wait_with_output().unwrap().status.success());
}

#[test]
fn payload_is_what_was_sent() {
    let Some(network) = network() else { return };
    let [a, b] = [(); 2].map(|()| network.add_host());
    let cases = [(IpAddr::from(b.ipv4()), IPV4_TCP_HEADER_BYTES), (b.ipv6().into(), IPV6_TCP_HEADER_BYTES)];
    for (address, header_bytes) in cases {
        let num_bytes = 3_000_000;
        let before = (a.link().traffic(), b.link().traffic());
        transfer(&a, &b, address, num_bytes);
        let (a, b) = (a.link().traffic() - before.0, b.link().traffic() - before.1);
        // Packets of other protocols, the setup of a connection, and retransmitted segments of 1448 bytes.
        let tolerance = 1000 + 1448 * a.num_retransmitted_segments;
        for volume in [a.sent, b.received] {
            let payload = volume.payload_bytes(header_bytes);
            assert!(payload.abs_diff(num_bytes as u64) < tolerance, "{payload} of {num_bytes} bytes: {a:?}");
        }
        assert!(b.sent.payload_bytes(header_bytes) < 1000, "{b:?}");
    }
}

/// Returns the number after `key` in the output of `tc` for a host's device.
fn queue_statistic(host: &Host, key: &str) -> Option<u64> {
    let output = host.command("tc").args("-j -s qdisc show dev eth0".split(' ')).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let rest = text.split_once(&format!("\"{key}\":"))?.1;
    Some(rest.split([',', '}']).next().unwrap().parse().unwrap())
}

#[test]
fn a_shaped_link_holds_back_what_exceeds_its_rate() {
    let Some(network) = network() else { return };
    let [a, b] = [(); 2].map(|()| network.add_host());
    assert_eq!(queue_statistic(&a, "rate"), None);
    for rate in [80_000_000, 40_000_000] {
        a.link().shape(rate);
        assert_eq!(queue_statistic(&a, "rate"), Some(rate / 8));
        // Both transfers are far above the burst. In one direction the host's end holds back, in the other the switch's end.
        assert_eq!(transfer(&a, &b, b.ipv4().into(), 300_000).len(), 300_000);
        assert!(queue_statistic(&a, "overlimits") > Some(0));
        assert_eq!(transfer(&b, &a, a.ipv4().into(), 300_000).len(), 300_000);
    }
    a.link().unshape();
    assert_eq!(queue_statistic(&a, "rate"), None);
}

/// Connects two hosts, and returns both ends of the connection.
fn connection(from: &Host, to: &Host) -> (TcpStream, TcpStream) {
    let address = SocketAddr::from((to.ipv4(), PORT));
    let listener = to.enter(|| TcpListener::bind(address)).unwrap();
    let stream = from.enter(|| TcpStream::connect(address)).unwrap();
    (stream, listener.accept().unwrap().0)
}

#[test]
fn a_cut_link_gives_no_error_and_delivers_after_it_is_restored() {
    let Some(network) = network() else { return };
    let [a, b] = [(); 2].map(|()| network.add_host());
    let (mut near, mut far) = connection(&a, &b);
    far.set_nonblocking(true).unwrap();
    let has_carrier = || {
        let flags = a.command("ip").args(["link", "show", "dev", "eth0"]).output().unwrap();
        !String::from_utf8(flags.stdout).unwrap().contains("NO-CARRIER")
    };
    type Failure = fn(&trireme_testkit::network::Link);
    for (fail, keeps_carrier) in [((|link| link.cut()) as Failure, true), (|link| link.unplug(), false)] {
        fail(a.link());
        assert_eq!(has_carrier(), keeps_carrier);
        let before = a.link().traffic();
        near.write_all(b"hello").unwrap();
        // The bytes were sent, or could not be sent without a carrier. Now nothing is in flight.
        let was_sent = || a.link().traffic().sent.bytes > before.sent.bytes;
        assert!(!keeps_carrier || crate::support::eventually(was_sent));
        assert_eq!(far.read(&mut [0; 9]).expect_err("nothing came").kind(), ErrorKind::WouldBlock);
        assert!(near.take_error().unwrap().is_none() && far.take_error().unwrap().is_none());
        a.link().restore();
        far.set_nonblocking(false).unwrap();
        far.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut received = [0; 5];
        far.read_exact(&mut received).unwrap();
        assert_eq!(&received, b"hello");
        far.set_nonblocking(true).unwrap();
    }
}

/// Returns the number of processes in the network namespace of this inode number.
fn processes_within(namespace: u64) -> usize {
    let processes = std::fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    let within = |entry: std::fs::DirEntry| {
        std::fs::metadata(entry.path().join("ns/net")).is_ok_and(|link| link.ino() == namespace)
    };
    processes
        .filter(|entry| entry.file_name().to_str().unwrap().parse::<u32>().is_ok())
        .filter(|entry| {
            // A process that has just ended does not count.
            std::fs::read_link(entry.path().join("exe")).is_ok()
        })
        .map(within)
        .filter(|&is_within| is_within)
        .count()
}

/// Returns the names of the devices and of the namespaces outside of the network.
fn outside() -> Vec<String> {
    let commands = [["-o", "link"], ["netns", "list"]];
    let listed = commands.map(|words| std::process::Command::new("ip").args(words).output().unwrap().stdout);
    let text = listed.map(|bytes| String::from_utf8(bytes).unwrap()).concat();
    text.lines().map(|line| line.split('<').next().unwrap().to_owned()).collect()
}

#[test]
fn namespaces_end_with_their_network() {
    if network().is_none() {
        return;
    }
    let before = outside();
    let mut namespaces = Vec::new();
    let here = || std::fs::metadata("/proc/thread-self/ns/net").unwrap().ino();
    let mut use_network_and_panic = || {
        let network = Network::new();
        let hosts = [(); 2].map(|()| network.add_host());
        namespaces.extend(hosts.each_ref().map(|host| host.enter(here)));
        assert!(namespaces.iter().all(|&namespace| namespace != here() && processes_within(namespace) == 1));
        assert_eq!(outside(), before);
        panic!("as a test that fails");
    };
    let panic = catch_unwind(AssertUnwindSafe(&mut use_network_and_panic)).expect_err("it panics");
    assert_eq!(panic.downcast_ref::<&str>(), Some(&"as a test that fails"));
    assert_eq!(namespaces.len(), 2);
    assert!(namespaces.iter().all(|&namespace| processes_within(namespace) == 0));
    assert_eq!(outside(), before);
}
