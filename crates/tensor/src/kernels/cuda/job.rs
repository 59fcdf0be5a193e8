//! Jobs of the compute stream.

use super::api::call;
use super::blas::{Arrays, Blas, MatmulKind};
use super::context::Context;
use super::error::CudaError;
use cudarc::driver::sys::CUstream;
use smallvec::SmallVec;

/// Number of threads of a block; `BLOCK` in `sources/common.cuh`.
pub(super) const BLOCK_THREADS: u32 = 256;

/// Memory of arguments.
pub(super) type Words = SmallVec<[u64; 16]>;

/// A job of the compute stream. Its arrays are named by their addresses.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) enum Job {
    Kernel(KernelLaunch),
    /// A matmul for which cuBLASLt has an algorithm.
    Matmul {
        kind: MatmulKind,
        arrays: Box<Arrays>,
    },
    /// A copy on the device.
    Copy {
        from: usize,
        to: usize,
        num_bytes: usize,
    },
    /// Sets bytes.
    Fill {
        to: usize,
        num_bytes: usize,
        byte: u8,
    },
}

impl Job {
    /// Issues the job to a stream.
    pub(super) fn issue(&self, context: &Context, blas: &Blas, stream: CUstream) -> Result<(), CudaError> {
        let driver = &context.installation.driver;
        match self {
            Job::Kernel(launch) => launch.issue(context, stream),
            Job::Matmul { kind, arrays } => blas.multiply(*kind, arrays, stream.cast()),
            Job::Copy { from, to, num_bytes } => {
                // SAFETY: operands are arrays of this device's memory, which outlives the copy (see `kernels::operand`).
                unsafe { call!(driver, cuMemcpyDtoDAsync_v2(*to as u64, *from as u64, *num_bytes, stream)) }
            }
            Job::Fill { to, num_bytes, byte } => {
                // SAFETY: as above.
                unsafe { call!(driver, cuMemsetD8Async(*to as u64, *byte, *num_bytes, stream)) }
            }
        }
    }
}

/// A kernel with its arguments.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct KernelLaunch {
    pub(super) name: String,
    pub(super) num_blocks: u32,
    /// The arguments, each from the start of a word on.
    pub(super) words: Words,
    /// The size of each argument in bytes.
    pub(super) sizes: SmallVec<[u32; 16]>,
}

impl KernelLaunch {
    /// Launches the kernel on a stream.
    pub(super) fn issue(&self, context: &Context, stream: CUstream) -> Result<(), CudaError> {
        self.try_issue(context, stream)
            .map_err(|error| CudaError::Kernel { name: self.name.clone(), source: Box::new(error) })
    }

    fn try_issue(&self, context: &Context, stream: CUstream) -> Result<(), CudaError> {
        let function = context.function(&self.name)?;
        let sizes = self.sizes.iter().map(|size| *size as usize);
        assert!(
            sizes.clone().eq(function.argument_bytes.iter().copied()),
            "arguments of the kernel {}",
            self.name
        );
        let mut first = 0;
        let mut pointers: SmallVec<[_; 16]> = sizes
            .map(|num_bytes| {
                let argument = &self.words[first..];
                first += num_bytes.div_ceil(size_of::<u64>());
                argument.as_ptr().cast_mut().cast()
            })
            .collect();
        let driver = &context.installation.driver;
        // SAFETY: as many arguments as the kernel has, of the same sizes, which the driver reads before it returns. Operands are arrays of
        // this device's memory, which outlives the kernel (see `kernels::operand`).
        unsafe {
            call!(
                driver,
                cuLaunchKernel(
                    function.handle,
                    self.num_blocks,
                    1,
                    1,
                    BLOCK_THREADS,
                    1,
                    1,
                    0,
                    stream,
                    pointers.as_mut_ptr(),
                    std::ptr::null_mut(),
                )
            )
        }
    }
}
