//! The output of `trireme doctor`, `trireme bench` and `trireme plan --time` makes sense. Speeds are not tested.

use crate::common::{Fixture, Outcome, Running, assert_contains, free_port};
use serde_json::Value;

pub(crate) const LLAMA: &str = r#"{"model_type": "llama", "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}"#;

const MIXTRAL: &str = r#"{"model_type": "mixtral", "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16, "num_local_experts": 4}"#;

fn parse(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

#[track_caller]
fn positive(value: &Value) -> f64 {
    let number = value.as_f64().unwrap_or_else(|| panic!("no number: {value}"));
    assert!(number > 0.0 && number.is_finite(), "{number}");
    number
}

fn texts<'a>(list: &'a Value, key: &str) -> Vec<&'a str> {
    list.as_array().unwrap().iter().map(|entry| entry[key].as_str().unwrap()).collect()
}

/// Returns the error about an option that makes no sense.
fn misused(outcome: Outcome) -> String {
    assert!(outcome.code == Some(2) && outcome.stdout.is_empty(), "{outcome:?}");
    outcome.stderr
}

#[test]
fn doctor_reports_the_machine_and_measures_every_matmul_kernel() {
    let fixture = Fixture::new();
    let found = parse(&fixture.run("doctor --json --shape 24x40x16 --threads 2 --seconds 0").succeeded());

    let machine = &found["machine"];
    positive(&machine["num_cores"]);
    positive(&machine["memory_bytes"]);
    assert!(positive(&machine["memory_available_bytes"]) < positive(&machine["memory_bytes"]));

    let uses = &found["uses"];
    assert_eq!(uses["threads"], 2);
    assert_eq!(texts(&uses["products"], "precision"), ["f32", "bf16", "f16"]);
    assert_eq!(texts(&uses["transports"], "name"), ["shm", "tcp"]);
    for transport in uses["transports"].as_array().unwrap() {
        assert!(transport["error"].is_null(), "{transport}");
        positive(&transport["all_reduce_seconds"]);
        positive(&transport["message_latency_seconds"]);
        let choices = transport["algorithms"].as_array().unwrap();
        let direct = choices.iter().all(|choice| choice["algorithm"] == "direct");
        assert_eq!(direct, transport["name"] == "shm", "{transport}");
    }

    let products = found["products"].as_array().unwrap();
    for product in products {
        assert_eq!([&product["rows"], &product["cols"], &product["inner"]], [24, 40, 16]);
        positive(&product["peak_gflops"]);
        assert_eq!(texts(&product["transposes"], "transposes"), ["NN", "NT", "TN"]);
        for figure in product["transposes"].as_array().unwrap() {
            assert!(positive(&figure["gflops_median"]) <= positive(&figure["gflops_best"]), "{figure}");
            positive(&figure["fraction_of_peak"]);
        }
    }
    for kernel in uses["products"].as_array().unwrap() {
        for threads in [1, 2] {
            let is_its = |product: &&Value| {
                product["is_used"] == true
                    && product["precision"] == kernel["precision"]
                    && product["threads"] == threads
            };
            let used: Vec<&Value> = products.iter().filter(is_its).collect();
            assert!(used.len() == 1 && used[0]["unit"] == kernel["unit"], "{kernel}: {used:?}");
        }
    }
}

#[test]
fn doctor_prints_text_and_refuses_invalid_arguments() {
    let fixture = Fixture::new();
    let told = fixture.run("doctor --shape 8x8x8 --shape 3x5x7 --threads 1 --seconds 0").succeeded();
    assert_contains(
        &told,
        &["machine", "Trireme uses", "matmul 8x8x8", "matmul 3x5x7", "* f32", "* bf16", "* f16"],
    );
    assert_contains(&fixture.run("doctor --help").succeeded(), &["How to read it", "--thorough"]);
    assert_contains(&misused(fixture.run("doctor --shape 8x8")), &["8x8", "such as 512x512x512"]);
    assert_contains(&misused(fixture.run("doctor --seconds=-1")), &["-1", "seconds from 0 to 3600"]);
    assert_contains(&misused(fixture.run("doctor --across-hosts 5us")), &["5us", "such as 40:1.2"]);
    assert_contains(&fixture.run("doctor --workers 1").refused(), &["--workers must be from 2 to 64"]);
    assert_contains(
        &fixture.run("doctor --workers 4 --hosts 65").refused(),
        &["--hosts", "at most 256 workers"],
    );
    assert_contains(&misused(fixture.run("doctor --thorough --shape 8x8x8")), &["--thorough", "--shape"]);
}

#[test]
fn doctor_reports_the_algorithms_for_more_workers_and_hosts() {
    let fixture = Fixture::new();
    let arguments =
        "doctor --shape 8x8x8 --threads 1 --seconds 0 --workers 3 --hosts 4 --across-hosts 50:0.1";
    let found = parse(&fixture.run(&format!("{arguments} --json")).succeeded());
    for transport in found["uses"]["transports"].as_array().unwrap() {
        assert!(transport["error"].is_null(), "{transport}");
        assert_eq!(transport["workers"], 3);
    }
    let hosts = &found["uses"]["hosts"];
    assert_eq!([&hosts["hosts"], &hosts["workers_per_host"]], [4, 3]);
    let choices = hosts["algorithms"].as_array().unwrap();
    let is_hierarchical = |choice: &Value| choice["algorithm"].as_str().unwrap().starts_with("hierarchical:");
    assert!(choices.iter().any(is_hierarchical), "{hosts}");
    let told = fixture.run(arguments).succeeded();
    assert_contains(
        &told,
        &["among 3 workers", "4 hosts", "3 workers each, assuming 50.0 us and 0.1 GB/s between them"],
    );
}

#[test]
fn kernels_of_a_step_are_measured_with_their_bounds() {
    let fixture = Fixture::new();
    fixture.write("config.json", LLAMA);
    let arguments = "bench kernels --model . --batch 2 --seq 16 --threads 2 --seconds 0";
    let found = parse(&fixture.run(&format!("{arguments} --dtype f32,bf16,f16 --json")).succeeded());
    positive(&found["copy_bytes_per_second"]);
    assert_eq!(texts(&found["steps"], "dtype"), ["f32", "bf16", "f16"]);
    for step in found["steps"].as_array().unwrap() {
        positive(&step["product_peak_gflops"]);
        positive(&step["arithmetic_peak_gflops"]);
        let (mut bound, mut measured) = (0.0, 0.0);
        for kernel in step["kernels"].as_array().unwrap() {
            positive(&kernel["moved_bytes"]);
            positive(&kernel["fraction_of_bound"]);
            let calls = kernel["calls"].as_f64().unwrap();
            bound += calls * positive(&kernel["bound_us"]) / 1e3;
            measured += calls * positive(&kernel["median_us"]) / 1e3;
        }
        let is_close = |key: &str, sum: f64| (positive(&step[key]) - sum).abs() <= 1e-9 * sum;
        assert!(is_close("bound_ms", bound) && is_close("measured_ms", measured), "{step}");
        let names = texts(&step["kernels"], "name");
        for name in
            ["embedding", "matmul", "attention_backward", "rotary", "cross_entropy_gradient", "update"]
        {
            assert!(names.contains(&name), "{name}: {names:?}");
        }
    }

    let one = parse(&fixture.run(&format!("{arguments} --dtype f16 --only statistics --json")).succeeded());
    assert_eq!(texts(&one["steps"][0]["kernels"], "name"), ["softmax_statistics"]);
    // The command accepts any model and any optimizer.
    std::fs::create_dir(fixture.path("moe")).unwrap();
    fixture.write("moe/config.json", MIXTRAL);
    let experts =
        "bench kernels --model moe --batch 2 --seq 16 --seconds 0 --dtype bf16 --optimizer muon --json";
    let experts = parse(&fixture.run(experts).succeeded());
    let names = texts(&experts["steps"][0]["kernels"], "name");
    for name in ["grouped_matmul", "combine_rows", "orthogonalize"] {
        assert!(names.contains(&name), "{name}: {names:?}");
    }

    let table = fixture.run(&format!("{arguments} --dtype bf16")).succeeded();
    let rows: Vec<&str> = table.lines().filter(|line| line.starts_with('|')).collect();
    assert!(rows.len() > 20, "{table}");
    assert!(rows.iter().all(|row| row.matches('|').count() == rows[0].matches('|').count()), "{table}");
}

#[test]
fn kernels_of_no_model_are_refused() {
    let fixture = Fixture::new();
    fixture.write("config.json", LLAMA);
    let refused = |arguments: &str| fixture.run(&format!("bench kernels {arguments}")).refused();
    assert_contains(&refused("--model nowhere"), &["nowhere/config.json"]);
    assert_contains(&refused("--model . --seq 17"), &["--seq 17", "16 positions"]);
    assert_contains(&refused("--model . --batch 0 --seq 4"), &["--batch", "at least 1"]);
    assert_contains(
        &refused("--model . --batch 1 --seq 4 --seconds 0 --only conv2d"),
        &["'conv2d'", "--only"],
    );
    assert_contains(&misused(fixture.run("bench kernels --batch 4")), &["--model"]);
    assert_contains(&misused(fixture.run("bench kernels --optimizer adamx")), &["adamx", "adamw, adam, sgd"]);
    assert_contains(&misused(fixture.run("bench kernels --dtype f8")), &["f8", "one of f32, bf16, f16"]);
}

#[test]
fn steps_in_16_bits_report_what_they_did() {
    let fixture = Fixture::new();
    fixture.write("config.json", LLAMA);
    let arguments = "bench step --model . --batch 1 --seq 8 --threads 1 --steps 1 --warmup 0";
    let f16 = format!("{arguments} --workers 2 --dtype f16 --reduce-dtype f16 --json");
    let found = parse(&fixture.run(&f16).succeeded());
    assert_eq!([&found["dtype"], &found["reduce_dtype"]], ["f16", "f16"]);
    assert!(found["skipped_steps"].as_u64().is_some_and(|steps| steps <= 1), "{found}");
    let told = fixture.run(&format!("{arguments} --dtype bf16 --fp8 hybrid")).succeeded();
    assert_contains(&told, &["fp8 multiplications need a GPU"]);
    let refused = |options: &str| fixture.run(&format!("{arguments} {options}")).refused();
    assert_contains(&refused("--reduce-dtype f16"), &["--reduce-dtype f16", "--dtype f16"]);
    assert_contains(&refused("--fp8 e4m3"), &["--fp8 e4m3", "--dtype bf16"]);
}

#[test]
fn steps_with_state_elsewhere_have_the_same_loss() {
    let fixture = Fixture::new();
    fixture.write("config.json", LLAMA);
    let arguments = "bench step --model . --batch 1 --seq 8 --threads 1 --steps 2 --warmup 0 --json";
    let plain = parse(&fixture.run(arguments).succeeded());
    assert_eq!(plain["disk_bytes_read"], 0);
    for options in [
        "--zero-stage 3 --workers 1 --keep input",
        "--free-gradients",
        "--zero-stage 1 --free-gradients",
        "--zero-stage 3 --offload optimizer=disk --offload parameters=disk --offload-prefetch 2",
        "--zero-stage 1 --offload optimizer=host --keep products --offload activations=disk",
    ] {
        let found = parse(&fixture.run(&format!("{arguments} {options}")).succeeded());
        assert_eq!(found["final_loss"], plain["final_loss"], "{options}");
        let reads = found["disk_bytes_read"].as_u64().unwrap();
        assert_eq!(reads > 0, options.contains("=disk"), "{options}: {reads}");
    }
    assert_contains(
        &misused(fixture.run(&format!("{arguments} --offload optimizer=tape"))),
        &["optimizer=tape", "optimizer=disk"],
    );
    assert_contains(&misused(fixture.run(&format!("{arguments} --keep some"))), &["all, products or input"]);
    let refused = fixture.run(&format!("{arguments} --free-gradients --zero-stage 2")).refused();
    assert_contains(&refused, &["--free-gradients requires"]);
}

#[test]
fn the_speed_of_independent_workers_counts_the_tokens_of_all() {
    let fixture = Fixture::new();
    fixture.write("config.json", LLAMA);
    let arguments =
        "bench step --model . --batch 1 --seq 8 --threads 1 --steps 1 --warmup 0 --workers 2 --json";
    for (options, num_tokens) in [("", 16.0), ("--independent", 16.0), ("--tensor 2", 8.0)] {
        let found = parse(&fixture.run(&format!("{arguments} {options}")).succeeded());
        let number = |key: &str| found[key].as_f64().unwrap();
        let tokens = number("tokens_per_second_median") * number("step_ms_median") / 1e3;
        assert!((tokens - num_tokens).abs() < 1e-6, "{options}: {tokens}");
    }
}

#[test]
fn the_disk_is_timed() {
    let fixture = Fixture::new();
    let found = parse(&fixture.run("bench disk --json").succeeded());
    assert!(found["read_bytes_per_second"].as_f64().unwrap() > 0.0, "{found}");
    assert_contains(&fixture.run("bench disk --folder nowhere").refused(), &["nowhere"]);
}

#[test]
fn the_collectives_of_workers_are_timed() {
    let fixture = Fixture::new();
    let sizes = "--min-bytes 4096 --max-bytes 65536 --factor 16 --iters 3 --warmup 1";
    let ops = "all_reduce,all_gather,reduce_scatter,all_to_all,all_to_all_variable,broadcast,reduce,gather,scatter,send,barrier";
    for transport in
        ["shm --memory private --dtype f16", "shm", "tcp --algorithm ring --any-order --dtype i64"]
    {
        let bench =
            format!("bench collectives --workers 3 --json --transport {transport} --ops {ops} {sizes}");
        let text = fixture.run(&bench).succeeded();
        let lines: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        // Each operation at two sizes, the barrier once.
        assert_eq!(lines.len(), 21, "{text}");
        for line in &lines {
            assert_eq!((&line["peer"], &line["world_size"]), (&"trireme".into(), &3.into()), "{line}");
            positive(&line["iters"]);
            positive(&line["median_us"]);
            for key in ["bytes", "algbw_gbps", "busbw_gbps"] {
                let value = line[key].as_f64().unwrap();
                assert_eq!(value > 0.0, line["op"] != "barrier", "{line}");
            }
            let has_choice =
                !["all_to_all_variable", "send", "barrier"].contains(&line["op"].as_str().unwrap());
            assert_eq!(line["algorithm"].is_string(), has_choice, "{line}");
        }
        assert_eq!(lines[0]["algorithm"] == "ring", transport.contains("ring"), "{}", lines[0]);
        assert!(transport.contains(lines[0]["dtype"].as_str().unwrap()) || lines[0]["dtype"] == "f32");
    }
    let table = fixture.run("bench collectives --ops all_reduce --max-bytes 4K --iters 2").succeeded();
    assert_contains(
        &table,
        &["2 workers over shm, vectors of f32 in arena memory", "all_reduce", "GB/s", "direct"],
    );
    assert_contains(
        &fixture.run("bench collectives --help").succeeded(),
        &["How to read it", "bus bandwidth", "--timeout"],
    );
    assert_contains(
        &misused(fixture.run("bench collectives --max-bytes 4k")),
        &["4k", "such as 4096, 4K or 64M"],
    );
    assert_contains(&misused(fixture.run("bench collectives --dtype f8")), &["f8", "bf16"]);
    let refused = fixture.run("bench collectives --factor 1").one_error();
    assert_contains(&refused, &["--factor at least 2"]);
}

#[test]
fn schedules_are_made_and_proven_phase_by_phase() {
    let fixture = Fixture::new();
    let arguments = "bench schedule --ranks 4 --microbatches 8 --repeats 2";
    let found = parse(&fixture.run(&format!("{arguments} --units-per-stage 3 --json")).succeeded());
    let names = texts(&found["schedules"], "schedule");
    let expected = [
        "gpipe",
        "1f1b",
        "interleaved-1f1b",
        "zb-h1",
        "zb-h2",
        "zb-v",
        "dualpipe-v",
        "breadth-first",
        "pipedream",
        "pipedream-2bw",
        "auto",
    ];
    assert_eq!(names, expected);
    for schedule in found["schedules"].as_array().unwrap() {
        for key in ["generate_ms", "check_ms", "programs_ms", "lower_ms", "prove_ms", "total_ms"] {
            positive(&schedule[key]);
        }
    }
    // Three units' forward, recomputation and backward, and four messages, for eight microbatches; three reductions, updates and
    // all-gathers.
    assert_eq!(found["schedules"][1]["actions_per_rank"], (3 * 3 + 4) * 8 + 3 * 3);

    let table = fixture.run(&format!("{arguments} --stages-per-rank 2")).succeeded();
    let rows: Vec<Vec<&str>> = table.lines().skip(3).map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(
        rows.iter().map(|row| row[0]).collect::<Vec<_>>(),
        [expected[2], expected[5], expected[6], expected[7], expected[10]]
    );
    for row in &rows {
        let actions: usize = row[3].parse().unwrap();
        assert!((60_000..63_000).contains(&actions), "{table}");
    }
    let unknown = fixture.run(&format!("{arguments} --schedule pipedreams"));
    assert_eq!(unknown.code, Some(2), "{unknown:?}");
    assert_contains(&unknown.stderr, &["expected all, or one of gpipe, 1f1b"]);
    assert_contains(
        &fixture.refused_without_changes(&format!("{arguments} --schedule 1f1b --stages-per-rank 2")),
        &["schedule '1f1b' needs 1 stages per rank"],
    );
}

#[test]
fn a_plan_tells_the_time_of_a_step() {
    let fixture = Fixture::with_corpus();
    let pipeline =
        "--workers 2 --set parallelism.pipeline_parallel_degree=2 --set training.global_batch_size=4";
    for layout in ["--workers 1", "--workers 2 --set parallelism.zero_stage=3", pipeline] {
        let found = parse(&fixture.run(&format!("plan tiny.toml --time --json {layout}")).succeeded());
        positive(&found["step_seconds"]);
        positive(&found["samples_per_second"]);
        positive(&found["memory_peak_bytes"]["total"]);
    }
    let shown = fixture.run("plan tiny.toml --time --workers 2").succeeded();
    assert!(shown.contains("peak total: ") && shown.contains("\npredicted step time: "), "{shown}");
    assert!(!fixture.path("runs").exists(), "a plan writes nothing");
}

#[test]
fn a_run_tells_after_ten_steps_how_far_its_prediction_was_off() {
    let fixture = Fixture::with_corpus();
    for (settings, is_told) in [("training.steps=10", true), ("training.steps=9", false)] {
        let command =
            format!("train tiny.toml --set metrics.predict_step_time=true --set {settings} --set run.name=x");
        let outcome = fixture.run(&format!("{command} --set checkpoint.resume=never"));
        assert_eq!(outcome.code, Some(0), "{outcome:?}");
        let told = format!("{}{}", outcome.stdout, outcome.stderr);
        assert!(told.contains("predicted step time: "), "{told}");
        assert_eq!(told.contains("(median of steps 4 to 10 of this run); predicted "), is_told, "{told}");
        assert!(fixture.records("x").iter().all(|record| positive(&record["step_seconds_predicted"]) > 0.0));
    }
}

#[test]
fn layouts_are_predicted_and_measured_by_one_command() {
    let fixture = Fixture::with_corpus();
    let command = "bench layouts tiny.toml --json --steps 5 --rounds 1 --layout launch.workers=1 --layout launch.workers=2";
    let text = fixture.run(command).succeeded();
    let found: Vec<Value> = text.lines().map(parse).collect();
    assert_eq!(
        found.iter().map(|line| &line["layout"]).collect::<Vec<_>>(),
        ["launch.workers=1", "launch.workers=2"]
    );
    for line in &found {
        let [predicted, measured] =
            ["predicted_step_seconds", "measured_step_seconds"].map(|key| positive(&line[key]));
        assert!((positive(&line["ratio"]) - predicted / measured).abs() < 1e-9, "{line}");
    }
    assert!(!fixture.path("runs").exists(), "its runs are gone");
    let wrong = "bench layouts tiny.toml --rounds 1 --layout launch.workers=1 --layout training.seq_len=0";
    let error = fixture.run(wrong).refused();
    assert_contains(
        &error,
        &["layout 'training.seq_len=0'\n  because: 1 mistake", "expected a whole number"],
    );
    assert!(!error.contains("the run failed"), "mistakes are found before the first run: {error}");
}

#[test]
fn the_doctor_examines_a_cluster() {
    let fixture = Fixture::with_corpus();
    let shown = fixture.run("doctor --cluster tiny.toml").succeeded();
    assert_contains(
        &shown,
        &[
            "2 workers on 1 host over shm",
            "ranks 0, 1",
            "link 0 - 1",
            "disk of rank 0",
            "free in runs/tiny",
            "passed: ",
        ],
    );
    // The workers of another launcher get different configs.
    std::fs::create_dir(fixture.path("other")).unwrap();
    fixture.write("other/tiny.toml", fixture.read("tiny.toml").replace("seq_len = 16", "seq_len = 8"));
    let port = free_port();
    let workers = ["tiny.toml", "other/tiny.toml"].map(|config| format!("doctor --cluster {config} --json"));
    let worker = |rank: usize| Running::start(fixture.worker(rank, port, &workers[rank]));
    for outcome in [0, 1].map(worker).map(Running::end) {
        assert_contains(&outcome.refused(), &["the ranks disagree about the run"]);
    }
    let left: Vec<_> =
        fixture.everything().into_keys().filter(|path| path.to_string_lossy().contains(".doctor")).collect();
    assert!(left.is_empty(), "{left:?}");
}
