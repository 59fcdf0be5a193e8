use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::process::{Child, Command, Stdio};

/// Name of the host's end of its link.
pub(super) const DEVICE: &str = "eth0";

/// Name of the bridge that forwards frames between the switch's ports.
pub(super) const BRIDGE: &str = "br0";

/// A network namespace without a name, held by a process that does nothing else. The namespace and the devices in it end when this value is
/// dropped, and when this process ends, for whatever reason.
#[derive(Debug)]
pub(super) struct Namespace {
    /// Runs `cat`, which ends when its standard input is closed. The kernel closes it when the test process ends.
    holder: Child,
}

impl Namespace {
    pub(super) fn new() -> Self {
        let mut command = Command::new("unshare");
        command.args(["--net", "cat"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut namespace =
            Namespace { holder: command.spawn().expect("unshare of util-linux is installed") };
        let holder = &mut namespace.holder;
        // `cat`, which runs in the namespace, echoes the line. If no line comes back, `unshare` has printed the reason.
        let sent = holder.stdin.as_mut().expect("a pipe").write_all(b"ready\n");
        let mut line = String::new();
        let read = BufReader::new(holder.stdout.as_mut().expect("a pipe")).read_line(&mut line);
        assert!(sent.is_ok() && read.is_ok() && line == "ready\n", "no network namespace can be made");
        namespace
    }

    /// Id of the process that holds the namespace. `ip link … netns` takes this id.
    pub(super) fn id(&self) -> u32 {
        self.holder.id()
    }

    /// Returns a command that runs `program` inside. The spawned process becomes the program itself, without a child.
    pub(super) fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/proc/{}/ns/net", self.id())).arg("--").arg(program);
        command
    }

    pub(super) fn run(&self, words: &str) {
        let (program, arguments) = words.split_once(' ').expect("a program and arguments");
        let mut command = self.command(program);
        command.args(arguments.split(' '));
        run(&mut command).unwrap_or_else(|failure| panic!("{failure}"));
    }

    /// Runs `body` on a thread inside. Threads and processes that it starts are inside as well, and sockets that it creates stay there.
    pub(super) fn enter<T: Send>(&self, body: impl FnOnce() -> T + Send) -> T {
        let namespace = File::open(format!("/proc/{}/ns/net", self.id())).expect("the holder lives");
        let inside = || {
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
                .expect("root may enter a namespace");
            body()
        };
        let outcome = std::thread::scope(|scope| scope.spawn(inside).join());
        outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

/// Runs a command to its end. The error is the command line with its error output.
pub(super) fn run(command: &mut Command) -> Result<(), String> {
    let outcome = command.stdin(Stdio::null()).output();
    let failure = match outcome {
        Ok(output) if output.status.success() => return Ok(()),
        Ok(output) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        Err(error) => error.to_string(),
    };
    let words: Vec<_> = std::iter::once(command.get_program()).chain(command.get_args()).collect();
    Err(format!("`{}` failed: {failure}", words.join(" ".as_ref()).display()))
}
