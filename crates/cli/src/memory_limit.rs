//! How much memory the processes of this host may take, and what says so.

use crate::control_groups::{Controller, settings};
use rustix::system::sysinfo;
use std::fmt;
use std::path::{Path, PathBuf};
use trireme_base::Bytes;

/// Above `memory.high` the kernel slows processes down until they hardly run.
const MEMORY: Controller = Controller {
    name: "memory",
    files: &["memory.max", "memory.high"],
    files_of_version_1: &["memory.limit_in_bytes"],
};

/// A limit on the memory of all processes in a group, or of the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MemoryLimit {
    pub(crate) bytes: u64,
    /// The file of the control group that sets the limit; `None` if it is the machine's memory.
    pub(crate) file: Option<PathBuf>,
}

impl MemoryLimit {
    /// The lowest limit that applies to this process.
    ///
    /// Memory that other programs use at the moment does not lower it: the same run gets the same limit every time.
    pub(crate) fn of_this_process() -> Self {
        let system = sysinfo();
        let machine =
            MemoryLimit { bytes: system.totalram as u64 * u64::from(system.mem_unit.max(1)), file: None };
        match Self::of_control_groups(Path::new("/")) {
            Some(limit) if limit.bytes < machine.bytes => limit,
            _ => machine,
        }
    }

    /// The lowest limit of the control groups that this process belongs to, read from the files below `root`, which is `/`
    /// except in tests.
    pub(crate) fn of_control_groups(root: &Path) -> Option<Self> {
        let limits = settings(root, &MEMORY).filter_map(|(file, text)| {
            // A group without a limit has `max` in its file.
            Some(MemoryLimit { bytes: text.trim().parse().ok()?, file: Some(file) })
        });
        // Of equal ones the outermost: more processes share it.
        limits.collect::<Vec<_>>().into_iter().rev().min_by_key(|limit| limit.bytes)
    }
}

impl fmt::Display for MemoryLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = Bytes(self.bytes);
        match &self.file {
            None => write!(f, "the {bytes} of this machine"),
            Some(file) => write!(f, "the {bytes} that the control group allows ({})", file.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const MOUNTS: &str = "\
31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:9 master:1 - cgroup2 cgroup2 rw
";
    const CONTAINER: &str = "35 31 0:32 /docker/1 /sys/fs/cgroup/x rw - cgroup cgroup rw,cpu,memory\n";

    /// The limit that is found, with its file below `/sys/fs/cgroup`.
    fn found(groups: &str, mounts: &str, files: &[(&str, &str)]) -> Option<(u64, String)> {
        let folder = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("proc/self/cgroup", groups);
        write("proc/self/mountinfo", mounts);
        files.iter().for_each(|(file, text)| write(&format!("sys/fs/cgroup/{file}"), text));
        let limit = MemoryLimit::of_control_groups(folder.path())?;
        let file = limit.file.unwrap();
        Some((limit.bytes, file.strip_prefix("/sys/fs/cgroup").unwrap().to_str().unwrap().to_owned()))
    }

    #[test]
    fn the_lowest_limit_of_all_groups_counts() {
        let both = "4:memory:/a/b\n3:cpu:/\n0::/c/d\n";
        let none = ("memory/a/b/memory.limit_in_bytes", "9223372036854771712\n");
        for (groups, mounts, files, expected) in [
            (
                both,
                MOUNTS,
                &[none, ("memory/a/memory.limit_in_bytes", "1000\n")][..],
                "memory/a/memory.limit_in_bytes",
            ),
            (both, MOUNTS, &[none, ("unified/c/d/memory.max", "1000\n")], "unified/c/d/memory.max"),
            (
                both,
                MOUNTS,
                &[("unified/memory.max", "max\n"), ("unified/c/memory.high", "1000\n")],
                "unified/c/memory.high",
            ),
            // A container that sees no other group than its own.
            (
                "4:cpu,memory:/docker/1\n",
                CONTAINER,
                &[("x/memory.limit_in_bytes", "1000\n")],
                "x/memory.limit_in_bytes",
            ),
            (
                "4:memory:/docker/1/a\n",
                CONTAINER,
                &[("x/a/memory.limit_in_bytes", "1000\n")],
                "x/a/memory.limit_in_bytes",
            ),
            (
                "4:memory:/../other\n",
                CONTAINER,
                &[("x/memory.limit_in_bytes", "1000\n")],
                "x/memory.limit_in_bytes",
            ),
            ("0::/../../x\n", MOUNTS, &[("unified/memory.max", "1000\n")], "unified/memory.max"),
        ] {
            assert_eq!(found(groups, mounts, files), Some((1000, expected.to_owned())), "{groups}");
        }
    }

    #[test]
    fn what_is_not_told_or_makes_no_sense_limits_nothing() {
        let file = ("memory/memory.limit_in_bytes", "1000");
        assert!(found("4:memory:/\n", MOUNTS, &[file]).is_some());
        for (groups, mounts, text) in [
            ("4:memory:/\n", MOUNTS, "max"),
            ("4:memory:/\n", MOUNTS, "-5"),
            ("4:memory:/\n", MOUNTS, ""),
            ("4:memory:/\n", "", "1000"),
            ("4:memory:/\n", "35 31 / -\n\n - cgroup cgroup memory\n", "1000"),
            ("3:cpu:/\n", MOUNTS, "1000"),
            ("0\n::\n:memory\n", MOUNTS, "1000"),
            ("", MOUNTS, "1000"),
        ] {
            assert_eq!(found(groups, mounts, &[(file.0, text)]), None, "{groups}");
        }
    }

    #[test]
    fn a_limit_says_what_sets_it() {
        let limit = MemoryLimit { bytes: 3 << 20, file: Some("/sys/fs/cgroup/a/memory.max".into()) };
        let expected = "the 3.00MiB that the control group allows (/sys/fs/cgroup/a/memory.max)";
        assert_eq!(limit.to_string(), expected);
        let machine = MemoryLimit { file: None, ..limit };
        assert_eq!(machine.to_string(), "the 3.00MiB of this machine");
        assert!(MemoryLimit::of_this_process().bytes > 0);
    }
}
