//! Allocates, fills and reads vectors in the memory of the host or of a GPU.

use super::number::Number;
use crate::commands::bench::devices::open_gpu;
use anyhow::{Result, bail};
use trireme_base::{Category, DType};
use trireme_comm::{Buffer, Group};
use trireme_tensor::{Device, DeviceOptions, Tensor};

/// Where vectors are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum BufferMemory {
    /// Memory shared between the workers of a host, where available.
    Arena,
    /// Heap memory.
    Private,
    /// Memory of each worker's NVIDIA GPU. NCCL exchanges the vectors.
    Gpu,
}

/// Memory that vectors are allocated in.
pub(super) enum VectorMemory<'a> {
    Arena(&'a Group),
    Private,
    Gpu(Device),
}

impl<'a> VectorMemory<'a> {
    /// Opens memory for vectors of a group. `local_rank` is the rank among the workers of this host. Collective.
    pub(super) fn open(memory: BufferMemory, group: &'a Group, local_rank: usize) -> Result<Self> {
        Ok(match memory {
            BufferMemory::Arena => VectorMemory::Arena(group),
            BufferMemory::Private => VectorMemory::Private,
            BufferMemory::Gpu => {
                let options = DeviceOptions { num_threads: 1, ..DeviceOptions::default() };
                if group.world_size() == 1 {
                    bail!("--memory gpu needs at least two workers; set --workers to 2 or more");
                }
                let (device, obstacle) = open_gpu(group, local_rank, options)?;
                if let Some(reason) = obstacle {
                    bail!("--memory gpu needs NCCL between the GPUs of the workers: {reason}");
                }
                group.need_devices();
                group.join_devices()?.wait()?;
                VectorMemory::Gpu(device)
            }
        })
    }

    /// Returns the name of the transport of these vectors.
    pub(super) fn transport(&self, group: &Group) -> String {
        match self {
            VectorMemory::Arena(_) | VectorMemory::Private => group.transport().to_string(),
            VectorMemory::Gpu(_) => "nccl".to_owned(),
        }
    }

    /// Allocates a vector whose elements are `value`.
    pub(super) fn vector<T: Number>(&self, len: usize, value: T) -> Result<Buffer<T>> {
        let mut vector = match self {
            VectorMemory::Arena(group) => group.buffer::<T>(len)?,
            VectorMemory::Private => Buffer::private(len)?,
            VectorMemory::Gpu(device) => {
                let shape = [len].into();
                let tensor = device.exchange_tensor(shape, T::DTYPE, Category::Communication)?;
                let memory = tensor.exchange_memory().expect("the tensor is for exchanges");
                Buffer::on_device(memory, T::DTYPE, len)
            }
        };
        self.fill(&mut vector, value);
        Ok(vector)
    }

    /// Sets all elements to `value`.
    pub(super) fn fill<T: Number>(&self, vector: &mut Buffer<T>, value: T) {
        match self {
            VectorMemory::Gpu(device) => {
                let values = vec![value; vector.len()];
                device.upload(&values, bytes_on_device(vector).view_mut());
                // The group does not wait for the copy.
                device.synchronize();
            }
            VectorMemory::Arena(_) | VectorMemory::Private => vector.fill(value),
        }
    }

    /// Returns the elements.
    pub(super) fn read<T: Number>(&self, vector: &Buffer<T>) -> Result<Vec<T>> {
        match self {
            VectorMemory::Gpu(device) => {
                let mut values = vec![T::of(0.0); vector.len()];
                device.download(bytes_on_device(vector).view(), &mut values)?;
                Ok(values)
            }
            VectorMemory::Arena(_) | VectorMemory::Private => Ok(vector.to_vec()),
        }
    }
}

/// Returns the bytes of a vector on a device as a tensor.
fn bytes_on_device<T: Number>(vector: &Buffer<T>) -> Tensor {
    let memory = vector.device_memory().expect("the vector is on a device");
    Tensor::from_exchange_memory(memory, [vector.len() * size_of::<T>()].into(), DType::U8)
}
