//! Ranks as processes, one of which is killed.

use crate::support::{join_options, small_pieces};
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use trireme_base::{Rank, ReduceOp};
use trireme_comm::{CommError, Group, JoinOptions, TransportChoice, TransportKind, join};

/// Environment variable of the processes that this test starts: rank, transport, address, port.
const CHILD: &str = "TRIREME_COMM_TEST_CHILD";
const WORLD_SIZE: usize = 3;
const VICTIM: Rank = Rank(2);

/// A process that is killed when the test ends.
struct Worker(Child);

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn options(rank: Rank, transport: TransportChoice, master_addr: &str, master_port: u16) -> JoinOptions {
    let options = join_options(WORLD_SIZE, transport, &small_pieces());
    JoinOptions { rank, master_addr: master_addr.to_owned(), master_port, ..options }
}

fn sum(group: &Group, len: usize) -> Result<f32, CommError> {
    let mut buffer = group.buffer::<f32>(len)?;
    buffer.fill(1.0);
    Ok(group.all_reduce(buffer, ReduceOp::Sum).wait()?[len - 1])
}

/// The body of a process that this test starts. Does nothing in the process that cargo started.
#[test]
fn child() {
    let Ok(role) = std::env::var(CHILD) else { return };
    let [rank, transport, master_addr, master_port] =
        <[&str; 4]>::try_from(role.split(' ').collect::<Vec<_>>()).expect("four words");
    let rank = Rank(rank.parse().expect("a rank"));
    let (transport, master_port) =
        (transport.parse().expect("a transport"), master_port.parse().expect("a port"));
    let group = join(&options(rank, transport, master_addr, master_port)).expect("joined");
    sum(&group, 1000).expect("everybody is here");
    println!("child: ready");
    if rank == VICTIM {
        // Ends with the parent, if it is not killed before.
        let _ = std::io::stdin().read(&mut [0]);
        return;
    }
    println!("child: {}", sum(&group, 1000).expect_err("a rank was killed"));
}

fn start(rank: usize, transport: TransportChoice, options: &JoinOptions) -> Worker {
    let JoinOptions { master_addr, master_port, .. } = options;
    let child = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "processes::child", "--nocapture", "--test-threads=1"])
        .env(CHILD, format!("{rank} {transport} {master_addr} {master_port}"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    Worker(child.expect("a process"))
}

fn next_word(lines: &mut impl Iterator<Item = std::io::Result<String>>) -> String {
    lines
        .map(|line| line.expect("text"))
        .find_map(|line| line.split_once("child: ").map(|(_, word)| word.to_owned()))
        .expect("the child says something")
}

fn kill_one(choice: TransportChoice, transport: TransportKind, is_blocked: bool) {
    let options = join_options(WORLD_SIZE, choice, &small_pieces());
    let mut bystander = start(1, choice, &options);
    let mut victim = start(VICTIM.0, choice, &options);
    let group = join(&options).expect("joined");
    assert_eq!(group.transport(), transport);
    assert_eq!(sum(&group, 1000).expect("everybody is here"), 3.0);

    let mut lines = BufReader::new(bystander.0.stdout.take().expect("a pipe")).lines();
    let mut victim_lines = BufReader::new(victim.0.stdout.take().expect("a pipe")).lines();
    assert_eq!(next_word(&mut lines), "ready");
    assert_eq!(next_word(&mut victim_lines), "ready");
    let mut buffer = group.buffer::<f32>(1000).expect("memory");
    buffer.fill(1.0);
    let pending = is_blocked.then(|| group.all_reduce(buffer, ReduceOp::Sum));
    victim.0.kill().expect("killed");
    victim.0.wait().expect("dead");

    let failure = match pending {
        Some(work) => work.wait().map(drop),
        None => sum(&group, 1000).map(drop),
    }
    .expect_err("a rank was killed");
    assert!(matches!(failure, CommError::PeerLost { rank: VICTIM, sequence: 1, .. }), "{failure}");
    let told = next_word(&mut lines);
    assert!(told.contains("rank 2 was lost"), "{told}");
    assert!(bystander.0.wait().expect("ended").success());
}

#[test]
fn a_killed_process_is_named_by_all_others() {
    for is_blocked in [true, false] {
        kill_one(TransportChoice::Auto, TransportKind::Shm, is_blocked);
        kill_one(TransportChoice::Tcp, TransportKind::Tcp, is_blocked);
    }
}
