//! Kernels, and their launches.

use crate::ptx::PtxKernel;
use std::ffi::c_void;
use std::sync::Arc;

/// Number of threads of a warp.
pub(crate) const WARP: usize = 32;

/// `FakeIndex` of `device.h`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Index {
    /// Index or size of each dimension.
    pub x: u32,
    /// As `x`.
    pub y: u32,
    /// As `x`.
    pub z: u32,
}

impl Index {
    /// Returns the number of indices of a grid or block of this size.
    pub fn num(self) -> u64 {
        u64::from(self.x) * u64::from(self.y) * u64::from(self.z)
    }

    pub(crate) fn at(self, position: u64) -> Index {
        let [x, y] = [u64::from(self.x), u64::from(self.y)];
        Index { x: (position % x) as u32, y: (position / x % y) as u32, z: (position / x / y) as u32 }
    }
}

/// `FakeThread` of `device.h`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Thread {
    pub(crate) thread: Index,
    pub(crate) block: Index,
    pub(crate) block_size: Index,
    pub(crate) grid_size: Index,
}

/// A kernel of a module.
#[derive(Debug, Clone)]
pub enum Kernel {
    /// Compiled for the host.
    Compiled(CompiledKernel),
    /// Interpreted.
    Ptx(Arc<PtxKernel>),
}

impl Kernel {
    /// The size of each argument in bytes.
    pub(crate) fn sizes(&self) -> &[usize] {
        match self {
            Kernel::Compiled(kernel) => kernel.sizes,
            Kernel::Ptx(kernel) => &kernel.sizes,
        }
    }
}

/// A kernel that is compiled for the host.
#[derive(Debug, Clone, Copy)]
pub struct CompiledKernel {
    pub(crate) call: extern "C" fn(*const *const c_void),
    pub(crate) switch: extern "C" fn(*const Thread),
    pub(crate) sizes: &'static [usize],
}

/// A launch of a kernel.
#[derive(Debug, Clone)]
pub struct Launch {
    /// Name of the kernel.
    pub name: String,
    /// The kernel.
    pub kernel: Kernel,
    /// Number of blocks.
    pub grid: Index,
    /// Number of threads of a block.
    pub block: Index,
    /// Bytes of dynamic shared memory.
    pub shared_bytes: usize,
    /// The arguments, each in memory of its own, aligned to 16 bytes.
    pub arguments: Vec<Vec<u128>>,
}
