//! How matmuls run on a GPU: their algorithms, TF32, and their times.

use super::fp8::Layer;
use super::{empty, random, shaped};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use trireme_base::DType;
use trireme_tensor::probe::Probe;
use trireme_tensor::tape::WeightLayout;
use trireme_tensor::{
    BackendKind, CudaOptions, Device, DeviceOptions, Fp8Formats, MatmulEpilogue, Precision, Transposition,
};
use trireme_testkit::{TracedDevice, fake_cuda_folder, fake_gpu};

/// Held by tests that change the file of choices.
static FILE: Mutex<()> = Mutex::new(());

/// A time that ends every measurement after its minimum of runs.
const NO_TIME: Duration = Duration::ZERO;

/// Opens a stand-in for a GPU with these options; `None` on a machine that has no stand-in.
fn gpu(change: impl FnOnce(&mut CudaOptions)) -> Option<TracedDevice> {
    let Some(BackendKind::Cuda(mut cuda)) = fake_gpu() else { return None };
    change(&mut cuda);
    let options =
        DeviceOptions { num_threads: 1, backend: BackendKind::Cuda(cuda), ..DeviceOptions::default() };
    Some(TracedDevice::open(options).unwrap())
}

/// Returns the product of two matrices that is added to 1.
fn product(device: &Device, [rows, inner, cols]: [usize; 3], left: &[f32], right: &[f32]) -> Vec<f32> {
    let (left, right) = (shaped(device, left, [rows, inner]), shaped(device, right, [inner, cols]));
    let mut out = empty(device, [rows, cols], DType::F32);
    device.upload(&vec![1.0_f32; rows * cols], out.view_mut());
    let factors = ((left.view(), Transposition::No), (right.view(), Transposition::No));
    device.matmul(Precision::F32, factors.0, factors.1, out.view_mut(), MatmulEpilogue::Accumulate).unwrap();
    device.read(out.view()).unwrap()
}

#[test]
fn tf32_rounds_factors_if_it_is_allowed() {
    // Needs 12 bits of fraction.
    let factor = 1.0 + 2.0_f32.powi(-12);
    for (allow_tf32, expected) in [(false, 1.0 + factor), (true, 2.0)] {
        let Some(device) = gpu(|options| options.allow_tf32 = allow_tf32) else { return };
        assert_eq!(product(&device, [1, 1, 1], &[factor], &[1.0]), [expected]);
    }
}

/// The file of choices survives damage, and serves devices that are opened later. The stand-in's second proposal is the fastest.
#[test]
fn the_fastest_algorithm_is_measured_once_and_kept() {
    let Some(folder) = fake_cuda_folder() else { return };
    let _lock = FILE.lock().unwrap_or_else(PoisonError::into_inner);
    let sizes = [5, 7, 6];
    let (left, right) = (random(35, "left"), random(42, "right"));
    let expected = product(&gpu(|_| ()).unwrap(), sizes, &left, &right);
    let path = folder.join("trireme/cuda/matmuls-Fake-GPU-120800.txt");
    let run = |text: Option<&str>| -> Vec<String> {
        match text {
            Some(text) => std::fs::write(&path, text).unwrap(),
            None => drop(std::fs::remove_file(&path)),
        }
        let device = gpu(|options| options.time_matmuls = true).unwrap();
        for _ in 0..2 {
            assert_eq!(product(&device, sizes, &left, &right), expected);
        }
        let text = std::fs::read_to_string(&path).unwrap();
        text.lines().map(str::to_owned).collect()
    };
    let lines = run(None);
    assert!(lines.len() == 1 && lines[0].ends_with(" 1 0 0 0"), "{lines:?}");
    let other = lines[0].replace(" 1 0 0 0", " 2 0 0 0");
    assert_eq!(run(Some(&other)), [&*other], "a choice is not measured again");
    for damaged in [
        lines[0].replace(" 1 0 0 0", " 9 0 0 0"),
        lines[0].replace(" 1 0 0 0", " 1 0 0"),
        lines[0].replace(" 1 0 0 0", " x 0 0 0"),
        lines[0][..20].to_owned(),
    ] {
        assert_eq!(run(Some(&damaged)), [&*damaged, &lines[0]]);
    }
}

/// The file of choices has a line for each kind of matmul.
#[test]
fn fp8_units_multiply_what_they_can() {
    let Some(folder) = fake_cuda_folder() else { return };
    let _lock = FILE.lock().unwrap_or_else(PoisonError::into_inner);
    let path = folder.join("trireme/cuda/matmuls-Fake-GPU-120800.txt");
    let [e4m3, e5m2] = ["E4m3", "E5m2"];
    for (rows, is_direct, has_residual) in [(16, true, false), (16, true, true), (8, false, false)] {
        drop(std::fs::remove_file(&path));
        let device = gpu(|options| options.time_matmuls = true).unwrap();
        let (formats, layout) = (Fp8Formats::Hybrid, WeightLayout::InputsFirst);
        Layer { formats, layout, rows, inputs: 32, outputs: 48, has_residual }.train(&device);
        let text = std::fs::read_to_string(&path).unwrap();
        for [left, right] in [[e4m3, e4m3], [e5m2, e4m3], [e4m3, e5m2]] {
            assert_eq!(text.contains(&format!("fp8: Some([{left}, {right}])")), is_direct, "{text}");
        }
        assert_eq!(text.contains("fp8: None"), !is_direct, "{text}");
    }
}

/// A timed kernel runs several times, and leaves what one run leaves.
#[test]
fn matmuls_are_timed_and_bounded() {
    let Some(backend) = fake_gpu() else { return };
    let options = DeviceOptions { num_threads: 1, backend, ..DeviceOptions::default() };
    let (device, timer) = Device::timed(options).unwrap();
    let expected = product(&device, [1, 1, 1], &[2.0], &[3.0]);
    timer.start(NO_TIME, "matmul", |_| ());
    assert_eq!(product(&device, [1, 1, 1], &[2.0], &[3.0]), expected);
    let timed = timer.finish();
    assert_eq!(timed.len(), 1);
    // On the stand-in's clock.
    assert_eq!(timed[0].timing.median, 3e-3);
    let probe = Probe::new(&device, NO_TIME);
    let peaks = probe.peaks(Precision::Bf16).unwrap();
    assert_eq!(peaks.matmul, 2.0 * 256.0_f64.powi(3) / 3e-3);
    let (bound, _) = probe.bound(peaks, &timed[0].cost).unwrap();
    assert!(bound > 0.0 && bound.is_finite(), "{bound}");
}
