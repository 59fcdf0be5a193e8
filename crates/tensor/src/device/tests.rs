//! Counting devices, budgets and kernel timers.

use super::*;
use crate::precision::Precision;
use crate::tape::RotaryTable;
use trireme_base::Positions;

#[test]
fn counting_devices_compute_and_allocate_nothing() {
    let options = DeviceOptions { num_threads: 2, ..DeviceOptions::default() };
    let counting = Device::counting(options).unwrap();
    // One terabyte: a kernel that touched it would fail.
    let side = 1 << 19;
    let tensor = |device: &Device| device.zeros([side, side].into(), DType::F32, Category::Activations);
    let (left, mut out) = (tensor(&counting).unwrap(), tensor(&counting).unwrap());
    let factor = || (left.view(), Transposition::No);
    let epilogue = MatmulEpilogue::Overwrite;
    assert_eq!(counting.cost(), Cost::ZERO.writes(2 * 4 * side * side));
    counting.reset_cost();
    counting.matmul(Precision::F32, factor(), factor(), out.view_mut(), epilogue).unwrap();
    let expected = Cost::products(&[2, side, side, side]).reads(2 * 4 * side * side).writes(4 * side * side);
    assert_eq!(counting.cost(), expected);
    let peak = counting.memory().usage(Category::Activations).peak;
    assert!(peak > 2 * 4 * side * side, "scratch memory is counted as well: {peak}");
}

#[test]
fn budgets_limit_rounded_allocation_sizes() {
    let options = DeviceOptions { num_threads: 1, budget: Some(1024), ..DeviceOptions::default() };
    let device = Device::cpu(options).unwrap();
    let vector = |len: usize| device.zeros([len].into(), DType::F32, Category::Gradients);
    let half = vector(128).unwrap();
    let Err(DeviceError::OverBudget(refused)) = vector(129) else { panic!("the budget is 1024 bytes") };
    assert_eq!((refused.requested, refused.excess()), (576, 64));
    assert_eq!(refused.largest, "1 [128] in f32 for gradients, 512B each");
    let other_half = vector(128).unwrap();
    drop((half, other_half));
    vector(256).unwrap();
}

fn cpu_options() -> DeviceOptions {
    DeviceOptions { num_threads: 2, ..DeviceOptions::default() }
}

/// Returns a tensor with varied values.
fn values(device: &Device, shape: [usize; 2]) -> Tensor {
    let mut tensor = device.empty(shape.into(), DType::F32, Category::Activations).unwrap();
    let write = |values: &mut [f32]| {
        (0..).zip(values).for_each(|(index, value): (u32, _)| *value = (index % 7) as f32 - 2.5);
        Ok::<_, DeviceError>(())
    };
    device.fill(tensor.view_mut(), write).unwrap();
    tensor
}

/// Runs a few kernels, some of them in place, and returns their results.
fn some_kernels(device: &Device) -> Vec<f32> {
    let (left, right, mut out) = (values(device, [4, 6]), values(device, [6, 5]), values(device, [4, 5]));
    let factors = || ((left.view(), Transposition::No), (right.view(), Transposition::No));
    for _ in 0..2 {
        let (left, right) = factors();
        device.matmul(Precision::F32, left, right, out.view_mut(), MatmulEpilogue::Accumulate).unwrap();
    }
    device.map_in_place(out.view_mut(), 1, |x| 0.5 * x);
    let mut sums = device.zeros([5].into(), DType::F32, Category::Activations).unwrap();
    device.column_sums(out.view(), sums.view_mut(), true);
    [device.read(out.view()).unwrap(), device.read(sums.view()).unwrap()].concat()
}

#[test]
fn timed_kernels_give_the_results_of_one_run() {
    let expected = some_kernels(&Device::cpu(cpu_options()).unwrap());
    let (device, timer) = Device::timed(cpu_options()).unwrap();
    assert_eq!(some_kernels(&device), expected);
    for (only, num_kernels) in [("", 4), ("4x6, 6x5", 1), ("map", 1), ("conv", 0)] {
        timer.start(std::time::Duration::ZERO, only, |_| ());
        assert_eq!(some_kernels(&device), expected, "{only}");
        let timed = timer.finish();
        assert_eq!(timed.len(), num_kernels, "{only}: {timed:?}");
        for call in timed {
            let shapes = match call.kernel {
                "matmul" => "4x6, 6x5 -> 4x5",
                "map_in_place" => "4x5",
                "zero" => "5",
                _ => "4x5 -> 5",
            };
            assert_eq!(
                (call.shapes.as_str(), call.num_calls),
                (shapes, 1 + usize::from(call.kernel == "matmul"))
            );
            assert!(call.cost.traffic.moved() > 0 && call.timing.best > 0.0);
        }
    }
    assert!(timer.finish().is_empty());
}

#[test]
fn recorded_calls_replay_on_new_memory() {
    let (calls, journal) = (RecordedCalls::default(), Journal::default());
    let counting = Device::counting(cpu_options()).unwrap();
    counting.record_calls(&calls);
    counting.keep_journal(&journal);
    some_kernels(&counting);
    let (table, mut rows) = (values(&counting, [6, 4]), values(&counting, [3, 4]));
    counting.add_assign(rows.view_mut(), table.view().rows(3, 3));
    let ids = counting.zeros([3].into(), DType::U32, Category::Activations).unwrap();
    counting.gather_rows(table.view(), ids.view(), rows.view_mut());
    let noted: Vec<KernelCall> = journal
        .take()
        .into_iter()
        .filter_map(|(entry, _)| match entry {
            JournalEntry::Kernel(call) => Some(call),
            _ => None,
        })
        .collect();
    let detached = BackendKind::Detached(DetachedOptions::default());
    for backend in [BackendKind::Cpu, detached] {
        let device = Device::open(DeviceOptions { backend, ..cpu_options() }).unwrap();
        let mut replayed = Vec::new();
        for call in &noted {
            let Some(mut replay) = calls.replay(call, &device).unwrap() else { continue };
            device.reset_cost();
            replay.issue();
            replay.issue();
            device.synchronize();
            assert_eq!(device.cost(), call.cost + call.cost, "{}", call.kernel);
            replayed.push(call.kernel);
        }
        for kernel in ["zero", "matmul", "map_in_place", "column_sums", "add_assign"] {
            assert!(replayed.contains(&kernel), "{kernel}: {replayed:?}");
        }
        assert!(!replayed.contains(&"gather_rows"), "its indices mean something");
    }
    let unknown = KernelCall { kernel: "matmul", cost: Cost::ZERO };
    assert!(calls.replay(&unknown, &counting).unwrap().is_none());
}

#[test]
fn sizes_beyond_the_address_space_return_an_error() {
    let device = Device::counting(DeviceOptions::default()).unwrap();
    let (half, all) = (1 << 32, usize::MAX);
    // With dims of 0 counted as 1, the product exceeds `isize::MAX` for every shape.
    for dims in [&[half, half][..], &[all, 2], &[half, half, 0], &[0, all], &[half / 2, half / 4]] {
        let refused = device.empty(Shape::new(dims), DType::F32, Category::Gradients).unwrap_err();
        assert!(matches!(refused, DeviceError::Unaddressable { .. }), "{refused}");
        let text = refused.to_string();
        assert!(text.contains(&format!("{dims:?}")) && text.contains("gradients"), "{text}");
    }
    // The address space is larger than the device's memory.
    let refused = device.empty([half / 2, half / 8].into(), DType::F32, Category::Gradients).unwrap_err();
    assert!(matches!(refused, DeviceError::OutOfMemory(_)), "{refused}");
    assert_eq!(Shape::from([half, half, 7]).num_elements(), usize::MAX);
    assert_eq!(Shape::from([half, half, 0]).num_elements(), 0);
    assert_eq!(Shape::from([half, half, 0]).rows(), usize::MAX);
}

#[test]
fn operation_counts_saturate() {
    let device = Device::counting(DeviceOptions { num_threads: 1, ..DeviceOptions::default() }).unwrap();
    // 2^61 operations per matmul. The operands and their packed copies stay addressable at every SIMD level.
    let side = 1 << 20;
    let tensor = || device.empty([side, side].into(), DType::Bf16, Category::Activations).unwrap();
    let (factor, mut out) = (tensor(), tensor());
    for product in 1..=9 {
        let factors = [(factor.view(), Transposition::No); 2];
        let epilogue = MatmulEpilogue::Overwrite;
        device.matmul(Precision::Bf16, factors[0], factors[1], out.view_mut(), epilogue).unwrap();
        assert_eq!(device.cost().operations() == u64::MAX, product >= 8, "{product}");
    }
}

#[test]
fn a_table_of_rotary_positions_is_counted_and_not_computed() {
    let device = Device::counting(DeviceOptions { num_threads: 1, ..DeviceOptions::default() }).unwrap();
    let table = RotaryTable::new(&device, 64, &[1.0; 16], 1.0).unwrap();
    assert_eq!(device.memory().usage(Category::Parameters).current, 2 * 4 * 64 * 16);
    // The cosine of position 0 is 1, but untouched memory reads as zeros.
    assert!(table.at(Positions::run(0, 1)).cos.operand().f32s(&device.cpu).iter().all(|&cos| cos == 0.0));
}
