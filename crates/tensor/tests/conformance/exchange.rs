//! Steps of exchanges that run on one GPU: reductions in canonical order, and quotients.

use super::{FLOATS, gpu_options};
use trireme_base::{Bf16, DType, DeviceSpan, DeviceStep, F16, Rank, ReduceOp};
use trireme_tensor::{Category, Device, Tensor};
use trireme_testkit::TracedDevice;

/// Values that are exact in all dtypes, whose sums and products are not, and special values.
const VALUES: [f32; 10] = [1.0, -0.0, 0.0, 1.0078125, 3.0, -2.5, 257.0, f32::INFINITY, f32::NAN, 65_280.0];

/// Rounds to a dtype.
fn rounded(value: f32, dtype: DType) -> f32 {
    match dtype {
        DType::Bf16 => Bf16::from_f32(value).to_f32(),
        DType::F16 => F16::from_f32(value).to_f32(),
        _ => value,
    }
}

/// The definition of a reduction of two elements. NaN takes precedence.
fn reduced(op: ReduceOp, left: f32, right: f32) -> f32 {
    match op {
        ReduceOp::Sum | ReduceOp::Mean => left + right,
        ReduceOp::Prod => left * right,
        ReduceOp::Max if left > right || left.is_nan() => left,
        ReduceOp::Min if left < right || left.is_nan() => left,
        ReduceOp::Max | ReduceOp::Min => right,
    }
}

/// Runs steps in a communicator of one rank.
fn run(device: &Device, steps: Vec<DeviceStep>) {
    let transport = device.transport().unwrap().expect("GPUs have a transport");
    let id = transport.create_id().unwrap();
    let mut communicator = transport.join(&id, Rank(0), 1).unwrap();
    communicator.issue(steps).unwrap();
    while !communicator.poll().unwrap() {
        std::thread::yield_now();
    }
}

#[test]
fn vectors_are_combined_and_divided_as_on_the_cpu() {
    let Some(options) = gpu_options() else { return };
    let device = TracedDevice::open(options).unwrap();
    let pairs: Vec<(f32, f32)> =
        VALUES.iter().flat_map(|&left| VALUES.iter().map(move |&right| (left, right))).collect();
    for dtype in FLOATS {
        let upload = |values: Vec<f32>| {
            let shape = [values.len()].into();
            let mut wide = device.empty(shape, DType::F32, Category::Communication).unwrap();
            device.upload(&values, wide.view_mut());
            let mut tensor = device.exchange_tensor(shape, dtype, Category::Communication).unwrap();
            device.convert(wide.view(), tensor.view_mut());
            tensor
        };
        let rounded = |value: f32| rounded(value, dtype);
        for op in ReduceOp::ALL {
            let left = upload(pairs.iter().map(|pair| pair.0).collect());
            let right = upload(pairs.iter().map(|pair| pair.1).collect());
            // A communicator uses memory after the kernels that fill it.
            device.record_event().wait();
            let [left, right] =
                [&left, &right].map(|tensor| DeviceSpan::all(&tensor.exchange_memory().unwrap()));
            // The result replaces the right operand.
            let combine = DeviceStep::Combine { left, right: right.clone(), out: right.clone(), dtype, op };
            let divide = DeviceStep::Divide { span: right.clone(), dtype, by: 3 };
            let steps = if op == ReduceOp::Mean { vec![combine, divide] } else { vec![combine] };
            run(&device, steps);
            let result = Tensor::from_exchange_memory(right.memory, [pairs.len()].into(), dtype);
            let mut wide = device.empty([pairs.len()].into(), DType::F32, Category::Communication).unwrap();
            device.convert(result.view(), wide.view_mut());
            for (found, &(left, right)) in device.read::<f32>(wide.view()).unwrap().into_iter().zip(&pairs) {
                let sum = rounded(reduced(op, rounded(left), rounded(right)));
                let expected = if op == ReduceOp::Mean { rounded(sum / 3.0) } else { sum };
                let is_equal = found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan();
                assert!(is_equal, "{op} of {left} and {right} in {dtype}: {found} in place of {expected}");
            }
        }
    }
}
