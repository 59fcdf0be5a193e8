//! Modules: shared libraries that the fake NVRTC has compiled, or PTX of the real one.

use crate::block::{RUNTIME, Runtime};
use crate::launch::{CompiledKernel, Kernel, Thread};
use crate::ptx;
use libloading::Library;
use rustix::fs::{MemfdFlags, memfd_create};
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_void};
use std::fs::File;
use std::io::Write;
use std::mem::ManuallyDrop;
use std::os::fd::IntoRawFd;
use std::sync::{Mutex, PoisonError};

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

/// The kernels of an image.
#[derive(Debug)]
pub(crate) struct Module {
    kernels: Vec<(String, Kernel)>,
}

/// All modules by image. They stay loaded, because a library with unique symbols of C++ cannot be unloaded. Devices can share one, because
/// a kernel must not rely on earlier values of `__shared__` variables. Each takes a file descriptor and twice the memory of its image.
static MODULES: Mutex<BTreeMap<Vec<u8>, &Module>> = Mutex::new(BTreeMap::new());

impl Module {
    /// Returns the module of an image that the fake NVRTC has made. Loads the image on first use.
    pub(crate) fn of_image(image: &[u8]) -> Result<&'static Self, Box<dyn std::error::Error>> {
        let mut modules = MODULES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = modules.get(image) {
            return Ok(module);
        }
        let module: &Module = Box::leak(Box::new(Module::load(image)?));
        modules.insert(image.to_vec(), module);
        Ok(module)
    }

    fn load(image: &[u8]) -> Result<Self, Box<dyn std::error::Error>> {
        let text = image.get(ELF_HEADER_BYTES..).and_then(|text| std::str::from_utf8(text).ok());
        if let Some(text) = text {
            let kernels = ptx::parse(text)?;
            let kernels = kernels.into_iter().map(|kernel| (kernel.name.clone(), Kernel::Ptx(kernel)));
            return Ok(Module { kernels: kernels.collect() });
        }
        // A memfd: some file systems take long to create and delete a file for each module.
        let mut file = File::from(memfd_create(c"trireme-kernels", MemfdFlags::CLOEXEC)?);
        file.write_all(image)?;
        // The loader returns the loaded library for a path that it knows, so the descriptor must not be used again.
        let path = format!("/proc/self/fd/{}", file.into_raw_fd());
        // SAFETY: the fake NVRTC has compiled the library from the sources of kernels, with these functions and tables, and nothing else
        // runs when it is loaded. The names and sizes of kernels are constants of the library, which stays loaded.
        unsafe {
            let library = ManuallyDrop::new(Library::new(path)?);
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
            Ok(Module { kernels: kernels.collect() })
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
