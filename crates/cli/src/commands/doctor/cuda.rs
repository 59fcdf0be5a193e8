//! GPUs, and the libraries that they need.

use crate::console::Output;
use anyhow::Result;
use serde::Serialize;
use std::io::Write;
use std::path::PathBuf;
use trireme_base::Bytes;
use trireme_tensor::{CudaFolders, CudaInstallation, CudaReport, Gpu};

/// GPUs and libraries, as `[training] device = "cuda"` finds them; the fields are keys of `--json`.
#[derive(Debug, Serialize)]
pub(super) struct CudaFacts {
    gpus: Vec<GpuFacts>,
    libraries: Vec<LibraryFacts>,
    /// Why there is no list of GPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

#[derive(Debug, Serialize)]
struct GpuFacts {
    name: String,
    /// Such as 9.0.
    compute_capability: String,
    memory_bytes: usize,
    /// Why it cannot be used.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

#[derive(Debug, Serialize)]
struct LibraryFacts {
    name: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<String>,
    /// Why it cannot be used, and what to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

impl CudaFacts {
    pub(super) fn read() -> Self {
        let CudaReport { libraries, gpus } = CudaInstallation::report(&CudaFolders::from_environment());
        let libraries = libraries.into_iter().map(|(name, found)| match found {
            Ok(found) => {
                let (major, minor) = found.version;
                let version = Some(format!("{major}.{minor}"));
                LibraryFacts { name, path: Some(found.path), version, problem: None }
            }
            Err(error) => LibraryFacts { name, path: None, version: None, problem: Some(error.to_string()) },
        });
        let (gpus, problem) = match gpus {
            Ok(gpus) => (gpus, None),
            Err(error) => (Vec::new(), Some(error.to_string())),
        };
        let gpus = gpus.into_iter().map(|gpu| {
            let problem = gpu.check().err().map(|error| error.to_string());
            let compute_capability = gpu.compute_capability();
            let Gpu { name, memory_bytes, .. } = gpu;
            GpuFacts { name, compute_capability, memory_bytes, problem }
        });
        CudaFacts { gpus: gpus.collect(), libraries: libraries.collect(), problem }
    }

    /// Prints GPUs and libraries; without a driver, only why there is none.
    pub(super) fn print(&self) -> Result<()> {
        let line = |name: &str, value: String| writeln!(Output, "  {name:<14}{value}");
        writeln!(Output, "\nGPUs")?;
        for (ordinal, gpu) in self.gpus.iter().enumerate() {
            let memory = Bytes(gpu.memory_bytes as u64);
            let problem = gpu.problem.as_ref().map_or_else(String::new, |problem| format!("; {problem}"));
            let GpuFacts { name, compute_capability, .. } = gpu;
            line(
                &ordinal.to_string(),
                format!("{name}, compute capability {compute_capability}, {memory}{problem}"),
            )?;
        }
        let of_driver = self.libraries[0].problem.as_ref();
        if let Some(problem) = self.problem.as_ref().or(of_driver) {
            line("none", problem.clone())?;
        } else if self.gpus.is_empty() {
            line("none", "the driver lists none; see whether CUDA_VISIBLE_DEVICES hides them".to_owned())?;
        }
        if of_driver.is_some() {
            return Ok(());
        }
        for LibraryFacts { name, path, version, problem } in &self.libraries {
            match (problem, path, version) {
                (Some(problem), ..) => line("", problem.clone())?,
                (None, Some(path), Some(version)) => {
                    line("", format!("{name}: {version}, {}", path.display()))?;
                }
                _ => {}
            }
        }
        Ok(())
    }
}
