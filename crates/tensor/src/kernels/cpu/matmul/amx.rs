//! The AMX micro-kernel: bf16 products of tiles of 16 rows of 64 bytes.
//!
//! **Bound.** A product of two tiles (`tdpbf16ps`) takes the matrix unit 16 cycles, the load of a tile from the L1 cache 8, a store 16
//! (Intel 64 and IA-32 Architectures Optimization Reference Manual, on AMX). A step of [`STEP`] words loads two tiles of each operand for
//! four products: the loads take 32 cycles, the products 64. The kernel is therefore bound by the products: 65,536 floating-point
//! operations in 64 cycles. Each sum is accumulated once per step, which hides a product's latency of 52 cycles. The stores of a call take
//! as long as one step, so `len` should be many steps.
//!
//! A step reads 4 KiB, 64 bytes per cycle, which is the peak of the L2 cache: one of the operands should fit into the L1 cache. Rows that
//! do not start at a multiple of 64 bytes are read as two cache lines each. There are no software prefetches: no load waits for a product,
//! so the processor runs ahead with loads.
//!
//! **Arithmetic.** (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, TDPBF16PS.) Within each step of 16 words, the
//! products of low halves and the products of high halves are summed separately, one by one. The two sums are added, and the result is
//! added to the element. Every operation is in f32 and rounded to nearest even, whatever the thread's rounding mode. Denormal bf16
//! operands, sums and previous elements count as zero, and results are never denormal: values below 2^-126 are lost. A sum without terms
//! leaves an element unchanged.

use core::arch::asm;
use core::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
use std::marker::PhantomData;
use std::sync::OnceLock;

/// Rows per call.
pub(super) const ROWS: usize = 32;

/// Columns per call.
pub(super) const COLS: usize = 32;

/// Words of the inner dim per tile.
pub(super) const STEP: usize = 16;

/// Returns whether the machine has bf16 tiles and the system grants them to this process. The result is cached.
///
/// Linux grants a process the 8 KiB of tile state on request.
pub(crate) fn detect() -> bool {
    static GRANTED: OnceLock<bool> = OnceLock::new();
    *GRANTED.get_or_init(|| cfg!(target_os = "linux") && machine_has_tiles() && request_tiles())
}

#[allow(unused_unsafe)] // CPUID is a safe function only in compilers newer than the oldest supported one.
pub(crate) fn machine_has_tiles() -> bool {
    const OSXSAVE: u32 = 1 << 27;
    const AMX_TILE_AND_BF16: u32 = 1 << 24 | 1 << 22;
    const TILE_CONFIG_AND_DATA: u64 = 1 << 17 | 1 << 18;
    // SAFETY: every x86-64 machine has CPUID.
    let (leaf_max, feature_bits) = unsafe { (__cpuid(0).eax, __cpuid(1).ecx) };
    if leaf_max < 7 || feature_bits & OSXSAVE == 0 {
        return false;
    }
    // SAFETY: as above; the system has enabled XGETBV.
    let (extended, enabled) = unsafe { (__cpuid_count(7, 0).edx, _xgetbv(0)) };
    extended & AMX_TILE_AND_BF16 == AMX_TILE_AND_BF16
        && enabled & TILE_CONFIG_AND_DATA == TILE_CONFIG_AND_DATA
}

/// Calls `arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)` on Linux, for all threads.
fn request_tiles() -> bool {
    const ARCH_PRCTL: i64 = 158;
    let mut result = ARCH_PRCTL;
    // SAFETY: the system call changes no memory of the process, and only the three named registers.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") result,
            in("rdi") 0x1023,
            in("rsi") 18,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result == 0
}

/// The operand of `ldtilecfg`, which has room for more tiles than exist.
#[repr(C, align(64))]
struct TileConfigOperand {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 8],
    reserved_row_bytes: [u16; 8],
    rows: [u8; 8],
    reserved_rows: [u8; 8],
}

/// All eight tiles at full size.
static TILE_CONFIG: TileConfigOperand = TileConfigOperand {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64; 8],
    reserved_row_bytes: [0; 8],
    rows: [16; 8],
    reserved_rows: [0; 8],
};

/// The calling thread's tiles, configured until this is dropped.
///
/// At most one per thread, because dropping it releases the tiles. While tiles are configured, the system saves and restores them on every
/// context switch, so a kernel holds this only while it multiplies.
pub(crate) struct TileConfig {
    not_send: PhantomData<*const ()>,
}

impl TileConfig {
    /// Configures the tiles and sets them to zero.
    ///
    /// # Safety
    /// The process may execute AMX instructions: [`detect`] has returned true, or a test emulates them.
    pub(crate) unsafe fn load() -> Self {
        // SAFETY: guaranteed by the caller; the layout is valid.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &TILE_CONFIG, options(nostack, readonly, preserves_flags)) };
        TileConfig { not_send: PhantomData }
    }
}

impl Drop for TileConfig {
    fn drop(&mut self) {
        // SAFETY: the tiles were configured on this thread.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
    }
}

/// Computes `out = left panel`, or adds the product if `accumulate` is set, for [`ROWS`] rows and [`COLS`] columns of f32.
///
/// A word is a pair of bf16 that are adjacent along the inner dim, the first in the low half. `left` has rows of `len` words,
/// `left_row_bytes` apart. The panel has `len` contiguous rows of [`COLS`] words. The rows of `out` are `out_row_stride` elements apart. No
/// alignment is required. `len` is a multiple of [`STEP`].
///
/// # Safety
/// A [`TileConfig`] exists on this thread. The rows of `left` and the panel are readable, the rows of `out` are readable and writable, and
/// no other code writes to any of them.
pub(super) unsafe fn multiply(
    len: usize,
    left: *const u8,
    left_row_bytes: usize,
    panel: *const u32,
    out: *mut f32,
    out_row_stride: usize,
    accumulate: bool,
) {
    debug_assert!(len.is_multiple_of(STEP), "{len} words are not whole steps");
    let out_row_bytes = size_of::<f32>() * out_row_stride;
    // SAFETY: tiles 0 to 3 are the quarters of `out`, tiles 4 and 5 the halves of a step's left operand, tiles 6 and 7 the halves of its
    // right operand. Each load and store accesses 16 rows of 64 bytes that the caller guarantees.
    unsafe {
        asm!(
            "test {accumulate:e}, {accumulate:e}",
            "jnz 2f",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "jmp 3f",
            "2:",
            "tileloadd tmm0, [{out} + {out_row_bytes}*1]",
            "tileloadd tmm1, [{out} + {out_row_bytes}*1 + 64]",
            "tileloadd tmm2, [{lower_out} + {out_row_bytes}*1]",
            "tileloadd tmm3, [{lower_out} + {out_row_bytes}*1 + 64]",
            "3:",
            "test {steps}, {steps}",
            "jz 5f",
            // Loads are issued between products that do not need them, so that both units are busy.
            "4:",
            "tileloadd tmm4, [{left} + {left_row_bytes}*1]",
            "tileloadd tmm6, [{panel} + {panel_row_bytes}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{panel} + {panel_row_bytes}*1 + 64]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{lower_left} + {left_row_bytes}*1]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {left}, 64",
            "add {lower_left}, 64",
            "add {panel}, 2048",
            "dec {steps}",
            "jnz 4b",
            "5:",
            "tilestored [{out} + {out_row_bytes}*1], tmm0",
            "tilestored [{out} + {out_row_bytes}*1 + 64], tmm1",
            "tilestored [{lower_out} + {out_row_bytes}*1], tmm2",
            "tilestored [{lower_out} + {out_row_bytes}*1 + 64], tmm3",
            accumulate = in(reg) u32::from(accumulate),
            steps = inout(reg) len / STEP => _,
            left = inout(reg) left => _,
            lower_left = inout(reg) left.wrapping_add(ROWS / 2 * left_row_bytes) => _,
            left_row_bytes = in(reg) left_row_bytes,
            panel = inout(reg) panel => _,
            panel_row_bytes = in(reg) size_of::<u32>() * COLS,
            out = in(reg) out,
            lower_out = in(reg) out.wrapping_add(ROWS / 2 * out_row_stride),
            out_row_bytes = in(reg) out_row_bytes,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests;
