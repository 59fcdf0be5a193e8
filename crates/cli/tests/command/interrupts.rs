//! Signals make a run save a checkpoint, whichever process receives them.

use crate::common::{Fixture, Running, assert_contains, free_port, poll};
use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, prlimit};
use std::net::TcpStream;
use std::process::Command;
use std::time::{Duration, UNIX_EPOCH};
use trireme_testkit::or_skip;

const ENDLESS: &str =
    "--set training.steps=1000000000 --set lr_scheduler.decay=constant --set checkpoint.interval=1000000000";

fn send(process: Pid, signal: Signal) {
    kill_process(process, signal).unwrap();
}

/// Asserts that a run stopped after some step with a checkpoint of that step, and that resuming it gives the losses of an undisturbed run.
fn assert_resumes(fixture: &Fixture, printed: &str, run: &str) {
    let mut lines = printed.lines();
    let step = lines.find_map(|line| line.strip_prefix("stopped after step "));
    let step = step.unwrap_or_else(|| panic!("{printed}"));
    let step: u64 = step.split_once(' ').unwrap().0.parse().unwrap();
    assert_contains(
        printed,
        &[&format!("checkpoint: runs/{run}/checkpoints/step-{step}"), "to resume: ", "train tiny.toml"],
    );
    let more = format!(
        "train tiny.toml --set run.name={run} --set training.steps={} --set lr_scheduler.decay=constant",
        step + 2
    );
    assert_contains(
        &fixture.run(&more).succeeded(),
        &[&format!("resuming after step {step} of {}", step + 2)],
    );
    let alone = more.replace(&format!("run.name={run}"), &format!("run.name={run}-alone"));
    fixture.run(&format!("{alone} --set checkpoint.interval={step}")).succeeded();
    assert_eq!(fixture.losses(run), fixture.losses(&format!("{run}-alone")));
}

/// As in a container without an init process, where the kernel drops unhandled signals.
#[test]
fn the_first_process_of_a_container_ends_while_it_waits_for_others() {
    let fixture = Fixture::with_corpus();
    let port = free_port();
    let inner = fixture.worker(0, port, "train tiny.toml");
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork"]).arg(inner.get_program()).args(inner.get_args());
    fixture.isolate(&mut command);
    command.envs(inner.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let can_unshare = Command::new("unshare").args(["--pid", "--fork", "true"]).output();
    let can_unshare = can_unshare.map_err(|error| error.to_string()).and_then(|output| {
        if output.status.success() {
            Ok(())
        } else {
            Err(String::from_utf8_lossy(&output.stderr).into_owned())
        }
    });
    let Some(()) = or_skip("process namespaces", can_unshare) else { return };
    let running = Running::start(command);
    // The process listens, so it waits for the others.
    poll(|| TcpStream::connect(("127.0.0.1", port)).ok());
    let outer = running.process().as_raw_nonzero();
    let children = std::fs::read_to_string(format!("/proc/{outer}/task/{outer}/children")).unwrap();
    let first = Pid::from_raw(children.trim().parse().unwrap()).unwrap();
    send(first, Signal::TERM);
    assert_eq!(running.end().code, Some(143));
}

#[test]
fn a_signal_to_the_command_saves_and_ends_it() {
    for (workers, signal, name, code) in [
        (1, Signal::INT, "SIGINT", 130),
        (2, Signal::INT, "SIGINT", 130),
        (1, Signal::TERM, "SIGTERM", 143),
        (2, Signal::USR1, "SIGUSR1", 138),
    ] {
        let fixture = Fixture::with_corpus();
        let mut run =
            Running::start(fixture.command(&format!("train tiny.toml --workers {workers} {ENDLESS}")));
        run.until("step: 2 ");
        if workers > 1 {
            run.watch_workers();
        }
        send(run.process(), signal);
        let outcome = run.end();
        assert_eq!(outcome.code, Some(code), "{outcome:?}");
        assert_eq!(outcome.stderr.lines().count(), 1, "{outcome:?}");
        assert_contains(&outcome.stderr, &[name, "the run ends after this step"]);
        assert_resumes(&fixture, &outcome.stdout, "tiny");
    }
}

#[test]
fn ctrl_c_on_a_terminal_is_one_signal_though_all_processes_get_it() {
    let fixture = Fixture::with_corpus();
    // The command ignores SIGINT, as if a shell had started it in the background.
    let mut run = Running::start(fixture.command_after("trap '' INT", &format!("train tiny.toml {ENDLESS}")));
    run.until("step: 2 ");
    run.watch_workers();
    run.interrupt();
    let outcome = run.end();
    assert_eq!(outcome.code, Some(130), "{outcome:?}");
    assert_resumes(&fixture, &outcome.stdout, "tiny");
}

#[test]
fn a_signal_to_any_rank_saves_and_ends_all() {
    let fixture = Fixture::with_corpus();
    let train = format!("train tiny.toml {ENDLESS}");
    let mut run = Running::start(fixture.command(&train));
    run.until("step: 2 ");
    let second = run.worker(1);
    send(second, Signal::TERM);
    let outcome = run.end();
    assert_eq!((outcome.code, &outcome.stderr[..]), (Some(143), ""), "{outcome:?}");
    assert_resumes(&fixture, &outcome.stdout, "tiny");
    // The same with another launcher.
    let (port, named) = (free_port(), format!("{train} --set run.name=other"));
    let [mut first, second] = [0, 1].map(|rank| Running::start(fixture.worker(rank, port, &named)));
    first.until("step: 2 ");
    send(second.process(), Signal::USR1);
    let outcomes = [first.end(), second.end()];
    assert_eq!(outcomes.each_ref().map(|outcome| outcome.code), [Some(138); 2], "{outcomes:?}");
    assert_resumes(&fixture, &outcomes[0].stdout, "other");
}

#[test]
fn a_second_signal_ends_a_run_at_once_without_a_checkpoint() {
    let fixture = Fixture::with_corpus();
    // Each step takes longer than a test waits.
    let slow = "--set training.global_batch_size=16384 --set training.local_batch_size=1";
    for workers in [1, 2] {
        let train = format!("train tiny.toml --workers {workers} {slow} --set run.name=slow-{workers}");
        let mut run = Running::start(fixture.command(&train));
        run.until("training 4 steps");
        if workers > 1 {
            run.watch_workers();
        }
        send(run.process(), Signal::INT);
        // Signals within the first half second count as one.
        poll(|| {
            let _ = kill_process(run.process(), Signal::INT);
            run.has_ended().then_some(())
        });
        let outcome = run.end();
        assert_eq!(outcome.code, if workers == 1 { None } else { Some(130) }, "{outcome:?}");
        assert_eq!(fixture.names(&format!("runs/slow-{workers}/checkpoints")), [""; 0]);
    }
}

/// A shell must read the printed command as the original one.
#[test]
fn the_command_to_resume_is_quoted_for_the_shell() {
    let fixture = Fixture::with_corpus();
    std::fs::rename(fixture.path("tiny.toml"), fixture.path("my $HOME's.toml")).unwrap();
    let mut command = fixture.command("train");
    command.arg("my $HOME's.toml").args(ENDLESS.split_whitespace());
    let mut run = Running::start(command);
    run.until("step: 2 ");
    run.interrupt();
    let printed = run.end().stdout;
    assert_contains(&printed, &[r"train 'my $HOME'\''s.toml' --set training.steps=1000000000"]);
}

/// A batch system takes exit code 143 for a saved run, and would start this run again for ever.
#[test]
fn a_worker_that_is_killed_while_the_run_saves_after_a_signal_is_reported() {
    let fixture = Fixture::with_corpus();
    let mut run = Running::start(fixture.command(&format!("train tiny.toml {ENDLESS}")));
    run.until("step: 2 ");
    run.worker(0);
    // Enough for a few lines of the log, but not for the worker's part of a checkpoint, where SIGXFSZ kills it.
    let limit = Rlimit { current: Some(1 << 15), maximum: Some(1 << 15) };
    prlimit(Some(run.worker(1)), Resource::Fsize, limit).unwrap();
    send(run.process(), Signal::TERM);
    let outcome = run.end();
    assert_eq!(outcome.code, Some(1), "{outcome:?}");
    assert_contains(&outcome.stderr, &["rank 1 was killed by SIGXFSZ", "checkpoint"]);
    assert_eq!(fixture.names("runs/tiny/checkpoints"), [""; 0]);
}

#[test]
fn a_stopped_worker_is_continued_to_save_after_a_signal() {
    let fixture = Fixture::with_corpus();
    let mut run = Running::start(fixture.command(&format!("train tiny.toml {ENDLESS}")));
    run.until("step: 2 ");
    run.worker(0);
    send(run.worker(1), Signal::STOP);
    send(run.process(), Signal::TERM);
    let outcome = run.end();
    assert_eq!(outcome.code, Some(143), "{outcome:?}");
    assert_resumes(&fixture, &outcome.stdout, "tiny");
}

#[test]
fn a_checkpoint_is_due_after_a_time() {
    let fixture = Fixture::with_corpus();
    let train = format!("train tiny.toml {ENDLESS} --set checkpoint.interval=1s");
    let mut run = Running::start(fixture.command(&train));
    run.until("checkpoint of step ");
    run.until("checkpoint of step ");
    run.interrupt();
    assert_eq!(run.end().code, Some(130));
    assert!(fixture.complete_checkpoints("tiny") >= 2);
}

#[test]
fn a_run_saves_and_ends_before_its_time_is_over() {
    let fixture = Fixture::with_corpus();
    for (name, workers) in [("limit", 1), ("job", 2)] {
        let mut command =
            fixture.command(&format!("train tiny.toml --workers {workers} {ENDLESS} --set run.name={name}"));
        match name {
            "limit" => command.args(["--set", "training.time_limit=3s"]),
            _ => {
                let end = UNIX_EPOCH.elapsed().unwrap() + Duration::from_secs(4);
                command.env("SLURM_JOB_END_TIME", end.as_secs().to_string())
            }
        };
        let outcome = Running::start(command).end();
        assert_eq!(outcome.code, Some(138), "{outcome:?}");
        assert_contains(&outcome.stdout, &["the time limit is near; the run saves what it has, and ends"]);
        assert_resumes(&fixture, &outcome.stdout, name);
    }
    let refused = fixture.refused_without_changes("train tiny.toml --set training.time_limit=5");
    assert_contains(&refused, &["expected a time such as"]);
}
