//! The device that a worker computes on.

use crate::config::{Config, DeviceName, HugePages};
use crate::error::TrainError;
use rustix::thread::disable_transparent_huge_pages;
use std::num::NonZeroUsize;
use std::sync::Arc;
use trireme_parallel::Spill;
use trireme_tensor::{
    BackendKind, CudaError, CudaInstallation, CudaOptions, DetachedOptions, Device, DeviceError,
    DeviceOptions, FoundLibrary, Gpu, OverflowAllocator, PageSource, Precision, SimdLevel,
};

/// Returns the options with which a worker opens its device.
pub fn device_options(config: &Config, num_threads: usize) -> DeviceOptions {
    let budget = config.memory().device_budget.0.map(|bytes| bytes.0 as usize);
    let backend = match config.training().device {
        DeviceName::Auto | DeviceName::Cpu => BackendKind::Cpu,
        DeviceName::Cuda => BackendKind::Cuda(CudaOptions {
            allow_tf32: config.training().allow_tf32 && config.training().dtype == Precision::F32,
            time_matmuls: config.training().time_matmuls,
            launch_singly: !config.training().cuda_graphs,
            ..CudaOptions::default()
        }),
        DeviceName::Detached => {
            BackendKind::Detached(DetachedOptions { seed: config.training().seed, ignored_wait: None })
        }
    };
    let page_source = match config.memory().huge_pages {
        HugePages::Reserved => PageSource::Reserved,
        HugePages::Transparent | HugePages::Never => PageSource::Transparent,
    };
    DeviceOptions { num_threads, budget, backend, page_source, ..DeviceOptions::default() }
}

/// The GPU of a worker.
#[derive(Debug, Clone)]
pub struct LocalGpu {
    /// Number of the GPU among those that are visible to this process.
    pub ordinal: usize,
    /// The GPU.
    pub gpu: Gpu,
    /// The libraries that kernels need: the driver, NVRTC and cuBLASLt.
    pub libraries: &'static [FoundLibrary; 3],
}

/// Returns the GPU of each of `num_workers` workers of this host; none if workers do not compute on GPUs.
///
/// # Errors
/// If CUDA cannot be used on this host, or if a worker has no GPU.
pub fn local_gpus(config: &Config, num_workers: usize) -> Result<Vec<LocalGpu>, CudaError> {
    (0..num_workers).map_while(|worker| local_gpu(config, worker).transpose()).collect()
}

/// Returns the GPU of the worker `local_rank` of this host; `None` if workers do not compute on GPUs.
///
/// # Errors
/// As [`gpu_of_worker`].
pub(crate) fn local_gpu(config: &Config, local_rank: usize) -> Result<Option<LocalGpu>, CudaError> {
    (config.training().device == DeviceName::Cuda).then(|| gpu_of_worker(local_rank)).transpose()
}

/// Returns the GPU of the worker `local_rank` of this host.
///
/// # Errors
/// If CUDA cannot be used on this host, or if the worker has no GPU.
pub fn gpu_of_worker(local_rank: usize) -> Result<LocalGpu, CudaError> {
    let cuda = CudaInstallation::from_environment()?;
    let ordinal = gpu_ordinal(cuda, local_rank)?;
    Ok(LocalGpu { ordinal, gpu: cuda.gpu(ordinal)?, libraries: cuda.libraries() })
}

/// Returns the number of the GPU of a worker among those that are visible to its process. The only one belongs to all workers: a launcher
/// may show each worker its own GPU, or workers may share one.
fn gpu_ordinal(cuda: &CudaInstallation, local_rank: usize) -> Result<usize, CudaError> {
    Ok(if cuda.gpus()?.len() == 1 { 0 } else { local_rank })
}

/// Opens the device of the worker `local_rank` of this host. With `huge_pages = "never"`, turns transparent huge pages off for the whole
/// process.
pub(crate) fn open_device(
    config: &Config,
    local_rank: usize,
    num_threads: usize,
    simd_level_max: Option<SimdLevel>,
) -> Result<Device, TrainError> {
    if config.memory().huge_pages == HugePages::Never {
        disable_transparent_huge_pages(true).map_err(|error| TrainError::HugePages(error.into()))?;
    }
    let mut options = DeviceOptions { simd_level_max, ..device_options(config, num_threads) };
    if let BackendKind::Cuda(cuda) = &mut options.backend {
        let installation = CudaInstallation::from_environment().map_err(DeviceError::from)?;
        cuda.ordinal = gpu_ordinal(installation, local_rank).map_err(DeviceError::from)?;
    }
    Ok(Device::open(options)?)
}

/// Returns an error if a device is a GPU with less memory left than the `needed` bytes of its steps. The groups must have joined, so that
/// NCCL has allocated its buffers.
pub(crate) fn check_gpu_memory(device: &Device, needed: usize) -> Result<(), TrainError> {
    match device.gpu_memory()? {
        Some(memory) if needed > memory.available() => Err(TrainError::GpuMemory { needed, memory }),
        _ => Ok(()),
    }
}

/// Lets activations spill to files if loads of experts are uneven, and if the config and the device allow it. Activations leave `reserved`
/// bytes of the budget free.
pub(crate) fn enable_spill(config: &Config, device: &Device, reserved: usize) -> Option<Arc<Spill>> {
    if !config.may_spill() || !device.reaches_host() {
        return None;
    }
    let spill = Arc::new(Spill::new(config.offload().folder.clone()));
    device.set_overflow_allocator(Arc::clone(&spill) as Arc<dyn OverflowAllocator>, reserved);
    Some(spill)
}

/// Returns an equal share of this host's cores for each of `local_world_size` workers, at least 1.
pub fn share_of_cores(local_world_size: usize) -> usize {
    (std::thread::available_parallelism().map_or(1, NonZeroUsize::get) / local_world_size.max(1)).max(1)
}

/// Returns the number of threads of a worker: the configured number, or `share` if the config leaves it open.
pub fn local_threads(config: &Config, share: usize) -> usize {
    match config.training().threads {
        0 => share,
        threads => threads,
    }
}
