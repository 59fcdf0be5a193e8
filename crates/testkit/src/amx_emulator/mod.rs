//! AMX on machines without it: a handler of SIGILL executes the instructions that the hardware refuses.
#![allow(unsafe_code)]

mod decode;
mod tiles;

use decode::{Registers, decode};
use libc::{c_int, c_void, siginfo_t, ucontext_t};
use std::cell::RefCell;
use std::mem;
use std::ptr;
use std::sync::{Once, OnceLock};
use tiles::Tiles;

thread_local! {
    // Initialized without a call, and without a destructor, so that a signal handler may access it.
    static TILES: RefCell<Tiles> = const { RefCell::new(Tiles::RELEASED) };
}

/// The process's action for SIGILL before the emulator was installed.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// Makes the AMX instructions for bf16 run in this process, on all its threads.
///
/// On hardware with AMX, the process gets the permission to use it, and nothing else changes. Elsewhere, a handler of SIGILL executes
/// `ldtilecfg`, `tilerelease`, `tilezero`, `tileloadd`, `tileloaddt1`, `tilestored` and `tdpbf16ps` as Intel's manual specifies. A product
/// of tiles takes microseconds. All other illegal instructions are passed to the previous handler, and so are instructions
/// that hardware would refuse: invalid configurations, configurations for a restart (`start_row`), and tiles whose shapes do not fit.
///
/// # Panics
/// If the system refuses the handler.
pub fn emulate_amx() {
    static INIT: Once = Once::new();
    INIT.call_once(|| {
        if !request_tile_permission() {
            install();
        }
    });
}

fn request_tile_permission() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const TILE_DATA: libc::c_long = 18;
    // SAFETY: the call has no effect on memory; a system without the request answers with an error.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0 }
}

fn install() {
    // SAFETY: the structure is plain data, for which zeros are valid.
    let (mut previous, mut action): (libc::sigaction, libc::sigaction) = unsafe { mem::zeroed() };
    // The handler runs on the stack of the thread that it interrupts.
    action.sa_flags = libc::SA_SIGINFO;
    action.sa_sigaction = on_illegal_instruction as *const () as usize;
    // SAFETY: both structures are valid, and the handler calls nothing but what handlers may call.
    unsafe {
        assert_eq!(libc::sigaction(libc::SIGILL, ptr::null(), &mut previous), 0, "SIGILL can be asked for");
        PREVIOUS.get_or_init(|| previous);
        assert_eq!(libc::sigaction(libc::SIGILL, &action, ptr::null_mut()), 0, "SIGILL can be handled");
    }
}

/// Handles SIGILL. Takes no lock and does not allocate.
extern "C" fn on_illegal_instruction(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the system passes a context of this type, which belongs to the handler until it returns.
    let registers = unsafe { &mut (*context.cast::<ucontext_t>()).uc_mcontext.gregs };
    // SAFETY: the registers belong to the program at the instruction that was refused.
    let executed = unsafe { execute(registers) };
    if executed.is_some() {
        // Executes the following AMX instructions as well, because a signal takes as long as many instructions.
        // SAFETY: the registers belong to the program at the next instruction, after the one before was executed.
        while unsafe { execute(registers) }.is_some() {}
    } else {
        let previous = PREVIOUS.get().expect("set before the handler is installed");
        // SAFETY: the arguments are the system's.
        unsafe { forward_signal(previous, signal, info, context) };
    }
}

/// Executes the instruction at the program's instruction pointer, and moves the pointer to the next instruction. Returns `None` if the
/// emulator does not execute the instruction.
///
/// # Safety
/// The registers must belong to a program that may execute the instruction.
unsafe fn execute(saved: &mut [libc::greg_t; 23]) -> Option<()> {
    use libc::*;
    // In the order of their numbers in instructions.
    const GENERAL: [c_int; 16] = [
        REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI, REG_R8, REG_R9, REG_R10,
        REG_R11, REG_R12, REG_R13, REG_R14, REG_R15,
    ];
    let read = |register: c_int| saved[register as usize] as u64;
    let registers = Registers { general: GENERAL.map(read), instruction: read(REG_RIP) };
    // SAFETY: the program was about to execute these bytes, and `decode` asks for none past the instruction.
    let (instruction, next) = decode(&registers, |address| unsafe { *(address as *const u8) })?;
    // SAFETY: the program's own loads and stores. No borrow is open: the handler does not interrupt itself.
    TILES.with_borrow_mut(|tiles| unsafe { tiles.execute(instruction) })?;
    saved[REG_RIP as usize] = next as greg_t;
    Some(())
}

/// Passes a signal to the action that the process had before.
///
/// # Safety
/// The arguments must be the arguments of a signal handler.
unsafe fn forward_signal(
    previous: &libc::sigaction,
    signal: c_int,
    info: *mut siginfo_t,
    context: *mut c_void,
) {
    let handler = previous.sa_sigaction;
    if handler == libc::SIG_DFL || handler == libc::SIG_IGN {
        // SAFETY: `previous` is an action that the system returned. The signal arrives when the handler returns.
        unsafe {
            libc::sigaction(signal, previous, ptr::null_mut());
            libc::raise(signal);
        }
    } else if previous.sa_flags & libc::SA_SIGINFO != 0 {
        type Handler = extern "C" fn(c_int, *mut siginfo_t, *mut c_void);
        // SAFETY: with this flag, the address points to such a function.
        let handler = unsafe { mem::transmute::<*const (), Handler>(handler as *const ()) };
        handler(signal, info, context);
    } else {
        // SAFETY: without the flag, the address points to a function of the signal alone.
        let handler = unsafe { mem::transmute::<*const (), extern "C" fn(c_int)>(handler as *const ()) };
        handler(signal);
    }
}

#[cfg(test)]
mod tests;
