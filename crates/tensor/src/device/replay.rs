//! Replay of recorded kernel calls on newly allocated memory.

use super::{Device, RecordedCalls, Result};
use crate::kernels::call::{Access, Call, Operands};
use crate::kernels::cpu::element::with_element;
use crate::kernels::{Operand, OperandMut};
use crate::tensor::Tensor;
use std::ops::Range;
use trireme_base::{Category, DType, Float, KernelCall, RandomKey};

impl RecordedCalls {
    /// Prepares a recorded call for repeated runs on `device` with newly allocated operands: random normal values for floats, zeros
    /// otherwise. Returns `None` if the call was not recorded, or if it reads indices, because its work then depends on their values.
    ///
    /// # Errors
    /// If the device has no memory for the operands.
    pub fn replay(&self, call: &KernelCall, device: &Device) -> Result<Option<Replay>> {
        let Some(call) = self.lock().get(call).cloned() else { return Ok(None) };
        let mut has_indices = false;
        let mut ranges = Vec::new();
        call.for_each_operand(&mut |operand, access| {
            has_indices |= operand.dtype() == DType::U32 && access == Access::Read;
            ranges.push(operand.addresses());
        });
        if has_indices {
            return Ok(None);
        }
        // Operands that overlap in the recorded call also share memory here.
        let ranges = merged(ranges);
        let memory =
            |range: &Range<usize>| device.zeros([range.len()].into(), DType::U8, Category::Activations);
        let memory: Vec<Tensor> = ranges.iter().map(memory).collect::<Result<_, _>>()?;
        let call = call.with_operands(&mut |operand, _| {
            let addresses = operand.addresses();
            let index = ranges.partition_point(|range| range.end <= addresses.start);
            let Some(range) = ranges.get(index).filter(|range| range.start <= addresses.start) else {
                return *operand;
            };
            let bytes = addresses.start - range.start..addresses.end - range.start;
            memory[index].view().operand().part(bytes, (operand.shape(), operand.dtype()))
        });
        call.for_each_operand(&mut |operand, _| fill(device, operand));
        Ok(Some(Replay { device: device.clone(), call, _memory: memory }))
    }
}

/// A recorded call with its own memory.
#[derive(Debug)]
pub struct Replay {
    device: Device,
    call: Call,
    _memory: Vec<Tensor>,
}

impl Replay {
    /// Issues the call to its device.
    pub fn issue(&mut self) {
        self.device.issue(self.call.clone());
    }
}

/// Returns the union of the ranges as disjoint ranges in ascending order.
fn merged(mut ranges: Vec<Range<usize>>) -> Vec<Range<usize>> {
    ranges.retain(|range| !range.is_empty());
    ranges.sort_by_key(|range| range.start);
    let mut united: Vec<Range<usize>> = Vec::new();
    for range in ranges {
        match united.last_mut().filter(|last| range.start < last.end) {
            Some(last) => last.end = last.end.max(range.end),
            None => united.push(range),
        }
    }
    united
}

/// Maximum number of elements that are generated at a time.
const FILLED_MAX: usize = 1 << 20;

/// Fills a float operand with random normal values. Leaves other operands unchanged.
fn fill(device: &Device, operand: &Operand) {
    let dtype = operand.dtype();
    if ![DType::F32, DType::Bf16, DType::F16].contains(&dtype) {
        return;
    }
    let num_elements = operand.num_bytes() / dtype.size();
    let mut values = vec![0.0; num_elements.min(FILLED_MAX)];
    RandomKey::new(0, "operands").fill_normal(&mut values, 0.5);
    for start in (0..num_elements).step_by(FILLED_MAX) {
        let values = &values[..FILLED_MAX.min(num_elements - start)];
        let bytes = start * dtype.size()..(start + values.len()) * dtype.size();
        let to = OperandMut::new(operand.part(bytes, ([values.len()].into(), dtype)));
        with_element!(dtype => |T| {
            let values: Vec<T> = values.iter().map(|&value| T::from_f32(value)).collect();
            device.backend.upload(bytemuck::cast_slice(&values), to);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operands_that_overlap_share_a_range() {
        assert_eq!(merged(vec![5..9, 0..3, 8..8, 2..4, 9..12, 6..7]), [0..4, 5..9, 9..12]);
    }
}
