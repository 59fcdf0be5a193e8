//! Safe wrappers of the MPI library's functions.
#![allow(unsafe_code)]

use mpi_sys::{
    MPI_Comm, MPI_Comm_dup, MPI_Comm_get_attr, MPI_Comm_rank, MPI_Comm_set_errhandler, MPI_Comm_size,
    MPI_Error_string, MPI_Finalize, MPI_Finalized, MPI_Get_count, MPI_Init_thread, MPI_Initialized,
    MPI_Irecv, MPI_Isend, MPI_MAX_ERROR_STRING, MPI_Query_thread, MPI_Request, MPI_SUCCESS, MPI_Status,
    MPI_TAG_UB, MPI_Test, RSMPI_COMM_WORLD, RSMPI_ERRORS_RETURN, RSMPI_THREAD_MULTIPLE, RSMPI_UINT8_T,
};
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Largest tag that every MPI library supports (MPI 4.1, section 9.1.2).
const GUARANTEED_TAG_MAX: u32 = 32_767;

/// Number of connection ends that are in use or ended with messages in flight. MPI cannot be finalized cleanly while there are any.
static NUM_OPEN: AtomicUsize = AtomicUsize::new(0);

/// The MPI library, initialized in this process for several threads.
pub(super) struct Library {
    rank: u32,
    size: u32,
    communicator: OnceLock<Result<Communicator, String>>,
}

/// A duplicate of MPI's world communicator, with its own tags.
pub(super) struct Communicator {
    handle: MPI_Comm,
    tag_max: u32,
}

// SAFETY: any thread may use a communicator if the process has MPI_THREAD_MULTIPLE, which `Library::start` ensures.
unsafe impl Send for Communicator {}
// SAFETY: as above; no function called here changes a communicator.
unsafe impl Sync for Communicator {}

/// A message in flight. Dropping it does not cancel the message.
pub(super) struct Request(MPI_Request);

// SAFETY: any thread of a process that has MPI_THREAD_MULTIPLE may complete a request, one at a time.
unsafe impl Send for Request {}

/// The library reported an error.
pub(super) struct Failed;

impl Library {
    /// Initializes MPI in this process, on the first call.
    pub(super) fn start() -> Result<&'static Self, String> {
        static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
        LIBRARY.get_or_init(Library::init).as_ref().map_err(String::clone)
    }

    fn init() -> Result<Self, String> {
        let (mut is_initialized, mut level) = (0, 0);
        // SAFETY: MPI allows this call at any time. It writes one number.
        check("MPI_Initialized", unsafe { MPI_Initialized(&mut is_initialized) })?;
        if is_initialized == 0 {
            // SAFETY: MPI has not been started; it takes null for both arguments of `main` and writes one number.
            let result =
                unsafe { MPI_Init_thread(null_mut(), null_mut(), RSMPI_THREAD_MULTIPLE, &mut level) };
            check("MPI_Init_thread", result)?;
            // SAFETY: the function exists as long as the program.
            let result = unsafe { atexit(finish) };
            assert_eq!(result, 0, "the C library has room for 32 functions at least");
        } else {
            // SAFETY: MPI is initialized; the call writes one number.
            check("MPI_Query_thread", unsafe { MPI_Query_thread(&mut level) })?;
        }
        // SAFETY: a constant of the library.
        if level < unsafe { RSMPI_THREAD_MULTIPLE } {
            return Err(format!(
                "the MPI library supports threads only up to level {level}, but MPI_THREAD_MULTIPLE is required; use \
                 a library that was built with it"
            ));
        }
        let (mut rank, mut size) = (0, 0);
        // SAFETY: MPI is initialized; each function writes one number or sets how errors are reported.
        unsafe {
            check("MPI_Comm_set_errhandler", MPI_Comm_set_errhandler(RSMPI_COMM_WORLD, RSMPI_ERRORS_RETURN))?;
            check("MPI_Comm_rank", MPI_Comm_rank(RSMPI_COMM_WORLD, &mut rank))?;
            check("MPI_Comm_size", MPI_Comm_size(RSMPI_COMM_WORLD, &mut size))?;
        }
        Ok(Library { rank: rank as u32, size: size as u32, communicator: OnceLock::new() })
    }

    /// The rank of this process in MPI's world.
    pub(super) fn rank(&self) -> u32 {
        self.rank
    }

    /// Number of processes in MPI's world.
    pub(super) fn size(&self) -> u32 {
        self.size
    }

    /// The communicator of all groups. The first call is collective: all processes make it and wait for each other.
    pub(super) fn communicator(&self) -> Result<&Communicator, String> {
        self.communicator.get_or_init(Communicator::new).as_ref().map_err(String::clone)
    }
}

impl Communicator {
    fn new() -> Result<Self, String> {
        let mut handle = MaybeUninit::uninit();
        let (mut tag_max, mut has_tag_max) = (null_mut::<c_int>(), 0);
        // SAFETY: MPI is initialized, because a `Library` exists; the handle is written before it is read; the value of the attribute
        // MPI_TAG_UB is a pointer to a number that remains valid.
        unsafe {
            check("MPI_Comm_dup", MPI_Comm_dup(RSMPI_COMM_WORLD, handle.as_mut_ptr()))?;
            let handle = handle.assume_init();
            check("MPI_Comm_set_errhandler", MPI_Comm_set_errhandler(handle, RSMPI_ERRORS_RETURN))?;
            let value = (&raw mut tag_max).cast::<c_void>();
            let result = MPI_Comm_get_attr(handle, MPI_TAG_UB as c_int, value, &mut has_tag_max);
            check("MPI_Comm_get_attr", result)?;
            let tag_max = if has_tag_max == 0 { GUARANTEED_TAG_MAX } else { *tag_max as u32 };
            Ok(Communicator { handle, tag_max: tag_max.max(GUARANTEED_TAG_MAX) })
        }
    }

    pub(super) fn tag_max(&self) -> u32 {
        self.tag_max
    }

    /// Starts to send `bytes`.
    ///
    /// # Safety
    /// The bytes must not move or change until the request has completed, or ever, if it does not complete.
    pub(super) unsafe fn send(&self, bytes: &[u8], to: u32, tag: u32) -> Result<Request, Failed> {
        let mut request = MaybeUninit::uninit();
        let (len, to, tag) = (length(bytes), to as c_int, tag as c_int);
        // SAFETY: the bytes are valid, and the caller keeps them; the request is written before it is read.
        unsafe {
            let bytes = bytes.as_ptr().cast();
            check_success(MPI_Isend(bytes, len, RSMPI_UINT8_T, to, tag, self.handle, request.as_mut_ptr()))?;
            Ok(Request(request.assume_init()))
        }
    }

    /// Starts to receive at most `bytes.len()` bytes.
    ///
    /// # Safety
    /// The bytes must not move, and no other code may access them, until the request has completed, or ever, if it does not complete.
    pub(super) unsafe fn receive(&self, bytes: &mut [u8], from: u32, tag: u32) -> Result<Request, Failed> {
        let mut request = MaybeUninit::uninit();
        let (len, from, tag) = (length(bytes), from as c_int, tag as c_int);
        // SAFETY: the bytes are valid, and the caller keeps them; the request is written before it is read.
        unsafe {
            let bytes = bytes.as_mut_ptr().cast();
            check_success(MPI_Irecv(
                bytes,
                len,
                RSMPI_UINT8_T,
                from,
                tag,
                self.handle,
                request.as_mut_ptr(),
            ))?;
            Ok(Request(request.assume_init()))
        }
    }

    /// Counts one more connection end as open.
    pub(super) fn open(&self) {
        NUM_OPEN.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts one connection end as closed cleanly.
    pub(super) fn close(&self) {
        NUM_OPEN.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Request {
    /// Tests whether the message has completed. Returns the number of bytes received, or an arbitrary number for a send. After completion
    /// or an error, MPI no longer uses the memory.
    pub(super) fn test(&mut self) -> Result<Option<usize>, Failed> {
        let (mut has_ended, mut num_bytes) = (0, 0);
        let mut status = MaybeUninit::<MPI_Status>::uninit();
        // SAFETY: the handle is a request or MPI's null request; the status is written before it is read.
        unsafe {
            check_success(MPI_Test(&mut self.0, &mut has_ended, status.as_mut_ptr()))?;
            if has_ended == 0 {
                return Ok(None);
            }
            check_success(MPI_Get_count(status.as_ptr(), RSMPI_UINT8_T, &mut num_bytes))?;
        }
        // Negative if the count is undefined, such as for a send.
        Ok(Some(usize::try_from(num_bytes).unwrap_or(0)))
    }
}

fn length(bytes: &[u8]) -> c_int {
    c_int::try_from(bytes.len()).expect("messages are cut into fragments")
}

fn check_success(result: c_int) -> Result<(), Failed> {
    if result == MPI_SUCCESS as c_int { Ok(()) } else { Err(Failed) }
}

fn check(function: &str, result: c_int) -> Result<(), String> {
    if result == MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = [0_u8; MPI_MAX_ERROR_STRING as usize];
    let mut len = 0;
    // SAFETY: the text has the length that the library requires.
    let known = unsafe { MPI_Error_string(result, text.as_mut_ptr().cast(), &mut len) };
    let len = usize::try_from(len).unwrap_or(0).min(text.len());
    let text = if known == MPI_SUCCESS as c_int { &text[..len] } else { &[] };
    Err(format!("{function} failed with error {result}: {}", String::from_utf8_lossy(text)))
}

// SAFETY: the declaration of the C standard.
unsafe extern "C" {
    /// Registers a function to be called when the process exits normally.
    fn atexit(function: extern "C" fn()) -> c_int;
}

/// Finalizes MPI, which waits for all processes. If a group failed, the process exits without it, which MPI's launcher reports.
extern "C" fn finish() {
    if NUM_OPEN.load(Ordering::Relaxed) > 0 {
        return;
    }
    let mut is_finalized = 0;
    // SAFETY: MPI is initialized in this process; no message is in flight, because all connections have ended.
    unsafe {
        if MPI_Finalized(&mut is_finalized) == MPI_SUCCESS as c_int && is_finalized == 0 {
            MPI_Finalize();
        }
    }
}
