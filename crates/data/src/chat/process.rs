//! Child processes that run chat templates with limits on memory, stack and processor time.
//!
//! A template is untrusted code. The interpreter limits the number of steps but not the cost of a step: thirty steps
//! can double a text thirty times. Only limits that the operating system enforces on a process bound the cost.

use super::interpreter::{Interpreter, RenderRequest, TemplateSpec};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::panic::resume_unwind;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::thread;
use trireme_base::{Bytes, with_resource_limits};

/// Limit on the address space of the child process in bytes. A conversation has at most 64 MiB, and a rendered text at most 256 MiB.
const MEMORY_BYTES_MAX: u64 = 1 << 30;
/// Limit on the processor time of one conversation, in seconds. Published templates take less than a millisecond.
const PROCESSOR_SECONDS_MAX: u64 = 3;
/// Stack size of the thread that runs a template, in bytes. Hand-written templates need far less.
const STACK_BYTES: usize = 16 << 20;
/// Maximum length of a message between the processes, in bytes.
const MESSAGE_BYTES_MAX: u64 = 1 << 30;
/// Maximum number of bytes read from a child's standard error.
const STDERR_BYTES_MAX: u64 = 4096;

/// The command-line arguments that make this program call [`serve_chat_template`].
static ARGUMENTS: OnceLock<&'static [&'static str]> = OnceLock::new();

/// Runs chat templates from files in child processes from now on. A child is this program, started with `arguments`;
/// with these arguments it must call [`serve_chat_template`] and exit. Only the first call in a process has an effect.
///
/// In a program that does not call this function, templates run in the program's own process, and only their steps and
/// their output are limited. Such a program should use only templates that its author has read.
pub fn isolate_chat_templates(arguments: &'static [&'static str]) {
    let _ = ARGUMENTS.set(arguments);
}

pub(super) fn is_isolation_enabled() -> bool {
    ARGUMENTS.get().is_some()
}

#[derive(Debug)]
pub(super) struct Process {
    child: Child,
    socket: UnixStream,
}

impl Process {
    /// Starts a process and compiles the template in it.
    /// Fails if the template is not valid or exceeds a limit, or the process cannot be started.
    pub(super) fn start(spec: &TemplateSpec<'_>) -> Result<Self, String> {
        let failed = |error: io::Error| format!("cannot start a process to run it: {error}");
        let (socket, of_child) = UnixStream::pair().map_err(failed)?;
        let child = Command::new("/proc/self/exe")
            .args(ARGUMENTS.get().copied().unwrap_or_default())
            .env_clear()
            .current_dir("/")
            // Ctrl-C must reach only this process, which then ends the child.
            .process_group(0)
            .stdin(OwnedFd::from(of_child))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| failed(with_resource_limits(error)))?;
        let mut process = Process { child, socket };
        process.exchange::<()>(spec)?;
        Ok(process)
    }

    pub(super) fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Sends the [`TemplateSpec`] or a [`RenderRequest`] to the child, and returns the result of [`Interpreter::new`] or
    /// [`Interpreter::run`] there.
    ///
    /// # Errors
    /// If the call fails in the child, or the template exceeds a limit; in the latter case the child has ended.
    pub(super) fn exchange<T: DeserializeOwned>(&mut self, request: &impl Serialize) -> Result<T, String> {
        let answer = send(&mut self.socket, request).and_then(|()| receive(&mut self.socket));
        match answer {
            Ok(Some(answer)) => answer,
            Ok(None) | Err(_) => Err(self.exit_reason()),
        }
    }

    /// Waits for the end of the child, which has closed its side of the connection, and describes why it ended.
    fn exit_reason(&mut self) -> String {
        // Ends a child that still waits for a request.
        let _ = self.socket.shutdown(Shutdown::Both);
        let mut stderr_text = Vec::new();
        if let Some(stderr) = self.child.stderr.take() {
            // If standard error cannot be read, the reason is reported without it.
            let _ = stderr.take(STDERR_BYTES_MAX).read_to_end(&mut stderr_text);
        }
        let stderr_text = String::from_utf8_lossy(&stderr_text);
        let status = match self.child.wait() {
            Ok(status) => status,
            Err(error) => return format!("the process that runs it was lost: {error}"),
        };
        let is_signal = |signal: rustix::process::Signal| status.signal() == Some(signal.as_raw());
        if is_signal(rustix::process::Signal::XCPU) {
            format!("it takes more than {PROCESSOR_SECONDS_MAX} s of processor time")
        } else if stderr_text.contains("overflowed its stack") {
            format!("its expressions or calls nest too deeply for a stack of {}", Bytes(STACK_BYTES as u64))
        } else if stderr_text.contains("memory allocation") || stderr_text.contains("capacity overflow") {
            format!("it takes more than {} of memory", Bytes(MEMORY_BYTES_MAX))
        } else {
            format!("the process that runs it has ended ({status}): {}", stderr_text.trim())
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Killing fails only if the process has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs the child's side of [`isolate_chat_templates`]: renders with the template that the parent sends, until the
/// parent closes the connection on the standard input. Sets limits on this process, which can do nothing else
/// afterwards.
///
/// # Errors
/// If the standard input is not a socket of the parent, the connection fails, or a limit cannot be set.
pub fn serve_chat_template() -> io::Result<()> {
    limit(Resource::As, MEMORY_BYTES_MAX)?;
    limit(Resource::Core, 0)?;
    limit(Resource::Fsize, 0)?;
    let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let serving = thread::Builder::new().stack_size(STACK_BYTES).spawn(move || serve(socket))?;
    serving.join().unwrap_or_else(|panic| resume_unwind(panic))
}

fn serve(mut socket: UnixStream) -> io::Result<()> {
    let Some(spec) = receive::<TemplateSpec<'_>>(&mut socket)? else { return Ok(()) };
    limit_processor_time()?;
    let interpreter = match Interpreter::new(&spec) {
        Ok(interpreter) => interpreter,
        Err(reason) => return send(&mut socket, &Err::<(), _>(reason)),
    };
    send(&mut socket, &Ok::<_, String>(()))?;
    while let Some(request) = receive::<RenderRequest<'_>>(&mut socket)? {
        limit_processor_time()?;
        send(&mut socket, &interpreter.run(&request))?;
        // Reading the next request has its own time limit.
        limit_processor_time()?;
    }
    Ok(())
}

/// Lowers a limit of this process. A limit that is already lower does not change.
fn limit(resource: Resource, value: u64) -> io::Result<()> {
    let Rlimit { current, maximum } = getrlimit(resource);
    let lower = |limit: Option<u64>| Some(limit.map_or(value, |limit| limit.min(value)));
    Ok(setrlimit(resource, Rlimit { current: lower(current), maximum: lower(maximum) })?)
}

/// Limits the processor time of this process to [`PROCESSOR_SECONDS_MAX`] more than it has used.
fn limit_processor_time() -> io::Result<()> {
    // Used time is rounded up, so every conversation has at least the full limit.
    let used = clock_gettime(ClockId::ProcessCPUTime).tv_sec.unsigned_abs() + 1;
    let seconds = used + PROCESSOR_SECONDS_MAX;
    let maximum = getrlimit(Resource::Cpu).maximum;
    let current = Some(maximum.map_or(seconds, |maximum| maximum.min(seconds)));
    Ok(setrlimit(Resource::Cpu, Rlimit { current, maximum })?)
}

fn send(socket: &mut UnixStream, message: &impl Serialize) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    socket.write_all(&(bytes.len() as u64).to_le_bytes())?;
    socket.write_all(&bytes)
}

/// Receives the next message; `None` if the other process has closed the connection.
fn receive<T: DeserializeOwned>(socket: &mut UnixStream) -> io::Result<Option<T>> {
    let mut length = [0; 8];
    match socket.read_exact(&mut length) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    }
    let length = u64::from_le_bytes(length);
    if length > MESSAGE_BYTES_MAX {
        return Err(io::Error::other(format!("a message of {length} bytes, more than {MESSAGE_BYTES_MAX}")));
    }
    let mut bytes = Vec::new();
    socket.take(length).read_to_end(&mut bytes)?;
    Ok(Some(serde_json::from_slice(&bytes)?))
}
