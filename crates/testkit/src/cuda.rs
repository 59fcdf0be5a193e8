use crate::or_skip;
use std::process::Command;
use std::sync::OnceLock;
use std::time::UNIX_EPOCH;
use trireme_tensor::{BackendKind, CudaFolders, CudaInstallation, CudaOptions};

/// Returns a GPU that runs kernels on the host (see `trireme_fake_cuda`). `None` on a machine without a C++ compiler.
pub fn fake_gpu() -> Option<BackendKind> {
    static INSTALLATION: OnceLock<Option<&'static CudaInstallation>> = OnceLock::new();
    let installation = *INSTALLATION.get_or_init(|| {
        let compiler = Command::new("c++").arg("--version").output();
        or_skip("C++ compiler", compiler).map(|_| install())
    });
    installation
        .map(|installation| BackendKind::Cuda(CudaOptions { installation: Some(installation), ordinal: 0 }))
}

/// Loads the libraries. Kernels that were compiled by another version of them are not used.
fn install() -> &'static CudaInstallation {
    let library = trireme_fake_cuda::library().expect("cargo has built the libraries");
    let built = library.metadata().and_then(|metadata| metadata.modified()).expect("the library has a time");
    let built = built.duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos());
    let folder = library.with_file_name("fake_cuda").join(built.to_string());
    trireme_fake_cuda::install(&folder).expect("the target folder can be written");
    let folders = CudaFolders { cache: folder.join("kernels"), first: Some(folder), others: Vec::new() };
    CudaInstallation::load(&folders).unwrap_or_else(|error| panic!("{error}"))
}
