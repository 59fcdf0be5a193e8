use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::io::Write;
use std::ops::Deref;
use std::path::PathBuf;
use trireme_base::{Journal, JournalEntry};
use trireme_tensor::{BackendKind, Device, DeviceError, DeviceOptions};

/// Environment variable with the folder for traces.
const VARIABLE: &str = "TRIREME_KERNEL_TRACE";

/// A device for a test, with an optional trace of kernels. If `TRIREME_KERNEL_TRACE` names a folder, the names of the kernels that the test
/// has called are appended to a file `SUITE.MODULE.BACKEND` in that folder. `cargo xtask kernels` reads these files to list the tests of
/// each kernel.
#[derive(Debug)]
pub struct TracedDevice {
    device: Device,
    trace: Option<(Journal, PathBuf)>,
}

impl TracedDevice {
    /// Opens a device with these options.
    ///
    /// # Errors
    /// As [`Device::open`].
    pub fn open(options: DeviceOptions) -> Result<Self, DeviceError> {
        let device = Device::open(options)?;
        let trace = std::env::var_os(VARIABLE).map(|folder| {
            let journal = Journal::default();
            device.keep_journal(&journal);
            (journal, PathBuf::from(folder).join(file_name(options.backend)))
        });
        Ok(TracedDevice { device, trace })
    }
}

impl Deref for TracedDevice {
    type Target = Device;

    fn deref(&self) -> &Device {
        &self.device
    }
}

impl Drop for TracedDevice {
    fn drop(&mut self) {
        let Some((journal, path)) = &self.trace else { return };
        let kernels: BTreeSet<&str> =
            journal.take().into_iter().filter_map(|(entry, _)| kernel(entry)).collect();
        let lines: String = kernels.into_iter().map(|kernel| format!("{kernel}\n")).collect();
        let file = OpenOptions::new().append(true).create(true).open(path);
        file.and_then(|mut file| file.write_all(lines.as_bytes()))
            .expect("the folder for traces can be written to");
    }
}

fn kernel(entry: JournalEntry) -> Option<&'static str> {
    match entry {
        JournalEntry::Kernel(call) => Some(call.kernel),
        _ => None,
    }
}

/// Returns the name `SUITE.MODULE.BACKEND` for the test that runs on this thread.
fn file_name(backend: BackendKind) -> String {
    let program = std::env::current_exe().unwrap_or_default();
    let program = program.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    // Cargo appends a hash to the name of a suite.
    let suite = program.rsplit_once('-').map_or(&*program, |(suite, _)| suite);
    let thread = std::thread::current();
    let test = thread.name().unwrap_or_default();
    let module = test.split("::").next().unwrap_or_default();
    let backend = match backend {
        BackendKind::Cpu => "cpu",
        BackendKind::Detached(_) => "detached",
        BackendKind::Cuda(_) => "cuda",
    };
    format!("{suite}.{module}.{backend}")
}
