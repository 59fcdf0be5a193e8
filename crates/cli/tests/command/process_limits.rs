//! Limits of the address space and of the private memory of a process.

use crate::common::{Fixture, Running, assert_contains};

/// More than the small model needs, and less than the machine has.
const LIMITS: [&str; 3] = ["ulimit -d 100000", "ulimit -v 1000000", "ulimit -v 1000000; ulimit -d 100000"];

#[test]
fn a_run_that_fits_is_planned_and_trained() {
    let fixture = Fixture::with_corpus();
    for limits in LIMITS {
        for command in ["plan tiny.toml", "train tiny.toml", "generate runs/tiny --num-tokens 1 --threads 1"]
        {
            Running::start(fixture.command_after(limits, command)).end().succeeded();
        }
        std::fs::remove_dir_all(fixture.path("runs")).unwrap();
    }
}

#[test]
fn a_run_that_does_not_fit_is_refused_in_words() {
    let fixture = Fixture::with_corpus();
    let train = "train tiny.toml --workers 1 --set model.hidden_size=1024";
    let error = Running::start(fixture.command_after("ulimit -d 60000", train)).end().refused();
    assert_contains(&error, &["out of memory: the system refuses", "ulimit -d", "vm.overcommit_memory"]);
}

#[test]
fn threads_that_cannot_be_started_are_an_error_that_names_the_limits() {
    let fixture = Fixture::new();
    // The stacks of 256 threads take half a gigabyte of address space.
    for more in ["", " --train-bpe 300"] {
        let prepare = format!("prepare text.txt --out corpus --threads 256{more}");
        let error = Running::start(fixture.command_after("ulimit -v 400000", &prepare)).end().refused();
        assert_contains(
            &error,
            &[
                "cannot start the thread 'tokenizer-",
                "ulimit -u is ",
                "pids.max",
                "ulimit -v is 409600000 bytes",
            ],
        );
        assert!(!fixture.path("corpus").exists());
    }
    fixture.run("train tiny.toml").succeeded();
    let generate = "generate runs/tiny --num-tokens 1 --threads 256";
    let error = Running::start(fixture.command_after("ulimit -v 400000", generate)).end().refused();
    assert_contains(&error, &["cannot start the thread 'kernel-", "ulimit -v is 409600000 bytes"]);
}

/// Fewer open files than four workers need even if they inherit none, but enough to start a program.
const FEW_FILES: usize = 16;

#[test]
fn a_soft_limit_of_open_files_is_raised() {
    let fixture = Fixture::with_corpus();
    let train = "train tiny.toml --workers 4";
    let soft = fixture.command_after(&format!("ulimit -Sn {FEW_FILES}"), train);
    Running::start(soft).end().succeeded();
    // A limit that cannot be raised is reported.
    let hard =
        fixture.command_after(&format!("ulimit -n {FEW_FILES}"), &format!("{train} --set run.name=hard"));
    assert_contains(&Running::start(hard).end().refused(), &["open files"]);
}
