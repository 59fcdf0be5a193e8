//! The axes of a pass, whose ranks shard parameters, positions or experts.

use super::{AxisOps, ExpertAxis};
use crate::device::{DeviceError, Result};
use crate::shape::Shape;
use std::sync::Arc;
use trireme_base::{AxisRank, ContextRank, DType};

/// The axes that split parameters, positions or experts of a unit; `None` for an axis with one rank.
#[derive(Debug, Clone, Default)]
pub struct PassAxes {
    /// Ranks that shard parameters.
    pub tensor: Option<TensorAxis>,
    /// Ranks that shard positions.
    pub context: Option<ContextAxis>,
    /// Ranks with different experts.
    pub experts: Option<ExpertAxis>,
}

/// Sharding of a value on the tensor axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sharding {
    /// Every rank holds the full value.
    #[default]
    Replicated,
    /// Each rank holds an equal number of rows, in the order of the ranks.
    Rows,
    /// Each rank holds the part that belongs to its shards of parameters, such as its heads.
    ByParameters,
}

/// The tensor axis of a pass.
#[derive(Debug, Clone)]
pub struct TensorAxis {
    /// Communication with the other ranks of the axis.
    pub ops: Arc<dyn AxisOps>,
    /// Whether values between sharded layers are sharded by rows: sequence parallelism.
    pub shards_rows: bool,
}

impl TensorAxis {
    /// Returns this rank's place on the axis.
    pub fn axis_rank(&self) -> AxisRank {
        self.ops.axis_rank()
    }

    /// Returns the sharding of values between sharded layers.
    pub fn sharding_between_layers(&self) -> Sharding {
        if self.shards_rows { Sharding::Rows } else { Sharding::Replicated }
    }

    /// Returns the sharding of a value of this shape and dtype that passes from unit to unit.
    pub(super) fn sharding_between_units(&self, shape: Shape, dtype: DType) -> Sharding {
        let is_sharded = shape.dims().len() >= ROWS_DIMS_MIN && dtype.is_float();
        if is_sharded { self.sharding_between_layers() } else { Sharding::Replicated }
    }

    /// Returns the shape of a rank's shard of the rows of a value of shape `whole`: the second-last dim is divided by the degree. Only the
    /// number of elements is meaningful: `[batch, seq_len / degree, cols]` stands for consecutive rows of the concatenated sequences, not
    /// for the same positions of each. Fails if the degree does not divide the dim.
    pub(super) fn part_shape(&self, whole: Shape) -> Result<Shape> {
        let (dim, degree) = (rows_dim(whole), self.axis_rank().degree);
        let len = whole.dims()[dim];
        if !len.is_multiple_of(degree) {
            return Err(DeviceError::IndivisibleRows { shape: whole, dim, degree });
        }
        Ok(whole.with_dim(dim, len / degree))
    }

    /// Returns the shape of the full value whose row shards have shape `part`.
    pub(super) fn full_shape(&self, part: Shape) -> Shape {
        let dim = rows_dim(part);
        part.with_dim(dim, part.dims()[dim] * self.axis_rank().degree)
    }
}

/// Minimum number of dims of values that are sharded by rows. Values with fewer dims, such as one number per sample, are replicated.
const ROWS_DIMS_MIN: usize = 3;

fn rows_dim(shape: Shape) -> usize {
    shape.dims().len().checked_sub(2).expect("a value in rows has columns")
}

/// The context axis of a pass.
#[derive(Debug, Clone)]
pub struct ContextAxis {
    /// The ring along which keys and values are passed; `None` if this rank has all positions of its heads.
    pub ring: Option<Arc<dyn AxisOps>>,
    /// The ranks that exchange positions for heads; `None` if this rank has all heads of its positions.
    pub heads: Option<Arc<dyn AxisOps>>,
}

impl ContextAxis {
    /// Returns this rank's place on the axis.
    pub fn context_rank(&self) -> ContextRank {
        let place =
            |ops: &Option<Arc<dyn AxisOps>>| ops.as_ref().map_or(AxisRank::ALONE, |ops| ops.axis_rank());
        ContextRank { ring: place(&self.ring), heads: place(&self.heads) }
    }
}
