use crate::or_skip;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::UNIX_EPOCH;
use trireme_tensor::{BackendKind, CudaFolders, CudaInstallation, CudaOptions};

/// Environment variable: with the value 1, tests run on the machine's first GPU instead of a stand-in.
const REAL_GPU_VARIABLE: &str = "TRIREME_TEST_GPU";

/// Returns the GPU that suites run on: a [stand-in](fake_gpu), or the machine's first GPU if `TRIREME_TEST_GPU` is 1.
pub fn test_gpu() -> Option<BackendKind> {
    if uses_real_gpu() { Some(BackendKind::Cuda(CudaOptions::default())) } else { fake_gpu() }
}

fn uses_real_gpu() -> bool {
    std::env::var_os(REAL_GPU_VARIABLE).is_some_and(|value| value == "1")
}

/// Returns a GPU that runs kernels on the host (see `trireme_fake_cuda`). `None` without a [folder](fake_cuda_folder).
pub fn fake_gpu() -> Option<BackendKind> {
    fake_cuda_folder().map(|folder| {
        let cache = folder.join("trireme").join("cuda");
        let folders = CudaFolders { cache, first: Some(folder.to_owned()), others: Vec::new() };
        let installation = CudaInstallation::load(&folders).unwrap_or_else(|error| panic!("{error}"));
        BackendKind::Cuda(CudaOptions { installation: Some(installation), ..CudaOptions::default() })
    })
}

/// Returns a folder with stand-ins for CUDA's libraries, which also serves as `XDG_CACHE_HOME` for the kernels that they have compiled.
/// `None` on a machine without a C++ compiler, and if tests run on a real GPU.
pub fn fake_cuda_folder() -> Option<&'static Path> {
    if uses_real_gpu() {
        return None;
    }
    static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
    let install = || {
        let compiler = Command::new("c++").arg("--version").output();
        or_skip("C++ compiler", compiler).map(|_| install())
    };
    FOLDER.get_or_init(install).as_deref()
}

/// Installs the stand-ins in a folder of their version and returns it. Kernels that another version has compiled must not be used.
fn install() -> PathBuf {
    let library = trireme_fake_cuda::library().expect("cargo has built the libraries");
    let built = library.metadata().and_then(|metadata| metadata.modified()).expect("the library has a time");
    let built = built.duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos());
    let folder = library.with_file_name("fake_cuda").join(built.to_string());
    trireme_fake_cuda::install(&folder).expect("the target folder can be written");
    folder
}
