//! What ranks of the tensor axis exchange while units run.

use crate::error::ParallelError;
use crate::pool::Pool;
use crate::stored::Stored;
use crate::waiting::Waiting;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use trireme_base::{AxisPlace, Bf16, DType, F16, Pending, ReduceOp};
use trireme_comm::{Buffer, Group, Work};
use trireme_tensor::tape::AxisOps;
use trireme_tensor::{Category, Device, DeviceError, View, ViewMut};

/// The ranks of the tensor axis, as operations of units see them. What travels passes through memory of their group.
pub(crate) struct GroupAxis {
    group: Arc<Group>,
    f32s: Pool<f32>,
    bf16s: Pool<Bf16>,
    f16s: Pool<F16>,
    /// How long this rank has waited.
    waiting: Mutex<Waiting>,
}

impl fmt::Debug for GroupAxis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GroupAxis({:?})", self.place())
    }
}

impl GroupAxis {
    /// Memory of the group is counted on `device`.
    pub(crate) fn new(group: &Arc<Group>, device: &Device) -> Self {
        GroupAxis {
            group: Arc::clone(group),
            f32s: Pool::new(group, device, Category::Communication, true),
            bf16s: Pool::new(group, device, Category::Communication, true),
            f16s: Pool::new(group, device, Category::Communication, true),
            waiting: Mutex::default(),
        }
    }

    /// How long this rank has waited since the last call.
    pub(crate) fn take_waiting(&self) -> Waiting {
        std::mem::take(&mut self.waiting.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// This rank's part of `len` elements.
    fn own_part(&self, len: usize) -> Range<usize> {
        let AxisPlace { rank, degree } = self.place();
        assert!(len.is_multiple_of(degree), "{degree} parts of {len} elements");
        rank * (len / degree)..(rank + 1) * (len / degree)
    }

    /// Copies `from` to the elements `leaving` of a buffer of `len` elements, and exchanges it.
    fn exchange<T: Stored>(
        &self,
        pool: &Pool<T>,
        device: &Device,
        len: usize,
        (from, leaving): (View<'_>, Range<usize>),
        exchange: impl FnOnce(Buffer<T>) -> Work<Buffer<T>>,
    ) -> Result<Buffer<T>, ParallelError> {
        let mut buffer = pool.take_buffer(len)?.wait();
        device.download(from, &mut buffer[leaving]);
        let work = exchange(buffer);
        Ok(self.waiting.lock().unwrap_or_else(PoisonError::into_inner).wait(work)?)
    }
}

/// Runs `$body` with `$pool` as the pool for elements of a type.
macro_rules! with_pool {
    ($axis:expr, $dtype:expr => |$pool:ident| $body:expr) => {
        match $dtype {
            DType::F32 => {
                let $pool = &$axis.f32s;
                $body
            }
            DType::Bf16 => {
                let $pool = &$axis.bf16s;
                $body
            }
            DType::F16 => {
                let $pool = &$axis.f16s;
                $body
            }
            other => unreachable!("units exchange floats, not {other}"),
        }
    };
}

impl AxisOps for GroupAxis {
    fn place(&self) -> AxisPlace {
        AxisPlace::new(self.group.rank().0, self.group.world_size())
    }

    fn all_reduce(&self, device: &Device, values: ViewMut<'_>) -> Result<(), DeviceError> {
        let len = values.shape().num_elements();
        with_pool!(self, values.dtype() => |pool| {
            let sum = |buffer| self.group.all_reduce(buffer, ReduceOp::Sum);
            let buffer = self.exchange(pool, device, len, (values.as_view(), 0..len), sum)?;
            device.upload(&buffer[..], values);
            pool.give_buffer(len, Pending::new(buffer));
        });
        Ok(())
    }

    fn all_gather(&self, device: &Device, part: View<'_>, whole: ViewMut<'_>) -> Result<(), DeviceError> {
        let len = whole.shape().num_elements();
        with_pool!(self, whole.dtype() => |pool| {
            let gather = |buffer| self.group.all_gather(buffer);
            let buffer = self.exchange(pool, device, len, (part, self.own_part(len)), gather)?;
            device.upload(&buffer[..], whole);
            pool.give_buffer(len, Pending::new(buffer));
        });
        Ok(())
    }

    fn reduce_scatter(&self, device: &Device, whole: View<'_>, part: ViewMut<'_>) -> Result<(), DeviceError> {
        let len = whole.shape().num_elements();
        with_pool!(self, whole.dtype() => |pool| {
            let sum = |buffer| self.group.reduce_scatter(buffer, ReduceOp::Sum);
            let buffer = self.exchange(pool, device, len, (whole, 0..len), sum)?;
            device.upload(&buffer[self.own_part(len)], part);
            pool.give_buffer(len, Pending::new(buffer));
        });
        Ok(())
    }
}
