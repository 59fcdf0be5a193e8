//! Memory limits that the workers of one host share, and the changes that are suggested.

use crate::host::{MemoryLimit, Pages, SharedLimit};
use crate::planning::alternatives::advice;
use crate::planning::{ConfigSource, Limit, Plan, PlannedRun, Workers, Workload};
use tempfile::TempDir;
use trireme_train::config::TaskKind;

const CONFIG: &str = "\
[model]
architecture = \"gpt2\"
hidden_size = 64
num_layers = 6
num_heads = 2
[data]
inputs = [\"text.txt\"]
[training]
local_batch_size = 64
seq_len = 128
threads = 1
";

const VOCABULARY_SIZE: usize = 257;

/// Bytes of a process in addition to its prediction.
const RESERVE: u64 = 16 << 20;

fn limit(file: &str, pages: Pages, bytes: u64, num_sharing: Option<usize>) -> SharedLimit {
    SharedLimit { limit: MemoryLimit { bytes, file: Some(file.into()), pages }, num_sharing }
}

struct Fixture {
    folder: TempDir,
    overrides: Vec<String>,
}

impl Fixture {
    fn new(overrides: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("test.toml"), CONFIG).unwrap();
        Fixture { folder, overrides: overrides.iter().map(|&change| change.to_owned()).collect() }
    }

    /// Returns the plan within a limit, and the refusal if there is one.
    fn plan(&self, bytes: u64) -> (Plan, Option<String>) {
        self.plan_within(&[limit("/sys/fs/cgroup/memory.max", Pages::Ordinary, bytes, None)])
    }

    fn plan_within(&self, limits: &[SharedLimit]) -> (Plan, Option<String>) {
        let path = self.folder.path().join("test.toml");
        let source = ConfigSource {
            path: &path,
            overrides: &self.overrides,
            world_size: None,
            task_kind: TaskKind::LanguageModel,
        };
        let config = source.load(&[]).unwrap();
        let workers = Workers::local(&config, limits, trireme_tensor::SimdLevel::detect());
        let (model, _) = trireme_train::model_config(&config, VOCABULARY_SIZE).unwrap();
        let workload =
            Workload::Language { model: &model, sequences: crate::planning::sequences_of(&config) };
        let job = PlannedRun { config: &config, source, workload, workers };
        let plan = Plan::largest(job).unwrap();
        let refusal = plan.exceeded_limit().map(|limit| {
            assert!(matches!(limit, Limit::Host(_)));
            advice(job, &plan, limit)
        });
        (plan, refusal)
    }

    /// Returns the lowest limit within which the plan fits.
    fn need(&self) -> u64 {
        self.plan(u64::MAX).0.used_and_limit(Limit::Host(0)).0 as u64
    }
}

#[test]
fn without_a_budget_the_host_s_limit_bounds_a_plan() {
    let fixture = Fixture::new(&[]);
    let need = fixture.need();
    assert_eq!(fixture.plan(need).1, None);
    let refusal = fixture.plan(need - 1).1.unwrap();
    for fact in [
        "1B more than the",
        "(/sys/fs/cgroup/memory.max)",
        "worker 0",
        "at its peak, line ",
        "activations",
        "what would fit:",
    ] {
        assert!(refusal.contains(fact), "{fact}: {refusal}");
    }
    // Each change that is said to fit does fit.
    let changes: Vec<&str> =
        refusal.lines().filter_map(|line| Some(line.split_once(" with --set ")?.1)).collect();
    assert!(!changes.is_empty(), "{refusal}");
    for change in changes {
        let fixture = Fixture::new(&change.split(" --set ").collect::<Vec<_>>());
        assert_eq!(fixture.plan(need - 1).1, None, "{change}");
    }
}

#[test]
fn workers_share_the_limit_and_mapped_memory_counts_once() {
    let mapped = |plan: &Plan| plan.prediction.total() - plan.prediction.own;
    let [(one, _), (two, _)] =
        ["1", "2"].map(|workers| Fixture::new(&[&format!("launch.workers={workers}")]).plan(u64::MAX));
    assert_eq!(mapped(&one), 0);
    assert!(mapped(&two) > 0, "each reduces a part of the other's gradients in place");
    let process = |plan: &Plan| (plan.prediction.own + plan.prediction.own / 32) as u64 + RESERVE;
    assert_eq!(one.used_and_limit(Limit::Host(0)).0 as u64, process(&one));
    assert_eq!(
        two.used_and_limit(Limit::Host(0)).0 as u64,
        2 * process(&two) + RESERVE,
        "and the launcher is a process, too"
    );
}

#[test]
fn every_limit_counts_for_the_workers_that_share_it() {
    let fixture = Fixture::new(&[]);
    let need = fixture.need();
    let refusal = |own: u64, node: u64| {
        let limits = [
            limit("own", Pages::Ordinary, own, Some(1)),
            // A worker in another pod of the same machine shares this limit.
            limit("node", Pages::Ordinary, node, Some(2)),
        ];
        fixture.plan_within(&limits).1
    };
    assert_eq!(refusal(need, 2 * need), None);
    assert!(refusal(need - 1, 10 * need).unwrap().contains("(own)"));
    assert!(refusal(need, 2 * need - 1).unwrap().contains("(node)"));
}

#[test]
fn tensors_in_reserved_pages_and_the_rest_have_limits_of_their_own() {
    let fixture = Fixture::new(&["memory.huge_pages=reserved", "launch.workers=2"]);
    let refusal = |pool: u64, memory: u64| {
        let limits =
            [limit("memory.max", Pages::Ordinary, memory, None), limit("pool", Pages::Reserved, pool, None)];
        fixture.plan_within(&limits).1
    };
    let plan = fixture.plan_within(&[limit("pool", Pages::Reserved, u64::MAX, None)]).0;
    let pool = plan.used_and_limit(Limit::Host(0)).0 as u64;
    // Gradients that workers share are outside the device's memory.
    let [gradients, outside] =
        [plan.prediction.peaks.get(trireme_base::Category::Gradients), plan.prediction.outside_arena];
    assert!(gradients > 0 && outside >= gradients, "{outside} bytes, {gradients} of them gradients");
    let memory = 2 * (outside as u64 + RESERVE) + RESERVE;
    assert_eq!(refusal(pool, memory), None);
    assert!(refusal(pool - 1, memory).unwrap().contains("(pool)"));
    assert!(refusal(pool, memory - 1).unwrap().contains("(memory.max)"));
}

#[test]
fn stages_of_a_pipeline_count_as_they_are() {
    let settings =
        ["launch.workers=2", "parallelism.pipeline_parallel_degree=2", "training.local_batch_size=8"];
    let fixture = Fixture::new(&settings);
    let (largest, _) = fixture.plan(u64::MAX);
    let twice_the_largest = 2 * (largest.prediction.own + largest.prediction.own / 32) as u64 + 3 * RESERVE;
    let need = fixture.need();
    assert!(need < twice_the_largest, "{need}, {twice_the_largest}");
    assert_eq!(fixture.plan(need).1, None);
}

#[test]
fn auto_stays_within_the_limit_without_a_budget() {
    let all = Fixture::new(&[]).need();
    let recomputed = Fixture::new(&["activation_checkpoint.mode=auto"]);
    let (plan, refusal) = recomputed.plan(all * 9 / 10);
    assert_eq!(refusal, None);
    assert!(plan.reasons[0].contains("keep"), "{:?}", plan.reasons);
    assert_eq!(recomputed.plan(all * 9 / 10).0.choices, plan.choices, "the same limit, the same choice");
    // Moving state to host memory does not lower the host's use: only a disk does.
    let large = "training.local_batch_size=1024";
    let moved = Fixture::new(&["offload.activations=auto", large]);
    let (plan, refusal) = moved.plan(Fixture::new(&[large]).need() * 9 / 10);
    assert_eq!(refusal, None);
    assert!(plan.reasons[0].contains("(disk"), "{:?}", plan.reasons);
    let refusal = recomputed.plan(1 << 20).1.unwrap();
    assert!(refusal.contains("none of the changes tried fits"), "{refusal}");
}

#[test]
fn a_budget_above_the_limit_is_reported_and_the_limit_counts() {
    let all = Fixture::new(&[]).need();
    let fixture = Fixture::new(&["memory.device_budget=64GiB", "activation_checkpoint.mode=auto"]);
    let (plan, refusal) = fixture.plan(all * 9 / 10);
    assert_eq!(refusal, None);
    let told = plan.reasons.last().unwrap();
    assert!(told.contains("device_budget = 64.00GiB exceeds") && told.contains("memory.max"), "{told}");
    let (plan, _) = fixture.plan(128 << 30);
    assert!(!plan.reasons.iter().any(|reason| reason.contains("device_budget")), "{:?}", plan.reasons);
}

#[test]
fn the_sample_at_the_end_is_accounted_for() {
    let [without, with] = ["0", "8"].map(|num_tokens| {
        let sample = format!("generate.num_tokens={num_tokens}");
        Fixture::new(&["training.local_batch_size=1", "training.seq_len=8", &sample])
    });
    let (plan, _) = without.plan(u64::MAX);
    let held = plan.prediction.own + (with.need() - without.need()) as usize;
    let state_and_copy = plan.prediction.own_between_steps + 4 * plan.model.table().num_elements();
    assert!(held > state_and_copy && plan.prediction.own < state_and_copy, "{held}, {state_and_copy}");
}
