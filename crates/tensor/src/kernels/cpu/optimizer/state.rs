//! Values in fewer bits than f32: optimizer state, and parameters in bf16.
//!
//! Rounding is stochastic and unbiased: with rounding to nearest, a moment that changes by less than half a unit per step would never
//! change (see docs/optimizers.md for figures). A value that the format represents is unchanged, so that a state can be converted to f32
//! and back without loss.

use crate::kernels::cpu::simd::{SimdLevel, for_each_simd_level};
use crate::kernels::cpu::{Cpu, SharedSlice};
use std::ops::Range;
use trireme_base::Bf16;

/// Number of elements that share the quantization step of their 8-bit codes.
pub(super) const BLOCK_LEN: usize = 256;

/// Larger values are clamped to this, so that steps can be rounded up.
const LARGEST: f32 = 3e38;

/// Number of positive and of negative codes.
const SIGNED_LEVELS: f32 = 127.0;

/// Number of codes of square roots.
const ROOT_LEVELS: f32 = 255.0;

/// Distance from the largest code, in codes, within which values get that code. Steps are rounded up, so the quotient of a block's largest
/// value and its step may be smaller than the largest code, but by less than this.
const SNAP: f32 = 0.01;

/// Smallest step that values are divided by. Smaller steps are rounded to 0.
const STEP_MIN: f32 = 1e-30;

trireme_base::named! {
    /// The dtype of optimizer state.
    pub enum StateDType {
        /// f32.
        F32 = "f32",
        /// bf16 with stochastic rounding.
        Bf16 = "bf16",
        /// One byte per value, and one f32 per up to 256 of them (Dettmers et al., "8-bit optimizers via block-wise quantization", 2022,
        /// with linear codes and stochastic rounding). Signed values are multiples of 1/127 of the block's largest magnitude. Second
        /// moments are stored by their square roots, as multiples of 1/255 of the largest root; at least one multiple if they are not 0.
        Int8 = "int8",
    }
}

impl StateDType {
    /// Returns the bytes of `len` elements of one piece.
    pub(crate) fn num_bytes(self, len: usize) -> usize {
        match self {
            StateDType::F32 => len * size_of::<f32>(),
            StateDType::Bf16 => len * size_of::<Bf16>(),
            StateDType::Int8 => len + num_blocks(len) * size_of::<f32>(),
        }
    }
}

pub(crate) fn num_blocks(len: usize) -> usize {
    len.div_ceil(BLOCK_LEN)
}

/// A state that tasks divide into pieces.
#[derive(Clone, Copy)]
pub(crate) enum StateSlice<'a> {
    Absent,
    F32(SharedSlice<'a, f32>),
    Bf16(SharedSlice<'a, Bf16>),
    Int8 { codes: SharedSlice<'a, u8>, steps: SharedSlice<'a, f32>, is_second_moment: bool },
}

impl<'a> StateSlice<'a> {
    /// Returns the elements `range`, whose first block is `block`.
    ///
    /// # Safety
    /// No other live reference covers these elements or their blocks.
    pub(super) unsafe fn piece(&self, range: Range<usize>, block: usize) -> PieceState<'a> {
        let (start, len) = (range.start, range.len());
        // SAFETY: guaranteed by the caller.
        unsafe {
            match self {
                StateSlice::Absent => PieceState::Absent,
                StateSlice::F32(values) => PieceState::F32(values.range(start, len)),
                StateSlice::Bf16(values) => PieceState::Bf16(values.range(start, len)),
                StateSlice::Int8 { codes, steps, is_second_moment } => PieceState::Int8 {
                    codes: codes.range(start, len),
                    steps: steps.range(block, num_blocks(len)),
                    is_second_moment: *is_second_moment,
                },
            }
        }
    }
}

pub(super) enum PieceState<'a> {
    Absent,
    F32(&'a mut [f32]),
    Bf16(&'a mut [Bf16]),
    Int8 { codes: &'a mut [u8], steps: &'a mut [f32], is_second_moment: bool },
}

impl PieceState<'_> {
    /// Converts a block to f32.
    pub(super) fn load(&self, simd_level: SimdLevel, block: usize, out: &mut [f32]) {
        let range = block * BLOCK_LEN..block * BLOCK_LEN + out.len();
        match self {
            PieceState::Absent => {}
            PieceState::F32(values) => out.copy_from_slice(&values[range]),
            PieceState::Bf16(values) => load_bf16(simd_level, &values[range], out),
            PieceState::Int8 { codes, steps, is_second_moment: true } => {
                load_roots(simd_level, &codes[range], steps[block], out);
            }
            PieceState::Int8 { codes, steps, is_second_moment: false } => {
                load_signed(simd_level, &codes[range], steps[block], out);
            }
        }
    }

    /// Sets a block, which begins at `position` in its unit.
    pub(super) fn store(
        &mut self,
        simd_level: SimdLevel,
        block: usize,
        values: &[f32],
        rounding_seed: u32,
        position: usize,
    ) {
        let range = block * BLOCK_LEN..block * BLOCK_LEN + values.len();
        let (seed, position) = seed_and_position(rounding_seed, position);
        match self {
            PieceState::Absent => {}
            PieceState::F32(kept) => kept[range].copy_from_slice(values),
            PieceState::Bf16(kept) => store_bf16(simd_level, values, &mut kept[range], seed, position),
            PieceState::Int8 { codes, steps, is_second_moment: true } => {
                steps[block] = store_roots(simd_level, values, &mut codes[range], seed, position);
            }
            PieceState::Int8 { codes, steps, is_second_moment: false } => {
                steps[block] = store_signed(simd_level, values, &mut codes[range], seed, position);
            }
        }
    }
}

impl Cpu {
    pub(crate) fn round_stochastically(&self, x: &[f32], seed: u32, position: usize, y: &mut [Bf16]) {
        assert_eq!(x.len(), y.len());
        self.for_each_block(y, |first, y| {
            let (seed, position) = seed_and_position(seed, position + first);
            store_bf16(self.simd_level, &x[first..first + y.len()], y, seed, position);
        });
    }
}

/// Splits a 64-bit position for [`random_bits`]: returns the seed, changed by the high bits, which are mostly 0, and the low bits.
fn seed_and_position(seed: u32, position: usize) -> (u32, u32) {
    (seed ^ ((position as u64 >> 32) as u32).wrapping_mul(0x85eb_ca6b), position as u32)
}

/// Returns 32 random bits, a function of seed and position (constants: Wellons, "Prospecting for hash functions", 2018).
#[inline(always)]
fn random_bits(seed: u32, position: u32) -> u32 {
    let mut bits = position.wrapping_mul(0x9e37_79b1) ^ seed;
    bits = (bits ^ (bits >> 16)).wrapping_mul(0x7feb_352d);
    bits = (bits ^ (bits >> 15)).wrapping_mul(0x846c_a68b);
    bits ^ (bits >> 16)
}

/// Rounds a number from 0 to 255 stochastically: adds a random shift between -1/2 and 1/2 and rounds to nearest. Integers are unchanged,
/// because the magnitude of the shift is less than 1/2.
///
/// Avoids a cast, because saturating casts do not become SIMD code. Adding 2^23 leaves the nearest integer in the low bits.
#[inline(always)]
fn round_code(value: f32, bits: u32) -> u8 {
    const ROUNDER: f32 = 8_388_608.0;
    let shift = (bits >> 20) as f32 * (1.0 / 4096.0) + (0.5 / 4096.0 - 0.5);
    ((value + shift) + ROUNDER).to_bits() as u8
}

/// Returns the largest magnitude. Compares integers, because a maximum of floats does not become SIMD code.
#[inline(always)]
fn magnitude_max(values: &[f32]) -> f32 {
    let bits = values.iter().fold(0_u32, |most, value| most.max(value.to_bits() & 0x7fff_ffff));
    f32::from_bits(bits).min(LARGEST)
}

/// Returns the value of code 1: `largest / levels`, rounded up to 16 significant bits, so that multiples are exact; 0 if it is too small.
#[inline(always)]
fn step_of(largest: f32, levels: f32) -> f32 {
    let step = largest / levels;
    if step < STEP_MIN { 0.0 } else { f32::from_bits((step.to_bits() + 0xff) & !0xff) }
}

for_each_simd_level! {
    fn load_bf16(values: &[Bf16], out: &mut [f32]) {
        out.iter_mut().zip(values).for_each(|(out, value)| *out = value.to_f32());
    }

    fn store_bf16(values: &[f32], kept: &mut [Bf16], seed: u32, position: u32) {
        for (index, (kept, value)) in kept.iter_mut().zip(values).enumerate() {
            let bits = random_bits(seed, position.wrapping_add(index as u32)) & 0xffff;
            let rounded = value.to_bits().wrapping_add(bits);
            // The addition could turn a NaN into another value.
            let rounded = if value.is_nan() { value.to_bits() | 0x0040_0000 } else { rounded };
            *kept = Bf16::from_bits((rounded >> 16) as u16);
        }
    }

    fn load_signed(codes: &[u8], step: f32, out: &mut [f32]) {
        out.iter_mut().zip(codes).for_each(|(out, &code)| *out = (f32::from(code) - 128.0) * step);
    }

    fn store_signed(values: &[f32], codes: &mut [u8], seed: u32, position: u32) -> f32 {
        let step = step_of(magnitude_max(values), SIGNED_LEVELS);
        // Dividing by infinity gives 0 for all values if there is no step.
        let divisor = if step == 0.0 { f32::INFINITY } else { step };
        for (index, (code, value)) in codes.iter_mut().zip(values).enumerate() {
            let bits = random_bits(seed, position.wrapping_add(index as u32));
            let exact = value / divisor;
            let exact = if exact > SIGNED_LEVELS - SNAP { SIGNED_LEVELS } else { exact };
            let exact = if exact < SNAP - SIGNED_LEVELS { -SIGNED_LEVELS } else { exact };
            *code = round_code(exact + 128.0, bits);
        }
        step
    }

    fn load_roots(codes: &[u8], step: f32, out: &mut [f32]) {
        for (out, &code) in out.iter_mut().zip(codes) {
            let root = f32::from(code) * step;
            *out = root * root;
        }
    }

    fn store_roots(values: &[f32], codes: &mut [u8], seed: u32, position: u32) -> f32 {
        let step = step_of(magnitude_max(values).sqrt(), ROOT_LEVELS);
        let divisor = if step == 0.0 { f32::INFINITY } else { step };
        for (index, (code, value)) in codes.iter_mut().zip(values).enumerate() {
            let bits = random_bits(seed, position.wrapping_add(index as u32));
            let exact = value.sqrt() / divisor;
            let exact = if exact > ROOT_LEVELS - SNAP { ROOT_LEVELS } else { exact };
            // Values that are not zero must not become zero, because updates are divided by them.
            let exact = if *value > 0.0 && exact < 1.0 { 1.0 } else { exact };
            *code = round_code(exact, bits);
        }
        step
    }
}
