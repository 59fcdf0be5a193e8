//! Settings of this process's control groups.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

/// A controller, and the files in which a group of version 2 or 1 keeps its settings.
pub(crate) struct Controller {
    pub(crate) name: &'static str,
    pub(crate) files: &'static [&'static str],
    pub(crate) files_of_version_1: &'static [&'static str],
}

/// Returns the files of a controller with their contents, for this process's groups and their ancestors. `root` is `/` except in tests.
pub(crate) fn settings(root: &Path, controller: &Controller) -> impl Iterator<Item = (PathBuf, String)> {
    let text = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
    let (groups, mounts) = (text("proc/self/cgroup"), text("proc/self/mountinfo"));
    let hierarchies = groups.lines().filter_map(|line| Hierarchy::of(line, &mounts, controller));
    let files: Vec<PathBuf> = hierarchies.flat_map(|hierarchy| hierarchy.paths()).collect();
    files.into_iter().filter_map(|file| {
        let text = fs::read_to_string(root.join(file.strip_prefix("/").ok()?)).ok()?;
        Some((file, text))
    })
}

/// Returns the device and the inode of a file that sets a limit. Both are 0 if unknown, so that all such files count as one.
pub(crate) fn identity(file: &Path) -> (u64, u64) {
    fs::metadata(file).map_or((0, 0), |file| (file.dev(), file.ino()))
}

/// A tree of control groups that has the controller.
struct Hierarchy {
    mount_point: PathBuf,
    /// This process's group, relative to `mount_point`.
    group: PathBuf,
    files: &'static [&'static str],
}

impl Hierarchy {
    /// Returns the hierarchy of a line of `/proc/self/cgroup`, `0::/path` in version 2 and `4:memory:/path` in version 1; `None` if it
    /// lacks the controller.
    fn of(line: &str, mounts: &str, controller: &Controller) -> Option<Self> {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, group) = (fields.next()?, Path::new(fields.next()?));
        let has_it = |options: &str| options.split(',').any(|option| option == controller.name);
        let is_unified = controllers.is_empty();
        if !is_unified && !has_it(controllers) {
            return None;
        }
        let is_of_this = |mount: &Mount<'_>| match mount.kind {
            "cgroup2" => is_unified,
            "cgroup" => !is_unified && has_it(mount.options),
            _ => false,
        };
        let mount = mounts.lines().filter_map(Mount::parse).find(is_of_this)?;
        // A container may see its own group as the root of the tree, under whatever name the host has for it.
        let is_below = group.components().all(|component| component != Component::ParentDir);
        let group = group.strip_prefix(mount.root).ok().filter(|_| is_below).unwrap_or(Path::new(""));
        Some(Hierarchy {
            mount_point: mount.point.into(),
            group: group.strip_prefix("/").unwrap_or(group).to_owned(),
            files: if is_unified { controller.files } else { controller.files_of_version_1 },
        })
    }

    /// Returns the files of the group and of its ancestors.
    fn paths(&self) -> Vec<PathBuf> {
        let folders = self.group.ancestors().map(|group| self.mount_point.join(group));
        folders.flat_map(|folder| self.files.iter().map(move |file| folder.join(file))).collect()
    }
}

/// A line of `/proc/self/mountinfo`, with the fields that are needed here.
struct Mount<'a> {
    /// The part of the file system that is mounted.
    root: &'a str,
    point: &'a str,
    kind: &'a str,
    options: &'a str,
}

impl<'a> Mount<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        // Any number of optional fields precedes the separator.
        let (place, file_system) = line.split_once(" - ")?;
        let mut place = place.split(' ').skip(3);
        let mut file_system = file_system.split(' ');
        let (root, point) = (place.next()?, place.next()?);
        Some(Mount { root, point, kind: file_system.next()?, options: file_system.nth(1)? })
    }
}
