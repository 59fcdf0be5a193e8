//! Modules: shared libraries that the fake NVRTC has compiled, or PTX of the real one.

use crate::block::{RUNTIME, Runtime};
use crate::launch::{CompiledKernel, Kernel, Thread};
use crate::ptx;
use libloading::Library;
use rustix::fs::{MemfdFlags, memfd_create};
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes of the header of an ELF file of 64 bits.
const ELF_HEADER_BYTES: usize = 64;

/// `FakeEntry` of `device.h`.
#[repr(C)]
struct Entry {
    name: *const c_char,
    call: extern "C" fn(*const *const c_void),
    num_arguments: usize,
    sizes: *const usize,
}

/// A module.
#[derive(Debug)]
pub(crate) struct Module {
    kernels: Vec<(String, Kernel)>,
    /// The library of compiled kernels, and its file. The loader takes a library for the loaded one of the same path, so no other file may
    /// have this number.
    _library: Option<(Library, File)>,
}

/// All modules by image. Modules are never unloaded: libraries of C++ with unique symbols cannot be, and each has no state but the threads
/// that run.
static MODULES: Mutex<Option<HashMap<Vec<u8>, Arc<Module>>>> = Mutex::new(None);

impl Module {
    /// Returns the module of an image that the fake NVRTC has made. Loads it when it is first asked for.
    pub(crate) fn of_image(image: &[u8]) -> Result<Arc<Self>, Box<dyn std::error::Error>> {
        let mut modules = MODULES.lock().unwrap_or_else(PoisonError::into_inner);
        let modules = modules.get_or_insert_default();
        if let Some(module) = modules.get(image) {
            return Ok(Arc::clone(module));
        }
        let module = Arc::new(Module::load(image)?);
        modules.insert(image.to_vec(), Arc::clone(&module));
        Ok(module)
    }

    fn load(image: &[u8]) -> Result<Self, Box<dyn std::error::Error>> {
        let text = image.get(ELF_HEADER_BYTES..).and_then(|text| std::str::from_utf8(text).ok());
        if let Some(text) = text {
            let kernels = ptx::parse(text)?;
            let kernels = kernels.into_iter().map(|kernel| (kernel.name.clone(), Kernel::Ptx(kernel)));
            return Ok(Module { kernels: kernels.collect(), _library: None });
        }
        // In memory: some file systems take long to replace files that were just deleted.
        let mut file = File::from(memfd_create("kernels", MemfdFlags::CLOEXEC)?);
        file.write_all(image)?;
        // SAFETY: the fake NVRTC has compiled the library from the sources of kernels, with these functions and tables, and nothing else
        // runs when it is loaded. The names and sizes of kernels are constants of the library, which the module keeps.
        unsafe {
            let library = Library::new(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
            library.get::<extern "C" fn(&Runtime)>(b"fake_attach\0")?(&RUNTIME);
            let switch = *library.get::<extern "C" fn(*const Thread)>(b"fake_switch\0")?;
            let num_kernels = **library.get::<*const usize>(b"fake_num_kernels\0")?;
            let entries = *library.get::<*const Entry>(b"fake_kernels\0")?;
            let kernels = std::slice::from_raw_parts(entries, num_kernels).iter();
            let kernels = kernels.map(|entry| {
                let sizes = std::slice::from_raw_parts(entry.sizes, entry.num_arguments);
                let name = CStr::from_ptr(entry.name).to_str().expect("names are those of functions");
                let kernel = CompiledKernel { call: entry.call, switch, sizes };
                (name.to_owned(), Kernel::Compiled(kernel))
            });
            Ok(Module { kernels: kernels.collect(), _library: Some((library, file)) })
        }
    }

    /// Returns the kernel with this name.
    pub(crate) fn kernel(&self, name: &str) -> Option<Kernel> {
        self.kernels.iter().find(|(own, _)| *own == name).map(|(_, kernel)| kernel.clone())
    }
}

/// Returns an image that holds PTX: a header of an ELF file of this size, without sections, and the text.
pub(crate) fn image_of_ptx(text: &[u8]) -> Vec<u8> {
    let mut image = vec![0; ELF_HEADER_BYTES];
    image[..4].copy_from_slice(b"\x7fELF");
    image[0x28..0x30].copy_from_slice(&((ELF_HEADER_BYTES + text.len()) as u64).to_le_bytes());
    image.extend(text);
    image
}

/// Returns the size of an ELF file from its header: section headers are at its end.
///
/// # Safety
/// `image` is the address of an ELF file of 64 bits in memory.
pub(crate) unsafe fn image_bytes(image: *const u8) -> usize {
    // SAFETY: such a file has a header.
    let header = unsafe { std::slice::from_raw_parts(image, ELF_HEADER_BYTES) };
    let sections = u64::from_le_bytes(header[0x28..0x30].try_into().expect("eight bytes")) as usize;
    let short = |at: usize| usize::from(u16::from_le_bytes([header[at], header[at + 1]]));
    sections + short(0x3a) * short(0x3c)
}
