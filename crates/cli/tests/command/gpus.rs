//! Workers on GPUs: stand-ins for CUDA's libraries run kernels on the host.

use crate::common::{Fixture, Running, assert_contains};
use crate::layouts::{MODELS, assert_predicted, layout_arguments, model_config, relative_difference};
use crate::measuring::LLAMA;
use std::collections::BTreeSet;
use std::process::Command;
use trireme_testkit::{fake_cuda_folder, install_fake_cuda};

/// Returns a command that finds the stand-ins, and kernels that they have compiled.
fn with_cuda(fixture: &Fixture, arguments: &str) -> Option<Command> {
    let folder = fake_cuda_folder()?;
    let mut command = fixture.command(arguments);
    command.env("TRIREME_CUDA_LIBRARIES", folder).env("XDG_CACHE_HOME", folder);
    Some(command)
}

const DRY_RUN: &str = "train tiny.toml --dry-run --workers 1 --set training.device=cuda";

#[test]
fn a_gpu_that_cannot_be_used_is_refused_in_one_message() {
    let fixture = Fixture::new();
    for (variable, value, expected) in [
        ("FAKE_CUDA_GPUS", "0", "error: no NVIDIA GPU was found"),
        ("FAKE_CUDA_DRIVER", "12000", "error: the driver supports CUDA 12.0 and Trireme needs 12.4 or later"),
        ("FAKE_CUDA_CAPABILITY", "75", "error: Fake GPU has compute capability 7.5 and Trireme needs 8.0"),
        ("FAKE_CUDA_MEMORY", "0", "more than its limit of 0B"),
    ] {
        let Some(mut command) = with_cuda(&fixture, DRY_RUN) else { return };
        command.env(variable, value);
        assert_contains(&Running::start(command).end().refused(), &[expected]);
    }
    // Workers that this command starts share the only GPU, where each leaves 512 MiB to CUDA.
    let with_memory = |arguments: &str| {
        let mut command = with_cuda(&fixture, arguments)?;
        command.env("FAKE_CUDA_MEMORY", "1025");
        Some(command)
    };
    let Some(two) = with_memory(&DRY_RUN.replace("--workers 1", "--workers 2")) else { return };
    assert_contains(&Running::start(two).end().refused(), &["more than its limit of 496.47KiB"]);
    let Some(mut four) = with_cuda(&fixture, &DRY_RUN.replace("--workers 1", "--workers 4")) else { return };
    four.env("FAKE_CUDA_GPUS", "2");
    let error = Running::start(four).end().refused();
    assert_contains(&error, &["GPU 2 does not exist: 2 GPUs are visible"]);
}

#[test]
fn missing_libraries_are_named_with_the_command_that_installs_them() {
    let fixture = Fixture::new();
    if fake_cuda_folder().is_none() {
        return;
    }
    assert_contains(&fixture.run(DRY_RUN).refused(), &["error: the NVIDIA driver (libcuda) was not found"]);
    install_fake_cuda(&fixture.path("cuda")).unwrap();
    std::fs::remove_file(fixture.path("cuda/libnvrtc.so.12")).unwrap();
    let mut command = fixture.command(DRY_RUN);
    command.env("TRIREME_CUDA_LIBRARIES", fixture.path("cuda"));
    let error = Running::start(command).end().refused();
    assert_contains(&error, &["libnvrtc", "pip install nvidia-cuda-nvrtc-cu12"]);
}

#[test]
fn doctor_lists_gpus_and_libraries() {
    let fixture = Fixture::new();
    let Some(mut command) = with_cuda(&fixture, "doctor --json --seconds 0.001") else { return };
    command.env("FAKE_CUDA_GPUS", "2");
    let report: serde_json::Value = serde_json::from_str(&Running::start(command).end().succeeded()).unwrap();
    let cuda = &report["cuda"];
    assert_eq!(cuda["gpus"].as_array().unwrap().len(), 2);
    assert_eq!(cuda["gpus"][1]["name"], "Fake GPU");
    assert_eq!(cuda["gpus"][1]["compute_capability"], "9.0");
    let libraries = cuda["libraries"].as_array().unwrap();
    assert!(libraries.iter().all(|library| library["problem"].is_null()));
    assert!(
        libraries[..3].iter().all(|library| library["version"] == "12.8")
            && libraries[3]["version"] == "2.27"
    );
}

/// Number of GPUs, number of workers, and keys of each layout, as in [`layouts`](crate::layouts). Workers share the only GPU, or have one
/// each.
const GPU_LAYOUTS: [(usize, usize, &str); 14] = [
    (1, 1, ""),
    (1, 1, "activation_checkpoint.mode=block zero_stage=1 offload.optimizer=host"),
    (1, 1, "offload.activations=host"),
    (2, 2, "zero_stage=1"),
    (1, 2, "zero_stage=2"),
    (2, 2, "zero_stage=3 offload.parameters=host"),
    (2, 2, "pipeline_parallel_degree=2"),
    (1, 2, "tensor_parallel_degree=2"),
    (2, 2, "context_parallel_degree=2"),
    (2, 2, "expert_parallel_degree=2"),
    (4, 4, "zero_stage=3 offload.optimizer=host"),
    (4, 4, "tensor_parallel_degree=2 pipeline_parallel_degree=2 pipeline_parallel_schedule=zb-h1"),
    (4, 4, "context_parallel_degree=2 zero_stage=2"),
    (1, 4, "expert_parallel_degree=2 zero_stage=1"),
];

/// Relative difference from the losses of the CPU that other orders of f32 sums may cause.
const F32_TOLERANCE: f64 = 1e-6;

/// Trains every layout on GPUs for `num_steps` steps, once for each of `seeds`, which set the order in which a GPU runs threads and
/// streams. Asserts that all seeds give the same bits, and that the relative difference from the CPU's losses is less than `tolerance`.
fn check_layouts(dtype: &str, num_steps: usize, seeds: &[&str], tolerance: f64) {
    if fake_cuda_folder().is_none() {
        return;
    }
    let fixture = Fixture::with_corpus();
    let training = format!(
        "[training]\nlocal_batch_size = 1\nglobal_batch_size = 4\nseq_len = 16\nthreads = 1\nsteps = {num_steps}\ndtype = \"{dtype}\"\n"
    );
    let models = ["gpt2", "mixtral"];
    for name in models {
        let (_, config) = MODELS.iter().find(|(other, _)| *other == name).expect("MODELS has the model");
        fixture.write(&format!("{name}.json"), config);
        fixture.write(&format!("{name}.toml"), model_config(name, &training));
        fixture.run(&format!("train {name}.toml --workers 1 --set checkpoint.enable=false")).succeeded();
    }
    for (num_gpus, num_workers, layout) in GPU_LAYOUTS {
        let model = models[usize::from(layout.contains("expert"))];
        let arguments = layout_arguments(num_workers, layout);
        let fixed = "--set training.device=cuda --set checkpoint.resume=never";
        let mut runs = Vec::new();
        for seed in seeds {
            let train = format!("train {model}.toml {fixed} --set run.name=gpu {arguments}");
            let Some(mut command) = with_cuda(&fixture, &train) else { return };
            command.env("FAKE_CUDA_GPUS", num_gpus.to_string()).env("FAKE_CUDA_SEED", seed);
            assert_predicted(&Running::start(command).end().succeeded(), layout);
            runs.push(fixture.losses("gpu"));
        }
        assert!(runs.iter().all(|run| *run == runs[0]), "{dtype} {arguments}: other bits with another seed");
        assert_eq!(runs[0].len(), num_steps, "{dtype} {arguments}");
        assert_close(&runs[0], &fixture.losses(model), tolerance, &format!("{dtype} {arguments}"));
    }
}

/// Asserts that the losses of the same steps differ by less than `tolerance`, relative.
fn assert_close(found: &[(u64, u64)], expected: &[(u64, u64)], tolerance: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for ((step, found), (expected_step, expected)) in found.iter().zip(expected) {
        let difference = relative_difference(*found, *expected);
        println!("{what}, step {step}: {difference:.1e}");
        assert!(
            step == expected_step && difference < tolerance,
            "{what}, step {step}: differs by {difference:.1e}"
        );
    }
}

#[test]
fn layouts_on_gpus_have_the_losses_of_the_cpu() {
    check_layouts("f32", 2, &["1"], F32_TOLERANCE);
}

#[test]
#[ignore = "trains for minutes"]
fn long_runs_on_gpus_have_the_losses_of_the_cpu() {
    check_layouts("f32", 20, &["1", "2"], F32_TOLERANCE);
    check_layouts("bf16", 20, &["1", "2"], 1e-4);
}

#[test]
fn a_run_of_the_cpu_continues_on_a_gpu() {
    let fixture = Fixture::with_corpus();
    fixture.run("train tiny.toml --set run.name=cpu").succeeded();
    let expected = fixture.losses("cpu");
    let resume = "--set training.device=cuda --set run.name=gpu --resume runs/cpu/checkpoints/step-2";
    let Some(command) = with_cuda(&fixture, &format!("train tiny.toml --workers 1 {resume}")) else { return };
    Running::start(command).end().succeeded();
    assert_close(&fixture.losses("gpu"), &expected[2..], F32_TOLERANCE, "resumed");
}

/// Kernels are launched one by one if the config asks for it, and if the driver does not instantiate graphs.
#[test]
fn graphs_change_no_bit() {
    let fixture = Fixture::with_corpus();
    let mut losses = Vec::new();
    for (graphs, arguments) in [("1", ""), ("0", ""), ("1", " --set training.cuda_graphs=false")] {
        let arguments = format!("--workers 1 --resume never --set model.num_layers=2{arguments}");
        let Some(mut command) = gpu_run(&fixture, "1", &arguments) else { return };
        command.env("FAKE_CUDA_GRAPHS", graphs);
        Running::start(command).end().succeeded();
        losses.push(fixture.losses("tiny"));
    }
    assert!(losses.iter().all(|other| *other == losses[0]), "{losses:?}");
}

/// GPUs of compute capability 8.0 have no fp8 units.
#[test]
fn runs_in_fp8_have_nearly_the_losses_of_the_cpu() {
    let fixture = Fixture::with_corpus();
    let arguments = "--workers 1 --resume never --set model.hidden_size=32 --set training.dtype=bf16 --set training.fp8=hybrid";
    fixture.run(&format!("train tiny.toml {arguments} --set run.name=cpu")).succeeded();
    let expected = fixture.losses("cpu");
    for capability in ["80", "90"] {
        let Some(mut command) = gpu_run(&fixture, "1", arguments) else { return };
        command.env("FAKE_CUDA_CAPABILITY", capability);
        assert_contains(&Running::start(command).end().succeeded(), &["fp8 multiplications need a GPU"]);
        assert_close(&fixture.losses("tiny"), &expected, 1e-5, capability);
    }
}

/// If pinning fails, the run says so, and has the same losses.
#[test]
fn a_run_goes_on_without_pinned_memory() {
    let fixture = Fixture::with_corpus();
    let arguments = "--workers 1 --set parallelism.zero_stage=1 --set offload.optimizer=host";
    let mut losses = Vec::new();
    for pinned in ["1024", "0"] {
        let Some(mut command) = gpu_run(&fixture, "1", arguments) else { return };
        command.env("FAKE_CUDA_PINNED", pinned);
        let text = Running::start(command).end().succeeded();
        assert_eq!(text.contains("memory of the host could not be pinned"), pinned == "0", "{text}");
        losses.push(fixture.losses("tiny"));
    }
    assert_eq!(losses[0], losses[1]);
}

#[test]
fn a_gpu_that_other_programs_have_filled_is_refused_before_the_first_step() {
    let fixture = Fixture::with_corpus();
    let Some(mut command) = gpu_run(&fixture, "1", "--workers 1") else { return };
    command.env("FAKE_CUDA_MEMORY", "1024").env("FAKE_CUDA_OTHERS", "1024");
    let error = Running::start(command).end().refused();
    assert_contains(&error, &["out of memory: the GPU has no ", " left for communication"]);
    // The state fits, but not the activations of a step.
    let mut command = gpu_run(&fixture, "1", "--workers 1 --set model.hidden_size=128").unwrap();
    command.env("FAKE_CUDA_MEMORY", "1024").env("FAKE_CUDA_OTHERS", "1020");
    let error = Running::start(command).end().refused();
    let expected = ["a step needs ", "are left: CUDA, NCCL and other programs use 1020.00MiB"];
    assert_contains(&error, &expected);
}

/// Workers on GPUs that round differently would diverge.
#[test]
fn gpus_that_differ_are_refused() {
    let fixture = Fixture::with_corpus();
    let arguments = "train tiny.toml --set training.device=cuda --workers 2";
    let Some(mut command) = with_cuda(&fixture, arguments) else { return };
    command.env("FAKE_CUDA_GPUS", "2").env("FAKE_CUDA_CAPABILITY", "90,80");
    let error = Running::start(command).end().refused();
    assert_contains(
        &error,
        &[
            "GPU (use the same model on all ranks): Fake GPU with compute capability 9.0",
            "on rank 0; Fake GPU with compute capability 8.0",
            "on rank 1",
        ],
    );
}

/// The run continues from its last checkpoint, with the losses of a run on the CPU.
#[test]
fn a_gpu_that_is_lost_is_named() {
    let fixture = Fixture::with_corpus();
    fixture.run("train tiny.toml --set run.name=cpu").succeeded();
    let expected = fixture.losses("cpu");
    for (layout, num_kernels) in [
        ("", 200),
        ("zero_stage=3 offload.parameters=host", 230),
        ("pipeline_parallel_degree=2 offload.activations=host model.num_layers=2", 100),
        ("tensor_parallel_degree=2", 130),
    ] {
        let arguments = format!(
            "train tiny.toml --set training.device=cuda --resume never {}",
            layout_arguments(2, layout)
        );
        let Some(mut command) = with_cuda(&fixture, &arguments) else { return };
        command.env("FAKE_CUDA_GPUS", "2").env("FAKE_CUDA_LOST", format!("1:{num_kernels}"));
        let error = Running::start(command).end().refused();
        let named = "the device failed: GPU 1 (Fake GPU): ";
        assert_contains(&error, &["rank 1 exited with code 1", named, "CUDA_ERROR_DEVICE_UNAVAILABLE; see"]);
        if !layout.is_empty() {
            continue;
        }
        assert_eq!(fixture.complete_checkpoints("tiny"), 1);
        let Some(mut command) = with_cuda(&fixture, &arguments.replace("--resume never", "")) else { return };
        command.env("FAKE_CUDA_GPUS", "2");
        Running::start(command).end().succeeded();
        assert_close(&fixture.losses("tiny"), &expected, F32_TOLERANCE, "resumed");
    }
}

/// Returns a run of two workers, unless `keys` say otherwise, on `num_gpus`.
fn gpu_run(fixture: &Fixture, num_gpus: &str, keys: &str) -> Option<Command> {
    let workers = if keys.contains("--workers") { "" } else { "--workers 2" };
    let arguments = format!("train tiny.toml {workers} --set training.device=cuda --resume never {keys}");
    let mut command = with_cuda(fixture, &arguments)?;
    command.env("FAKE_CUDA_GPUS", num_gpus);
    Some(command)
}

const STAGED_NOTICE: &str = "note: GPUs exchange data through the memory of their hosts";

/// Sums keep their order with NCCL. Its own order gives other bits, which are the same in every run.
#[test]
fn nccl_keeps_the_order_of_sums_if_it_must() {
    let fixture = Fixture::with_corpus();
    let losses = |num_gpus: &str, keys: &str| {
        let output = Running::start(gpu_run(&fixture, num_gpus, keys)?).end().succeeded();
        Some((fixture.losses("tiny"), output))
    };
    let Some((staged, output)) = losses("1", "") else { return };
    assert_contains(&output, &[STAGED_NOTICE, "ranks 0 and 1 share a GPU"]);
    let (direct, output) = losses("2", "").unwrap();
    assert!(!output.contains(STAGED_NOTICE), "{output}");
    assert_eq!(direct, staged);
    let (never, output) = losses("2", "--set comm.nccl=never").unwrap();
    assert!(!output.contains(STAGED_NOTICE) && never == direct, "{output}");
    let any_order = "--workers 4 --set training.local_batch_size=1 --set training.determinism=run";
    let runs = [(); 2].map(|()| losses("4", any_order).unwrap().0);
    assert_eq!(runs[0], runs[1]);
    assert_ne!(runs[0], direct);
    assert_close(&runs[0], &direct, F32_TOLERANCE, "any order");
}

#[test]
fn a_run_that_needs_nccl_is_refused_without_it() {
    let fixture = Fixture::with_corpus();
    let always = "--set comm.nccl=always";
    let Some(shared) = gpu_run(&fixture, "1", always) else { return };
    let expected = ["[comm] nccl is \"always\", but GPUs cannot exchange data by NCCL", "share a GPU"];
    assert_contains(&Running::start(shared).end().refused(), &expected);
    install_fake_cuda(&fixture.path("cuda")).unwrap();
    std::fs::remove_file(fixture.path("cuda/libnccl.so.2")).unwrap();
    let mut missing = gpu_run(&fixture, "2", always).unwrap();
    missing.env("TRIREME_CUDA_LIBRARIES", fixture.path("cuda"));
    let expected = [expected[0], "rank 0: ", "(libnccl) was not found", "pip install nvidia-nccl-cu12"];
    assert_contains(&Running::start(missing).end().refused(), &expected);
}

/// The other ranks name the rank that was killed, the operation and the line of the program.
#[test]
fn a_rank_that_is_killed_in_an_operation_of_nccl_ends_the_run() {
    let fixture = Fixture::with_corpus();
    let pipeline = "--set parallelism.pipeline_parallel_degree=2 --set model.num_layers=2";
    for (layout, num_operations, operation) in [
        ("", "7", "all_reduce(sum, f32"),
        ("--set parallelism.zero_stage=3", "4", "all_gather(f32"),
        (pipeline, "3", ""),
    ] {
        let Some(mut command) = gpu_run(&fixture, "2", layout) else { return };
        command.env("FAKE_NCCL_KILLED", format!("1:{num_operations}"));
        let error = Running::start(command).end().refused();
        assert_contains(&error, &["rank 1 was killed by SIGABRT", operation, "step ", ", line "]);
        assert!(!error.contains("failed between the devices"), "{error}");
    }
}

/// The library keeps a communicator that is aborted waiting for its peers, which must not keep the rank from telling what has happened.
#[test]
fn a_rank_that_stops_in_an_operation_of_nccl_ends_the_run() {
    let fixture = Fixture::with_corpus();
    let Some(mut command) = gpu_run(&fixture, "2", "--set comm.timeout_seconds=2") else { return };
    command.env("FAKE_NCCL_STOPPED", "1:7");
    let outcome = Running::start(command).end();
    assert_eq!(outcome.code, Some(1), "{outcome:?}");
    assert_contains(&outcome.stderr, &["made no progress for 2s", "     1  stopped", ", line "]);
}

#[test]
fn steps_and_kernels_of_gpus_are_timed() {
    let fixture = Fixture::new();
    fixture.write("config.json", LLAMA);
    let run = |arguments: &str| {
        let mut command = with_cuda(&fixture, arguments)?;
        command.env("FAKE_CUDA_GPUS", "2");
        Some(serde_json::from_str(&Running::start(command).end().succeeded()).unwrap())
    };
    let step = "bench step --model . --batch 1 --seq 8 --threads 1 --steps 2 --warmup 0 --json";
    for workers in ["--workers 1", "--workers 2"] {
        let device = |device: &str| run(&format!("{step} {workers} --device {device}"));
        let Some(on_gpus): Option<serde_json::Value> = device("cuda") else { return };
        let on_cpus = device("cpu").unwrap();
        assert_eq!((&on_gpus["device"], &on_cpus["device"]), (&"cuda".into(), &"cpu".into()));
        let [found, expected] = [on_gpus, on_cpus].map(|step| step["final_loss"].as_f64().unwrap());
        let difference = relative_difference(found.to_bits(), expected.to_bits());
        assert!(difference < F32_TOLERANCE, "{workers}: {found} {expected}");
    }
    let kernels = "bench kernels --model . --batch 1 --seq 8 --seconds 0 --device cuda --dtype bf16 --json";
    let report = run(&format!("{kernels} --only matmul")).unwrap();
    assert_eq!(report["gpu"], "Fake GPU");
    let step = &report["steps"][0];
    assert_eq!(step["product_unit"], "cuBLASLt in bf16");
    let kernels = step["kernels"].as_array().unwrap();
    assert!(!kernels.is_empty() && kernels.iter().all(|kernel| kernel["name"] == "matmul"), "{report}");
}

#[test]
fn collectives_of_gpus_are_timed() {
    let fixture = Fixture::new();
    let ops = "all_reduce,all_gather,reduce_scatter,all_to_all,all_to_all_variable,broadcast,reduce,gather,scatter,send,barrier";
    let sizes = "--min-bytes 64 --max-bytes 4096 --factor 64 --iters 2 --warmup 1";
    for order in ["--any-order", "--dtype bf16"] {
        let bench = format!("bench collectives --workers 3 --memory gpu --ops {ops} {sizes} {order} --json");
        let Some(mut command) = with_cuda(&fixture, &bench) else { return };
        command.env("FAKE_CUDA_GPUS", "3");
        let lines = Running::start(command).end().succeeded();
        assert_eq!(lines.lines().count(), 10 * 2 + 1, "{lines}");
        assert!(lines.lines().all(|line| line.contains(r#""transport":"nccl""#)), "{lines}");
    }
    let Some(shared) = with_cuda(&fixture, "bench collectives --memory gpu") else { return };
    assert_contains(
        &Running::start(shared).end().refused(),
        &["--memory gpu needs NCCL between the GPUs", "share a GPU"],
    );
}

#[test]
fn traces_have_the_times_of_kernels() {
    let fixture = Fixture::with_corpus();
    let traced = "--workers 1 --set metrics.trace_interval=1 --set training.steps=2";
    let Some(command) = gpu_run(&fixture, "1", traced) else { return };
    Running::start(command).end().succeeded();
    let trace = std::fs::read_to_string(fixture.path("runs/tiny/trace.json")).unwrap();
    let trace: serde_json::Value = serde_json::from_str(&trace).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let named = |event: &&serde_json::Value| event["args"]["name"] == "kernels on the GPU";
    let thread = &events.iter().find(named).expect("there is a thread of kernels")["tid"];
    // The stand-in's clock counts matmuls alone.
    let of_kernels: Vec<_> = events.iter().filter(|event| event["cat"] == "kernels").collect();
    assert!(!of_kernels.is_empty() && of_kernels.iter().all(|event| event["tid"] == *thread));
    let is_action = |event: &&serde_json::Value| event["args"].get("issued").is_some();
    let is_other = |event: &serde_json::Value| event["cat"] == "kernels" || event["cat"] == "waiting";
    let mut actions = BTreeSet::new();
    for event in events.iter().filter(is_action).filter(|event| !is_other(event)) {
        let [began, ended] = [0, 1].map(|index| event["args"]["kernels"][index].as_f64().unwrap());
        assert!(event["args"]["issued"].as_f64().unwrap() <= began && began <= ended, "{event}");
        actions.insert(event["name"].as_str().unwrap().split(' ').next().unwrap());
    }
    assert!(actions.is_superset(&["F", "B", "STEP"].into()), "{actions:?}");
    fixture.run("report trace runs/tiny").succeeded();
}
