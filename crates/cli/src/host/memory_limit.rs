//! Memory limits of the processes of this host, and the files that set them.

use super::control_groups::{Controller, settings};
use rustix::system::sysinfo;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::{fmt, fs};
use trireme_base::{Bytes, HUGE_PAGE_BYTES};
use trireme_train::config::HugePages;

/// Limits on ordinary memory. Above `memory.high`, the kernel slows processes down until they hardly run.
const MEMORY: Controller = Controller {
    name: "memory",
    files: &["memory.max", "memory.high"],
    files_of_version_1: &["memory.limit_in_bytes"],
};

/// Limits on pages of 2 MiB from the host's pool. Such memory counts against no other limit.
const HUGE_PAGES: Controller = Controller {
    name: "hugetlb",
    files: &["hugetlb.2MB.max"],
    files_of_version_1: &["hugetlb.2MB.limit_in_bytes"],
};

/// File with the number of pages of 2 MiB that the host has reserved.
const POOL: &str = "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

/// The kind of memory that counts against a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Pages {
    /// All memory outside the host's pool of huge pages.
    Ordinary,
    /// Memory in the pool of huge pages.
    Reserved,
}

/// A limit on the memory of all processes in a group, of the machine, or of its pool of huge pages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MemoryLimit {
    pub(crate) bytes: u64,
    /// The file that sets the limit; `None` if it is the machine's memory.
    pub(crate) file: Option<PathBuf>,
    pub(crate) pages: Pages,
}

/// A limit, and the number of workers that share it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SharedLimit {
    pub(crate) limit: MemoryLimit,
    /// `None` if it is unknown which workers share it. Then all workers of this host count.
    pub(crate) num_sharing: Option<usize>,
}

impl SharedLimit {
    /// Returns the limits of this process, which also apply to the workers that it starts.
    pub(crate) fn all(huge_pages: HugePages) -> Vec<Self> {
        let limits = MemoryLimit::all(Path::new("/"), huge_pages).into_iter();
        limits.map(|limit| SharedLimit { limit, num_sharing: None }).collect()
    }
}

impl MemoryLimit {
    /// Returns all limits that apply to this process, inner ones before outer ones. `root` is `/` except in tests. Memory that other
    /// programs use does not lower the limits, so the same run gets the same limits every time.
    pub(crate) fn all(root: &Path, huge_pages: HugePages) -> Vec<Self> {
        let mut limits = Self::of_groups(root, &MEMORY, Pages::Ordinary);
        limits.push(Self::of_machine(root));
        if huge_pages == HugePages::Reserved {
            limits.extend(Self::of_groups(root, &HUGE_PAGES, Pages::Reserved));
            limits.push(Self::of_pool(root));
        }
        limits
    }

    /// Returns the lowest limit that a control group sets on ordinary memory. Of equal limits, returns the outermost, which more processes
    /// share.
    pub(crate) fn lowest_of_groups(root: &Path) -> Option<Self> {
        Self::of_groups(root, &MEMORY, Pages::Ordinary).into_iter().rev().min_by_key(|limit| limit.bytes)
    }

    fn of_groups(root: &Path, controller: &Controller, pages: Pages) -> Vec<Self> {
        let limits = settings(root, controller).filter_map(|(file, text)| {
            // A group without a limit has `max` in its file.
            Some(MemoryLimit { bytes: text.trim().parse().ok()?, file: Some(file), pages })
        });
        limits.collect()
    }

    /// Returns the machine's memory without the memory that is reserved in huge pages of any size.
    fn of_machine(root: &Path) -> Self {
        let system = sysinfo();
        let bytes = system.totalram as u64 * u64::from(system.mem_unit.max(1));
        let text = fs::read_to_string(root.join("proc/meminfo")).unwrap_or_default();
        let set_aside =
            text.lines().find_map(|line| line.strip_prefix("Hugetlb:")?.trim().strip_suffix(" kB"));
        let set_aside = set_aside.and_then(|number| number.parse::<u64>().ok()).unwrap_or(0);
        let bytes = bytes.saturating_sub(set_aside.saturating_mul(1024));
        MemoryLimit { bytes, file: None, pages: Pages::Ordinary }
    }

    pub(crate) fn is_pool(&self) -> bool {
        self.file.as_ref().is_some_and(|file| file.ends_with(POOL))
    }

    pub(crate) fn of_pool(root: &Path) -> Self {
        let num_pages = fs::read_to_string(root.join(POOL)).ok().and_then(|text| text.trim().parse().ok());
        MemoryLimit {
            bytes: num_pages.unwrap_or(0u64).saturating_mul(HUGE_PAGE_BYTES as u64),
            file: Some(Path::new("/").join(POOL)),
            pages: Pages::Reserved,
        }
    }
}

impl fmt::Display for MemoryLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = Bytes(self.bytes);
        match &self.file {
            None => write!(f, "the {bytes} of this machine"),
            Some(file) if self.is_pool() => {
                write!(f, "the {bytes} in huge pages that this host has reserved ({})", file.display())
            }
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

    /// Returns the lowest limit, with its file below `/sys/fs/cgroup`.
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
        let limit = MemoryLimit::lowest_of_groups(folder.path())?;
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
    fn the_pool_of_huge_pages_is_a_limit_of_its_own() {
        let folder = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let limits = || -> Vec<MemoryLimit> {
            let all = MemoryLimit::all(folder.path(), HugePages::Reserved).into_iter();
            all.filter(|limit| limit.pages == Pages::Reserved).collect()
        };
        assert_eq!(limits()[0].bytes, 0);
        write(POOL, "8\n");
        let expected = format!("the 16.00MiB in huge pages that this host has reserved (/{POOL})");
        assert_eq!(limits()[0].to_string(), expected);
        write("proc/self/cgroup", "0::/a\n");
        write("proc/self/mountinfo", MOUNTS);
        // Ordinary memory has its own limits.
        write("sys/fs/cgroup/unified/a/memory.max", "1000\n");
        write("sys/fs/cgroup/unified/a/hugetlb.2MB.max", "33554432\n");
        write("sys/fs/cgroup/unified/hugetlb.2MB.max", "4194304\n");
        let bytes: Vec<u64> = limits().iter().map(|limit| limit.bytes).collect();
        assert_eq!(bytes, [32 << 20, 4 << 20, 16 << 20]);
        let ordinary = || MemoryLimit::all(folder.path(), HugePages::Transparent);
        let [group, machine] = &ordinary()[..] else { panic!("{:?}", ordinary()) };
        assert_eq!(group.bytes, 1000);
        // The pool is not available as ordinary memory.
        write("proc/meminfo", "MemTotal: 9 kB\nHugetlb:        16384 kB\n");
        assert_eq!(machine.bytes - ordinary()[1].bytes, 16 << 20);
    }

    #[test]
    fn missing_or_malformed_limits_limit_nothing() {
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
        let file = Some("/sys/fs/cgroup/a/memory.max".into());
        let limit = MemoryLimit { bytes: 3 << 20, file, pages: Pages::Ordinary };
        let expected = "the 3.00MiB that the control group allows (/sys/fs/cgroup/a/memory.max)";
        assert_eq!(limit.to_string(), expected);
        let machine = MemoryLimit { file: None, ..limit };
        assert_eq!(machine.to_string(), "the 3.00MiB of this machine");
        assert!(MemoryLimit::of_machine(Path::new("/")).bytes > 0);
    }
}
