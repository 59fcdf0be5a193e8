//! Finds and loads CUDA's libraries.

use super::api::{BlasApi, DriverApi, NcclApi, NvrtcApi, call};
use super::error::CudaError;
use cudarc::driver::sys as cuda;
use libloading::Library;
use std::error::Error;
use std::ffi::c_int;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Version of CUDA that a driver must support, as `cuDriverGetVersion` reports it.
const DRIVER_VERSION_MIN: c_int = 12_040;

/// Compute capability that kernels need, as 10 * major + minor: bf16 in tensor cores.
const CAPABILITY_MIN: c_int = 80;

/// The environment variable that names a folder in which all libraries of CUDA are looked for first.
pub const LIBRARY_VARIABLE: &str = "TRIREME_CUDA_LIBRARIES";

/// Folders in which CUDA's libraries are looked for, and the folder for compiled kernels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaFolders {
    /// The folder that is searched first.
    pub first: Option<PathBuf>,
    /// Folders that are searched after the system's loader: toolkits, and packages of Python.
    pub others: Vec<PathBuf>,
    /// The folder for compiled kernels and chosen algorithms, which is created.
    pub cache: PathBuf,
}

impl CudaFolders {
    /// Returns the folders that the environment names: `TRIREME_CUDA_LIBRARIES`, `CUDA_HOME` or `CUDA_PATH`, the packages `nvidia-…` of the
    /// active or the user's Python, and `XDG_CACHE_HOME` or `HOME` for compiled kernels.
    pub fn from_environment() -> Self {
        let folder = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let home = folder("HOME");
        let toolkits = [folder("CUDA_HOME"), folder("CUDA_PATH"), Some("/usr/local/cuda".into())];
        let toolkits = toolkits.into_iter().flatten().map(|toolkit| toolkit.join("lib64"));
        let user = home.as_ref().map(|home| home.join(".local"));
        let pythons = [
            folder("VIRTUAL_ENV"),
            folder("CONDA_PREFIX"),
            user,
            Some("/usr/local".into()),
            Some("/usr".into()),
        ];
        let packages = pythons.into_iter().flatten().flat_map(|python| package_folders(&python));
        let cache = folder("XDG_CACHE_HOME")
            .or(home.map(|home| home.join(".cache")))
            .unwrap_or_else(std::env::temp_dir);
        CudaFolders {
            first: folder(LIBRARY_VARIABLE),
            others: toolkits.chain(packages).collect(),
            cache: cache.join("trireme").join("cuda"),
        }
    }
}

/// Returns the folders with libraries of the packages `nvidia-…` of a Python installation, in alphabetical order.
fn package_folders(python: &Path) -> Vec<PathBuf> {
    let versions = children(&python.join("lib"))
        .into_iter()
        .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python3")));
    let sites =
        versions.flat_map(|version| ["site-packages", "dist-packages"].map(|site| version.join(site)));
    let packages = sites.flat_map(|site| children(&site.join("nvidia")));
    packages.map(|package| package.join("lib")).filter(|folder| folder.is_dir()).collect()
}

/// Returns the entries of a folder in alphabetical order; none if it cannot be read.
fn children(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

/// A library of CUDA: its file names, and how to get it.
struct LibraryKind {
    name: &'static str,
    file_names: &'static [&'static str],
    advice: &'static str,
}

const DRIVER: LibraryKind = LibraryKind {
    name: "the NVIDIA driver (libcuda)",
    file_names: &["libcuda.so.1"],
    advice: "install the NVIDIA driver, or use the CPU",
};

const NVRTC: LibraryKind = LibraryKind {
    name: "the compiler of kernels (libnvrtc)",
    file_names: &["libnvrtc.so.12", "libnvrtc.so.13"],
    advice: "install it with `pip install nvidia-cuda-nvrtc-cu12`, or set TRIREME_CUDA_LIBRARIES to the folder that contains it",
};

const CUBLAS: LibraryKind = LibraryKind {
    name: "the library for matmuls (libcublasLt)",
    file_names: &["libcublasLt.so.12", "libcublasLt.so.13"],
    advice: "install it with `pip install nvidia-cublas-cu12`, or set TRIREME_CUDA_LIBRARIES to the folder that contains it",
};

/// The first version of NCCL whose communicators can be joined without blocking.
const NCCL_VERSION_MIN: i32 = 21_800;

const NCCL: LibraryKind = LibraryKind {
    name: "the library for collectives between GPUs (libnccl)",
    file_names: &["libnccl.so.2"],
    advice: "install it with `pip install nvidia-nccl-cu12`, or set TRIREME_CUDA_LIBRARIES to the folder that contains it",
};

/// A library that was found.
#[derive(Debug, Clone)]
pub struct FoundLibrary {
    /// Its path, or its file name if the system's loader has found it.
    pub path: PathBuf,
    /// Major and minor version.
    pub version: (i32, i32),
}

/// The libraries of CUDA, loaded. A process keeps them until it ends.
pub struct CudaInstallation {
    pub(super) driver: DriverApi,
    pub(super) nvrtc: NvrtcApi,
    pub(super) blas: BlasApi,
    /// NCCL, which devices need only to communicate, and its version; or why it cannot be used.
    nccl: Result<(NcclApi, i32), String>,
    pub(super) cache: PathBuf,
    found: [FoundLibrary; 3],
}

impl fmt::Debug for CudaInstallation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaInstallation")
            .field("found", &self.found)
            .field("cache", &self.cache)
            .finish_non_exhaustive()
    }
}

impl CudaInstallation {
    /// Loads the libraries. Calls with equal folders return the same installation.
    ///
    /// # Errors
    /// If a library is missing, cannot be loaded or lacks a function, if the driver is too old, or if there is no GPU.
    pub fn load(folders: &CudaFolders) -> Result<&'static CudaInstallation, CudaError> {
        static LOADED: Mutex<Vec<(CudaFolders, &'static CudaInstallation)>> = Mutex::new(Vec::new());
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, installation)) = loaded.iter().find(|(known, _)| known == folders) {
            return Ok(installation);
        }
        let installation: &'static CudaInstallation = Box::leak(Box::new(Self::open(folders)?));
        loaded.push((folders.clone(), installation));
        Ok(installation)
    }

    /// Loads the libraries that [`CudaFolders::from_environment`] finds.
    ///
    /// # Errors
    /// As [`load`](CudaInstallation::load).
    pub fn from_environment() -> Result<&'static CudaInstallation, CudaError> {
        Self::load(&CudaFolders::from_environment())
    }

    fn open(folders: &CudaFolders) -> Result<CudaInstallation, CudaError> {
        let (driver, found_driver) = open_driver(folders)?;
        let others = open_nvrtc(folders).and_then(|nvrtc| Ok((nvrtc, open_blas(folders)?)));
        let ((nvrtc, found_nvrtc), (blas, found_blas)) = match others {
            Ok(others) => others,
            Err(error) => {
                // After `cuInit`, the driver has threads of its own, and must stay loaded.
                std::mem::forget(driver);
                return Err(error);
            }
        };
        let found = [found_driver, found_nvrtc, found_blas];
        let nccl = open_nccl(folders).map(|(api, _, version)| (api, version));
        let nccl = nccl.map_err(|error| error.to_string());
        Ok(CudaInstallation { driver, nvrtc, blas, nccl, cache: folders.cache.clone(), found })
    }

    /// Looks for each library, and for GPUs. Unlike [`load`](CudaInstallation::load), continues after an error.
    pub fn report(folders: &CudaFolders) -> CudaReport {
        let driver = open_driver(folders);
        let gpus = match &driver {
            Ok((driver, _)) => Gpu::all(driver),
            Err(_) => Ok(Vec::new()),
        };
        // Libraries stay loaded: after `cuInit`, the driver has threads of its own.
        fn found<A>((api, found): (A, FoundLibrary)) -> FoundLibrary {
            std::mem::forget(api);
            found
        }
        let libraries = [
            (DRIVER.name, driver.map(found)),
            (NVRTC.name, open_nvrtc(folders).map(found)),
            (CUBLAS.name, open_blas(folders).map(found)),
            (NCCL.name, open_nccl(folders).map(|(api, library, _)| found((api, library)))),
        ];
        CudaReport { libraries, gpus }
    }

    /// Returns the GPUs that are visible to the process, in the order of their numbers.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn gpus(&self) -> Result<Vec<Gpu>, CudaError> {
        Gpu::all(&self.driver)
    }

    /// Returns GPU `ordinal` and checks that kernels can use it.
    ///
    /// # Errors
    /// If the driver fails, if there is no such GPU, or if it is too old.
    pub fn gpu(&self, ordinal: usize) -> Result<Gpu, CudaError> {
        let mut gpus = self.gpus()?;
        if gpus.is_empty() {
            return Err(CudaError::NoGpu { reason: "the driver lists none".to_owned() });
        }
        if ordinal >= gpus.len() {
            return Err(CudaError::NoSuchGpu { ordinal, num_gpus: gpus.len() });
        }
        let gpu = gpus.swap_remove(ordinal);
        gpu.check()?;
        Ok(gpu)
    }

    /// Returns the libraries: the driver, NVRTC and cuBLASLt.
    pub fn libraries(&self) -> &[FoundLibrary; 3] {
        &self.found
    }

    /// Returns NCCL's version: ten thousand times the major, a hundred times the minor, and the patch number.
    ///
    /// # Errors
    /// Why it cannot be used.
    pub fn nccl_version(&self) -> Result<i32, &str> {
        self.nccl.as_ref().map(|(_, version)| *version).map_err(String::as_str)
    }

    pub(super) fn nccl(&self) -> Result<&NcclApi, CudaError> {
        self.nccl.as_ref().map(|(api, _)| api).map_err(|reason| CudaError::NcclUnavailable(reason.clone()))
    }

    /// Returns the version of NVRTC.
    pub(super) fn nvrtc_version(&self) -> (i32, i32) {
        self.found[1].version
    }
}

/// The libraries and GPUs of a machine, from [`CudaInstallation::report`].
#[derive(Debug)]
pub struct CudaReport {
    /// The name of each library, and where it is or why it cannot be used.
    pub libraries: [(&'static str, Result<FoundLibrary, CudaError>); 4],
    /// The visible GPUs; none without a driver.
    pub gpus: Result<Vec<Gpu>, CudaError>,
}

/// A GPU that is visible to the process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// NVIDIA's name.
    pub name: String,
    /// Compute capability, as 10 * major + minor.
    pub capability: i32,
    /// Number of multiprocessors, by which cuBLASLt chooses its kernels.
    pub num_multiprocessors: i32,
    /// Memory in bytes.
    pub memory_bytes: usize,
    /// Domain, bus and device number of the GPU on PCI, which parts of a GPU (MIG) share.
    pub pci: [i32; 3],
}

impl Gpu {
    /// Checks whether kernels can use this GPU.
    ///
    /// # Errors
    /// If it is too old.
    pub fn check(&self) -> Result<(), CudaError> {
        if self.capability < CAPABILITY_MIN {
            return Err(CudaError::OldGpu { name: self.name.clone(), capability: self.capability });
        }
        Ok(())
    }

    /// Returns the compute capability as `major.minor`.
    pub fn compute_capability(&self) -> String {
        format!("{}.{}", self.capability / 10, self.capability % 10)
    }

    fn all(driver: &DriverApi) -> Result<Vec<Gpu>, CudaError> {
        let mut num_gpus = 0;
        // SAFETY: writes a number.
        unsafe { call!(driver, cuDeviceGetCount(&mut num_gpus))? };
        (0..num_gpus).map(|ordinal| Gpu::read(driver, ordinal)).collect()
    }

    fn read(driver: &DriverApi, ordinal: c_int) -> Result<Gpu, CudaError> {
        use cuda::CUdevice_attribute as attributes;
        let (mut device, mut name, mut memory_bytes) = (0, [0; 256], 0);
        // SAFETY: each function writes one number, or at most the number of bytes that is passed.
        let (capability, num_multiprocessors, pci) = unsafe {
            call!(driver, cuDeviceGet(&mut device, ordinal))?;
            call!(driver, cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int, device))?;
            call!(driver, cuDeviceTotalMem_v2(&mut memory_bytes, device))?;
            let attribute = |attribute| {
                let mut value = 0;
                call!(driver, cuDeviceGetAttribute(&mut value, attribute, device))?;
                Ok::<_, CudaError>(value)
            };
            let capability = 10 * attribute(attributes::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?
                + attribute(attributes::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
            let pci = [
                attribute(attributes::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?,
                attribute(attributes::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?,
                attribute(attributes::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?,
            ];
            (capability, attribute(attributes::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?, pci)
        };
        let name = name.iter().take_while(|&&byte| byte != 0).map(|&byte| byte as u8);
        let name = String::from_utf8_lossy(&name.collect::<Vec<_>>()).into_owned();
        Ok(Gpu { name, capability, num_multiprocessors, memory_bytes, pci })
    }
}

fn open_driver(folders: &CudaFolders) -> Result<(DriverApi, FoundLibrary), CudaError> {
    let (path, driver) = find(&DRIVER, folders)?;
    let driver = DriverApi::load(driver).map_err(|source| unusable(&DRIVER, &path, source))?;
    let mut version = 0;
    // SAFETY: writes one number.
    unsafe { call!(driver, cuDriverGetVersion(&mut version))? };
    if version < DRIVER_VERSION_MIN {
        return Err(CudaError::OldDriver { found: version, needed: DRIVER_VERSION_MIN });
    }
    // SAFETY: the function has no requirements.
    if let Err(error) = unsafe { call!(driver, cuInit(0)) } {
        std::mem::forget(driver);
        return Err(CudaError::NoGpu { reason: error.to_string() });
    }
    Ok((driver, FoundLibrary { path, version: (version / 1000, version % 1000 / 10) }))
}

fn open_nvrtc(folders: &CudaFolders) -> Result<(NvrtcApi, FoundLibrary), CudaError> {
    let (path, nvrtc) = find(&NVRTC, folders)?;
    let nvrtc = NvrtcApi::load(nvrtc).map_err(|source| unusable(&NVRTC, &path, source))?;
    let mut version = (0, 0);
    // SAFETY: writes two numbers.
    unsafe { call!(nvrtc, nvrtcVersion(&mut version.0, &mut version.1))? };
    Ok((nvrtc, FoundLibrary { path, version }))
}

fn open_blas(folders: &CudaFolders) -> Result<(BlasApi, FoundLibrary), CudaError> {
    let (path, blas) = find(&CUBLAS, folders)?;
    let blas = BlasApi::load(blas).map_err(|source| unusable(&CUBLAS, &path, source))?;
    let version = blas.version() as i32;
    Ok((blas, FoundLibrary { path, version: (version / 10_000, version % 10_000 / 100) }))
}

fn open_nccl(folders: &CudaFolders) -> Result<(NcclApi, FoundLibrary, i32), CudaError> {
    let (path, library) = find(&NCCL, folders)?;
    let nccl = NcclApi::load(library).map_err(|source| unusable(&NCCL, &path, source))?;
    let mut version = 0;
    // SAFETY: writes one number.
    unsafe { call!(nccl, ncclGetVersion(&mut version))? };
    let short = (version / 10_000, version % 10_000 / 100);
    let refuse = |reason: String| CudaError::Unusable { path: path.clone(), reason, advice: NCCL.advice };
    if version < NCCL_VERSION_MIN {
        return Err(refuse(format!("it is NCCL {}.{}, and Trireme needs 2.18 or later", short.0, short.1)));
    }
    // The variable takes precedence over the configuration of a communicator.
    if std::env::var("NCCL_COMM_BLOCKING").is_ok_and(|value| value == "1") {
        return Err(refuse("NCCL_COMM_BLOCKING is set, so a lost peer would block it; unset it".to_owned()));
    }
    Ok((nccl, FoundLibrary { path, version: short }, version))
}

fn unusable(kind: &LibraryKind, path: &Path, source: libloading::Error) -> CudaError {
    // The system's message, which names the library or function that is missing, is the source of the error.
    let reason = source.source().map_or_else(|| source.to_string(), ToString::to_string);
    CudaError::Unusable { path: path.to_owned(), reason, advice: kind.advice }
}

/// Loads the first library of a kind: from the first folder, by the system's loader, or from the other folders.
fn find(kind: &LibraryKind, folders: &CudaFolders) -> Result<(PathBuf, Library), CudaError> {
    let in_folder =
        |folder: &PathBuf| kind.file_names.iter().map(|name| folder.join(name)).collect::<Vec<_>>();
    let by_loader = kind.file_names.iter().map(PathBuf::from);
    let candidates = folders.first.iter().flat_map(in_folder).chain(by_loader);
    for path in candidates.chain(folders.others.iter().flat_map(in_folder)) {
        let is_by_loader = path.parent() == Some(Path::new(""));
        if !is_by_loader && !path.exists() {
            continue;
        }
        // SAFETY: a library of NVIDIA, whose initialization has no requirements, or one that the user has named in its place.
        match unsafe { Library::new(&path) } {
            Ok(library) => return Ok((path, library)),
            // The loader's error says only that it has not found the library.
            Err(_) if is_by_loader => {}
            Err(source) => return Err(unusable(kind, &path, source)),
        }
    }
    let looked_in = folders.first.iter().map(|folder| folder.display().to_string());
    let looked_in = looked_in.chain(["the system's libraries".to_owned()]);
    let others = folders.others.iter().map(|folder| folder.display().to_string());
    let looked_in = looked_in.chain(others).collect::<Vec<_>>().join(", ");
    Err(CudaError::Missing { library: kind.name, looked_in, advice: kind.advice })
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIND: LibraryKind =
        LibraryKind { name: "a library", file_names: &["libtrireme-none.so.1"], advice: "install it" };

    fn folders(first: Option<PathBuf>, others: Vec<PathBuf>) -> CudaFolders {
        CudaFolders { first, others, cache: PathBuf::new() }
    }

    #[test]
    fn a_missing_library_is_reported_with_the_folders_and_advice() {
        let error = find(&KIND, &folders(Some("/first".into()), vec!["/other".into()])).unwrap_err();
        let expected =
            "a library was not found (looked in /first, the system's libraries, /other); install it";
        assert_eq!(error.to_string(), expected);
    }

    /// A file that is not a library is reported, and not passed over: the user has named its folder.
    #[test]
    fn the_first_folder_comes_before_the_others() {
        let [first, other] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let paths = [&first, &other].map(|folder| folder.path().join(KIND.file_names[0]));
        paths.iter().for_each(|path| std::fs::write(path, "no library").unwrap());
        let of = |first: Option<&Path>| {
            let folders = folders(first.map(Path::to_owned), vec![other.path().to_owned()]);
            find(&KIND, &folders).unwrap_err().to_string()
        };
        let [in_first, in_other] = paths.map(|path| format!("{} cannot be used", path.display()));
        assert!(of(Some(first.path())).starts_with(&in_first));
        assert!(of(None).starts_with(&in_other));
    }

    #[test]
    fn packages_of_a_python_installation_are_found() {
        let python = tempfile::tempdir().unwrap();
        let packages = python.path().join("lib/python3.12/site-packages/nvidia");
        for package in ["cuda_nvrtc/lib", "cublas/lib", "empty"] {
            std::fs::create_dir_all(packages.join(package)).unwrap();
        }
        let expected = ["cublas", "cuda_nvrtc"].map(|package| packages.join(package).join("lib"));
        assert_eq!(package_folders(python.path()), expected);
    }
}
