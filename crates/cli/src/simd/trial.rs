//! Trying kernels in child processes.
//!
//! A child prints `try` with a kernel's name before it tries it, and then `proven`, or `wrong` with the reason. If it dies in
//! between, the kernel is excluded, and another child tries those that are left.

use crate::hang::plain;
use crate::launch::signal_name;
use rustix::process::Signal;
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Stdio};

/// For each kernel why it must not be used; `None` if it may.
pub(crate) type Verdicts = BTreeMap<String, Option<String>>;

/// Longer reasons are cut.
pub(super) const REASON_CHARS_MAX: usize = 300;

/// How to try a kernel.
pub(crate) struct Trial {
    /// Its name, without a line break.
    pub(crate) kernel: String,
    /// What is wrong with it.
    pub(crate) prove: Box<dyn Fn() -> Result<(), String>>,
}

/// Signals by which the system ends a process for what it executed.
const FAULTS: [Signal; 8] = [
    Signal::ILL,
    Signal::SEGV,
    Signal::BUS,
    Signal::FPE,
    Signal::TRAP,
    Signal::ABORT,
    Signal::SYS,
    Signal::XCPU,
];

/// What a child does.
pub(crate) fn try_kernels<'a>(
    trials: impl IntoIterator<Item = &'a Trial>,
    out: &mut impl Write,
) -> io::Result<()> {
    for Trial { kernel, prove } in trials {
        writeln!(out, "try {kernel}")?;
        out.flush()?;
        match prove() {
            Ok(()) => writeln!(out, "proven")?,
            Err(reason) => writeln!(out, "wrong {reason}")?,
        }
    }
    out.flush()
}

/// Tries kernels in this process, which ends if one of them is killed.
pub(super) fn here(trials: &[Trial]) -> Verdicts {
    let (mut printed, mut verdicts) = (Vec::new(), Verdicts::new());
    try_kernels(trials, &mut printed).expect("memory takes what is written");
    let names: Vec<String> = trials.iter().map(|trial| trial.kernel.clone()).collect();
    read(&printed, &names, &mut verdicts);
    verdicts
}

/// Tries kernels in children that `command` makes for them.
///
/// # Errors
/// If a child cannot be started, or ends for another reason than a kernel before it has tried all.
pub(super) fn in_children(
    names: &[String],
    command: &dyn Fn(&[String]) -> io::Result<Command>,
) -> io::Result<Verdicts> {
    let mut verdicts = Verdicts::new();
    loop {
        let is_left = |name: &&String| !verdicts.contains_key(*name);
        let left: Vec<String> = names.iter().filter(is_left).cloned().collect();
        if left.is_empty() {
            return Ok(verdicts);
        }
        let child = command(&left)?.stdin(Stdio::null()).stderr(Stdio::null()).output()?;
        let tried = read(&child.stdout, &left, &mut verdicts);
        match (tried, fault(child.status)) {
            (Some(kernel), Some(fault)) => drop(verdicts.insert(kernel, Some(fault))),
            // All that it was to try is judged, or it goes on with what is left of it.
            (None, None) if left.iter().all(|name| verdicts.contains_key(name)) => {}
            _ => return Err(io::Error::other(format!("it ended with {}", child.status))),
        }
    }
}

/// Takes in what a child has printed; returns the kernel that it tried without a verdict.
fn read(printed: &[u8], names: &[String], verdicts: &mut Verdicts) -> Option<String> {
    let mut tried = None;
    for line in String::from_utf8_lossy(printed).lines() {
        if let Some(name) = line.strip_prefix("try ") {
            tried = names.iter().find(|known| *known == name).cloned();
        } else if let Some(name) = tried.take() {
            let reason = line.strip_prefix("wrong ");
            let cut = |reason| plain(reason).chars().take(REASON_CHARS_MAX).collect();
            match (line, reason) {
                ("proven", _) => drop(verdicts.insert(name, None)),
                (_, Some(reason)) => drop(verdicts.insert(name, Some(cut(reason)))),
                _ => tried = Some(name),
            }
        }
    }
    tried
}

/// How a child died, if what it executed was the cause.
fn fault(status: ExitStatus) -> Option<String> {
    match (status.signal(), status.code()) {
        (Some(signal), _) if FAULTS.iter().any(|fault| fault.as_raw() == signal) => {
            Some(format!("a process that runs them is killed by {}", signal_name(signal)))
        }
        // A panic.
        (None, Some(code)) if code != 0 => Some(format!("a process that runs them exits with code {code}")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{getpid, kill_process};

    /// Tells this test program which kernels to try as a child; names have no comma.
    const CHILD: &str = "TRIREME_TEST_TRIED_KERNELS";

    fn trial(kernel: &str, prove: impl Fn() -> Result<(), String> + 'static) -> Trial {
        Trial { kernel: kernel.to_owned(), prove: Box::new(prove) }
    }

    /// Good kernels, and every way to fail.
    fn trials() -> Vec<Trial> {
        let dies_by = |signal| {
            move || {
                // Not by an instruction, for which a test would need unsafe code: the end is the same.
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
            trial("also good", || Ok(())),
            trial("killed", dies_by(Signal::KILL)),
        ])
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    /// This test program again, to run only `be_a_child`.
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
        let is_chosen = |trial: &&Trial| kernels.split(',').any(|kernel| kernel == trial.kernel);
        // The line on which the test's own name stands is none of the child's.
        println!();
        try_kernels(trials().iter().filter(is_chosen), &mut io::stdout()).unwrap();
    }

    #[test]
    fn kernels_that_are_wrong_or_killed_are_excluded_and_the_others_are_not() {
        let kernels = names(&["good", "illegal", "wrong", "panics", "endless", "also good"]);
        let verdicts = in_children(&kernels, &command).unwrap();
        let reason = |kernel: &str| verdicts[kernel].as_deref();
        assert_eq!([reason("good"), reason("also good")], [None; 2]);
        assert_eq!(reason("illegal"), Some("a process that runs them is killed by SIGILL"));
        assert_eq!(reason("wrong"), Some(plain("1 is 2,\u{1b}[31m here").as_str()));
        assert!(!reason("wrong").unwrap().chars().any(char::is_control));
        assert_eq!(reason("panics"), Some("a process that runs them exits with code 101"));
        assert!(reason("endless").unwrap().contains("SIGXCPU"));
        assert_eq!(verdicts.len(), kernels.len());
    }

    #[test]
    fn a_child_that_ends_for_another_reason_proves_nothing() {
        let killed = in_children(&names(&["good", "killed"]), &command).unwrap_err();
        assert!(killed.to_string().contains("signal: 9"), "{killed}");
        // It knows no such kernel.
        assert!(in_children(&names(&["good", "unknown"]), &command).is_err());
        let no_program = |_: &[String]| Ok(Command::new("/nonexistent/trireme"));
        assert!(in_children(&names(&["good"]), &no_program).is_err());
        let silent = |_: &[String]| Ok(Command::new("true"));
        assert!(in_children(&names(&["good"]), &silent).is_err());
        assert!(in_children(&[], &silent).unwrap().is_empty());
    }

    #[test]
    fn without_children_wrong_kernels_are_excluded_all_the_same() {
        let trials = [trial("good", || Ok(())), trial("wrong", || Err("1 is 2".to_owned()))];
        let verdicts = here(&trials);
        assert_eq!(verdicts["good"], None);
        assert_eq!(verdicts["wrong"].as_deref(), Some("1 is 2"));
    }
}
