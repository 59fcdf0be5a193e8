//! Memory of runs: predicted, measured and bounded.

use crate::common::{Fixture, assert_contains};
use serde_json::Value;
use trireme_base::Bytes;

const CATEGORIES: [&str; 5] = ["parameters", "gradients", "optimizer", "activations", "communication"];

/// Returns the words after `name` in the first line that begins with it.
fn row<'a>(text: &'a str, name: &str) -> Vec<&'a str> {
    let row = text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name}: {text}"));
    row.split_whitespace().skip(1).collect()
}

fn bytes(record: &Value, what: &str, category: &str) -> f64 {
    record[what][category].as_u64().unwrap_or_else(|| panic!("{what} of {category}: {record}")) as f64
}

#[test]
fn the_memory_of_a_run_is_as_planned() {
    let fixture = Fixture::with_corpus();
    for (index, settings) in [
        "",
        "--set comm.transport=tcp --set training.dtype=bf16 --set training.reduce_dtype=bf16",
        "--set parallelism.zero_stage=1 --set activation_checkpoint.mode=block",
        "--set parallelism.zero_stage=2 --set training.dtype=bf16",
        "--workers 1 --set training.dtype=bf16 --set memory.bf16_parameters=true",
        "--set parallelism.zero_stage=1 --set training.dtype=bf16 --set memory.bf16_parameters=true",
        "--set parallelism.zero_stage=3 --set training.dtype=bf16 --set memory.bf16_parameters=true --set offload.parameters=host",
        "--set parallelism.zero_stage=3 --set activation_checkpoint.mode=selective",
        "--set parallelism.shard_gradients=true --set training.global_batch_size=8",
        "--workers 1 --set optimizer.name=lamb",
        "--workers 1 --set memory.free_gradients=true --set training.max_norm=0 --set training.global_batch_size=2",
        "--set memory.free_gradients=true --set training.clip_by_previous_norm=true --set parallelism.zero_stage=1 \
         --set training.global_batch_size=4 --set training.dtype=bf16 --set training.reduce_dtype=bf16",
        "--set parallelism.zero_stage=3 --set offload.optimizer=host --set offload.parameters=host --set model.num_layers=4 \
         --set offload.activations=host --set training.dtype=bf16",
        "--set parallelism.zero_stage=2 --set offload.optimizer=disk \
         --set training.global_batch_size=4 --set offload.gradients=disk",
        "--set training.determinism=run --set comm.compression=int8",
        "--set training.determinism=run --set comm.compression=powersgd --set comm.compression_rank=2 \
         --set comm.compression_warmup_steps=2 --set comm.transport=tcp",
        "--set training.determinism=run --set optimizer.name=one_bit_adam --set optimizer.freeze_step=2 \
         --set training.max_norm=0 --set training.dtype=f16",
        "--workers 4 --set parallelism.zero_stage=2 --set parallelism.data_parallel_shard_degree=2",
        "--set parallelism.zero_stage=3 --set parallelism.zero_quantized_weights=true \
         --set parallelism.zero_quantized_gradients=int8 --set training.determinism=run",
        "--workers 4 --set parallelism.tensor_parallel_degree=2 --set training.determinism=run --set comm.compression=int8",
        "--workers 4 --set parallelism.tensor_parallel_degree=2 --set parallelism.zero_stage=3 --set training.determinism=run \
         --set parallelism.zero_quantized_weights=true --set parallelism.zero_quantized_gradients=int8",
        // A device for each worker of the host.
        "--set training.device=detached --set parallelism.zero_stage=3 --set optimizer.name=adafactor \
         --set offload.activations=host",
    ]
    .into_iter()
    .enumerate()
    {
        let planned = fixture.run(&format!("plan tiny.toml {settings}")).succeeded();
        assert!(!fixture.path(&format!("runs/run-{index}")).exists(), "a plan writes nothing");
        let name = format!("run-{index}");
        let shown = fixture.run(&format!("train tiny.toml {settings} --set run.name={name}")).succeeded();
        let record = fixture.records(&name).pop().unwrap();
        for category in CATEGORIES.into_iter().chain(["total"]) {
            let [predicted, measured] = ["memory_predicted_bytes", "memory_peak_bytes"];
            let (predicted, measured) =
                (bytes(&record, predicted, category), bytes(&record, measured, category));
            assert!(predicted == measured, "{settings}, {category}: {record}");
            // A plan describes the first worker; the second column of a run is that worker's measured memory.
            let title = category;
            assert_eq!(row(&planned, title)[0], row(&shown, title)[1], "{planned}{shown}");
        }
        assert!(fixture.read(&format!("runs/{name}/program.txt")).contains("predicted peak: "));
    }
}

#[test]
fn workers_of_a_host_have_a_device_each_and_the_bits_of_the_cpu() {
    let fixture = Fixture::with_corpus();
    let losses = |device: &str| {
        let settings = format!("--set training.device={device} --set run.name={device}");
        fixture.run(&format!("train tiny.toml --workers 2 {settings} --set optimizer.name=lamb")).succeeded();
        let records = fixture.records(device);
        let bits = |record: &Value| ["loss", "grad_norm"].map(|key| record[key].as_f64().map(f64::to_bits));
        records.iter().map(bits).collect::<Vec<_>>()
    };
    assert_eq!(losses("detached"), losses("cpu"));
}

#[test]
fn runs_that_do_not_fit_are_refused_with_changes_that_fit() {
    let fixture = Fixture::with_corpus();
    // The memory of a step depends on the SIMD level.
    let planned = fixture.run("plan tiny.toml --workers 1 --set training.local_batch_size=4").succeeded();
    let total: f64 = row(&planned, "total")[0].strip_suffix("KiB").expect("a small model").parse().unwrap();
    let limit = total as u64 - 1;
    let budget = format!("--set memory.device_budget={limit}KiB --set training.local_batch_size=4");
    let error = fixture.refused_without_changes(&format!("train tiny.toml --workers 1 {budget}"));
    assert_contains(
        &error,
        &[
            "is predicted to take",
            &format!("more than its limit of {limit}.00KiB"),
            "at the peak, line ",
            "activations",
            "what would fit:",
        ],
    );
    // Each suggested change must fit.
    let changes: Vec<&str> =
        error.lines().filter_map(|line| line.split_once(" with ")).map(|(_, keys)| keys).collect();
    assert!(!changes.is_empty() && changes.len() <= 3, "{error}");
    for keys in changes {
        fixture
            .run(&format!("train tiny.toml --workers 1 {budget} --set checkpoint.resume=never {keys}"))
            .succeeded();
    }
    let error = fixture.run("plan tiny.toml --set memory.device_budget=10KiB").refused();
    assert_contains(&error, &["none of the changes tried fits; the smallest takes"]);
}

#[test]
fn without_a_budget_the_machine_bounds_a_run() {
    let fixture = Fixture::with_corpus();
    let settings = "--workers 4096 --set training.global_batch_size=8192 --set model.hidden_size=1024";
    for command in ["plan", "train"] {
        let error = fixture.refused_without_changes(&format!("{command} tiny.toml {settings}"));
        assert_contains(
            &error,
            &[
                "predicted to take",
                "TiB in total",
                "more than the",
                "worker 0",
                "at its peak, line ",
                "launch.workers=",
            ],
        );
    }
}

#[test]
fn auto_recomputes_as_little_as_fits() {
    let fixture = Fixture::with_corpus();
    let settings = "--workers 1 --set model.num_layers=6 --set activation_checkpoint.mode=auto";
    let plan = |memory: &str| {
        fixture.run(&format!("plan tiny.toml {settings} --set activation_checkpoint.memory={memory}"))
    };
    assert_contains(&plan("1GiB").succeeded(), &["units 0-7 keep all", "repeats 0.0 % of the forward pass"]);
    let all = fixture.run(&format!("train tiny.toml {settings} --set run.name=all")).succeeded();
    assert_contains(&all, &["recomputation, for at most", "units 0-7 keep all"]);
    let record = fixture.records("all").pop().unwrap();
    let total = bytes(&record, "memory_peak_bytes", "total") as u64;
    let memory = format!("{}B", total * 15 / 16);
    let text = plan(&memory).succeeded();
    assert!(
        text.contains("keeps input") || text.contains("keep input") || text.contains("products"),
        "{text}"
    );
    let settings = format!("{settings} --set activation_checkpoint.memory={memory} --set run.name=less");
    fixture.run(&format!("train tiny.toml {settings}")).succeeded();
    let record = fixture.records("less").pop().unwrap();
    assert!(bytes(&record, "memory_peak_bytes", "total") as u64 <= total * 15 / 16, "{record}");
    assert_eq!(fixture.losses("less"), fixture.losses("all"), "recomputation changes no bit");
    assert_contains(&fixture.read("runs/less/program.txt"), &["# recomputation, for at most"]);
    assert_contains(&plan("1KiB").refused(), &["more than its limit of 1.00KiB"]);
}

#[test]
fn auto_moves_as_little_as_fits() {
    let fixture = Fixture::with_corpus();
    let settings = "--workers 1 --set model.num_layers=6 --set parallelism.zero_stage=1";
    fixture.run(&format!("train tiny.toml {settings} --set run.name=all")).succeeded();
    let total = bytes(&fixture.records("all").pop().unwrap(), "memory_peak_bytes", "total") as u64;
    let budget = |bytes: u64| format!("{settings} --set memory.device_budget={bytes}B");
    let auto = "--set offload.activations=auto --set offload.optimizer=auto";
    let text = fixture.run(&format!("plan tiny.toml {} {auto}", budget(total * 2))).succeeded();
    assert_contains(&text, &["offload, for at most", "everything stays on the device"]);

    let activations = format!("{} --set offload.activations=auto", budget(total * 15 / 16));
    let text = fixture.run(&format!("plan tiny.toml {activations}")).succeeded();
    assert_contains(
        &text,
        &["activations of units 1-", "(host, from their forward pass until 1 pass", "of host memory"],
    );
    let text = fixture.run(&format!("train tiny.toml {activations} --set run.name=less")).succeeded();
    assert_contains(&text, &["offload, for at most"]);
    let record = fixture.records("less").pop().unwrap();
    assert!(bytes(&record, "memory_peak_bytes", "total") as u64 <= total * 15 / 16, "{record}");
    assert_eq!(fixture.losses("less"), fixture.losses("all"), "where state lives changes no bit");
    assert_contains(
        &fixture.read("runs/less/program.txt"),
        &["# offload, for at most", "EVICT activations 1 0"],
    );

    // Both classes move if one does not suffice, and to a disk if the host has no room.
    let text = fixture.run(&format!("plan tiny.toml {} {auto}", budget(total * 3 / 4))).succeeded();
    assert_contains(&text, &["optimizer (host)", "0B to and from disk"]);
    let poor = format!("{auto} --set memory.host_budget=1KiB");
    let error = fixture.run(&format!("plan tiny.toml {} {poor}", budget(total * 3 / 4))).refused();
    assert_contains(&error, &["more than"]);
    // The suggestions include offloading activations, which fits this budget.
    let error = fixture.run(&format!("plan tiny.toml {}", budget(total * 15 / 16))).refused();
    assert_contains(&error, &["what would fit:", "offload.activations=auto"]);
}

#[test]
fn a_plan_as_json_has_memory_operations_and_exchanges() {
    let fixture = Fixture::with_corpus();
    let plan = |arguments: &str| -> Value {
        let text = fixture.run(&format!("plan tiny.toml --json {arguments}")).succeeded();
        serde_json::from_str(&text).unwrap()
    };
    let plain = plan("--workers 1");
    let text = fixture.run("plan tiny.toml --workers 1").succeeded();
    let total = plain["memory_peak_bytes"]["total"].as_u64().unwrap();
    assert_eq!(row(&text, "total")[0], Bytes(total).to_string());
    assert_eq!(
        (&plain["fits"], &plain["exchanges"], &plain["pipeline_bubble"]),
        (&true.into(), &Value::Array(Vec::new()), &Value::Null)
    );
    let recomputed = plan("--workers 1 --set activation_checkpoint.mode=block");
    let [plain_operations, operations] = [&plain, &recomputed].map(|plan| &plan["product_operations"]);
    assert_eq!(plain_operations["recomputation"], 0);
    let number = |value: &Value| value.as_f64().unwrap();
    assert!((1.0..=number(&operations["forward"])).contains(&number(&operations["recomputation"])));
    assert!(["forward", "backward"].iter().all(|pass| operations[pass] == plain_operations[pass]));
    let muon = &plan("--workers 1 --set optimizer.name=muon")["product_operations"];
    assert!(number(&muon["update"]) > 0.0 && plain_operations["update"] == 0);
    assert_eq!(muon["backward"], plain_operations["backward"]);
    // A run that does not fit is described all the same.
    assert_eq!(plan("--workers 1 --set memory.device_budget=64KiB")["fits"], false);
    let pipeline =
        plan("--workers 2 --set parallelism.pipeline_parallel_degree=2 --set training.global_batch_size=4");
    assert!((0.01..1.0).contains(&number(&pipeline["pipeline_bubble"])));
    let hosts = "--workers 4 --set parallelism.zero_stage=3 --set training.global_batch_size=8";
    let gathers = |arguments: &str| -> Vec<(u64, u64)> {
        let plan = plan(&format!("{hosts} {arguments}"));
        let exchanges = plan["exchanges"].as_array().unwrap().iter();
        let gathers = exchanges.filter(|exchange| exchange["operation"] == "all_gather");
        let number = |exchange: &Value, key: &str| exchange[key].as_u64().unwrap();
        gathers.map(|exchange| (number(exchange, "num_ranks"), number(exchange, "num_hosts"))).collect()
    };
    assert!(gathers("").iter().all(|gather| *gather == (4, 1)));
    assert!(gathers("--workers-per-host 2").contains(&(4, 2)));
    assert_contains(
        &fixture.refused_without_changes(&format!("plan tiny.toml {hosts} --workers-per-host 3")),
        &["--workers-per-host 3 does not divide the 4 workers; choose a divisor"],
    );
}

#[test]
fn sizes_without_a_unit_and_unused_keys_are_mistakes() {
    let fixture = Fixture::with_corpus();
    for (setting, facts) in [
        ("memory.device_budget=lots", ["a size with a unit", "512MiB"]),
        ("activation_checkpoint.memory=1GiB", ["only applies with mode = ", "auto"]),
    ] {
        assert_contains(&fixture.refused_without_changes(&format!("plan tiny.toml --set {setting}")), &facts);
    }
}
