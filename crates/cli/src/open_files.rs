//! The limit of open files of a process.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the soft limit of open files to the hard limit: rank 0 has some connections to each other rank, and many systems begin with a
/// soft limit of 1024, for programs that use `select`. Workers inherit the limit.
pub(crate) fn raise_limit() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum {
        // If this fails, a world that needs more files reports it when it opens them.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    }
}
