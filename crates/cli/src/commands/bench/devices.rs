//! The devices that benchmarks compute on.

use anyhow::Result;
use trireme_comm::Group;
use trireme_tensor::{BackendKind, CudaOptions, Device, DeviceOptions};
use trireme_train::config::NcclUse;
use trireme_train::{connect_gpus, gpu_of_worker};

trireme_base::named! {
    /// Where a benchmark computes.
    pub enum BenchDevice {
        /// The CPU.
        Cpu = "cpu",
        /// NVIDIA GPUs.
        Cuda = "cuda",
    }
}

/// Returns the GPU of this number as a backend, which uses the fastest algorithm for each matmul.
pub(crate) fn gpu_backend(ordinal: usize) -> BackendKind {
    BackendKind::Cuda(CudaOptions { ordinal, time_matmuls: true, ..CudaOptions::default() })
}

/// Opens the GPU of the worker `local_rank` of this host, and connects the GPUs of the group by NCCL. Returns the device, and why the GPUs
/// do not use NCCL, if they do not. Collective.
pub(crate) fn open_gpu(
    group: &Group,
    local_rank: usize,
    options: DeviceOptions,
) -> Result<(Device, Option<String>)> {
    let gpu = gpu_of_worker(local_rank)?;
    let device = Device::open(DeviceOptions { backend: gpu_backend(gpu.ordinal), ..options })?;
    let has_peers = group.world_size() > 1;
    let obstacle = has_peers.then(|| connect_gpus(group, &device, &gpu, NcclUse::Auto, false)).transpose()?;
    Ok((device, obstacle.flatten()))
}
