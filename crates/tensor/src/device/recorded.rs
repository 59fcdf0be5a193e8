//! Kernel calls that are kept to be run again on memory of their own.

use super::{Device, DeviceError};
use crate::kernels::call::{Access, Call, Operands};
use crate::kernels::{Operand, OperandMut};
use crate::tensor::Tensor;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use trireme_base::{Bf16, Category, DType, F16, KernelCall, RandomKey};

/// Of each kernel and cost the first call that devices were given. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct RecordedCalls(Arc<Mutex<BTreeMap<KernelCall, Call>>>);

impl RecordedCalls {
    pub(super) fn note(&self, call: &Call) {
        let key = KernelCall { kernel: call.name(), cost: call.cost() };
        self.lock().entry(key).or_insert_with(|| call.clone());
    }

    /// Prepares to run a call as often as is asked for, on a device of one's own choice, with memory that holds normal values where it
    /// holds floats, and zeros elsewhere. `None` if the call was not recorded, or reads indices: these mean something.
    ///
    /// # Errors
    /// If the device has no memory for the operands.
    pub fn replay(&self, call: &KernelCall, device: &Device) -> Result<Option<Replay>, DeviceError> {
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
        // Operands that overlap do so again.
        let ranges = united(ranges);
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

    fn lock(&self) -> MutexGuard<'_, BTreeMap<KernelCall, Call>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A recorded call with memory of its own.
#[derive(Debug)]
pub struct Replay {
    device: Device,
    call: Call,
    _memory: Vec<Tensor>,
}

impl Replay {
    /// Issues the call to the device that it was prepared for.
    pub fn issue(&mut self) {
        self.device.issue(self.call.clone());
    }
}

/// Ranges that do not overlap, in order, and cover what these cover.
fn united(mut ranges: Vec<Range<usize>>) -> Vec<Range<usize>> {
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

/// Fills floats with normal values.
fn fill(device: &Device, operand: &Operand) {
    let mut values = vec![0.0; operand.num_bytes() / operand.dtype().size()];
    RandomKey::new(0, "operands").fill_normal(&mut values, 0.5);
    let to = OperandMut::new(*operand);
    match operand.dtype() {
        DType::F32 => device.backend.upload(bytemuck::cast_slice(&values), to),
        DType::Bf16 => {
            let values: Vec<Bf16> = values.into_iter().map(Bf16::from_f32).collect();
            device.backend.upload(bytemuck::cast_slice(&values), to);
        }
        DType::F16 => {
            let values: Vec<F16> = values.into_iter().map(F16::from_f32).collect();
            device.backend.upload(bytemuck::cast_slice(&values), to);
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operands_that_overlap_share_a_range() {
        assert_eq!(united(vec![5..9, 0..3, 8..8, 2..4, 9..12, 6..7]), [0..4, 5..9, 9..12]);
    }
}
