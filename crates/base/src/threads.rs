//! Starts threads, with errors that state the system's limits.

use memmap2::MmapMut;
use std::fs;
use std::io::{self, ErrorKind};
use std::sync::mpsc;
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};

/// Bytes of address space that must be free before a thread starts: a stack of 2 MiB, and the memory that it allocates at its start, with
/// room to spare. If such an allocation fails, the thread aborts the process.
const THREAD_ADDRESS_SPACE: usize = 40 << 20;

/// Starts a thread with this name, and waits until its work begins.
///
/// # Errors
/// If the system cannot start the thread. The error states the [limits](with_resource_limits) on the number of threads.
pub fn spawn_thread<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    start(name, work, |builder, work| builder.spawn(work))
}

/// Starts a thread with this name that ends within `scope`, and waits until its work begins.
///
/// # Errors
/// As [`spawn_thread`].
pub fn spawn_scoped_thread<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &str,
    work: impl FnOnce() -> T + Send + 'scope,
) -> io::Result<ScopedJoinHandle<'scope, T>> {
    start(name, work, |builder, work| builder.spawn_scoped(scope, work))
}

/// Starts a thread by `spawn`, and waits until its work begins. By then the thread has allocated its memory, so [`check_address_space`] for
/// the next thread does not count that memory as free.
fn start<'scope, T, H>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'scope,
    spawn: impl FnOnce(Builder, Box<dyn FnOnce() -> T + Send + 'scope>) -> io::Result<H>,
) -> io::Result<H> {
    let (begins, has_begun) = mpsc::channel::<()>();
    let work = move || {
        drop(begins);
        work()
    };
    let started =
        check_address_space().and_then(|()| spawn(Builder::new().name(name.to_owned()), Box::new(work)));
    let handle = with_thread_name(name, started)?;
    // `recv` returns an error as soon as the thread has dropped the sender.
    let _ = has_begun.recv();
    Ok(handle)
}

/// Returns an error if the process cannot map the memory that a new thread needs. Maps and unmaps that much without touching it.
fn check_address_space() -> io::Result<()> {
    MmapMut::map_anon(THREAD_ADDRESS_SPACE).map(drop)
}

fn with_thread_name<T>(name: &str, started: io::Result<T>) -> io::Result<T> {
    started.map_err(|error| {
        let error = with_resource_limits(error);
        io::Error::new(error.kind(), format!("cannot start the thread '{name}': {error}"))
    })
}

/// Adds the limits on processes, threads and memory to an error of starting a process or thread, if the error means that a limit is
/// reached. Returns other errors unchanged.
pub fn with_resource_limits(error: io::Error) -> io::Error {
    if !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::OutOfMemory) {
        return error;
    }
    let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let limit = |name: &str| soft_limit(&limits, name).unwrap_or("unknown");
    let text = format!(
        "{error}; a limit is reached: of processes and threads (ulimit -u is {}, and pids.max of the control group) or of memory (ulimit -v is {} \
         bytes); raise it, or use fewer threads or workers",
        limit("Max processes"),
        limit("Max address space"),
    );
    io::Error::new(error.kind(), text)
}

/// Returns the soft limit with this name from the text of `/proc/self/limits`.
fn soft_limit<'a>(limits: &'a str, name: &str) -> Option<&'a str> {
    limits.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_the_system_refuses_is_an_error_that_names_the_limits() {
        // The stack exceeds the address space of a process.
        let started = Builder::new().stack_size(1 << 47).spawn(|| ());
        let error = with_thread_name("kernel-3", started).unwrap_err().to_string();
        for fact in ["cannot start the thread 'kernel-3'", "ulimit -u is ", "pids.max", "ulimit -v is "] {
            assert!(error.contains(fact), "{error}");
        }
        let other = with_resource_limits(io::Error::new(ErrorKind::NotFound, "no such program"));
        assert_eq!(other.to_string(), "no such program");
    }

    #[test]
    fn soft_limits_are_read() {
        let limits = "Limit                     Soft Limit           Hard Limit           Units     \n\
                      Max processes             100                  63432                processes \n\
                      Max address space         unlimited            unlimited            bytes     \n";
        let read = ["Max processes", "Max address space", "Max other"].map(|name| soft_limit(limits, name));
        assert_eq!(read, [Some("100"), Some("unlimited"), None]);
    }

    #[test]
    fn threads_run_and_have_their_name() {
        let name = || std::thread::current().name().map(str::to_owned);
        let own = spawn_thread("own", name).unwrap().join().unwrap();
        let scoped =
            std::thread::scope(|scope| spawn_scoped_thread(scope, "scoped", name).unwrap().join().unwrap());
        assert_eq!([own, scoped], [Some("own".to_owned()), Some("scoped".to_owned())]);
    }
}
