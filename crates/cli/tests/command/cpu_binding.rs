//! The processors that workers use.

use crate::common::{Fixture, Running, assert_contains, free_port};
use std::process::Command;
use std::thread::available_parallelism;
use trireme_testkit::or_skip;

/// Returns two processors of this host that this process may use, as `/proc` lists them; `None` if the test is skipped.
fn two_cpus() -> Option<[usize; 2]> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap().trim();
    let bounds = |run: &str| {
        let (first, last) = run.split_once('-').unwrap_or((run, run));
        first.parse().unwrap()..=last.parse().unwrap()
    };
    let cpus: Vec<usize> = list.split(',').flat_map(bounds).collect();
    or_skip("two processors", cpus.first_chunk().copied().ok_or("this process may use but one"))
}

#[test]
fn the_cpus_that_a_launcher_chose_are_kept() {
    let Some(cpus) = two_cpus() else { return };
    let fixture = Fixture::with_corpus();
    let port = free_port();
    let worker = |rank: usize| {
        let plain = fixture.worker(rank, port, "train tiny.toml");
        let mut bound = Command::new("taskset");
        bound.args(["-c", &cpus[rank].to_string()]).arg(plain.get_program()).args(plain.get_args());
        fixture.isolate(&mut bound);
        bound.envs(plain.get_envs().filter_map(|(name, value)| Some((name, value?))));
        Running::start(bound)
    };
    let [first, second] = [0, 1].map(worker).map(|worker| worker.end().succeeded());
    assert_contains(&first, &["2 workers x 1 thread"]);
    assert_eq!(second, "");
    let log = |rank| fixture.read(&format!("runs/tiny/logs/rank-{rank}.log"));
    assert!([0, 1].iter().all(|rank| !log(rank).contains("is bound")));
}

#[test]
fn workers_are_bound_to_their_own_cores() {
    let Some([first, second]) = two_cpus() else { return };
    let fixture = Fixture::with_corpus();
    fixture.run("train tiny.toml --set launch.bind=none --set run.name=free").succeeded();
    fixture.run("train tiny.toml --set launch.bind=cores --set run.name=bound").succeeded();
    assert_eq!(fixture.losses("bound"), fixture.losses("free"));
    if available_parallelism().unwrap().get() == 2 {
        for (rank, cpu) in [first, second].into_iter().enumerate() {
            let log = fixture.read(&format!("runs/bound/logs/rank-{rank}.log"));
            assert_contains(&log, &[&format!("this worker is bound to CPUs {cpu}")]);
        }
    }
}
