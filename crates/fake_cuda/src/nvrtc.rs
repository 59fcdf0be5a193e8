//! NVRTC: compiles the sources of kernels with the host's C++ compiler, or with the real NVRTC to PTX.

use crate::Out;
use crate::module::image_of_ptx;
use libloading::Library;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, OsString, c_char, c_int};
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

use cudarc::nvrtc::sys::nvrtcResult::{self, *};

/// The language of CUDA for the host.
const DEVICE_HEADER: &str = include_str!("device.h");

/// Names the folder of the real NVRTC, which then compiles kernels to PTX.
pub const PTX_VARIABLE: &str = "FAKE_CUDA_PTX";

/// Names sanitizers of the C++ compiler, for kernels. The program that runs them must have been linked with, or preload, their library.
const SANITIZE_VARIABLE: &str = "FAKE_CUDA_SANITIZE";

/// A program, with the results of its compilation.
#[derive(Debug, Default)]
pub(crate) struct Program {
    pub(crate) source: String,
    headers: Vec<(String, String)>,
    pub(crate) image: Vec<u8>,
    log: Vec<u8>,
}

static PROGRAMS: Mutex<BTreeMap<usize, Program>> = Mutex::new(BTreeMap::new());

fn with<T>(program: usize, run: impl FnOnce(&mut Program) -> T) -> Option<T> {
    PROGRAMS.lock().unwrap_or_else(PoisonError::into_inner).get_mut(&program).map(run)
}

impl Program {
    /// Compiles for the host. On failure, the log says why.
    pub(crate) fn compile(&mut self) -> Result<(), Box<dyn std::error::Error>> {
        let folder = tempfile::tempdir()?;
        for (name, text) in &self.headers {
            std::fs::write(folder.path().join(name), text)?;
        }
        std::fs::write(folder.path().join("fake_device.h"), DEVICE_HEADER)?;
        let sanitizers = std::env::var(SANITIZE_VARIABLE).ok();
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
        let run = |arguments: &[&str], input: &str| {
            let mut command = Command::new(&compiler);
            // It may name the sanitizer's runtime. Kernels need it; the compiler would only be slower.
            command
                .current_dir(folder.path())
                .env_remove("LD_PRELOAD")
                .args(["-std=c++17", "-w"])
                .args(arguments);
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
            let mut child = command.spawn()?;
            // The compiler reads all its input before it writes more than a pipe holds.
            child.stdin.take().expect("piped").write_all(input.as_bytes())?;
            child.wait_with_output()
        };
        let expanded = run(&["-E", "-x", "c++", "-I.", "-include", "fake_device.h", "-"], &self.source)?;
        if !expanded.status.success() {
            self.log = expanded.stderr;
            return Err("the preprocessor has failed".into());
        }
        let expanded = String::from_utf8(expanded.stdout)?;
        let source = with_table(&expanded.replace("__global__", ""), &kernel_names(&expanded));
        let mut arguments =
            vec!["-x", "c++", "-fpreprocessed", "-O1", "-ffp-contract=off", "-fno-exceptions"];
        // Undefined behaviour ends a kernel. A GPU reports only addresses that are not a multiple of the size.
        arguments.extend(["-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"]);
        arguments.extend(["-fno-rtti", "-fPIC", "-shared", "-o", "kernels.so", "-"]);
        let sanitize = sanitizers.map(|names| format!("-fsanitize={names}"));
        arguments.extend(sanitize.as_deref());
        let compiled = run(&arguments, &source)?;
        self.log = compiled.stderr;
        if !compiled.status.success() {
            return Err("the compiler has failed".into());
        }
        self.image = std::fs::read(folder.path().join("kernels.so"))?;
        Ok(())
    }
}

impl Program {
    /// Compiles to PTX with the NVRTC of a folder.
    fn compile_to_ptx(
        &mut self,
        folder: OsString,
        options: &[String],
    ) -> Result<(), Box<dyn std::error::Error>> {
        type Handle = *mut std::ffi::c_void;
        let (source, mut handle) = (CString::new(&*self.source)?, std::ptr::null_mut());
        let text = |text: &String| CString::new(&**text);
        let names = self.headers.iter().map(|(name, _)| text(name)).collect::<Result<Vec<_>, _>>()?;
        let headers = self.headers.iter().map(|(_, header)| text(header)).collect::<Result<Vec<_>, _>>()?;
        let options = options.iter().map(text).collect::<Result<Vec<_>, _>>()?;
        let pointers = |texts: &[CString]| texts.iter().map(|text| text.as_ptr()).collect::<Vec<_>>();
        let (name_pointers, header_pointers, options) =
            (pointers(&names), pointers(&headers), pointers(&options));
        let num_headers = headers.len() as c_int;
        // SAFETY: the functions have these types in NVRTC 12. Strings and arrays outlive the calls, and buffers have the sizes that the
        // library tells.
        unsafe {
            let library = Library::new(PathBuf::from(folder).join("libnvrtc.so.12"))?;
            type Sources = *const *const c_char;
            let create: libloading::Symbol<
                '_,
                unsafe extern "C" fn(
                    &mut Handle,
                    *const c_char,
                    *const c_char,
                    c_int,
                    Sources,
                    Sources,
                ) -> c_int,
            > = library.get(b"nvrtcCreateProgram\0")?;
            let compile: libloading::Symbol<'_, unsafe extern "C" fn(Handle, c_int, Sources) -> c_int> =
                library.get(b"nvrtcCompileProgram\0")?;
            type GetSize = unsafe extern "C" fn(Handle, &mut usize) -> c_int;
            type GetText = unsafe extern "C" fn(Handle, *mut c_char) -> c_int;
            let read = |handle: Handle, get_size: &[u8], get: &[u8]| {
                let mut size = 0;
                library.get::<GetSize>(get_size)?(handle, &mut size);
                let mut text = vec![0_u8; size.max(1)];
                library.get::<GetText>(get)?(handle, text.as_mut_ptr().cast());
                text.pop();
                Ok::<_, libloading::Error>(text)
            };
            let created = create(
                &mut handle,
                source.as_ptr(),
                c"kernels.cu".as_ptr(),
                num_headers,
                header_pointers.as_ptr(),
                name_pointers.as_ptr(),
            );
            if created != 0 {
                return Err(format!("nvrtcCreateProgram returns {created}").into());
            }
            let compiled = compile(handle, options.len() as c_int, options.as_ptr());
            self.log = read(handle, b"nvrtcGetProgramLogSize\0", b"nvrtcGetProgramLog\0")?;
            let outcome = if compiled == 0 {
                self.image = image_of_ptx(&read(handle, b"nvrtcGetPTXSize\0", b"nvrtcGetPTX\0")?);
                Ok(())
            } else {
                Err(format!("nvrtcCompileProgram returns {compiled}").into())
            };
            library.get::<unsafe extern "C" fn(&mut Handle) -> c_int>(b"nvrtcDestroyProgram\0")?(&mut handle);
            // Its threads may still run.
            std::mem::forget(library);
            outcome
        }
    }
}

/// Returns the names of the kernels: what follows `__global__ void`, up to a parenthesis.
fn kernel_names(source: &str) -> Vec<&str> {
    let after = source.split("__global__").skip(1);
    let names = after.filter_map(|text| text.trim_start().strip_prefix("void")?.split('(').next());
    names.map(str::trim).collect()
}

/// Appends the table that `module` reads.
fn with_table(source: &str, names: &[&str]) -> String {
    let entries: String =
        names.iter().map(|name| format!("FakeCall<{name}>::entry(\"{name}\"),\n")).collect();
    let num_kernels = names.len();
    format!(
        "{source}\nextern \"C\" {{\nextern const FakeEntry fake_kernels[{num_kernels}] = {{\n{entries}}};\n\
         extern const size_t fake_num_kernels = {num_kernels};\n}}\n"
    )
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcVersion(major: Out<'_, c_int>, minor: Out<'_, c_int>) -> nvrtcResult {
    major.write(12);
    // The version is part of the key of caches, which must separate images of each kind.
    let kinds =
        [PTX_VARIABLE, SANITIZE_VARIABLE].map(|variable| c_int::from(std::env::var_os(variable).is_some()));
    minor.write(8 + kinds[0] + 2 * kinds[1]);
    NVRTC_SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcCreateProgram(
    program: Out<'_, usize>,
    source: *const c_char,
    _name: *const c_char,
    num_headers: c_int,
    headers: *const *const c_char,
    header_names: *const *const c_char,
) -> nvrtcResult {
    // SAFETY: the caller passes strings, and as many headers and names as it says.
    unsafe {
        let text = |text: *const c_char| CStr::from_ptr(text).to_string_lossy().into_owned();
        let headers = (0..num_headers as usize)
            .map(|index| (text(*header_names.add(index)), text(*headers.add(index))))
            .collect();
        let mut programs = PROGRAMS.lock().unwrap_or_else(PoisonError::into_inner);
        let handle = programs.last_key_value().map_or(1, |(last, _)| last + 1);
        program.write(handle);
        programs.insert(handle, Program { source: text(source), headers, ..Program::default() });
    }
    NVRTC_SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcDestroyProgram(program: Out<'_, usize>) -> nvrtcResult {
    // SAFETY: the caller passes the address of a program.
    let program = unsafe { program.assume_init_read() };
    let removed = PROGRAMS.lock().unwrap_or_else(PoisonError::into_inner).remove(&program);
    removed.map_or(NVRTC_ERROR_INVALID_PROGRAM, |_| NVRTC_SUCCESS)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcCompileProgram(
    program: usize,
    num_options: c_int,
    options: *const *const c_char,
) -> nvrtcResult {
    let mut compiler_options = Vec::new();
    for index in 0..num_options as usize {
        // SAFETY: the caller passes as many strings as it says.
        let option = unsafe { CStr::from_ptr(*options.add(index)) }.to_string_lossy();
        let known = ["--gpu-architecture=sm_", "--std=c++17", "--fmad=false"];
        if !known.iter().any(|known| option.starts_with(known)) {
            return NVRTC_ERROR_INVALID_OPTION;
        }
        compiler_options.push(option.replace("=sm_", "=compute_"));
    }
    // Compiles without the lock, so that programs compile in parallel.
    let copied = with(program, |program| Program {
        source: program.source.clone(),
        headers: program.headers.clone(),
        ..Program::default()
    });
    let Some(mut copied) = copied else { return NVRTC_ERROR_INVALID_PROGRAM };
    let result = match std::env::var_os(PTX_VARIABLE) {
        Some(folder) => copied.compile_to_ptx(folder, &compiler_options),
        None => copied.compile(),
    };
    if let Err(error) = &result {
        copied.log.extend(error.to_string().into_bytes());
    }
    with(program, |program| *program = copied);
    result.map_or(NVRTC_ERROR_COMPILATION, |()| NVRTC_SUCCESS)
}

/// Copies bytes to the caller, with a zero at the end if they are a text.
unsafe fn copy(bytes: &[u8], is_text: bool, to: *mut c_char) {
    // SAFETY: the caller has as much room as the function for the size has told.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.cast(), bytes.len());
        if is_text {
            *to.add(bytes.len()) = 0;
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetProgramLogSize(program: usize, size: Out<'_, usize>) -> nvrtcResult {
    let found = with(program, |program| {
        size.write(program.log.len() + 1);
    });
    found.map_or(NVRTC_ERROR_INVALID_PROGRAM, |()| NVRTC_SUCCESS)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetProgramLog(program: usize, log: *mut c_char) -> nvrtcResult {
    // SAFETY: as in `copy`.
    let found = with(program, |program| unsafe { copy(&program.log, true, log) });
    found.map_or(NVRTC_ERROR_INVALID_PROGRAM, |()| NVRTC_SUCCESS)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetCUBINSize(program: usize, size: Out<'_, usize>) -> nvrtcResult {
    let found = with(program, |program| {
        size.write(program.image.len());
    });
    found.map_or(NVRTC_ERROR_INVALID_PROGRAM, |()| NVRTC_SUCCESS)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetCUBIN(program: usize, image: *mut c_char) -> nvrtcResult {
    // SAFETY: as in `copy`.
    let found = with(program, |program| unsafe { copy(&program.image, false, image) });
    found.map_or(NVRTC_ERROR_INVALID_PROGRAM, |()| NVRTC_SUCCESS)
}
