//! The GPUs that the driver claims to have.

use std::str::FromStr;

/// Description of the GPUs, from the environment.
#[derive(Debug, Clone)]
pub struct Gpus {
    /// `FAKE_CUDA_GPUS`: number of GPUs; 1 by default.
    pub num_gpus: i32,
    /// `FAKE_CUDA_CAPABILITY`: compute capability of each GPU, as ten times the major plus the minor number, separated by commas. GPUs
    /// without an entry have the last one; 90 by default.
    capabilities: Vec<i32>,
    /// `FAKE_CUDA_LOST`: the number of a GPU and a number of kernels, separated by a colon. The GPU is lost when a process that uses it
    /// launches that many kernels. None by default.
    pub lost: Option<(i32, u64)>,
    /// `FAKE_CUDA_MEMORY`: memory of a GPU in MiB; 16 GiB by default. The host's memory is used only where a program writes.
    pub memory_bytes: usize,
    /// `FAKE_CUDA_OTHERS`: memory of a GPU that other programs use, in MiB; 0 by default.
    pub others_bytes: usize,
    /// `FAKE_CUDA_PINNED`: memory of the host that can be pinned, in MiB; any amount by default.
    pub pinned_bytes_max: usize,
    /// `FAKE_CUDA_GRAPHS`: 0 if graphs cannot be instantiated; 1 by default.
    pub has_graphs: bool,
    /// `FAKE_CUDA_DRIVER`: version of CUDA that the driver supports, as a thousand times the major and ten times the minor number; 12080 by
    /// default.
    pub driver_version: i32,
}

impl Gpus {
    /// Reads the environment.
    pub fn from_environment() -> Self {
        Gpus {
            num_gpus: variable("FAKE_CUDA_GPUS", 1),
            capabilities: variable_text("FAKE_CUDA_CAPABILITY")
                .split(',')
                .filter_map(|capability| capability.parse().ok())
                .collect(),
            lost: variable_text("FAKE_CUDA_LOST")
                .split_once(':')
                .and_then(|(gpu, launches)| Some((gpu.parse().ok()?, launches.parse().ok()?))),
            memory_bytes: variable::<usize>("FAKE_CUDA_MEMORY", 16 << 10) << 20,
            others_bytes: variable::<usize>("FAKE_CUDA_OTHERS", 0) << 20,
            pinned_bytes_max: variable::<usize>("FAKE_CUDA_PINNED", usize::MAX >> 20) << 20,
            has_graphs: variable("FAKE_CUDA_GRAPHS", 1) != 0,
            driver_version: variable("FAKE_CUDA_DRIVER", 12080),
        }
    }

    /// Returns the compute capability of a GPU.
    pub fn capability(&self, ordinal: i32) -> i32 {
        self.capabilities.get(ordinal as usize).or(self.capabilities.last()).copied().unwrap_or(90)
    }
}

/// Maximum threads of a block.
pub const THREADS_PER_BLOCK_MAX: u64 = 1024;

/// Maximum size of a grid in y and z.
pub const GRID_YZ_MAX: u32 = 65_535;

/// Bytes of dynamic shared memory that a block may have.
pub const SHARED_BYTES: usize = 48 << 10;

/// Number of multiprocessors of a GPU.
pub const NUM_MULTIPROCESSORS: i32 = 4;

/// Returns the value of an environment variable, or an empty string if it is absent.
fn variable_text(name: &str) -> String {
    std::env::var(name).unwrap_or_default()
}

/// Returns the value of an environment variable, or the default if it is absent or not a number.
pub(crate) fn variable<T: FromStr>(name: &str, default: T) -> T {
    variable_text(name).parse().unwrap_or(default)
}
