//! What a device must do beside the kernels of operations, which `tests/operations` checks: every backend against definitions in f64.
//!
//! Backends have the same bits: a kernel computes in the order that shapes alone decide.

mod copies;
mod fp8;
mod generation;
mod groups;
mod integers;
mod sums;
mod updates;

use trireme_base::{DType, RandomKey};
use trireme_tensor::{BackendKind, Category, DetachedOptions, Device, DeviceOptions, Shape, Tensor};
use trireme_testkit::TracedDevice;

/// Floats that kernels compute with.
pub(crate) const FLOATS: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];

/// A device of each backend, and with several threads.
pub(crate) fn devices() -> Vec<DeviceOptions> {
    let with = |num_threads, backend| DeviceOptions { num_threads, backend, ..DeviceOptions::default() };
    let detached = |seed| BackendKind::Detached(DetachedOptions { seed, ignored_wait: None });
    let seeds = (0..8).map(|seed| with(1, detached(seed)));
    [with(1, BackendKind::Cpu), with(3, BackendKind::Cpu), with(2, detached(8))]
        .into_iter()
        .chain(seeds)
        .collect()
}

/// What `run` finds on every device, which must be the same.
pub(crate) fn on_all<T: PartialEq + std::fmt::Debug>(run: impl Fn(&Device) -> T) -> T {
    let mut found =
        devices().into_iter().map(|options| (options, run(&TracedDevice::open(options).unwrap())));
    let (_, first) = found.next().expect("there is the CPU");
    for (options, other) in found {
        assert!(other == first, "{options:?} has other bits");
    }
    first
}

/// Normal values, of standard deviation 1.
pub(crate) fn random(len: usize, name: &str) -> Vec<f32> {
    let mut values = vec![0.0; len];
    RandomKey::new(5, name).fill_normal(&mut values, 1.0);
    values
}

/// A tensor of these values in f32.
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

/// The values, rounded to a type.
pub(crate) fn rounded(device: &Device, values: &[f32], dtype: DType) -> Tensor {
    let wide = tensor(device, values);
    let mut narrow = empty(device, [values.len()], dtype);
    device.convert(wide.view(), narrow.view_mut());
    narrow
}

/// The values in f32.
pub(crate) fn wide(device: &Device, tensor: &Tensor) -> Vec<f32> {
    let mut wide = empty(device, tensor.shape(), DType::F32);
    device.convert(tensor.view(), wide.view_mut());
    device.read(wide.view())
}

/// Half a unit in the last place of a type, in proportion to a value.
pub(crate) fn rounding(dtype: DType) -> f64 {
    match dtype {
        DType::Bf16 => 2.0_f64.powi(-8),
        DType::F16 => 2.0_f64.powi(-11),
        _ => 2.0_f64.powi(-24),
    }
}

/// Asserts that values are as near to those of a definition as so many roundings explain.
pub(crate) fn assert_near(found: &[f32], expected: impl IntoIterator<Item = f64>, bound: f64, what: &str) {
    let mut num = 0;
    for (index, (&found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (f64::from(found) - expected).abs();
        assert!(error <= bound * expected.abs().max(1.0), "{what} {index}: {found} instead of {expected}");
        num += 1;
    }
    assert_eq!(num, found.len(), "{what}");
}
