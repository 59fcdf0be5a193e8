//! A folder with a text and a config, commands that run there, and their outcomes.

mod running;
mod weights;

pub(crate) use running::{Running, kill, poll};
pub(crate) use weights::Weights;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// A config that trains in a few tenths of a second.
const CONFIG: &str = "\
[model]
architecture = \"gpt2\"
hidden_size = 32
num_layers = 1
num_heads = 2
[data]
inputs = [\"text.txt\"]
[training]
local_batch_size = 2
global_batch_size = 8
seq_len = 16
steps = 4
threads = 1
[checkpoint]
interval = 2
[metrics]
log_interval = 1
[launch]
workers = 2
[generate]
num_tokens = 8
";

/// Prefixes of the variables of other launchers and of an outer run. Commands that inherit such variables would take themselves for
/// workers.
const LAUNCHER_VARIABLES: [&str; 10] = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "GROUP_",
    "SLURM_",
    "OMPI_",
    "PMI_",
    "TORCHELASTIC_",
    "TRIREME_",
];

/// The cache folder that fixtures share, so that a program verifies its kernels once and not in each test.
const SHARED_CACHE: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/cache");

/// A temporary folder with `text.txt` and `tiny.toml`.
pub(crate) struct Fixture {
    folder: TempDir,
    /// A cache folder for this fixture alone, for tests of what is cached.
    own_cache: Option<TempDir>,
}

impl Fixture {
    pub(crate) fn new() -> Self {
        let fixture = Fixture { folder: tempfile::tempdir().unwrap(), own_cache: None };
        let words = ["one", "two", "three", "five", "eight", "thirteen", "owls"];
        let line = |index: usize| format!("{} {}\n", words[index % 7], words[index * index % 5]);
        fixture.write("text.txt", (0..1500).map(line).collect::<String>());
        fixture.write("tiny.toml", CONFIG);
        fixture
    }

    /// Creates a fixture whose text is prepared in `corpus`, with a config that uses this corpus.
    pub(crate) fn with_corpus() -> Self {
        let fixture = Fixture::new();
        fixture.run("prepare text.txt --out corpus").succeeded();
        fixture.write("tiny.toml", CONFIG.replace("inputs = [\"text.txt\"]", "folder = \"corpus\""));
        fixture
    }

    /// Creates a fixture as [`with_corpus`](Fixture::with_corpus) does, with an empty cache folder.
    pub(crate) fn with_own_cache() -> Self {
        Fixture { own_cache: Some(tempfile::tempdir().unwrap()), ..Fixture::with_corpus() }
    }

    fn cache(&self) -> &Path {
        self.own_cache.as_ref().map_or(Path::new(SHARED_CACHE), TempDir::path)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap()
    }

    pub(crate) fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        fs::write(self.path(name), content).unwrap();
    }

    /// Changes one bit in the middle of a file.
    pub(crate) fn flip_bit(&self, name: &str) {
        let mut content = fs::read(self.path(name)).unwrap();
        let middle = content.len() / 2;
        content[middle] ^= 4;
        self.write(name, content);
    }

    /// Removes the last `num_bytes` of a file.
    pub(crate) fn cut(&self, name: &str, num_bytes: usize) {
        let content = fs::read(self.path(name)).unwrap();
        self.write(name, &content[..content.len() - num_bytes]);
    }

    /// Returns a command of `trireme` with these words as its arguments.
    pub(crate) fn command(&self, arguments: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_trireme"));
        command.args(arguments.split_whitespace());
        self.isolate(&mut command);
        command
    }

    /// Like [`command`](Fixture::command), started by a shell that first runs `setup`, such as `ulimit -v 1000000`.
    pub(crate) fn command_after(&self, setup: &str, arguments: &str) -> Command {
        let mut command = Command::new("sh");
        let script = format!("{setup}; exec \"$@\"");
        command.args(["-c", &script, "sh", env!("CARGO_BIN_EXE_trireme")]);
        command.args(arguments.split_whitespace());
        self.isolate(&mut command);
        command
    }

    /// Like [`command`](Fixture::command), unable to make a file longer than `num_blocks` x 512 bytes, as on a disk that fills up.
    pub(crate) fn command_on_full_disk(&self, num_blocks: usize, arguments: &str) -> Command {
        // Ignoring the signal turns it into an error of the write, as on a full disk.
        self.command_after(&format!("trap '' XFSZ; ulimit -f {num_blocks}"), arguments)
    }

    /// Makes a command run in the fixture's folder, without a terminal and without another launcher's variables.
    pub(crate) fn isolate(&self, command: &mut Command) {
        let is_launchers = |name: &OsStr| {
            name.to_str().is_some_and(|name| LAUNCHER_VARIABLES.iter().any(|start| name.starts_with(start)))
        };
        for (name, _) in std::env::vars_os().filter(|(name, _)| is_launchers(name)) {
            command.env_remove(name);
        }
        command.env("XDG_CACHE_HOME", self.cache());
        // A panic would be visible by its backtrace.
        command.env("RUST_BACKTRACE", "1").current_dir(self.folder.path()).stdin(Stdio::null());
    }

    /// Returns one worker of a world of two, as torchrun starts it.
    pub(crate) fn worker(&self, rank: usize, master_port: u16, arguments: &str) -> Command {
        let mut command = self.command(arguments);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", "2").env("LOCAL_RANK", rank.to_string());
        command.env("LOCAL_WORLD_SIZE", "2").env("MASTER_ADDR", "127.0.0.1");
        command.env("MASTER_PORT", master_port.to_string());
        command
    }

    /// Runs `trireme` with these words as its arguments.
    pub(crate) fn run(&self, arguments: &str) -> Outcome {
        Running::start(self.command(arguments)).end()
    }

    /// Returns every file of the fixture with its content, and every folder with `None`.
    pub(crate) fn everything(&self) -> BTreeMap<PathBuf, Option<Vec<u8>>> {
        let mut found = BTreeMap::new();
        let mut folders = vec![self.folder.path().to_owned()];
        while let Some(folder) = folders.pop() {
            for path in entries(&folder) {
                if path.is_dir() {
                    folders.push(path.clone());
                    found.insert(path, None);
                } else {
                    let content = fs::read(&path).unwrap();
                    found.insert(path, Some(content));
                }
            }
        }
        found
    }

    /// Returns the files in which verdicts on kernels are cached.
    pub(crate) fn cached_verdicts(&self) -> Vec<PathBuf> {
        let folder = self.cache().join("trireme");
        if folder.exists() { entries(&folder) } else { Vec::new() }
    }

    /// Returns the names in a folder, sorted; empty if there is no such folder.
    pub(crate) fn names(&self, folder: &str) -> Vec<String> {
        let name = |path: PathBuf| path.file_name().unwrap().to_str().unwrap().to_owned();
        let folder = self.path(folder);
        if folder.exists() { entries(&folder).into_iter().map(name).collect() } else { Vec::new() }
    }

    /// Returns the error of a command, and asserts that the command has changed nothing in the fixture.
    pub(crate) fn refused_without_changes(&self, arguments: &str) -> String {
        let before = self.everything();
        let error = self.run(arguments).refused();
        let after = self.everything();
        let names = |everything: &BTreeMap<PathBuf, _>| everything.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&after), names(&before), "{error}");
        assert!(after == before, "a file has changed: {error}");
        error
    }

    /// Returns the lines of the run's `metrics.jsonl`, one for each step.
    pub(crate) fn records(&self, run: &str) -> Vec<serde_json::Value> {
        let metrics = self.read(&format!("runs/{run}/metrics.jsonl"));
        metrics.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Returns the steps of the run with the bits of their losses.
    pub(crate) fn losses(&self, run: &str) -> Vec<(u64, u64)> {
        let of_record = |record: &serde_json::Value| {
            (record["step"].as_u64().unwrap(), record["loss"].as_f64().unwrap().to_bits())
        };
        self.records(run).iter().map(of_record).collect()
    }

    /// Asserts that a run has checkpoints and that they are complete; returns their number.
    pub(crate) fn complete_checkpoints(&self, run: &str) -> usize {
        let listed = self.run(&format!("checkpoint list runs/{run}")).succeeded();
        assert!(!listed.contains("unusable"), "{listed}");
        self.run(&format!("checkpoint inspect runs/{run} --verify --json")).succeeded();
        listed.lines().count()
    }
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths
}

/// Returns a port on which no process listens.
pub(crate) fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// The output of a command, and how it ended.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// `None` if a signal killed the command.
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Outcome {
    /// Returns the output of a command that succeeded and printed nothing on standard error.
    pub(crate) fn succeeded(self) -> String {
        assert!(self.code == Some(0) && self.stderr.is_empty(), "{self:?}");
        self.stdout
    }

    /// Returns the error of a command that failed with exactly one error.
    pub(crate) fn refused(self) -> String {
        assert_eq!(self.code, Some(1), "{self:?}");
        self.one_error()
    }

    /// Returns the only error: a line, with its causes and details indented below, each fact once.
    pub(crate) fn one_error(self) -> String {
        let mut lines = self.stderr.lines();
        assert!(lines.next().is_some_and(|line| line.starts_with("error: ")), "{self:?}");
        assert!(lines.all(|line| line.starts_with("  ")), "{self:?}");
        for word in ["panicked", "backtrace", "RUST_BACKTRACE"] {
            assert!(!self.stderr.contains(word), "{self:?}");
        }
        let mut facts: Vec<&str> = self.stderr.lines().map(str::trim).collect();
        facts.sort_unstable();
        let num_facts = facts.len();
        facts.dedup();
        assert_eq!(facts.len(), num_facts, "a line stands twice: {self:?}");
        self.stderr
    }
}

/// Asserts that a message contains every fact.
#[track_caller]
pub(crate) fn assert_contains(message: &str, facts: &[&str]) {
    for fact in facts {
        assert!(message.contains(fact), "does not tell '{fact}': {message}");
    }
}
