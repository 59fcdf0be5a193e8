//! Compares kernels on every backend with their definitions in f64. `tests/operations` does so for the kernels of operations.
//!
//! All backends must give the same bits: only shapes determine the order in which a kernel computes. On a GPU, that holds for kernels
//! whose sums are exact, or whose order is fixed by their definition; other results are compared by bounds.

mod attention;
mod copies;
mod cuda_matmuls;
mod exchange;
mod fp8;
mod generation;
mod groups;
mod integers;
mod sums;
mod updates;

use std::process::Command;
use trireme_base::{DType, RandomKey};
use trireme_tensor::{BackendKind, Category, DetachedOptions, Device, DeviceOptions, Shape, Tensor};
use trireme_testkit::{FAKE_CUDA_PTX, TracedDevice, or_skip};

/// Float dtypes that kernels compute with.
pub(crate) const FLOATS: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];

/// Returns options for every backend.
pub(crate) fn device_options() -> Vec<DeviceOptions> {
    processor_options().into_iter().chain(gpu_options()).collect()
}

/// Returns options for processors, attached and detached, with different numbers of threads and seeds.
fn processor_options() -> Vec<DeviceOptions> {
    let with = |num_threads, backend| DeviceOptions { num_threads, backend, ..DeviceOptions::default() };
    let detached = |seed| BackendKind::Detached(DetachedOptions { seed, ignored_wait: None });
    let seeds = (0..8).map(|seed| with(1, detached(seed)));
    [with(1, BackendKind::Cpu), with(3, BackendKind::Cpu), with(2, detached(8))]
        .into_iter()
        .chain(seeds)
        .collect()
}

/// Returns options for a GPU, if there is one.
fn gpu_options() -> Option<DeviceOptions> {
    trireme_testkit::test_gpu().map(|backend| DeviceOptions {
        num_threads: 1,
        backend,
        ..DeviceOptions::default()
    })
}

/// NVRTC compiles the kernels to PTX, which the stand-in interprets. Runs the tests of kernels with inline assembly, and some others.
#[test]
fn kernels_have_the_same_results_as_ptx() {
    let folder = std::env::var_os("TRIREME_TEST_NVRTC").ok_or("TRIREME_TEST_NVRTC is not set");
    let Some(folder) = or_skip("NVRTC", folder) else { return };
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["attention::", "groups::", "generation::", "sums::"]).env(FAKE_CUDA_PTX, folder);
    let output = child.output().unwrap();
    let text = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    let num_passed =
        text[0].split("test result: ok. ").nth(1).and_then(|rest| rest.split(' ').next()?.parse().ok());
    assert!(output.status.success() && num_passed > Some(5), "{}", text.concat());
}

/// Runs `run` on every device and asserts equal results. Returns the result.
pub(crate) fn on_all<T: PartialEq + std::fmt::Debug>(run: impl Fn(&Device) -> T) -> T {
    let found = on_processors(&run);
    if let Some(options) = gpu_options() {
        assert!(run(&TracedDevice::open(options).unwrap()) == found, "the GPU has other bits");
    }
    found
}

/// As [`on_all`], but the results of a GPU may differ by `bound`, relative to values greater than 1.
pub(crate) fn on_all_near<const N: usize>(
    bound: f64,
    run: impl Fn(&Device) -> [Vec<f32>; N],
) -> [Vec<f32>; N] {
    let found = on_processors(&run);
    if let Some(options) = gpu_options() {
        let of_gpu = run(&TracedDevice::open(options).unwrap());
        for (of_gpu, found) in of_gpu.iter().zip(&found) {
            assert_near(of_gpu, found.iter().copied().map(f64::from), bound, "element of the GPU");
        }
    }
    found
}

/// Compares pairs of results that are computed in different orders: they have the same bits on processors, and differ by at most `bound`
/// on a GPU, relative to values greater than 1.
pub(crate) fn assert_same_or_near(run: impl Fn(&Device) -> [Vec<f32>; 2], bound: f64, what: &str) {
    let [left, right] = on_processors(&run);
    assert_eq!(left, right, "{what}");
    if let Some(options) = gpu_options() {
        let [left, right] = run(&TracedDevice::open(options).unwrap());
        assert_near(&left, right.into_iter().map(f64::from), bound, what);
    }
}

/// As [`on_all`], without a GPU.
fn on_processors<T: PartialEq + std::fmt::Debug>(run: &impl Fn(&Device) -> T) -> T {
    let mut found =
        processor_options().into_iter().map(|options| (options, run(&TracedDevice::open(options).unwrap())));
    let (_, first) = found.next().expect("there is the CPU");
    for (options, other) in found {
        assert!(other == first, "{options:?} has other bits");
    }
    first
}

/// Returns random normal values of standard deviation 1.
pub(crate) fn random(len: usize, name: &str) -> Vec<f32> {
    let mut values = vec![0.0; len];
    RandomKey::new(5, name).fill_normal(&mut values, 1.0);
    values
}

/// Returns an f32 tensor with these values.
pub(crate) fn tensor(device: &Device, values: &[f32]) -> Tensor {
    shaped(device, values, [values.len()])
}

pub(crate) fn shaped(device: &Device, values: &[f32], shape: impl Into<Shape>) -> Tensor {
    let mut tensor = empty(device, shape, DType::F32);
    device.upload(values, tensor.view_mut());
    tensor
}

pub(crate) fn empty(device: &Device, shape: impl Into<Shape>, dtype: DType) -> Tensor {
    device.empty(shape.into(), dtype, Category::Activations).unwrap()
}

/// Returns the values rounded to a dtype.
pub(crate) fn rounded(device: &Device, values: &[f32], dtype: DType) -> Tensor {
    narrow(device, values, [values.len()], dtype)
}

/// As [`rounded`], in a shape.
pub(crate) fn narrow(device: &Device, values: &[f32], shape: impl Into<Shape>, dtype: DType) -> Tensor {
    let wide = shaped(device, values, shape);
    let mut narrow = empty(device, wide.shape(), dtype);
    device.convert(wide.view(), narrow.view_mut());
    narrow
}

/// Returns a tensor of numbers.
pub(crate) fn ids(device: &Device, values: &[u32]) -> Tensor {
    let mut ids = empty(device, [values.len()], DType::U32);
    device.upload(values, ids.view_mut());
    ids
}

/// Returns the values in f32.
pub(crate) fn wide(device: &Device, tensor: &Tensor) -> Vec<f32> {
    let mut wide = empty(device, tensor.shape(), DType::F32);
    device.convert(tensor.view(), wide.view_mut());
    device.read(wide.view()).unwrap()
}

/// Returns the relative rounding error of a dtype: half a unit in the last place.
pub(crate) fn rounding(dtype: DType) -> f64 {
    match dtype {
        DType::Bf16 => 2.0_f64.powi(-8),
        DType::F16 => 2.0_f64.powi(-11),
        _ => 2.0_f64.powi(-24),
    }
}

/// Asserts that values equal expected ones up to `bound`, relative to values greater than 1 and absolute otherwise.
pub(crate) fn assert_near(found: &[f32], expected: impl IntoIterator<Item = f64>, bound: f64, what: &str) {
    let mut num = 0;
    for (index, (&found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (f64::from(found) - expected).abs();
        assert!(error <= bound * expected.abs().max(1.0), "{what} {index}: {found} instead of {expected}");
        num += 1;
    }
    assert_eq!(num, found.len(), "{what}");
}
