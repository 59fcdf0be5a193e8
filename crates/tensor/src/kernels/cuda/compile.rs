//! Compiles kernels for a GPU, once: NVRTC's results are kept in a cache folder.

use super::api::call;
use super::error::CudaError;
use super::installation::CudaInstallation;
use std::ffi::{CString, c_char};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::path::{Path, PathBuf};

/// The headers that sources include.
const HEADERS: [(&str, &str); 1] = [("common.cuh", include_str!("sources/common.cuh"))];

/// The sources of all kernels, which are compiled in parallel.
const SOURCES: &[(&str, &str)] = &[
    ("attention.cu", include_str!("sources/attention.cu")),
    ("blocks.cu", include_str!("sources/blocks.cu")),
    ("elementwise.cu", include_str!("sources/elementwise.cu")),
    ("layers.cu", include_str!("sources/layers.cu")),
    ("sums.cu", include_str!("sources/sums.cu")),
];

/// Returns the machine code of all sources for a compute capability, from the cache or from NVRTC.
pub(super) fn compile_all(
    installation: &'static CudaInstallation,
    capability: i32,
) -> Result<Vec<Vec<u8>>, CudaError> {
    // Features of one generation only, such as the tensor cores of Hopper, need the suffix.
    let suffix = if capability >= 90 { "a" } else { "" };
    let architecture = format!("sm_{capability}{suffix}");
    std::thread::scope(|scope| {
        let threads: Vec<_> = SOURCES
            .iter()
            .map(|&source| {
                let architecture = &architecture;
                scope.spawn(move || cached(installation, source, architecture))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("compiling does not panic")).collect()
    })
}

/// Returns the machine code of a source from the cache, or compiles it and stores the result there.
fn cached(
    installation: &CudaInstallation,
    (name, source): (&'static str, &str),
    architecture: &str,
) -> Result<Vec<u8>, CudaError> {
    let path = cache_path(installation, name, source, architecture);
    // An image begins with the magic number of ELF. Anything else is compiled again.
    if let Ok(image) = std::fs::read(&path)
        && image.starts_with(b"\x7fELF")
    {
        return Ok(image);
    }
    let image = compile(installation, (name, source), architecture)?;
    store(&path, &image).map_err(|source| CudaError::Cache { path, source })?;
    Ok(image)
}

fn cache_path(installation: &CudaInstallation, name: &str, source: &str, architecture: &str) -> PathBuf {
    let mut hasher = DefaultHasher::new();
    (HEADERS, source, installation.nvrtc_version(), OPTIONS).hash(&mut hasher);
    installation.libraries()[1].path.hash(&mut hasher);
    let stem = name.trim_end_matches(".cu");
    installation.cache.join(format!("{stem}-{architecture}-{:016x}.cubin", hasher.finish()))
}

/// Writes a file under another name and renames it, because other processes may read it.
fn store(path: &Path, image: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().expect("the path is in the cache folder");
    std::fs::create_dir_all(folder)?;
    let new = path.with_extension(format!("{}.{:?}", std::process::id(), std::thread::current().id()));
    std::fs::File::create(&new)?.write_all(image)?;
    std::fs::rename(new, path)
}

/// Options of NVRTC. Sums and products are fused only where kernels say so, so that results do not depend on the compiler's version.
const OPTIONS: [&str; 2] = ["--std=c++17", "--fmad=false"];

fn compile(
    installation: &CudaInstallation,
    (name, source): (&'static str, &str),
    architecture: &str,
) -> Result<Vec<u8>, CudaError> {
    let nvrtc = &installation.nvrtc;
    let text = |text: &str| CString::new(text).expect("sources have no zeros");
    let (c_name, c_source) = (text(name), text(source));
    let headers = HEADERS.map(|(name, source)| (text(name), text(source)));
    let header_names = headers.each_ref().map(|(name, _)| name.as_ptr());
    let header_sources = headers.each_ref().map(|(_, source)| source.as_ptr());
    let architecture_option = format!("--gpu-architecture={architecture}");
    let options: Vec<CString> = OPTIONS.iter().copied().chain([&*architecture_option]).map(text).collect();
    let option_pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
    // SAFETY: all strings and arrays outlive the calls, and have the lengths that are passed. Buffers have the sizes that the program
    // tells.
    unsafe {
        let mut program = std::ptr::null_mut();
        call!(
            nvrtc,
            nvrtcCreateProgram(
                &mut program,
                c_source.as_ptr(),
                c_name.as_ptr(),
                headers.len() as i32,
                header_sources.as_ptr(),
                header_names.as_ptr(),
            )
        )?;
        let compiled = call!(
            nvrtc,
            nvrtcCompileProgram(program, option_pointers.len() as i32, option_pointers.as_ptr())
        );
        let mut size = 0;
        let outcome = match compiled {
            Ok(()) => call!(nvrtc, nvrtcGetCUBINSize(program, &mut size)).and_then(|()| {
                let mut image = vec![0_u8; size];
                call!(nvrtc, nvrtcGetCUBIN(program, image.as_mut_ptr().cast())).map(|()| image)
            }),
            Err(error) => {
                let mut log = vec![0_u8; 1];
                if call!(nvrtc, nvrtcGetProgramLogSize(program, &mut size)).is_ok() {
                    log = vec![0_u8; size.max(1)];
                    let _ = (nvrtc.nvrtcGetProgramLog)(program, log.as_mut_ptr().cast());
                }
                let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned();
                let log = if log.is_empty() { error.to_string() } else { log };
                Err(CudaError::Compile { source_name: name, architecture: architecture.to_owned(), log })
            }
        };
        let _ = (nvrtc.nvrtcDestroyProgram)(&mut program);
        outcome
    }
}
