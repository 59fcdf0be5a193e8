//! CPU limits of this process's control groups.

use super::control_groups::{Controller, settings};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

const CPU: Controller =
    Controller { name: "cpu", files: &["cpu.max"], files_of_version_1: &["cpu.cfs_quota_us"] };

/// A limit on the CPU time of all processes of a group together.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct CpuLimit {
    /// Seconds of CPU time per second.
    pub(crate) num_cores: f64,
    pub(crate) file: PathBuf,
}

impl CpuLimit {
    /// Returns the limits of this process's control groups, innermost first, read from the files below `root`: `/` except in tests.
    pub(crate) fn all(root: &Path) -> Vec<Self> {
        let limits = settings(root, &CPU).filter_map(|(file, text)| {
            let period = || {
                let path = root.join(file.strip_prefix("/").ok()?).with_file_name("cpu.cfs_period_us");
                fs::read_to_string(path).ok()
            };
            let num_cores = num_cores(&text).or_else(|| num_cores_of(&text, &period()?))?;
            Some(CpuLimit { num_cores, file })
        });
        limits.collect()
    }

    /// Returns the lowest limit. Of equal limits, returns the outermost, which more processes share.
    pub(crate) fn lowest_of_groups(root: &Path) -> Option<Self> {
        Self::all(root).into_iter().rev().min_by(|a, b| a.num_cores.total_cmp(&b.num_cores))
    }
}

impl fmt::Display for CpuLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the {} cores that the control group allows ({})", self.num_cores, self.file.display())
    }
}

/// Parses `cpu.max`: quota and period in microseconds. `max` means no limit.
fn num_cores(text: &str) -> Option<f64> {
    let (quota, period) = text.trim().split_once(' ')?;
    num_cores_of(quota, period)
}

/// Divides a quota by its period. `None` if there is no limit, such as with a quota of -1.
fn num_cores_of(quota: &str, period: &str) -> Option<f64> {
    let [quota, period] = [quota, period].map(|text| text.trim().parse::<u64>().ok());
    let (quota, period) = (quota?, period?);
    (quota > 0 && period > 0).then(|| quota as f64 / period as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_quota_of_all_groups_counts() {
        let mounts = "\
31 23 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct
41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
";
        let folder = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("proc/self/cgroup", "3:cpu,cpuacct:/a\n0::/c/d\n");
        write("proc/self/mountinfo", mounts);
        let found = || CpuLimit::lowest_of_groups(folder.path());
        assert_eq!(found(), None);
        write("sys/fs/cgroup/unified/c/d/cpu.max", "max 100000\n");
        write("sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "-1\n");
        write("sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000\n");
        assert_eq!(found(), None);
        write("sys/fs/cgroup/unified/c/cpu.max", "350000 100000\n");
        let limit = found().unwrap();
        assert_eq!((limit.num_cores, limit.file.to_str()), (3.5, Some("/sys/fs/cgroup/unified/c/cpu.max")));
        write("sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "200000\n");
        assert_eq!(found().unwrap().num_cores, 2.0);
        write("sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "0\n");
        assert_eq!(found().unwrap().num_cores, 3.5);
    }
}
