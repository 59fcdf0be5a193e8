use super::*;
use std::arch::asm;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Returns the configuration for a product of 2 x 4 bf16 and 4 x 3 bf16, in the tiles 0 (sums), 1 and 2.
fn config() -> [u8; 64] {
    let mut bytes = [0; 64];
    bytes[0] = 1;
    for (tile, (rows, row_bytes)) in [(2, 12), (2, 8), (2, 12)].into_iter().enumerate() {
        (bytes[16 + 2 * tile], bytes[48 + tile]) = (row_bytes, rows);
    }
    bytes
}

/// Returns a pair of small integers in bf16.
fn pair(low: i16, high: i16) -> u32 {
    f32::from(low).to_bits() >> 16 | f32::from(high).to_bits()
}

#[test]
fn instructions_run_in_a_program() {
    emulate_amx();
    // Rows of four words, of which the tiles load two or three. The last word of each row belongs to another matrix.
    let left = [[pair(1, 2), pair(3, 4), 9, 9], [pair(5, 6), pair(7, 8), 9, 9]];
    let right = [[pair(1, 1), pair(1, 0), pair(0, 1), 9], [pair(1, 1), pair(0, 0), pair(-2, 3), 9]];
    let mut out = [[0.5_f32; 4]; 2];
    // SAFETY: rows of 16 bytes, two in each array; the tiles are released in the end.
    unsafe {
        asm!(
            "ldtilecfg [{config}]",
            "tileloadd tmm0, [{out} + {stride}*8]",
            "tileloaddt1 tmm1, [{past_left} + {stride}*8 - 32]",
            "tileloadd tmm2, [{right} + {stride}*8]",
            "tdpbf16ps tmm0, tmm1, tmm2",
            "tdpbf16ps tmm0, tmm1, tmm2",
            "tilestored [{out} + {stride}*8], tmm0",
            "tilezero tmm0",
            "tilerelease",
            config = in(reg) &config(),
            out = in(reg) &mut out,
            past_left = in(reg) left.as_ptr_range().end,
            right = in(reg) &right,
            stride = in(reg) 2_u64,
            out("tmm0") _, out("tmm1") _, out("tmm2") _,
            options(nostack),
        );
    }
    assert_eq!(out, [[20.5, 2.5, 16.5, 0.5], [52.5, 10.5, 32.5, 0.5]]);
}

static NUM_FORWARDED: AtomicUsize = AtomicUsize::new(0);

extern "C" fn count(_: c_int) {
    NUM_FORWARDED.fetch_add(1, Ordering::Relaxed);
}

extern "C" fn count_with_context(signal: c_int, _: *mut siginfo_t, context: *mut c_void) {
    assert!(signal == libc::SIGILL && !context.is_null());
    NUM_FORWARDED.fetch_add(10, Ordering::Relaxed);
}

#[test]
fn the_previous_handler_gets_forwarded_signals() {
    // SAFETY: the structure is plain data, for which zeros are valid.
    let mut previous: libc::sigaction = unsafe { mem::zeroed() };
    let mut context = 0_u8;
    let context: *mut c_void = ptr::from_mut(&mut context).cast();
    previous.sa_sigaction = count as *const () as usize;
    // SAFETY: neither function reads the context.
    unsafe { forward_signal(&previous, libc::SIGILL, ptr::null_mut(), context) };
    assert_eq!(NUM_FORWARDED.load(Ordering::Relaxed), 1);
    previous.sa_sigaction = count_with_context as *const () as usize;
    previous.sa_flags = libc::SA_SIGINFO;
    // SAFETY: as above.
    unsafe { forward_signal(&previous, libc::SIGILL, ptr::null_mut(), context) };
    assert_eq!(NUM_FORWARDED.load(Ordering::Relaxed), 11);
}

/// Environment variable for child processes that must end. Its value is the cause of their end.
const CHILD: &str = "TRIREME_TEST_ILLEGAL_INSTRUCTION";

#[test]
fn other_illegal_instructions_still_end_the_process() {
    if let Some(cause) = std::env::var_os(CHILD) {
        emulate_amx();
        // SAFETY: no register or memory changes before the process ends. `prctl` prevents a core dump.
        unsafe {
            libc::prctl(libc::PR_SET_DUMPABLE, 0);
            asm!("tilerelease", options(nomem, nostack));
            if cause == "signal" {
                libc::raise(libc::SIGILL);
            } else {
                asm!("ud2", options(noreturn));
            }
        }
    }
    let test = "amx_emulator::tests::other_illegal_instructions_still_end_the_process";
    let program = std::env::current_exe().expect("the test binary");
    let ends = |cause| {
        let child = Command::new(&program).args(["--exact", test]).env(CHILD, cause).output();
        let child = child.expect("a child runs");
        assert_eq!(child.status.signal(), Some(libc::SIGILL), "{cause}: {child:?}");
    };
    // A child that survives its cause must not start others.
    if std::env::var_os(CHILD).is_none() {
        ends("instruction");
        ends("signal");
    }
}
