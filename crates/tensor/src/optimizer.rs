//! What optimizers keep from step to step.

use crate::device::{Device, DeviceError};
use crate::kernels::{FactoredPart, Pieces, SharedSlice, StateDType, StateRef, StateSlice};
use crate::parameter_table::{ParameterInfo, UnitInfo};
use crate::tensor::Tensor;
use std::ops::Range;
use trireme_base::{Category, DType};

/// A value for each element of some pieces, in f32 or fewer bits.
#[derive(Debug)]
pub struct OptimizerState {
    dtype: StateDType,
    is_square: bool,
    values: Tensor,
    /// Of 8-bit codes, what one stands for, for each block.
    steps: Tensor,
}

impl OptimizerState {
    /// Zeros for the elements of `pieces`. `is_square` says that they are second moments: never negative, and of which the
    /// root counts.
    pub fn zeros(
        pieces: &Pieces,
        dtype: StateDType,
        is_square: bool,
        device: &Device,
    ) -> Result<Self, DeviceError> {
        let (values_dtype, num_blocks) = match dtype {
            StateDType::F32 => (DType::F32, 0),
            StateDType::Bf16 => (DType::Bf16, 0),
            StateDType::Int8 => (DType::U8, pieces.num_blocks()),
        };
        let shape = [pieces.num_elements()].into();
        device.check_room(pieces.num_elements().saturating_mul(values_dtype.size()), Category::Optimizer)?;
        Ok(OptimizerState {
            dtype,
            is_square,
            values: device.zeros(shape, values_dtype, Category::Optimizer)?,
            steps: device.zeros([num_blocks].into(), DType::F32, Category::Optimizer)?,
        })
    }

    /// What its elements are kept in.
    pub(crate) fn dtype(&self) -> StateDType {
        self.dtype
    }

    /// Bytes of memory.
    pub fn num_bytes(&self) -> usize {
        [&self.values, &self.steps]
            .iter()
            .map(|tensor| tensor.shape().num_elements() * tensor.dtype().size())
            .sum()
    }

    /// Shows `visit` the memory.
    pub fn for_each_memory(&mut self, mut visit: impl FnMut(&mut Tensor)) {
        visit(&mut self.values);
        visit(&mut self.steps);
    }

    /// What kernels read.
    pub(crate) fn as_ref(&self) -> StateRef<'_> {
        let values = self.values.view();
        match self.dtype {
            StateDType::F32 => StateRef::F32(values.elements()),
            StateDType::Bf16 => StateRef::Bf16(values.elements()),
            StateDType::Int8 => StateRef::Int8 {
                codes: values.u8s(),
                steps: self.steps.view().elements(),
                is_square: self.is_square,
            },
        }
    }

    /// What kernels write to.
    pub(crate) fn slice(&mut self) -> StateSlice<'_> {
        match self.dtype {
            StateDType::F32 => StateSlice::F32(SharedSlice::new(self.values.view_mut().into_elements())),
            StateDType::Bf16 => StateSlice::Bf16(SharedSlice::new(self.values.view_mut().into_elements())),
            StateDType::Int8 => StateSlice::Int8 {
                codes: SharedSlice::new(self.values.view_mut().into_u8s()),
                steps: SharedSlice::new(self.steps.view_mut().into_elements()),
                is_square: self.is_square,
            },
        }
    }
}

/// A matrix whose second moment is factored, or what is here of it.
#[derive(Debug, Clone)]
pub struct FactoredMatrix {
    pub(crate) part: FactoredPart,
}

impl FactoredMatrix {
    /// The parameter `info` of `unit`, of whose flat buffer the elements `held` are here.
    pub fn new(info: &ParameterInfo, unit: &UnitInfo, held: Range<usize>) -> Self {
        let range = info.range();
        let start = held.start.clamp(range.start, range.end);
        let end = held.end.clamp(start, range.end);
        let (cols, offset, leaf_len) = (info.shape.cols(), info.offset, unit.leaf_len());
        FactoredMatrix { part: FactoredPart { cols, offset, buffer: held.start, held: start..end, leaf_len } }
    }
}
