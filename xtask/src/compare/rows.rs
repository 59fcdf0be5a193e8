//! The rows of the table, and the commands that measure their numbers.

use std::fmt;

/// A command that prints JSON objects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct BenchCommand {
    pub(super) program: Program,
    /// Arguments, separated by spaces.
    pub(super) arguments: String,
}

impl fmt::Display for BenchCommand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let program = match self.program {
            Program::Trireme => "trireme",
            Program::TriremeBinary => "the size of trireme",
            Program::Python => "python",
            Program::Torchrun => "torchrun",
            Program::OpenMpi => "mpirun",
        };
        write!(f, "{program} {}", self.arguments)
    }
}

/// The program that a command starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Program {
    Trireme,
    /// No program: the number is the size of Trireme's binary.
    TriremeBinary,
    /// A script of `peers/`.
    Python,
    /// A script of `peers/` in two processes.
    Torchrun,
    /// `peers/mpi_all_reduce.c` in two processes.
    OpenMpi,
}

/// A number in the output of commands, and its format in the table.
#[derive(Debug, Clone, Copy)]
pub(super) struct Quantity {
    pub(super) key: &'static str,
    /// Selects the object with this many `bytes`. `None` selects the first one.
    pub(super) bytes: Option<u64>,
    /// The command's number is divided by this to give the table's number.
    pub(super) scale: f64,
    pub(super) num_decimals: usize,
    pub(super) larger_is_better: bool,
}

const TOKENS_PER_SECOND: Quantity = Quantity {
    key: "tokens_per_second_median",
    bytes: None,
    scale: 1.0,
    num_decimals: 0,
    larger_is_better: true,
};
const FIRST_STEP: Quantity =
    Quantity { key: "seconds_to_first_step", num_decimals: 2, larger_is_better: false, ..TOKENS_PER_SECOND };
const PEAK_MEMORY: Quantity =
    Quantity { key: "peak_rss_bytes", scale: (1 << 20) as f64, num_decimals: 0, ..FIRST_STEP };
const INSTALLATION: Quantity = Quantity { key: "installed_bytes", ..PEAK_MEMORY };
const SHORT_VECTOR: Quantity =
    Quantity { key: "median_us", bytes: Some(4 << 10), num_decimals: 1, ..FIRST_STEP };
const LONG_VECTOR: Quantity = Quantity { bytes: Some(64 << 20), scale: 1e3, ..SHORT_VECTOR };

#[derive(Debug, Clone)]
pub(super) struct Row {
    pub(super) name: &'static str,
    pub(super) quantity: Quantity,
    pub(super) ours: BenchCommand,
    pub(super) peers: Vec<Peer>,
    /// The step whose kernels bound the speed of our side.
    pub(super) bound: Option<Step>,
}

impl Row {
    fn new(name: &'static str, quantity: Quantity, ours: BenchCommand, peers: impl Into<Vec<Peer>>) -> Self {
        Row { name, quantity, ours, peers: peers.into(), bound: None }
    }

    fn bounded_by(self, step: Step) -> Self {
        Row { bound: Some(step), ..self }
    }
}

/// The other side of a row: one program in several variants, of which the best one counts.
#[derive(Debug, Clone)]
pub(super) struct Peer {
    pub(super) variants: Vec<(&'static str, BenchCommand)>,
}

impl Peer {
    fn new(name: &'static str, run: BenchCommand) -> Self {
        Peer { variants: Vec::from([(name, run)]) }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct BenchSettings {
    /// Number of timed steps of a training run, which follow the warmup steps.
    pub(super) num_steps: usize,
    pub(super) num_warmup_steps: usize,
    /// Duration of the measurement of one size of a collective operation.
    pub(super) seconds: f64,
}

/// A training step that both sides run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Step {
    pub(super) model: &'static str,
    pub(super) dtype: &'static str,
    num_workers: usize,
    /// Number of sequences in a worker's batch.
    batch: usize,
    seq: usize,
    bench_settings: BenchSettings,
}

/// Number of threads of all workers together.
const NUM_THREADS: usize = 2;

impl Step {
    /// Returns the number of tokens of all workers in a step.
    pub(super) fn num_tokens(self) -> usize {
        self.num_workers * self.batch * self.seq
    }

    fn shape(self) -> String {
        let Step { model, dtype, num_workers, batch, seq, .. } = self;
        let threads = NUM_THREADS / num_workers;
        format!(
            "--model configs/models/{model} --dtype {dtype} --batch {batch} --seq {seq} --threads {threads}"
        )
    }

    fn arguments(self) -> String {
        let BenchSettings { num_steps, num_warmup_steps, .. } = self.bench_settings;
        format!("{} --steps {num_steps} --warmup {num_warmup_steps}", self.shape())
    }

    /// Returns a row whose two sides run this step.
    fn row(self, name: &'static str, quantity: Quantity) -> Row {
        Row::new(name, quantity, self.trireme(), self.pytorch())
    }

    fn trireme(self) -> BenchCommand {
        let arguments = format!("bench step {} --workers {} --json", self.arguments(), self.num_workers);
        BenchCommand { program: Program::Trireme, arguments }
    }

    /// Returns Trireme's command with another option.
    fn trireme_with(self, option: &str) -> BenchCommand {
        let BenchCommand { program, arguments } = self.trireme();
        BenchCommand { program, arguments: format!("{arguments} {option}") }
    }

    /// Returns PyTorch's commands, eager and compiled.
    fn pytorch(self) -> [Peer; 1] {
        let (program, strategy, names) = match self.num_workers {
            1 => (Program::Python, "none", ["PyTorch", "PyTorch, compiled"]),
            _ => (Program::Torchrun, "ddp", ["PyTorch DDP over gloo", "PyTorch DDP over gloo, compiled"]),
        };
        let eager = format!("peers/torch_train.py {} --strategy {strategy}", self.arguments());
        let compiled = format!("{eager} --compile");
        let runs = [eager, compiled].map(|arguments| BenchCommand { program, arguments });
        [Peer { variants: names.into_iter().zip(runs).collect() }]
    }

    /// Returns the command that measures the kernels of this step, each with its bound.
    pub(super) fn kernels(self) -> BenchCommand {
        let arguments =
            format!("bench kernels {} --seconds {} --json", self.shape(), self.bench_settings.seconds / 10.0);
        BenchCommand { program: Program::Trireme, arguments }
    }
}

/// Returns the command that reports the versions of the Python side and its size on disk.
pub(super) fn installation() -> BenchCommand {
    BenchCommand { program: Program::Python, arguments: "peers/installation.py".to_owned() }
}

/// Returns the rows of the table of README.md.
pub(super) fn rows(settings: BenchSettings) -> Vec<Row> {
    let gpt2 = Step {
        model: "gpt2-11m",
        dtype: "bf16",
        num_workers: 1,
        batch: 8,
        seq: 256,
        bench_settings: settings,
    };
    let gpt2_by_two = Step { num_workers: 2, batch: 4, ..gpt2 };
    let [gpt2_f32, gpt2_by_two_f32] = [gpt2, gpt2_by_two].map(|step| Step { dtype: "f32", ..step });
    let llama = Step { model: "llama-12m", ..gpt2 };
    let gpt2_124m = Step { model: "gpt2-124m", batch: 2, seq: 512, ..gpt2 };

    // One command measures both sizes: 4 KiB, and 4 KiB times the factor, which is 64 MiB.
    let seconds = settings.seconds;
    let sizes = format!("--min-bytes 4096 --max-bytes 67108864 --factor 16384 --seconds {seconds}");
    let all_reduce = |transport: &str| BenchCommand {
        program: Program::Trireme,
        arguments: format!(
            "bench collectives --ops all_reduce --workers 2 --transport {transport} {sizes} --json"
        ),
    };
    let gloo = BenchCommand {
        program: Program::Torchrun,
        arguments: format!("peers/torch_collectives.py --ops all_reduce {sizes}"),
    };
    let gloo = || Peer::new("gloo", gloo.clone());
    let open_mpi = BenchCommand { program: Program::OpenMpi, arguments: format!("{seconds} 4096 67108864") };
    let open_mpi = || Peer::new("Open MPI", open_mpi.clone());

    Vec::from([
        gpt2.row("gpt2-11m, bf16, 1 process × 2 threads, tokens/s", TOKENS_PER_SECOND).bounded_by(gpt2),
        gpt2_by_two.row("gpt2-11m, bf16, 2 workers × 1 thread, tokens/s", TOKENS_PER_SECOND),
        llama.row("llama-12m, bf16, 1 process × 2 threads, tokens/s", TOKENS_PER_SECOND).bounded_by(llama),
        gpt2_124m
            .row("gpt2-124m, bf16, 1 process × 2 threads, tokens/s", TOKENS_PER_SECOND)
            .bounded_by(gpt2_124m),
        gpt2_f32
            .row("gpt2-11m, f32, 1 process × 2 threads, tokens/s", TOKENS_PER_SECOND)
            .bounded_by(gpt2_f32),
        gpt2_by_two_f32.row("gpt2-11m, f32, 2 workers × 1 thread, tokens/s", TOKENS_PER_SECOND),
        Row::new(
            "gpt2-11m, bf16, 2 workers, tokens/s",
            TOKENS_PER_SECOND,
            gpt2_by_two.trireme(),
            [Peer::new("Trireme, two independent workers", gpt2_by_two.trireme_with("--independent"))],
        ),
        Row::new(
            "all_reduce of 64 MiB, 2 workers, shared memory, ms",
            LONG_VECTOR,
            all_reduce("shm"),
            [gloo(), open_mpi()],
        ),
        Row::new(
            "all_reduce of 64 MiB, 2 workers, TCP over loopback, ms",
            LONG_VECTOR,
            all_reduce("tcp"),
            [gloo()],
        ),
        Row::new(
            "all_reduce of 4 KiB, 2 workers, shared memory, µs",
            SHORT_VECTOR,
            all_reduce("shm"),
            [gloo(), open_mpi()],
        ),
        gpt2_by_two.row("from the command to the end of the first step, 2 workers, seconds", FIRST_STEP),
        gpt2.row("gpt2-11m, bf16, peak memory, MiB", PEAK_MEMORY),
        Row::new(
            "gpt2-124m, bf16, --free-gradients, peak memory, MiB",
            PEAK_MEMORY,
            gpt2_124m.trireme_with("--free-gradients"),
            gpt2_124m.pytorch(),
        ),
        Row::new(
            "size of the installation, MiB",
            INSTALLATION,
            BenchCommand { program: Program::TriremeBinary, arguments: String::new() },
            [Peer::new("PyTorch and what it requires", installation())],
        ),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTINGS: BenchSettings = BenchSettings { num_steps: 16, num_warmup_steps: 3, seconds: 1.0 };

    #[test]
    fn the_rows_are_those_of_the_readme() {
        let readme = std::fs::read_to_string(crate::workspace_root().join("README.md")).unwrap();
        let figures = readme.split_once("\n## Figures\n").unwrap().1;
        let table = figures.lines().skip_while(|line| !line.starts_with('|')).skip(2);
        let in_readme: Vec<&str> =
            table.map_while(|line| line.strip_prefix("| ")?.split_once(" |")).map(|(name, _)| name).collect();
        let here: Vec<&str> = rows(SETTINGS).iter().map(|row| row.name).collect();
        assert_eq!(here, in_readme);
    }

    #[test]
    fn models_and_scripts_are_there() {
        for row in rows(SETTINGS) {
            let peers = row.peers.iter().flat_map(|peer| &peer.variants).map(|(_, run)| run);
            let kernels = row.bound.map(Step::kernels);
            for word in peers.chain([&row.ours]).chain(&kernels).flat_map(|run| run.arguments.split(' ')) {
                let is_path = word.starts_with("configs/") || word.starts_with("peers/");
                assert!(!is_path || crate::workspace_root().join(word).exists(), "{word}");
            }
        }
    }

    #[test]
    fn both_sides_take_the_same_step() {
        let rows = rows(SETTINGS);
        for row in rows.iter().filter(|row| row.quantity.key == TOKENS_PER_SECOND.key) {
            let (_, peer) = &row.peers[0].variants[0];
            let common = "--batch 4 --seq 256 --threads 1 --steps 16 --warmup 3";
            if row.name.contains("2 workers × 1 thread") {
                assert!(row.ours.arguments.contains(common), "{}", row.ours.arguments);
                assert!(peer.arguments.contains(common), "{}", peer.arguments);
            }
        }
        assert_eq!(rows.iter().filter_map(|row| row.bound).map(Step::num_tokens).max(), Some(2048));
    }
}
