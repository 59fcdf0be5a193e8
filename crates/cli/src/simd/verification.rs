//! Trying kernels in child processes.
//!
//! A child prints `try` with a kernel's name before it tries it, and then `proven`, or `wrong` with the reason. If it dies in between, the
//! kernel is excluded, and another child tries the remaining ones. Kernels never run in the calling process: an instruction that the system
//! refuses would end it.

use crate::hang::escape_controls;
use crate::process_state::signal_name;
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Stdio};
use trireme_base::with_resource_limits;

pub(super) type Verdicts = BTreeMap<String, Verdict>;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Verdict {
    /// The kernel computes what the portable kernel computes.
    Proven,
    /// The kernel's results differ from the portable kernel's, or the system kills it for an instruction; with the reason.
    Wrong(String),
    /// The trial failed, perhaps for a reason outside the kernel, such as a limit on memory. Never cached: a later trial may succeed.
    #[serde(skip)]
    Untried(String),
}

/// Maximum number of characters of a reason. Longer reasons are cut.
pub(super) const REASON_CHARS_MAX: usize = 300;

pub(crate) struct KernelVerification {
    /// Name of the kernel, without a line break.
    pub(crate) kernel: String,
    /// Compares the kernel with the portable one. The error says what is wrong.
    pub(crate) verify: Box<dyn Fn() -> Result<(), String>>,
}

/// Signals by which the system ends a process only for an instruction that it has executed.
const FAULTS: [Signal; 6] = [Signal::ILL, Signal::SEGV, Signal::BUS, Signal::FPE, Signal::TRAP, Signal::SYS];

pub(crate) fn verify_kernels<'a>(
    trials: impl IntoIterator<Item = &'a KernelVerification>,
    out: &mut impl Write,
) -> io::Result<()> {
    for KernelVerification { kernel, verify } in trials {
        writeln!(out, "try {kernel}")?;
        out.flush()?;
        match verify() {
            Ok(()) => writeln!(out, "proven")?,
            Err(reason) => writeln!(out, "wrong {reason}")?,
        }
    }
    out.flush()
}

/// Tries kernels in child processes that `command` creates.
pub(super) fn verify_in_children(
    names: &[String],
    command: &dyn Fn(&[String]) -> io::Result<Command>,
) -> Verdicts {
    let mut verdicts = Verdicts::new();
    loop {
        let is_left = |name: &&String| !verdicts.contains_key(*name);
        let left: Vec<String> = names.iter().filter(is_left).cloned().collect();
        if left.is_empty() {
            return verdicts;
        }
        if let Err(error) = verify_in_child(&left, command, &mut verdicts) {
            let reason = escape_controls(&format!("they cannot be tried in a child process ({error})"));
            for name in left {
                verdicts.entry(name).or_insert_with(|| Verdict::Untried(reason.clone()));
            }
        }
    }
}

/// Tries kernels in one child, up to the kernel that ends it.
///
/// # Errors
/// If the child cannot be started, or ends between kernels.
fn verify_in_child(
    names: &[String],
    command: &dyn Fn(&[String]) -> io::Result<Command>,
    verdicts: &mut Verdicts,
) -> io::Result<()> {
    let child =
        command(names)?.stdin(Stdio::null()).stderr(Stdio::null()).output().map_err(with_resource_limits)?;
    match read(&child.stdout, names, verdicts) {
        Some(kernel) => drop(verdicts.insert(kernel, verdict_of_death(child.status))),
        None if names.iter().all(|name| verdicts.contains_key(name)) => {}
        None => return Err(io::Error::other(format!("it ended with {}", child.status))),
    }
    Ok(())
}

/// Records the verdicts that a child has printed. Returns the kernel that it tried without a verdict.
fn read(printed: &[u8], names: &[String], verdicts: &mut Verdicts) -> Option<String> {
    let mut tried = None;
    for line in String::from_utf8_lossy(printed).lines() {
        if let Some(name) = line.strip_prefix("try ") {
            tried = names.iter().find(|known| *known == name).cloned();
        } else if let Some(name) = tried.take() {
            let reason = line.strip_prefix("wrong ");
            let cut = |reason| escape_controls(reason).chars().take(REASON_CHARS_MAX).collect();
            match (line, reason) {
                ("proven", _) => drop(verdicts.insert(name, Verdict::Proven)),
                (_, Some(reason)) => drop(verdicts.insert(name, Verdict::Wrong(cut(reason)))),
                _ => tried = Some(name),
            }
        }
    }
    tried
}

/// Returns the verdict on the kernel that a child was trying. Only faults are certain: a failed allocation aborts, a busy machine may
/// exceed a limit.
fn verdict_of_death(status: ExitStatus) -> Verdict {
    match status.signal() {
        Some(signal) if FAULTS.iter().any(|fault| fault.as_raw() == signal) => {
            Verdict::Wrong(format!("a process that runs them is killed by {}", signal_name(signal)))
        }
        Some(signal) => {
            Verdict::Untried(format!("the process that tried them was killed by {}", signal_name(signal)))
        }
        None => Verdict::Untried(format!("the process that tried them ended with {status}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{getpid, kill_process};

    /// Environment variable that makes this test program a child, and names the kernels to try. Names have no comma.
    const CHILD: &str = "TRIREME_TEST_TRIED_KERNELS";

    fn trial(kernel: &str, prove: impl Fn() -> Result<(), String> + 'static) -> KernelVerification {
        KernelVerification { kernel: kernel.to_owned(), verify: Box::new(prove) }
    }

    /// Returns good kernels, and a kernel for each way to fail.
    fn trials() -> Vec<KernelVerification> {
        let dies_by = |signal| {
            move || {
                // The signal is sent, because a test would need unsafe code to execute an instruction that raises it. The process ends
                // the same way.
                kill_process(getpid(), signal).unwrap();
                // Another thread may take the signal.
                loop {
                    std::thread::park();
                }
            }
        };
        Vec::from([
            trial("good", || Ok(())),
            trial("illegal", dies_by(Signal::ILL)),
            trial("wrong", || Err("1 is 2,\u{1b}[31m here".to_owned())),
            trial("panics", || panic!("a kernel's assertion")),
            trial("endless", dies_by(Signal::XCPU)),
            trial("aborts", dies_by(Signal::ABORT)),
            trial("also good", || Ok(())),
            trial("killed", dies_by(Signal::KILL)),
        ])
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    /// Returns a command that runs this test program again, with only the test `be_a_child`.
    fn command(kernels: &[String]) -> io::Result<Command> {
        let (_crate_name, module) = module_path!().split_once("::").unwrap();
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["--exact", "--nocapture", &format!("{module}::be_a_child")]);
        command.env(CHILD, kernels.join(","));
        Ok(command)
    }

    #[test]
    fn be_a_child() {
        let Ok(kernels) = std::env::var(CHILD) else { return };
        let is_chosen = |trial: &&KernelVerification| kernels.split(',').any(|kernel| kernel == trial.kernel);
        // Ends the line with the test's own name, which is not output of the child.
        println!();
        verify_kernels(trials().iter().filter(is_chosen), &mut io::stdout()).unwrap();
    }

    #[test]
    fn kernels_that_are_wrong_or_killed_are_excluded_and_the_others_are_not() {
        let kernels = names(&["good", "illegal", "wrong", "also good"]);
        let verdicts = verify_in_children(&kernels, &command);
        let wrong = |reason: &str| Verdict::Wrong(reason.to_owned());
        assert_eq!([&verdicts["good"], &verdicts["also good"]], [&Verdict::Proven; 2]);
        assert_eq!(verdicts["illegal"], wrong("a process that runs them is killed by SIGILL"));
        let reason = escape_controls("1 is 2,\u{1b}[31m here");
        assert!(!reason.chars().any(char::is_control));
        assert_eq!(verdicts["wrong"], wrong(&reason));
        assert_eq!(verdicts.len(), kernels.len());
    }

    #[test]
    fn a_death_that_may_have_another_cause_says_nothing_about_a_kernel() {
        for (kernel, end) in [
            ("panics", "exit status: 101"),
            ("aborts", "SIGABRT"),
            ("endless", "SIGXCPU"),
            ("killed", "SIGKILL"),
        ] {
            let verdicts = verify_in_children(&names(&["good", kernel, "also good"]), &command);
            assert_eq!([&verdicts["good"], &verdicts["also good"]], [&Verdict::Proven; 2]);
            let verdict = &verdicts[kernel];
            assert!(matches!(verdict, Verdict::Untried(reason) if reason.ends_with(end)), "{verdict:?}");
        }
    }

    #[test]
    fn without_a_child_that_tries_them_kernels_are_untried() {
        let is_untried = |verdict: &Verdict| matches!(verdict, Verdict::Untried(_));
        // The child knows no such kernel.
        let verdicts = verify_in_children(&names(&["good", "unknown"]), &command);
        assert!(verdicts["good"] == Verdict::Proven && is_untried(&verdicts["unknown"]), "{verdicts:?}");
        for program in ["/nonexistent/trireme", "true"] {
            let verdicts = verify_in_children(&names(&["good", "wrong"]), &|_| Ok(Command::new(program)));
            assert!(verdicts.len() == 2 && verdicts.values().all(is_untried), "{verdicts:?}");
        }
        assert!(verify_in_children(&[], &command).is_empty());
    }
}
