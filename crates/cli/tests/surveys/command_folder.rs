//! Commands of Trireme, and their results.

use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// Environment variable with the program that trains, instead of the one of this build: an optimized one is several times faster.
const TRAINING_BINARY: &str = "TRIREME_SURVEYS_BINARY";

const CONFIG: &str = r#"
[model]
architecture = "gpt2"

[training]
local_batch_size = 1
threads = 1

[data]
inputs = ["text.txt"]
folder = "data"

[checkpoint]
enable = false

[metrics]
tensorboard = false

[launch]
workers = 1

[generate]
num_tokens = 0
"#;

/// Files whose text is trained on, a few hundred thousand bytes.
const TEXTS: [&str; 12] = [
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "README.md",
    "docs/checkpoints.md",
    "docs/collectives.md",
    "docs/compression.md",
    "docs/experts.md",
    "docs/guide.md",
    "docs/memory.md",
    "docs/optimizers.md",
    "docs/performance.md",
    "docs/pipeline.md",
];

pub(crate) fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A decoder of the shape of GPT-2.
#[derive(Clone, Copy)]
pub(crate) struct Gpt {
    pub(crate) hidden_size: usize,
    pub(crate) num_layers: usize,
    pub(crate) num_heads: usize,
    pub(crate) vocab_size: usize,
    pub(crate) seq_len: usize,
    /// Whether the head shares the embedding's weights.
    pub(crate) is_tied: bool,
}

impl Gpt {
    /// GPT-3 (Brown et al., 2020, table 2.1).
    pub(crate) const GPT3: Gpt = Gpt::of(12_288, 96, 96);

    /// The largest model of Narayanan et al. (2021, table 1).
    pub(crate) const TRILLION: Gpt = Gpt::of(25_600, 128, 160);

    pub(crate) const fn of(hidden_size: usize, num_layers: usize, num_heads: usize) -> Gpt {
        Gpt { hidden_size, num_layers, num_heads, vocab_size: 51_200, seq_len: 2048, is_tied: true }
    }
}

/// A folder with a config, in which commands run.
pub(crate) struct CommandFolder {
    folder: TempDir,
}

impl CommandFolder {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("survey.toml"), CONFIG).unwrap();
        let text = TEXTS.map(|name| fs::read_to_string(repository().join(name)).unwrap()).concat();
        fs::write(folder.path().join("text.txt"), text).unwrap();
        CommandFolder { folder }
    }

    /// Plans a step of the model with `settings`, such as `launch.workers=2`, separated by spaces.
    pub(crate) fn plan(&self, model: Gpt, settings: &str) -> PlannedStep {
        self.plan_on_hosts(model, settings, None)
    }

    /// Like [`plan`](CommandFolder::plan), on hosts with `workers_per_host` workers each.
    pub(crate) fn plan_on_hosts(
        &self,
        model: Gpt,
        settings: &str,
        workers_per_host: Option<usize>,
    ) -> PlannedStep {
        let Gpt { hidden_size, num_layers, num_heads, vocab_size, seq_len, is_tied } = model;
        let mut command = self.command(Path::new(env!("CARGO_BIN_EXE_trireme")), "plan", settings);
        command.arg("--json");
        if let Some(number) = workers_per_host {
            command.args(["--workers-per-host", &number.to_string()]);
        }
        for (key, value) in [
            ("model.hidden_size", hidden_size),
            ("model.num_layers", num_layers),
            ("model.num_heads", num_heads),
            ("model.vocab_size", vocab_size),
            ("training.seq_len", seq_len),
        ] {
            command.args(["--set", &format!("{key}={value}")]);
        }
        command.args(["--set", &format!("model.tie_word_embeddings={is_tied}")]);
        PlannedStep(serde_json::from_str(&succeed(&mut command)).unwrap())
    }

    /// Trains with `settings` under its own name, and returns the records of its steps.
    pub(crate) fn train(&self, name: &str, settings: &str) -> Vec<Value> {
        let binary = std::env::var_os(TRAINING_BINARY).map(PathBuf::from);
        let binary = binary.as_deref().unwrap_or(Path::new(env!("CARGO_BIN_EXE_trireme")));
        let mut command = self.command(binary, "train", settings);
        succeed(command.args(["--set", &format!("run.name={name}")]));
        let path = self.folder.path().join("runs").join(name).join("metrics.jsonl");
        let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Returns the processor's name, as `trireme doctor` reports it.
    pub(crate) fn processor(&self) -> String {
        let mut command = Command::new(env!("CARGO_BIN_EXE_trireme"));
        command.args(["doctor", "--seconds", "0.01", "--json"]).env("XDG_CACHE_HOME", self.folder.path());
        let report: Value = serde_json::from_str(&succeed(&mut command)).unwrap();
        report["machine"]["processor"].as_str().unwrap_or("an unknown processor").to_owned()
    }

    fn command(&self, binary: &Path, name: &str, settings: &str) -> Command {
        let mut command = Command::new(binary);
        command.arg(name).arg("survey.toml").current_dir(self.folder.path());
        command.env("XDG_CACHE_HOME", self.folder.path());
        for setting in settings.split_whitespace() {
            command.args(["--set", setting]);
        }
        command
    }
}

/// Returns the standard output of a command that must succeed.
fn succeed(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// A planned step of the worker that needs the most memory: the object that `trireme plan --json` prints.
pub(crate) struct PlannedStep(Value);

impl PlannedStep {
    pub(crate) fn num_parameters(&self) -> f64 {
        self.number(&["num_parameters"])
    }

    /// Returns the peak bytes of a category of memory, or of the `total`.
    pub(crate) fn peak(&self, category: &str) -> f64 {
        self.number(&["memory_peak_bytes", category])
    }

    /// Returns the peak bytes of parameters, gradients and optimizer state.
    pub(crate) fn states(&self) -> f64 {
        ["parameters", "gradients", "optimizer"].map(|category| self.peak(category)).iter().sum()
    }

    pub(crate) fn host_bytes(&self) -> f64 {
        self.number(&["host_bytes"])
    }

    /// Returns the floating-point operations of matrix products in the `forward`, `recomputation` or `backward` pass.
    pub(crate) fn operations(&self, pass: &str) -> f64 {
        self.number(&["product_operations", pass])
    }

    /// Returns the floating-point operations of matrix products in all passes.
    pub(crate) fn all_operations(&self) -> f64 {
        ["forward", "recomputation", "backward"].map(|pass| self.operations(pass)).iter().sum()
    }

    pub(crate) fn bubble(&self) -> f64 {
        self.number(&["pipeline_bubble"])
    }

    pub(crate) fn exchanges(&self) -> impl Iterator<Item = Exchange<'_>> {
        self.0["exchanges"].as_array().unwrap().iter().map(|exchange| {
            let number = |key: &str| exchange[key].as_f64().unwrap();
            Exchange {
                operation: exchange["operation"].as_str().unwrap(),
                num_ranks: number("num_ranks"),
                num_hosts: number("num_hosts"),
                bytes: number("bytes") * number("count"),
                count: number("count"),
            }
        })
    }

    fn number(&self, keys: &[&str]) -> f64 {
        let value = keys.iter().fold(&self.0, |value, key| &value[*key]);
        value.as_f64().unwrap_or_else(|| panic!("{keys:?} of {}", self.0))
    }
}

/// Exchanges of one kind and length.
pub(crate) struct Exchange<'a> {
    pub(crate) operation: &'a str,
    pub(crate) num_ranks: f64,
    pub(crate) num_hosts: f64,
    /// Bytes of the vectors of all these exchanges.
    pub(crate) bytes: f64,
    pub(crate) count: f64,
}

/// Returns the validation loss at the end of a run.
pub(crate) fn last_loss(records: &[Value]) -> f64 {
    records.last().unwrap()["validation_loss"].as_f64().unwrap()
}
