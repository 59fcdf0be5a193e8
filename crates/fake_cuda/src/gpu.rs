//! The GPU that the driver claims to have.

use std::str::FromStr;

/// Description of the GPU, from the environment.
#[derive(Debug, Clone, Copy)]
pub struct Gpu {
    /// `FAKE_CUDA_GPUS`: number of GPUs; 1 by default.
    pub num_gpus: i32,
    /// `FAKE_CUDA_CAPABILITY`: compute capability, as ten times the major and the minor number; 90 by default.
    pub capability: i32,
    /// `FAKE_CUDA_MEMORY`: memory in MiB; 16 GiB by default. The host's memory is used only where a program writes.
    pub memory_bytes: usize,
    /// `FAKE_CUDA_DRIVER`: version of CUDA that the driver supports, as a thousand times the major and ten times the minor number; 12080 by
    /// default.
    pub driver_version: i32,
}

impl Gpu {
    /// Reads the environment.
    pub fn from_environment() -> Self {
        Gpu {
            num_gpus: variable("FAKE_CUDA_GPUS", 1),
            capability: variable("FAKE_CUDA_CAPABILITY", 90),
            memory_bytes: variable::<usize>("FAKE_CUDA_MEMORY", 16 << 10) << 20,
            driver_version: variable("FAKE_CUDA_DRIVER", 12080),
        }
    }
}

/// Maximum threads of a block.
pub const THREADS_PER_BLOCK_MAX: u64 = 1024;

/// Maximum size of a grid in y and z.
pub const GRID_YZ_MAX: u32 = 65_535;

/// Bytes of dynamic shared memory that a block may have.
pub const SHARED_BYTES: usize = 48 << 10;

/// Returns the value of an environment variable, or the default if it is absent or not a number.
pub(crate) fn variable<T: FromStr>(name: &str, default: T) -> T {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}
