//! Tests whose workers are shells. Each shell records its process id, so that the tests can check that it is gone.

use super::*;
use signal_hook::consts::{SIGHUP, SIGTERM};
use std::cell::RefCell;
use std::fs;
use std::path::PathBuf;
use std::thread;

struct Fixture {
    folder: tempfile::TempDir,
}

impl Fixture {
    fn new() -> Self {
        Fixture { folder: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn world(&self, num_workers: usize) -> LocalWorld<'_> {
        let folder = self.folder.path();
        LocalWorld {
            num_workers,
            master_port: 0,
            log_folder: folder,
            recorder_folder: folder,
            on_signal: OnSignal::End,
        }
    }

    /// Returns a shell that records its process id and then runs `script`.
    fn shell(&self, script: &str) -> Command {
        let mut command = Command::new("sh");
        command.arg("-c").arg(format!("echo $$ > pid-$RANK; {script}")).current_dir(self.folder.path());
        command
    }

    fn run(&self, scripts: &[&str]) -> Result<(), LaunchError> {
        run_local_workers(self.world(scripts.len()), |rank| self.shell(scripts[rank.0]))
    }

    fn log(&self, rank: usize) -> String {
        fs::read_to_string(self.path(&format!("rank-{rank}.log"))).unwrap()
    }

    /// Asserts that no worker is left, not even as a zombie.
    fn assert_all_gone(&self) {
        for entry in fs::read_dir(self.folder.path()).unwrap() {
            let path = entry.unwrap().path();
            if path.file_name().unwrap().to_str().unwrap().starts_with("pid-") {
                let id = fs::read_to_string(&path).unwrap();
                // Empty if the worker was killed while it wrote.
                let is_gone = id.is_empty() || !Path::new("/proc").join(id.trim()).exists();
                assert!(is_gone, "{}", path.display());
            }
        }
    }
}

/// Returns the rank, the death and the last lines of the log from the error.
fn death(result: Result<(), LaunchError>) -> (usize, AbnormalExit, Vec<String>) {
    match result {
        Err(LaunchError::WorkerDied { rank, death, last_lines, .. }) => (rank.0, death, last_lines),
        other => panic!("{other:?}"),
    }
}

/// Runs until it is killed. Ends by itself after a minute, in case a failed test leaves it running.
const FOREVER: &str = "exec sleep 60";

#[test]
fn workers_get_their_place_in_the_world_and_keep_logs() {
    let fixture = Fixture::new();
    fs::write(fixture.path("rank-1.log"), "earlier\n").unwrap();
    let place = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR; echo $MASTER_PORT >&2";
    fixture.run(&[":", place, place]).unwrap();
    let lines: Vec<String> = fixture.log(1).lines().map(str::to_owned).collect();
    assert_eq!(lines[..2], ["earlier", "1/3 1/3 127.0.0.1"]);
    assert_ne!(lines[2].parse::<u16>().unwrap(), 0);
    assert_eq!(fixture.log(2), format!("2/3 2/3 127.0.0.1\n{}\n", lines[2]));
    assert_eq!(fixture.log(0), "");
    fixture.assert_all_gone();
}

#[test]
fn every_world_has_a_secret_of_its_own() {
    let fixture = Fixture::new();
    let tell = "echo $TRIREME_SECRET";
    fixture.run(&[":", tell, tell]).unwrap();
    fixture.run(&[":", tell]).unwrap();
    let (first, second) = (fixture.log(2), fixture.log(1));
    assert_eq!(first.trim().len(), 64);
    let (of_first, of_second) = second.split_once('\n').unwrap();
    assert_eq!(of_first, first.trim());
    assert!(of_second.trim().len() == 64 && of_second.trim() != of_first);
}

#[test]
fn a_death_ends_the_others_and_is_reported_once() {
    let fixture = Fixture::new();
    fs::write(fixture.path("rank-2.log"), "of an earlier run\n").unwrap();
    let result = fixture.run(&[FOREVER, FOREVER, "echo loading; echo out of luck >&2; kill -SEGV $$"]);
    let text = result.as_ref().unwrap_err().to_string();
    assert_eq!(
        death(result),
        (2, AbnormalExit::Signal(11), vec!["loading".to_owned(), "out of luck".to_owned()])
    );
    assert!(text.starts_with("rank 2 was killed by SIGSEGV; "), "{text}");
    assert!(text.ends_with("rank-2.log, which ends with:\n    loading\n    out of luck"), "{text}");
    fixture.assert_all_gone();
}

#[test]
fn the_cause_is_reported_and_not_the_loss_of_a_peer_that_was_seen_first() {
    let fixture = Fixture::new();
    // A dead process exists until its parent has waited for it.
    let after_0 = "until [ -s pid-0 ]; do sleep 0.01; done; \
                   while kill -0 $(cat pid-0) 2>&-; do sleep 0.01; done; exit 3";
    assert_eq!(death(fixture.run(&["exit 74", after_0, FOREVER])), (1, AbnormalExit::Exit(3), vec![]));
    fixture.assert_all_gone();
}

#[test]
fn a_lost_peer_without_another_cause_is_reported() {
    let fixture = Fixture::new();
    assert_eq!(death(fixture.run(&[FOREVER, "exit 74"])), (1, AbnormalExit::Exit(74), vec![]));
    fixture.assert_all_gone();
}

#[test]
fn a_worker_that_ignores_sigterm_is_killed() {
    let fixture = Fixture::new();
    let deaf = "trap '' TERM; touch deaf; exec sleep 60";
    let result = fixture.run(&[deaf, "until [ -e deaf ]; do sleep 0.01; done; exit 1"]);
    assert_eq!(death(result), (1, AbnormalExit::Exit(1), vec![]));
    fixture.assert_all_gone();
}

/// Runs two workers that do not end by themselves, and acts as if the signals had reached this process.
fn interrupted_by(fixture: &Fixture, sent: &[i32]) -> LaunchError {
    let (sender, signals) = channel();
    let _forwarder = SignalForwarder::start(sender.clone()).unwrap();
    let workers = start_workers(fixture.world(2), |_| fixture.shell(FOREVER)).unwrap();
    sent.iter().for_each(|signal| sender.send(*signal).unwrap());
    let supervisor = Supervisor { world: fixture.world(2), workers, signals: &signals, print: &|_| {} };
    supervisor.until_all_have_ended().unwrap_err()
}

#[test]
fn signals_end_the_workers_and_give_the_exit_code_of_shells() {
    // The second Ctrl-C cuts the wait for the first one short.
    for (sent, code) in [(&[SIGTERM][..], 143), (&[SIGHUP], 129), (&[SIGINT, SIGINT], 130)] {
        let fixture = Fixture::new();
        let error = interrupted_by(&fixture, sent);
        assert!(matches!(error, LaunchError::Interrupted { signal } if signal == sent[0]), "{error:?}");
        assert_eq!(error.exit_code(), code);
        fixture.assert_all_gone();
    }
}

/// Runs two workers until both are ready, and acts as if SIGTERM had reached this process. `on_request` is the script that each worker runs
/// when the request arrives.
fn asked_to_save(fixture: &Fixture, on_request: [&str; 2]) -> LaunchError {
    asked_by(fixture, on_request, |sender| sender.send(SIGTERM).unwrap())
}

/// Like [`asked_to_save`], with the signals that `send` sends.
fn asked_by(fixture: &Fixture, on_request: [&str; 2], send: impl FnOnce(Sender<i32>)) -> LaunchError {
    let (sender, signals) = channel();
    let _forwarder = SignalForwarder::start(sender.clone()).unwrap();
    let workers = start_workers(fixture.world(2), |rank| {
        let on_request = on_request[rank.0];
        fixture.shell(&format!("trap '{on_request}' USR1; touch ready-$RANK; while :; do sleep 0.01; done"))
    });
    let workers = workers.unwrap();
    while !(0..2).all(|rank| fixture.path(&format!("ready-{rank}")).exists()) {
        thread::yield_now();
    }
    send(sender);
    let world = LocalWorld { on_signal: OnSignal::Save, ..fixture.world(2) };
    let watch = Supervisor { world, workers, signals: &signals, print: &|_| {} };
    let error = watch.until_all_have_ended().unwrap_err();
    fixture.assert_all_gone();
    error
}

#[test]
fn a_worker_killed_while_the_others_save_is_reported_unless_the_checkpoint_is_complete() {
    let fixture = Fixture::new();
    let after_1 = "while kill -0 $(cat pid-1) 2>&-; do sleep 0.01; done; exit 74";
    let error = asked_to_save(&fixture, [after_1, "kill -KILL $$"]);
    let text = error.to_string();
    assert_eq!(error.exit_code(), 1, "{text}");
    assert!(text.starts_with("rank 1 was killed by SIGKILL"), "{text}");
    // A worker exits with 143 only when all ranks have agreed that the checkpoint is complete.
    let fixture = Fixture::new();
    let after_0 = "while kill -0 $(cat pid-0) 2>&-; do sleep 0.01; done; kill -KILL $$";
    assert_eq!(asked_to_save(&fixture, ["exit 143", after_0]).exit_code(), 143);
    // The request itself, or another stop signal, kills a worker that has not begun to train.
    for on_request in ["trap - USR1; kill -USR1 $$", "kill -TERM $$"] {
        let fixture = Fixture::new();
        let error = asked_to_save(&fixture, [after_1, on_request]);
        assert!(matches!(error, LaunchError::Interrupted { signal: SIGTERM }), "{error:?}");
    }
}

/// Workers are killed without another request: only the launcher may have received the second signal.
#[test]
fn a_second_signal_ends_workers_that_save() {
    let fixture = Fixture::new();
    let ignores = "trap \"touch asked-again\" TERM INT";
    let error = asked_by(&fixture, [ignores; 2], |sender| {
        let again = move || {
            while sender.send(SIGTERM).is_ok() {
                thread::park_timeout(Duration::from_millis(20));
            }
        };
        thread::spawn(again);
    });
    assert!(matches!(error, LaunchError::Interrupted { signal: SIGTERM }), "{error:?}");
    assert!(!fixture.path("asked-again").exists());
}

#[test]
fn a_worker_ended_by_ctrl_c_is_no_death_to_report() {
    let fixture = Fixture::new();
    let error = fixture.run(&["kill -INT $$", "kill -INT $$"]).unwrap_err();
    assert_eq!(error.exit_code(), 130, "{error:?}");
    fixture.assert_all_gone();
}

#[test]
fn a_start_that_fails_leaves_no_worker() {
    let fixture = Fixture::new();
    let missing = |rank| {
        if rank == Rank(0) {
            return fixture.shell(FOREVER);
        }
        // Rank 0 runs by now. It must have recorded its process id, so that the test can look for it.
        while fs::read_to_string(fixture.path("pid-0")).unwrap_or_default().is_empty() {
            thread::yield_now();
        }
        Command::new("./missing")
    };
    let error = run_local_workers(fixture.world(2), missing).unwrap_err();
    assert!(matches!(error, LaunchError::Start { rank: Rank(1), .. }), "{error:?}");
    fixture.assert_all_gone();

    let folder = fixture.path("missing");
    let world = LocalWorld { log_folder: &folder, ..fixture.world(1) };
    let error = run_local_workers(world, |_| fixture.shell(FOREVER)).unwrap_err();
    assert!(matches!(error, LaunchError::Log { rank: Rank(0), .. }), "{error:?}");
}

#[test]
fn a_busy_port_is_refused_before_any_worker_starts() {
    let fixture = Fixture::new();
    let busy = TcpListener::bind("127.0.0.1:0").unwrap();
    let world = LocalWorld { master_port: busy.local_addr().unwrap().port(), ..fixture.world(2) };
    let error = run_local_workers(world, |_| panic!("a worker was started")).unwrap_err();
    assert!(matches!(error, LaunchError::Port { .. }), "{error:?}");
}

/// Opening a pipe that no process writes to would wait.
#[test]
fn reports_and_logs_that_are_pipes_are_skipped() {
    let fixture = Fixture::new();
    let pipes = "mkfifo rank-0.json rank-1.json; rm rank-1.log; mkfifo rank-1.log; kill -KILL $$";
    let (sender, signals) = channel();
    let _forwarder = SignalForwarder::start(sender).unwrap();
    let scripts = [FOREVER, pipes];
    let workers = start_workers(fixture.world(2), |rank| fixture.shell(scripts[rank.0])).unwrap();
    let printed = RefCell::new(Vec::new());
    let print = |line: &str| printed.borrow_mut().push(line.to_owned());
    let watch = Supervisor { world: fixture.world(2), workers, signals: &signals, print: &print };
    let LaunchError::WorkerDied { rank: Rank(1), death: AbnormalExit::Signal(9), last_lines, table, .. } =
        watch.until_all_have_ended().unwrap_err()
    else {
        panic!("another error");
    };
    assert_eq!((last_lines, table, printed.into_inner()), (vec![], vec![], vec![]));
    fixture.assert_all_gone();
}
