//! Optimizer state.

use crate::device::{Device, Result};
use crate::kernels::cpu::Cpu;
use crate::kernels::{FactoredMatrix, OperandMut, Pieces, SharedSlice, StateDType, StateSlice};
use crate::parameter_table::{ParameterInfo, UnitInfo};
use crate::tensor::Tensor;
use std::ops::Range;
use trireme_base::{Bf16, Category, DType};

/// One state value per element of some [`Pieces`], stored in f32, bf16 or block-wise quantized 8 bits.
#[derive(Debug)]
pub struct OptimizerState {
    dtype: StateDType,
    is_second_moment: bool,
    values: Tensor,
    /// Quantization step of each block of 8-bit codes; empty for other dtypes.
    steps: Tensor,
}

impl OptimizerState {
    /// Allocates zeros for the elements of `pieces`. `is_second_moment` marks second moments: they are never negative and are used through
    /// their square root, which determines their 8-bit code.
    ///
    /// # Errors
    /// If the device cannot allocate memory.
    pub fn zeros(
        pieces: &Pieces,
        dtype: StateDType,
        is_second_moment: bool,
        device: &Device,
    ) -> Result<Self> {
        let (values_dtype, num_blocks) = match dtype {
            StateDType::F32 => (DType::F32, 0),
            StateDType::Bf16 => (DType::Bf16, 0),
            StateDType::Int8 => (DType::U8, pieces.num_blocks()),
        };
        let shape = [pieces.num_elements()].into();
        device.check_room(pieces.num_elements().saturating_mul(values_dtype.size()), Category::Optimizer)?;
        Ok(OptimizerState {
            dtype,
            is_second_moment,
            values: device.zeros(shape, values_dtype, Category::Optimizer)?,
            steps: device.zeros([num_blocks].into(), DType::F32, Category::Optimizer)?,
        })
    }

    /// Returns the bytes of device memory.
    pub fn num_bytes(&self) -> usize {
        [&self.values, &self.steps]
            .iter()
            .map(|tensor| tensor.shape().num_elements() * tensor.dtype().size())
            .sum()
    }

    /// Calls `visit` with each tensor of the state.
    pub fn for_each_tensor(&mut self, mut visit: impl FnMut(&mut Tensor)) {
        visit(&mut self.values);
        visit(&mut self.steps);
    }

    /// Writes the values of the pieces `range`, in order, as f32 into `out`. The conversion is exact.
    ///
    /// # Errors
    /// If the device has failed.
    ///
    /// # Panics
    /// If `out` is too short.
    pub fn read(&self, pieces: &Pieces, range: Range<usize>, device: &Device, out: &mut [f32]) -> Result<()> {
        let (elements, blocks) = pieces.span(range.clone());
        let values = self.values.view().part(elements.start, [elements.len()].into());
        let read = |state: StateSlice<'_>, out| pieces.read_state(device.simd_level(), range, state, out);
        match self.dtype {
            StateDType::F32 => device.download(values, &mut out[..elements.len()])?,
            StateDType::Bf16 => read(StateSlice::Bf16(SharedSlice::new(&mut device.read(values)?)), out),
            StateDType::Int8 => {
                let steps = self.steps.view().part(blocks.start, [blocks.len()].into());
                let (mut codes, mut steps) = (device.read(values)?, device.read(steps)?);
                let (codes, steps) = (SharedSlice::new(&mut codes), SharedSlice::new(&mut steps));
                read(StateSlice::Int8 { codes, steps, is_second_moment: self.is_second_moment }, out);
            }
        }
        Ok(())
    }

    /// Sets the values of the pieces `range`. Values that [`read`](OptimizerState::read) returned for a state of the same dtype restore it
    /// bit for bit.
    ///
    /// # Panics
    /// If there are too few values.
    pub fn write(&mut self, pieces: &Pieces, range: Range<usize>, device: &Device, values: &[f32]) {
        let (elements, blocks) = pieces.span(range.clone());
        let (first, len) = (elements.start, elements.len());
        let is_second_moment = self.is_second_moment;
        let write = |state: StateSlice<'_>| pieces.write_state(device.simd_level(), range, state, values);
        let own = self.values.view_mut().into_part(first, [len].into());
        match self.dtype {
            StateDType::F32 => device.upload(&values[..len], own),
            StateDType::Bf16 => {
                let mut written = vec![Bf16::default(); len];
                write(StateSlice::Bf16(SharedSlice::new(&mut written)));
                device.upload(&written, own);
            }
            StateDType::Int8 => {
                let (mut codes, mut steps) = (vec![0; len], vec![0.0_f32; blocks.len()]);
                let of_codes = SharedSlice::new(&mut codes);
                write(StateSlice::Int8 {
                    codes: of_codes,
                    steps: SharedSlice::new(&mut steps),
                    is_second_moment,
                });
                device.upload(&codes, own);
                device.upload(&steps, self.steps.view_mut().into_part(blocks.start, [blocks.len()].into()));
            }
        }
    }

    pub(crate) fn operands(&mut self) -> StateOperands {
        let OptimizerState { dtype, is_second_moment, values, steps } = self;
        let (values, steps) = (values.view_mut().into_operand(), steps.view_mut().into_operand());
        StateOperands { dtype: *dtype, is_second_moment: *is_second_moment, values, steps }
    }
}

/// Kernel operands of an [`OptimizerState`].
#[derive(Debug)]
pub(crate) struct StateOperands {
    pub(crate) dtype: StateDType,
    pub(crate) is_second_moment: bool,
    pub(crate) values: OperandMut,
    pub(crate) steps: OperandMut,
}

impl StateOperands {
    /// Returns the state as slices that the tasks of a kernel share.
    pub(crate) fn slice<'c>(&'c mut self, cpu: &'c Cpu) -> StateSlice<'c> {
        match self.dtype {
            StateDType::F32 => StateSlice::F32(SharedSlice::new(self.values.elements(cpu))),
            StateDType::Bf16 => StateSlice::Bf16(SharedSlice::new(self.values.elements(cpu))),
            StateDType::Int8 => StateSlice::Int8 {
                codes: SharedSlice::new(self.values.bytes(cpu)),
                steps: SharedSlice::new(self.steps.elements(cpu)),
                is_second_moment: self.is_second_moment,
            },
        }
    }
}

impl FactoredMatrix {
    /// Describes the parameter `info` of `unit`, on a rank that stores the elements `held` of the unit's flat buffer.
    pub fn new(info: &ParameterInfo, unit: &UnitInfo, held: Range<usize>) -> Self {
        let range = info.range();
        let start = held.start.clamp(range.start, range.end);
        let end = held.end.clamp(start, range.end);
        let (cols, offset, leaf_len) = (info.shape.cols(), info.offset, unit.leaf_len());
        FactoredMatrix { cols, offset, buffer_start: held.start, stored: start..end, leaf_len }
    }
}
