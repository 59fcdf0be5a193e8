//! Compiles kernels for a GPU, once: NVRTC's results are kept in a cache folder.

use super::api::call;
use super::error::CudaError;
use super::installation::CudaInstallation;
use std::ffi::{CString, c_char};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::thread::Builder;
use std::time::{SystemTime, UNIX_EPOCH};

/// The headers that sources include.
const HEADERS: [(&str, &str); 4] = [
    ("attention.cuh", include_str!("sources/attention.cuh")),
    ("common.cuh", include_str!("sources/common.cuh")),
    ("grouped.cuh", include_str!("sources/grouped.cuh")),
    ("mma.cuh", include_str!("sources/mma.cuh")),
];

/// The sources of all kernels, which are compiled in parallel.
const SOURCES: &[(&str, &str)] = &[
    ("attention.cu", include_str!("sources/attention.cu")),
    ("blocks.cu", include_str!("sources/blocks.cu")),
    ("elementwise.cu", include_str!("sources/elementwise.cu")),
    ("exchange.cu", include_str!("sources/exchange.cu")),
    ("experts.cu", include_str!("sources/experts.cu")),
    ("grouped.cu", include_str!("sources/grouped.cu")),
    ("layers.cu", include_str!("sources/layers.cu")),
    ("optimizer.cu", include_str!("sources/optimizer.cu")),
    ("quantized.cu", include_str!("sources/quantized.cu")),
    ("sums.cu", include_str!("sources/sums.cu")),
];

/// The name of sources that are generated for a call.
const GENERATED: &str = "generated.cu";

/// Returns the machine code of all sources for a compute capability, from the cache or from NVRTC.
pub(super) fn compile_all(
    installation: &'static CudaInstallation,
    capability: i32,
) -> Result<Vec<Vec<u8>>, CudaError> {
    let architecture = architecture_of(capability);
    std::thread::scope(|scope| {
        let threads: Vec<_> = SOURCES
            .iter()
            .map(|&source| {
                let architecture = &architecture;
                let compile = move || cached(installation, source, architecture);
                let thread = Builder::new().spawn_scoped(scope, compile);
                thread.map_err(|source| CudaError::Thread { source })
            })
            .collect();
        let joined = threads.into_iter().map(|thread| thread?.join().expect("compiling does not panic"));
        joined.collect()
    })
}

/// Returns the machine code of a generated source for a compute capability, from the cache or from NVRTC.
pub(super) fn compile_generated(
    installation: &'static CudaInstallation,
    source: &str,
    capability: i32,
) -> Result<Vec<u8>, CudaError> {
    cached(installation, (GENERATED, source), &architecture_of(capability))
}

/// Returns NVRTC's name of a compute capability. The suffix allows features of one generation only, such as the tensor cores of Hopper.
fn architecture_of(capability: i32) -> String {
    format!("sm_{capability}{}", if capability >= 90 { "a" } else { "" })
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
    let (image, _log) = compile(installation, (name, source), architecture, &[])?;
    // Without a cache, each start compiles again.
    let _ = store(&path, &image);
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
    // Processes in different containers may have the same id.
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos());
    let thread = std::thread::current().id();
    let new = path.with_extension(format!("{}.{thread:?}.{now}", std::process::id()));
    std::fs::File::create(&new)?.write_all(image)?;
    std::fs::rename(new, path)
}

/// Options of NVRTC. Sums and products are fused only where kernels say so, so that results do not depend on the compiler's version.
const OPTIONS: [&str; 2] = ["--std=c++17", "--fmad=false"];

/// Compiles a source. Returns its machine code, and the compiler's messages.
fn compile(
    installation: &CudaInstallation,
    (name, source): (&'static str, &str),
    architecture: &str,
    more_options: &[&str],
) -> Result<(Vec<u8>, String), CudaError> {
    let nvrtc = &installation.nvrtc;
    let text = |text: &str| CString::new(text).expect("sources have no zeros");
    let (c_name, c_source) = (text(name), text(source));
    let headers = HEADERS.map(|(name, source)| (text(name), text(source)));
    let header_names = headers.each_ref().map(|(name, _)| name.as_ptr());
    let header_sources = headers.each_ref().map(|(_, source)| source.as_ptr());
    let architecture_option = format!("--gpu-architecture={architecture}");
    let options: Vec<CString> = OPTIONS
        .iter()
        .copied()
        .chain(more_options.iter().copied())
        .chain([&*architecture_option])
        .map(text)
        .collect();
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
        let mut log = Vec::new();
        if call!(nvrtc, nvrtcGetProgramLogSize(program, &mut size)).is_ok() {
            log = vec![0_u8; size.max(1)];
            let _ = (nvrtc.nvrtcGetProgramLog)(program, log.as_mut_ptr().cast());
        }
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned();
        let outcome = match compiled {
            Ok(()) => call!(nvrtc, nvrtcGetCUBINSize(program, &mut size)).and_then(|()| {
                let mut image = vec![0_u8; size];
                call!(nvrtc, nvrtcGetCUBIN(program, image.as_mut_ptr().cast())).map(|()| (image, log))
            }),
            Err(error) => {
                let log = if log.is_empty() { error.to_string() } else { log };
                Err(CudaError::Compile { source_name: name, architecture: architecture.to_owned(), log })
            }
        };
        let _ = (nvrtc.nvrtcDestroyProgram)(&mut program);
        outcome
    }
}

#[cfg(test)]
mod tests {
    use super::super::expression::generate;
    use super::super::launch::instance_source;
    use super::*;
    use crate::CudaFolders;
    use crate::kernels::call::{ExpressionCall, ExpressionInput, Operands};
    use crate::kernels::expression::{Expression, InputLayout};
    use crate::kernels::{Operand, OperandMut};
    use crate::shape::Shape;
    use smallvec::{SmallVec, smallvec};
    use std::collections::BTreeMap;
    use tempfile::TempDir;
    use trireme_base::{Cost, DType};
    use trireme_testkit::{install_fake_cuda, or_skip};

    /// Names the folder with NVRTC 12.9, from the Python package `nvidia-cuda-nvrtc-cu12`.
    const VARIABLE: &str = "TRIREME_TEST_NVRTC";

    /// Set to write the table instead of comparing it.
    const BLESS: &str = "TRIREME_BLESS";

    const TABLE: &str = "src/kernels/cuda/registers.txt";

    const CAPABILITIES: [i32; 4] = [80, 90, 100, 120];

    /// Kernels that are compiled for parameters: their headers and names, with common parameters and with those that need most registers.
    const INSTANCES: [(&str, &str, &str); 13] = [
        ("attention.cuh", "attention", "f32 f32 64 64"),
        ("attention.cuh", "attention_backward_keys_values", "f32 f32 64 64"),
        ("attention.cuh", "attention", "bf16 bf16 64 64"),
        ("attention.cuh", "attention_backward_queries", "bf16 bf16 64 64"),
        ("attention.cuh", "attention_backward_keys_values", "bf16 bf16 64 64"),
        ("attention.cuh", "attention", "f16 f16 64 64"),
        ("attention.cuh", "attention_backward_keys_values", "bf16 f32 128 128"),
        ("attention.cuh", "attention", "bf16 bf16 256 256"),
        ("attention.cuh", "attention_backward_keys", "bf16 bf16 256 256"),
        ("grouped.cuh", "grouped_matmul", "f32 false"),
        ("grouped.cuh", "grouped_matmul", "bf16 true"),
        ("grouped.cuh", "grouped_transposed_matmul", "bf16 1"),
        ("grouped.cuh", "grouped_transposed_matmul", "bf16 4"),
    ];

    /// NVRTC needs no GPU. No kernel causes a warning or spills registers. The table shows which registers a change costs. While it is of
    /// these sources and of this compiler, one generation is compiled: the others can have changed no more than that one.
    #[test]
    fn sources_compile_for_every_generation_without_warnings_and_spills() {
        let Some((installation, _folder)) = nvrtc() else { return };
        let sources = all_sources();
        let checksum = checksum(installation, &sources);
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(TABLE);
        let written = std::fs::read_to_string(&path).unwrap_or_default();
        let bless = std::env::var_os(BLESS).is_some();
        let is_current = !bless && written.lines().next() == Some(&checksum);
        let capabilities = if is_current { &CAPABILITIES[..1] } else { &CAPABILITIES };
        let table = format!("{checksum}\n{}", table(installation, &sources, capabilities));
        if bless {
            std::fs::write(path, table).unwrap();
        } else {
            let columns = 1 + capabilities.len();
            let cut = |line: &str| line.split(' ').take(columns).collect::<Vec<_>>().join(" ") + "\n";
            let expected: String = written.lines().map(cut).collect();
            assert!(table == expected, "{TABLE} is out of date: set {BLESS}=1 to write it; found\n{table}");
        }
    }

    /// Kernels of expressions are generated when they are first issued. This one has every operation.
    #[test]
    fn generated_sources_compile_without_warnings() {
        let Some((installation, _folder)) = nvrtc() else { return };
        let expression = Expression::record([true; 3], |[x, y, z]| {
            let exp = (x - x.row_max()).exp();
            let sum = (exp / exp.row_sum()).sqrt().ln() + y.tanh() * y.sigmoid();
            sum.if_less(2.0, -sum, z.ln_1p().abs())
        });
        let array = |shape: [usize; 2], dtype| Operand::of_host(&[], (Shape::from(shape), dtype));
        let input = |dtype, [row_stride, col_stride]: [usize; 2]| ExpressionInput {
            operand: array([4, 8], dtype),
            layout: InputLayout { row_stride, col_stride },
        };
        let call = ExpressionCall {
            name: "map_rows",
            cost: Cost::ZERO,
            expression,
            reads_output: true,
            inputs: smallvec![input(DType::Bf16, [8, 1]), input(DType::F16, [1, 0])],
            cols: 8,
            output: OperandMut::new(array([4, 8], DType::F32)),
        };
        let flat = ExpressionCall {
            expression: Expression::record([true; 1], |[x]| 2.0 * x),
            inputs: SmallVec::new(),
            ..call.with_operands(&mut |operand, _| *operand)
        };
        for call in [call, flat] {
            let source = generate(&call);
            for capability in CAPABILITIES {
                let architecture = architecture_of(capability);
                let (_, log) = compile(installation, (GENERATED, &source), &architecture, &[]).unwrap();
                assert_eq!(log, "", "{source}");
            }
        }
    }

    /// Returns NVRTC from the folder that the variable names, with stand-ins for the other libraries, and the folder that has them.
    fn nvrtc() -> Option<(&'static CudaInstallation, TempDir)> {
        let folder = std::env::var_os(VARIABLE).ok_or("TRIREME_TEST_NVRTC is not set");
        let nvrtc = or_skip("NVRTC", folder)?;
        let temporary = tempfile::tempdir().unwrap();
        let folder = temporary.path().to_owned();
        install_fake_cuda(&folder).unwrap();
        std::fs::remove_file(folder.join("libnvrtc.so.12")).unwrap();
        // The library looks for others in its folder.
        for entry in std::fs::read_dir(nvrtc).unwrap().flatten() {
            std::os::unix::fs::symlink(entry.path(), folder.join(entry.file_name())).unwrap();
        }
        let folders = CudaFolders { cache: folder.join("cache"), first: Some(folder), others: Vec::new() };
        let installation = CudaInstallation::load(&folders).unwrap();
        Some((installation, temporary))
    }

    /// Returns the sources of the table, with their names.
    fn all_sources() -> Vec<(&'static str, String)> {
        let instances = INSTANCES.map(|(header, kernel, parameters)| {
            let parameters: Vec<&str> = parameters.split(' ').collect();
            (GENERATED, instance_source(header, kernel, &parameters))
        });
        SOURCES.iter().map(|&(name, source)| (name, source.to_owned())).chain(instances).collect()
    }

    /// Returns a word that differs for other sources, capabilities, options and versions of the compiler.
    fn checksum(installation: &CudaInstallation, sources: &[(&str, String)]) -> String {
        let inputs = format!("{:?}", (HEADERS, sources, CAPABILITIES, OPTIONS, installation.nvrtc_version()));
        format!("checksum-{:08x}", crc32fast::hash(inputs.as_bytes()))
    }

    /// Returns a line per kernel: its registers for each capability. Asserts that the compiler says nothing else.
    fn table(
        installation: &CudaInstallation,
        sources: &[(&'static str, String)],
        capabilities: &[i32],
    ) -> String {
        let mut registers: BTreeMap<String, Vec<String>> = BTreeMap::new();
        let mut kernel = "";
        let logs = std::thread::scope(|scope| {
            let spawn = |&capability| {
                scope.spawn(move || -> Vec<String> {
                    let verbose = &["--ptxas-options=-v"];
                    let architecture = architecture_of(capability);
                    let log = |(name, source): &(_, String)| {
                        compile(installation, (*name, source), &architecture, verbose).unwrap().1
                    };
                    sources.iter().map(log).collect()
                })
            };
            let threads: Vec<_> = capabilities.iter().map(spawn).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        for line in logs.iter().flatten().flat_map(|log| log.lines()) {
            assert!(line.starts_with("ptxas"), "{line}");
            assert!(!line.contains("warning"), "{line}");
            if let Some((_, rest)) = line.split_once("entry function '") {
                kernel = rest.split('\'').next().unwrap();
            } else if line.contains("spill") {
                assert!(line.contains(" 0 bytes spill stores"), "{kernel}: {line}");
            } else if let Some((_, rest)) = line.split_once("Used ") {
                let num = rest.split(' ').next().unwrap().to_owned();
                registers.entry(kernel.to_owned()).or_default().push(num);
            }
        }
        let head =
            capabilities.iter().map(|&capability| architecture_of(capability)).collect::<Vec<_>>().join(" ");
        let lines = registers.iter().map(|(kernel, registers)| format!("{kernel} {}\n", registers.join(" ")));
        format!("kernel {head}\n{}", lines.collect::<String>())
    }
}
