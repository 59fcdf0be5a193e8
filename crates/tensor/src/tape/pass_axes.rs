//! The axes of a pass: ranks that have parts of parameters, of positions, or of the experts.

use super::{AxisOps, ExpertAxis};
use crate::device::{DeviceError, Result};
use crate::shape::Shape;
use std::sync::Arc;
use trireme_base::{AxisPlace, ContextPlace, DType};

/// The axes that split parameters, positions or experts of a unit; `None` for an axis with one rank.
#[derive(Debug, Clone, Default)]
pub struct PassAxes {
    /// Ranks that have parts of parameters.
    pub tensor: Option<TensorAxis>,
    /// Ranks that have parts of the positions.
    pub context: Option<ContextAxis>,
    /// Ranks with different experts.
    pub experts: Option<ExpertAxis>,
}

/// The part of a value that a rank of the tensor axis holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sharding {
    /// Every rank holds all of it.
    #[default]
    Replicated,
    /// An equal part of its rows, in the order of the ranks.
    Rows,
    /// The part that belongs to this rank's parts of parameters, such as its heads.
    Cut,
}

/// The tensor axis of a pass.
#[derive(Debug, Clone)]
pub struct TensorAxis {
    /// Communication with the other ranks of the axis.
    pub ops: Arc<dyn AxisOps>,
    /// Whether values are sharded by rows between layers that are split: sequence parallelism.
    pub shards_rows: bool,
}

impl TensorAxis {
    /// Which rank this is.
    pub fn place(&self) -> AxisPlace {
        self.ops.place()
    }

    /// The sharding of values between layers that are split.
    pub fn between_layers(&self) -> Sharding {
        if self.shards_rows { Sharding::Rows } else { Sharding::Replicated }
    }

    /// The sharding of a value of this shape and type that passes from unit to unit.
    pub(super) fn between_units(&self, shape: Shape, dtype: DType) -> Sharding {
        let is_sharded = shape.dims().len() >= ROWS_DIMS_MIN && dtype.is_float();
        if is_sharded { self.between_layers() } else { Sharding::Replicated }
    }

    /// The shape of a rank's part of the rows of a value of this shape: the last dim but one is shorter. Only the number of
    /// elements is that of the rows: `[batch, seq_len / degree, cols]` are consecutive rows of all sequences, not the same
    /// positions of each. Fails if it does not divide.
    pub(super) fn part_shape(&self, whole: Shape) -> Result<Shape> {
        let (dim, degree) = (rows_dim(whole), self.place().degree);
        let len = whole.dims()[dim];
        if !len.is_multiple_of(degree) {
            return Err(DeviceError::UnequalRows { shape: whole, dim, degree });
        }
        Ok(whole.with_dim(dim, len / degree))
    }

    /// The shape of a value of which ranks have such parts of the rows.
    pub(super) fn whole_shape(&self, part: Shape) -> Shape {
        let dim = rows_dim(part);
        part.with_dim(dim, part.dims()[dim] * self.place().degree)
    }
}

/// Values of fewer dims, such as one number per sample, are replicated.
const ROWS_DIMS_MIN: usize = 3;

fn rows_dim(shape: Shape) -> usize {
    shape.dims().len().checked_sub(2).expect("a value in rows has columns")
}

/// The context axis of a pass.
#[derive(Debug, Clone)]
pub struct ContextAxis {
    /// The ranks among which keys and values travel; `None` if this rank alone has all positions of its heads.
    pub ring: Option<Arc<dyn AxisOps>>,
    /// The ranks that exchange positions for heads; `None` if this rank has all heads of its positions.
    pub heads: Option<Arc<dyn AxisOps>>,
}

impl ContextAxis {
    /// Which rank this is.
    pub fn place(&self) -> ContextPlace {
        let place = |ops: &Option<Arc<dyn AxisOps>>| ops.as_ref().map_or(AxisPlace::ALONE, |ops| ops.place());
        ContextPlace { ring: place(&self.ring), heads: place(&self.heads) }
    }
}
