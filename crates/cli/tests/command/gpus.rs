//! Workers on GPUs: stand-ins for CUDA's libraries run kernels on the host.

use crate::common::{Fixture, Running, assert_contains};
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
    // Workers that this command starts share the only GPU.
    let with_memory = |arguments: &str| {
        let mut command = with_cuda(&fixture, arguments)?;
        command.env("FAKE_CUDA_MEMORY", "1");
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

/// One worker, workers with a GPU each, and workers that share the only one have the losses of the CPU, up to rounding. A checkpoint of
/// the CPU continues on a GPU.
#[test]
fn training_on_gpus_has_the_losses_of_the_cpu() {
    let fixture = Fixture::with_corpus();
    fixture.run("train tiny.toml --set run.name=cpu").succeeded();
    let expected = fixture.losses("cpu");
    let variants = [
        ("one", "1", "--workers 1"),
        ("sharded", "2", "--workers 2 --set parallelism.zero_stage=3 --set offload.optimizer=host"),
        ("tensor", "1", "--workers 2 --set parallelism.tensor_parallel_degree=2"),
        ("resumed", "1", "--workers 1 --resume runs/cpu/checkpoints/step-2"),
    ];
    for (name, num_gpus, options) in variants {
        let arguments = format!("train tiny.toml --set training.device=cuda --set run.name={name} {options}");
        let Some(mut command) = with_cuda(&fixture, &arguments) else { return };
        command.env("FAKE_CUDA_GPUS", num_gpus);
        let output = Running::start(command).end().succeeded();
        let found = fixture.losses(name);
        assert_eq!(found.last().map(|(step, _)| step), Some(&4), "{name}: {output}");
        for (step, found) in found {
            let of_cpu =
                expected.iter().find(|(other, _)| *other == step).expect("the CPU's run has the step");
            let [found, expected] = [found, of_cpu.1].map(f64::from_bits);
            assert!((found - expected).abs() < 1e-5, "{name}, step {step}: {found} instead of {expected}");
        }
    }
}
