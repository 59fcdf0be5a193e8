//! Modules: the shared libraries that the fake NVRTC has compiled.

use crate::block::{RUNTIME, Runtime, Thread};
use libloading::Library;
use std::ffi::{CStr, c_char, c_void};
use std::io::Write;

/// `FakeEntry` of `device.h`.
#[repr(C)]
struct Entry {
    name: *const c_char,
    call: extern "C" fn(*const *const c_void),
    num_arguments: usize,
    sizes: *const usize,
}

/// A kernel of a module.
#[derive(Debug, Clone, Copy)]
pub struct Kernel {
    pub(crate) call: extern "C" fn(*const *const c_void),
    pub(crate) switch: extern "C" fn(*const Thread),
    /// The size of each argument in bytes.
    pub(crate) sizes: &'static [usize],
}

/// A loaded module.
#[derive(Debug)]
pub(crate) struct Module {
    kernels: Vec<(&'static str, Kernel)>,
    _library: Library,
}

impl Module {
    /// Loads an image that the fake NVRTC has made.
    pub(crate) fn load(image: &[u8]) -> Result<Self, Box<dyn std::error::Error>> {
        let mut file = tempfile::NamedTempFile::new()?;
        file.write_all(image)?;
        // SAFETY: the fake NVRTC has compiled the library from the sources of kernels, with these functions and tables, and nothing else
        // runs when it is loaded. The names and sizes of kernels are constants of the library, which the module keeps.
        unsafe {
            let library = Library::new(file.path())?;
            library.get::<extern "C" fn(&Runtime)>(b"fake_attach\0")?(&RUNTIME);
            let switch = *library.get::<extern "C" fn(*const Thread)>(b"fake_switch\0")?;
            let num_kernels = **library.get::<*const usize>(b"fake_num_kernels\0")?;
            let entries = *library.get::<*const Entry>(b"fake_kernels\0")?;
            let kernels = std::slice::from_raw_parts(entries, num_kernels).iter();
            let kernels = kernels.map(|entry| {
                let sizes = std::slice::from_raw_parts(entry.sizes, entry.num_arguments);
                let name = CStr::from_ptr(entry.name).to_str().expect("names are those of functions");
                (name, Kernel { call: entry.call, switch, sizes })
            });
            Ok(Module { kernels: kernels.collect(), _library: library })
        }
    }

    /// Returns the kernel with this name.
    pub(crate) fn kernel(&self, name: &str) -> Option<Kernel> {
        self.kernels.iter().find(|(own, _)| *own == name).map(|(_, kernel)| *kernel)
    }
}

/// Returns the size of an ELF file from its header: section headers are at its end.
///
/// # Safety
/// `image` is the address of an ELF file of 64 bits in memory.
pub(crate) unsafe fn image_bytes(image: *const u8) -> usize {
    // SAFETY: a header of such a file has 64 bytes.
    let header = unsafe { std::slice::from_raw_parts(image, 64) };
    let sections = u64::from_le_bytes(header[0x28..0x30].try_into().expect("eight bytes")) as usize;
    let short = |at: usize| usize::from(u16::from_le_bytes([header[at], header[at + 1]]));
    sections + short(0x3a) * short(0x3c)
}
