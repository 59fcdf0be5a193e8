//! Peak throughput of execution units and of memory: the bounds that kernels are compared with.

use super::simd::{SimdLevel, for_each_simd_level};
use super::{Cpu, SharedSlice};
use crate::precision::Precision;
use trireme_base::Traffic;

/// Number of words of memory per task of [`Cpu::stream`].
const STREAM_BLOCK: usize = 16 * 1024;

trireme_base::named! {
    /// An execution unit of the processor that matmuls use.
    pub enum ExecutionUnit {
        /// Separate multiplication and addition of f32 in the narrowest registers (128 bits on x86-64).
        MulAdd128 = "mul+add 128",
        /// Fused multiply-add of f32 in 256-bit registers (AVX2, FMA).
        Fma256 = "fma 256",
        /// Fused multiply-add of f32 in 512-bit registers (AVX-512).
        Fma512 = "fma 512",
        /// Dot products of bf16 pairs in 512-bit registers (AVX512-BF16).
        DotBf16 = "vdpbf16ps",
        /// Matmuls of bf16 tiles (AMX).
        TileBf16 = "tdpbf16ps",
    }
}

impl ExecutionUnit {
    /// Returns the unit that matmuls of a precision use at a SIMD level.
    pub fn of(simd_level: SimdLevel, precision: Precision) -> Self {
        match (simd_level, precision) {
            (SimdLevel::Portable, _) => ExecutionUnit::MulAdd128,
            (SimdLevel::Avx2, _) => ExecutionUnit::Fma256,
            (SimdLevel::Avx512Bf16, Precision::Bf16) => ExecutionUnit::DotBf16,
            (SimdLevel::AmxBf16, Precision::Bf16) => ExecutionUnit::TileBf16,
            (SimdLevel::Avx512 | SimdLevel::Avx512Bf16 | SimdLevel::AmxBf16, _) => ExecutionUnit::Fma512,
        }
    }

    /// Returns the lowest SIMD level that has the unit.
    pub fn min_simd_level(self) -> SimdLevel {
        match self {
            ExecutionUnit::MulAdd128 => SimdLevel::Portable,
            ExecutionUnit::Fma256 => SimdLevel::Avx2,
            ExecutionUnit::Fma512 => SimdLevel::Avx512,
            ExecutionUnit::DotBf16 => SimdLevel::Avx512Bf16,
            ExecutionUnit::TileBf16 => SimdLevel::AmxBf16,
        }
    }

    /// Returns the floating-point operations in one round of [`run`].
    fn operations(self) -> u64 {
        match self {
            ExecutionUnit::MulAdd128 => 12 * 4 * 2,
            ExecutionUnit::Fma256 => 12 * 8 * 2,
            ExecutionUnit::Fma512 => 24 * 16 * 2,
            ExecutionUnit::DotBf16 => 24 * 16 * 4,
            ExecutionUnit::TileBf16 => 4 * 16 * 16 * 32 * 2,
        }
    }
}

impl Cpu {
    /// Runs `rounds` rounds of a unit's instruction on all threads concurrently, and nothing else. Returns the number of floating-point
    /// operations. Panics if the SIMD level does not have the unit.
    pub(crate) fn run_unit(&self, unit: ExecutionUnit, rounds: u64) -> u64 {
        assert!(self.simd_level >= unit.min_simd_level(), "{unit} is beyond {}", self.simd_level);
        let num_threads = self.threads.num_threads();
        self.threads.run(num_threads, &|_| run(unit, rounds));
        num_threads as u64 * rounds * unit.operations()
    }

    /// Streams through memory with almost no arithmetic: updates one part in place, copies from one part to another, and only reads or only
    /// writes the remainder. Panics if `memory` has fewer words than the traffic.
    pub(crate) fn stream(&self, traffic: Traffic, memory: &mut [u32]) {
        let words = |bytes: usize| bytes / size_of::<u32>();
        let (updated, memory) = memory.split_at_mut(words(traffic.updated));
        let (read, memory) = memory.split_at_mut(words(traffic.read));
        let written = SharedSlice::new(&mut memory[..words(traffic.written)]);
        let (updated, read) = (SharedSlice::new(updated), &*read);
        let num_updates = updated.len.div_ceil(STREAM_BLOCK);
        let num_others = read.len().max(written.len).div_ceil(STREAM_BLOCK);
        self.threads.run(num_updates + num_others, &|index| {
            let part = |index: usize, len: usize| {
                let first = (index * STREAM_BLOCK).min(len);
                (first, STREAM_BLOCK.min(len - first))
            };
            if index < num_updates {
                let (first, len) = part(index, updated.len);
                // SAFETY: parts do not overlap.
                increment(self.simd_level, unsafe { updated.range(first, len) });
                return;
            }
            let (first, len) = part(index - num_updates, read.len());
            let from = &read[first..first + len];
            let (first, len) = part(index - num_updates, written.len);
            // SAFETY: parts do not overlap.
            copy_or_touch(self.simd_level, from, unsafe { written.range(first, len) });
        });
    }
}

for_each_simd_level! {
    fn increment(x: &mut [u32]) {
        x.iter_mut().for_each(|x| *x = x.wrapping_add(1));
    }

    fn copy_or_touch(from: &[u32], to: &mut [u32]) {
        let num_copies = from.len().min(to.len());
        let ((from, read), (to, written)) = (from.split_at(num_copies), to.split_at_mut(num_copies));
        to.iter_mut().zip(from).for_each(|(to, from)| *to = from.wrapping_add(1));
        written.fill(1);
        std::hint::black_box(read.iter().fold(0_u32, |sum, &x| sum ^ x));
    }
}

/// Runs the unit's instruction once per round for each accumulator. There are enough accumulators to hide the latency of the instruction:
/// an accumulator is reused after at least 6 cycles, the latency is 4 or 5 cycles. For tiles, these are 64 and 52 cycles.
#[cfg(target_arch = "x86_64")]
fn run(unit: ExecutionUnit, rounds: u64) {
    use super::matmul::amx::TileConfig;
    use std::arch::asm;

    /// Words that are small and not subnormal as f32 and as two bf16, so that sums stay finite.
    static FACTORS: [u32; 256] = [0x3a83_3a83; 256];

    macro_rules! repeat {
        (4 sums, $($rest:tt)+) => { repeat!("0,1,2,3", $($rest)+) };
        (12 sums, $($rest:tt)+) => { repeat!("0,1,2,3,4,5,6,7,8,9,10,11", $($rest)+) };
        (24 sums, $($rest:tt)+) => {
            repeat!("0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23", $($rest)+)
        };
        ($sums:literal, load $($load:literal),+; zero $zero:literal; then $($operation:literal),+) => {
            asm!(
                $($load,)+
                concat!(".irp i, ", $sums), $zero, ".endr",
                "2:",
                concat!(".irp i, ", $sums), $($operation,)+ ".endr",
                "dec rcx",
                "jnz 2b",
                in("rsi") FACTORS.as_ptr(), in("rdx") 64, inout("rcx") rounds.max(1) => _,
                clobber_abi("sysv64"), options(readonly, nostack),
            )
        };
    }
    // SAFETY: the machine has the unit, as `Cpu::run_unit` has checked. The code reads `FACTORS` and changes only registers that a call may
    // change.
    unsafe {
        match unit {
            ExecutionUnit::MulAdd128 => {
                repeat!(12 sums, load "movups xmm15, [rsi]"; zero "xorps xmm\\i, xmm\\i";
                    then "movaps xmm14, xmm15", "mulps xmm14, xmm15", "addps xmm\\i, xmm14");
            }
            ExecutionUnit::Fma256 => {
                repeat!(12 sums, load "vmovups ymm15, [rsi]"; zero "vxorps ymm\\i, ymm\\i, ymm\\i";
                    then "vfmadd231ps ymm\\i, ymm15, ymm15");
            }
            ExecutionUnit::Fma512 => {
                repeat!(24 sums, load "vmovups zmm31, [rsi]"; zero "vpxord zmm\\i, zmm\\i, zmm\\i";
                    then "vfmadd231ps zmm\\i, zmm31, zmm31");
            }
            ExecutionUnit::DotBf16 => {
                repeat!(24 sums, load "vmovups zmm31, [rsi]"; zero "vpxord zmm\\i, zmm\\i, zmm\\i";
                    then "vdpbf16ps zmm\\i, zmm31, zmm31");
            }
            ExecutionUnit::TileBf16 => {
                let _tiles = TileConfig::load();
                repeat!(4 sums, load "tileloadd tmm4, [rsi + rdx*1]", "tileloadd tmm5, [rsi + rdx*1]";
                    zero "tilezero tmm\\i"; then "tdpbf16ps tmm\\i, tmm4, tmm5");
            }
        }
        if unit > ExecutionUnit::MulAdd128 {
            asm!("vzeroupper", clobber_abi("sysv64"), options(nomem, nostack));
        }
    }
}

/// The same in portable Rust.
#[cfg(not(target_arch = "x86_64"))]
fn run(_: ExecutionUnit, rounds: u64) {
    let factor = std::hint::black_box(1e-3_f32);
    let mut sums = [[0.0_f32; 4]; 12];
    for _ in 0..rounds {
        let product = std::hint::black_box(factor) * factor;
        sums.iter_mut().flatten().for_each(|sum| *sum += product * factor);
    }
    std::hint::black_box(sums);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::cpu::threads::ThreadPool;

    fn cpu(num_threads: usize) -> Cpu {
        Cpu::new(ThreadPool::new(num_threads).unwrap(), SimdLevel::detect())
    }

    #[test]
    fn every_unit_of_the_machine_runs() {
        for num_threads in [1, 3] {
            let cpu = cpu(num_threads);
            for unit in ExecutionUnit::ALL.into_iter().filter(|unit| unit.min_simd_level() <= cpu.simd_level)
            {
                assert_eq!(cpu.run_unit(unit, 10), num_threads as u64 * 10 * unit.operations());
            }
        }
    }

    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    #[test]
    fn tiles_run_where_they_are_emulated() {
        trireme_testkit::emulate_amx();
        let cpu = Cpu { simd_level: SimdLevel::AmxBf16, ..cpu(2) };
        assert_eq!(cpu.run_unit(ExecutionUnit::TileBf16, 3), 2 * 3 * ExecutionUnit::TileBf16.operations());
    }

    #[test]
    fn a_unit_beyond_the_level_is_refused() {
        let cpu = Cpu { simd_level: SimdLevel::Portable, ..cpu(1) };
        let run = std::panic::AssertUnwindSafe(|| cpu.run_unit(ExecutionUnit::Fma256, 1));
        assert!(std::panic::catch_unwind(run).is_err());
    }

    #[test]
    fn every_level_and_precision_has_a_unit_that_the_level_has() {
        for simd_level in SimdLevel::ALL {
            for precision in Precision::ALL {
                assert!(
                    ExecutionUnit::of(simd_level, precision).min_simd_level() <= simd_level,
                    "{simd_level} {precision}"
                );
            }
        }
    }

    #[test]
    fn a_stream_goes_through_every_word_once() {
        let len = 2 * STREAM_BLOCK + 7;
        for (read, updated, written) in [(0, 0, 0), (len, 0, 5), (5, 7, len), (3, len, 3), (len, len, len)] {
            let bytes = |words: usize| words * size_of::<u32>();
            let traffic = Traffic { read: bytes(read), updated: bytes(updated), written: bytes(written) };
            assert_eq!(traffic.extent(), bytes(read + updated + written));
            assert_eq!(traffic.moved(), bytes(read + 2 * updated + written));
            let mut memory = vec![4; read + updated + written + 1];
            cpu(2).stream(traffic, &mut memory);
            let (found_updated, rest) = memory.split_at(updated);
            let (found_read, rest) = rest.split_at(read);
            let (found_written, rest) = rest.split_at(written);
            assert!(found_updated.iter().all(|&word| word == 5));
            assert!(found_read.iter().all(|&word| word == 4));
            let copies = read.min(written);
            assert!(found_written[..copies].iter().all(|&word| word == 5));
            assert!(found_written[copies..].iter().all(|&word| word == 1));
            assert_eq!(rest, [4]);
        }
    }
}
