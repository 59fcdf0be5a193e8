//! How matmuls run on a GPU: their algorithms, and TF32.

use super::{empty, random, shaped};
use trireme_base::DType;
use trireme_tensor::{
    BackendKind, CudaOptions, Device, DeviceOptions, MatmulEpilogue, Precision, Transposition,
};
use trireme_testkit::{TracedDevice, fake_cuda_folder, fake_gpu};

/// Opens a GPU with these options; `None` on a machine that has no stand-in.
pub(crate) fn gpu(change: impl FnOnce(&mut CudaOptions)) -> Option<TracedDevice> {
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
