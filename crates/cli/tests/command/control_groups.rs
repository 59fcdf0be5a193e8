//! Runs in a control group that limits their memory. They fit or are refused, and the system kills no process.

use crate::common::{Fixture, Outcome, Running, assert_contains, poll};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use trireme_testkit::or_skip;

/// Mount points of the control groups that count memory, of version 2 and of version 1.
const MOUNT_POINTS: [(&str, &str); 2] = [("", "/sys/fs/cgroup"), ("memory", "/sys/fs/cgroup/memory")];

/// A control group below the group of this process.
struct ControlGroup {
    folder: PathBuf,
    limit_file: PathBuf,
}

impl ControlGroup {
    /// Creates a group whose processes may use `limit` bytes together.
    fn new(limit: u64) -> io::Result<Self> {
        let groups = fs::read_to_string("/proc/self/cgroup")?;
        let parent = |(controllers, mount_point): &(&str, &str)| {
            let path = |line: &str| {
                let mut fields = line.splitn(3, ':').skip(1);
                let group = (fields.next()? == *controllers).then(|| fields.next())??;
                Some(Path::new(mount_point).join(group.trim_start_matches('/')))
            };
            groups.lines().find_map(path).filter(|path| path.join("cgroup.procs").exists())
        };
        let parents: Vec<PathBuf> = MOUNT_POINTS.iter().filter_map(parent).collect();
        let mut reason = io::Error::from(io::ErrorKind::NotFound);
        for parent in parents {
            let folder = parent.join(format!("trireme-test-{}", std::process::id()));
            match fs::create_dir(&folder).and_then(|()| Self::limited(folder, limit)) {
                Ok(group) => return Ok(group),
                Err(error) => reason = error,
            }
        }
        Err(reason)
    }

    fn limited(folder: PathBuf, limit: u64) -> io::Result<Self> {
        let files = ["memory.max", "memory.limit_in_bytes"].map(|name| folder.join(name));
        // Without one of these files, the group has no memory controller.
        let limit_file = files.into_iter().find(|file| file.exists()).unwrap_or_default();
        let group = ControlGroup { folder, limit_file };
        fs::write(&group.limit_file, limit.to_string())?;
        Ok(group)
    }

    /// Runs `trireme` in the group.
    fn run(&self, fixture: &Fixture, arguments: &str) -> Outcome {
        let enter = format!("echo $$ > '{}'", self.folder.join("cgroup.procs").display());
        Running::start(fixture.command_after(&enter, arguments)).end()
    }

    /// Returns how many processes the system has killed because of the group's limit.
    fn num_kills(&self) -> u64 {
        let files =
            ["memory.events", "memory.oom_control"].map(|name| fs::read_to_string(self.folder.join(name)));
        let counts = files.into_iter().flatten().collect::<String>();
        counts.lines().find_map(|line| line.strip_prefix("oom_kill ")?.parse().ok()).unwrap()
    }
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        // The last process leaves the group a moment after its end is reported.
        let is_busy = |error: &io::Error| error.kind() == io::ErrorKind::ResourceBusy;
        poll(|| fs::remove_dir(&self.folder).err().filter(is_busy).is_none().then_some(()));
    }
}

#[test]
fn auto_fits_or_is_refused_and_nothing_is_killed() {
    let group = ControlGroup::new(300 << 20);
    let Some(group) = or_skip("control group for processes of this test", group) else { return };
    let fixture = Fixture::with_corpus();
    let model = "--set model.hidden_size=64 --set model.num_layers=6 --set training.seq_len=128 --set training.steps=1 \
                 --set checkpoint.interval=1 --set training.global_batch_size=160";
    for workers in [1, 2] {
        let settings =
            format!("{model} --workers {workers} --set training.local_batch_size={}", 160 / workers);
        let error = group.run(&fixture, &format!("train tiny.toml {settings}")).refused();
        let limit_file = group.limit_file.display().to_string();
        assert_contains(
            &error,
            &["more than the 300.00MiB", &limit_file, "what would fit:", "activation_checkpoint.mode="],
        );
        let name = format!("auto-{workers}");
        let auto = format!("{settings} --set activation_checkpoint.mode=auto --set run.name={name}");
        let shown = group.run(&fixture, &format!("train tiny.toml {auto}")).succeeded();
        assert_contains(&shown, &["recomputation, for at most", "of the forward pass"]);
        assert_eq!(fixture.complete_checkpoints(&name), 1);
    }
    let large = "--set model.hidden_size=1024 --set model.num_layers=8 --set activation_checkpoint.mode=auto";
    let error = group.run(&fixture, &format!("train tiny.toml {large}")).refused();
    assert_contains(&error, &["more than the 300.00MiB", "memory."]);
    assert_eq!(group.num_kills(), 0);
}
