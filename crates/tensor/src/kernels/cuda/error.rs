//! Errors of CUDA devices.

use std::path::PathBuf;
use trireme_base::DType;

/// An error of CUDA, or why a GPU cannot be used.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages explain the fields")]
pub enum CudaError {
    /// A library was not found.
    #[error("{library} was not found (looked in {looked_in}); {advice}")]
    Missing { library: &'static str, looked_in: String, advice: &'static str },
    /// A library lacks a function, or cannot be loaded.
    #[error("{} cannot be used: {reason}; {advice}", path.display())]
    Unusable { path: PathBuf, reason: String, advice: &'static str },
    /// The driver is too old.
    #[error(
        "the driver supports CUDA {}.{} and Trireme needs {}.{} or later; update the NVIDIA driver to 550 or later", found / 1000, found % 1000 / 10,
        needed / 1000, needed % 1000 / 10
    )]
    OldDriver { found: i32, needed: i32 },
    /// There is no GPU.
    #[error(
        "no NVIDIA GPU was found ({reason}); see whether `nvidia-smi` lists one and whether CUDA_VISIBLE_DEVICES hides it"
    )]
    NoGpu { reason: String },
    /// The GPU of this number does not exist.
    #[error(
        "GPU {ordinal} does not exist: {num_gpus} GPUs are visible; start one worker per GPU, or see CUDA_VISIBLE_DEVICES"
    )]
    NoSuchGpu { ordinal: usize, num_gpus: usize },
    /// The GPU is too old.
    #[error(
        "{name} has compute capability {}.{} and Trireme needs 8.0 (Ampere) or later; use the CPU", capability / 10,
        capability % 10
    )]
    OldGpu { name: String, capability: i32 },
    /// A function of CUDA failed.
    #[error("{function} failed: {name}")]
    Call { function: &'static str, name: String },
    /// cuBLASLt has no algorithm for a matmul.
    #[error(
        "cuBLASLt has no algorithm for a matmul of {rows} x {inner} times {inner} x {cols} in {dtype}; try another version"
    )]
    NoAlgorithm { rows: usize, cols: usize, inner: usize, dtype: DType },
    /// A kernel cannot be launched.
    #[error("the kernel {name} cannot be launched: {source}")]
    Kernel { name: String, source: Box<CudaError> },
    /// A kernel does not compile.
    #[error("the kernels of {source_name} do not compile for {architecture}: {log}")]
    Compile { source_name: &'static str, architecture: String, log: String },
    /// The file with the chosen algorithms of matmuls cannot be used.
    #[error("cannot use {}: {source}; make it writable, remove it, or do not time matmuls", path.display())]
    AlgorithmFile { path: PathBuf, source: std::io::Error },
    /// A function of NCCL failed.
    #[error("{function} failed: {reason}")]
    Nccl { function: &'static str, reason: String },
    /// NCCL cannot be used.
    #[error("{0}")]
    NcclUnavailable(String),
    /// A thread of the device could not be started.
    #[error("cannot start a thread that waits for the GPU: {source}")]
    Thread { source: std::io::Error },
}
