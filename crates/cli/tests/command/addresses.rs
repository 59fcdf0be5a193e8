//! Names that resolve late, wrong ports, and networks that let only some ports through.

use crate::common::{Fixture, Running, assert_contains, poll};
use crate::hosts::{hosts, network, set_worker_environment, start};
use std::process::Command;
use std::time::Duration;
use trireme_testkit::network::Host;
use trireme_testkit::or_skip;
use trireme_testkit::relay::{Conditions, Direction, FrameLoss, FrameRelay};

const TRIREME: &str = env!("CARGO_BIN_EXE_trireme");

/// A name in the form of a pod's name. A cluster's name service learns such a name some time after the pod has started.
const NAME: &str = "books-0.books";

/// Time for which ranks wait for the name.
const NAME_DELAY: Duration = Duration::from_secs(20);

/// Returns a command on a host with its own `/etc/hosts`, which is the fixture's file `hosts`.
fn command_with_names(fixture: &Fixture, host: &Host, arguments: &str) -> Command {
    let mut command = host.command("unshare");
    let script = "mount --bind \"$0\" /etc/hosts && exec \"$@\"";
    command.args(["--mount", "sh", "-c", script]).arg(fixture.path("hosts")).arg(TRIREME);
    command.args(arguments.split_whitespace());
    command
}

#[test]
fn a_name_that_is_known_late_is_waited_for() {
    let Some(hosts) = hosts() else { return };
    let fixture = Fixture::with_corpus();
    let known = "127.0.0.1 localhost\n";
    fixture.write("hosts", known);
    let mut workers = [0, 1].map(|rank: usize| {
        let mut command = command_with_names(&fixture, &hosts[rank], "train tiny.toml");
        set_worker_environment(&fixture, &mut command, rank, 2, NAME);
        Running::start(command)
    });
    workers[1].until_silent_for(NAME_DELAY);
    assert!(!workers[0].has_ended() && !workers[1].has_ended());
    // The file is written in place, because the mount would not show a new file.
    fixture.write("hosts", format!("{known}{} {NAME}\n", hosts[0].ipv4()));
    let note = &*format!("waiting for the name of rank 0's host, {NAME}");
    for (rank, outcome) in workers.map(Running::end).into_iter().enumerate() {
        assert_eq!(outcome.code, Some(0), "{outcome:?}");
        assert_contains(&outcome.stderr, &[note]);
        // The note was printed before there was a log.
        assert_contains(&fixture.read(&format!("runs/tiny/logs/rank-{rank}.log")), &["Z note: ", note]);
    }
    assert_eq!(fixture.records("tiny").len(), 4);
}

#[test]
fn a_worker_at_the_wrong_port_does_not_disturb_the_others() {
    let Some(hosts) = hosts() else { return };
    let fixture = Fixture::with_corpus();
    let address = hosts[0].ipv4().to_string();
    let worker = |host: usize, rank: usize, port: &str, settings: &str| {
        let mut command = hosts[host].command(TRIREME);
        command.args("train tiny.toml".split(' ')).args(settings.split_whitespace());
        set_worker_environment(&fixture, &mut command, rank, 2, &address);
        command.env("MASTER_PORT", port);
        Running::start(command)
    };
    // Ranks connect before rank 0 listens, and are refused.
    let late = worker(1, 1, "29500", "");
    let refusals = || hosts[1].link().traffic().received.num_packets;
    poll(|| (refusals() > 4).then_some(()));
    let stray = worker(1, 1, "29499", "--set comm.join_timeout_seconds=5");
    let first = worker(0, 0, "29500", "");
    assert_contains(&first.end().succeeded(), &["step: 4 "]);
    let late = late.end();
    assert_eq!(late.code, Some(0), "{late:?}");
    let stray = stray.end();
    assert_eq!(stray.code, Some(1), "{stray:?}");
    assert_contains(&stray.stderr, &[&format!("did not reach rank 0 at {address}:29499 within 5s")]);
}

/// As behind a network policy of Kubernetes.
#[test]
fn a_firewall_lets_a_run_through_whose_ports_are_set() {
    let Some(()) = or_skip("relays", FrameRelay::available()) else { return };
    let Some(network) = network() else { return };
    let (far, relay) = network.add_host_with_relay(Conditions::default(), FrameLoss::default());
    relay.allow_ports(&[29500..=29500, 20000..=20003]);
    let hosts = [far, network.add_host()];
    let num_refused = || {
        [Direction::Near, Direction::Far].map(|towards| relay.counts(towards).num_refused).iter().sum::<u64>()
    };
    let fixture = Fixture::with_corpus();
    for address in [hosts[0].ipv4().into(), hosts[0].ipv6().into()] {
        let train = "train tiny.toml --set checkpoint.resume=never --set comm.ports=20000-20003";
        let [first, second] = start(&fixture, &hosts, address, train).map(Running::end);
        assert_contains(&first.succeeded(), &["step: 4 "]);
        assert_eq!(second.code, Some(0), "{second:?}");
        assert_eq!(num_refused(), 0);
    }
    // Without the key, ranks listen on ports that the firewall closes.
    let train = "train tiny.toml --set checkpoint.resume=never --set comm.join_timeout_seconds=15";
    for outcome in start(&fixture, &hosts, hosts[0].ipv4().into(), train).map(Running::end) {
        assert!(outcome.code.is_some_and(|code| code != 0), "{outcome:?}");
        assert_contains(&outcome.stderr, &["error: "]);
    }
    assert!(num_refused() > 0);
}
