//! Counting without computing, and budgets.

use super::*;

#[test]
fn a_device_that_counts_computes_nothing_and_takes_no_memory() {
    let options = DeviceOptions { num_threads: 2, ..DeviceOptions::default() };
    let counting = Device::counting(options).unwrap();
    // A terabyte, which would be touched if anything were done with it.
    let side = 1 << 19;
    let tensor = |device: &Device| device.zeros([side, side].into(), DType::F32, Category::Activations);
    let (left, mut out) = (tensor(&counting).unwrap(), tensor(&counting).unwrap());
    let factor = || (left.view(), Transpose::No);
    let epilogue = MatmulEpilogue::Overwrite;
    counting.matmul(Precision::F32, factor(), factor(), out.view_mut(), epilogue).unwrap();
    assert_eq!(counting.num_operations(), 2 * (side as u64).pow(3));
    let peak = counting.memory().usage(Category::Activations).peak;
    assert!(peak > 2 * 4 * side * side, "scratch memory is counted as well: {peak}");
}

#[test]
fn a_budget_holds_for_blocks() {
    let options = DeviceOptions { num_threads: 1, budget: Some(1024), ..DeviceOptions::default() };
    let device = Device::cpu(options).unwrap();
    let vector = |len: usize| device.zeros([len].into(), DType::F32, Category::Gradients);
    let half = vector(128).unwrap();
    assert!(matches!(vector(129), Err(DeviceError::OverBudget(OverBudget { requested: 576, .. }))));
    let other_half = vector(128).unwrap();
    drop((half, other_half));
    vector(256).unwrap();
}
