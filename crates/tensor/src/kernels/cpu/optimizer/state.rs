//! Optimizer state in fewer bits than an f32.
//!
//! It is rounded at random, up or down so that the mean is right: to the nearest value, a moment that changes by less than
//! half a unit a step would never change (docs/optimizers.md has the figures). A value that the format has stays as it is,
//! so that a state goes through f32 and back without a change.

use crate::kernels::cpu::SharedSlice;
use crate::kernels::cpu::simd::{CpuFeatures, for_each_simd_level};
use std::ops::Range;
use trireme_base::Bf16;

/// Elements that share the step of their 8-bit codes.
pub(super) const BLOCK_LEN: usize = 256;

/// Larger values count as this, so that steps may be rounded up.
const LARGEST: f32 = 3e38;

/// Codes of either sign.
const SIGNED_LEVELS: f32 = 127.0;

/// Codes of roots.
const ROOT_LEVELS: f32 = 255.0;

/// So near to the largest code a value has that code, for steps are rounded up by less.
const SNAP: f32 = 0.01;

/// Steps below this cannot be divided by; what is so small counts as nothing.
const STEP_MIN: f32 = 1e-30;

trireme_base::named! {
    /// The type of optimizer state.
    pub enum StateDType {
        /// f32.
        F32 = "f32",
        /// bf16, rounded at random.
        Bf16 = "bf16",
        /// One byte, and an f32 for up to 256 of them (Dettmers et al., "8-bit optimizers via block-wise quantization", 2022,
        /// with linear codes, rounded at random): signed values as multiples of 1/127 of the block's largest, second moments
        /// by their roots, as multiples of 1/255 of the largest root, and at least one of them.
        Int8 = "int8",
    }
}

impl StateDType {
    /// Bytes of so many elements of one piece.
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
    Int8 { codes: SharedSlice<'a, u8>, steps: SharedSlice<'a, f32>, is_square: bool },
}

impl<'a> StateSlice<'a> {
    /// The elements `range`, whose first block is `block`.
    ///
    /// # Safety
    /// No other live reference reaches them or their blocks.
    pub(super) unsafe fn piece(&self, range: Range<usize>, block: usize) -> PieceState<'a> {
        let (start, len) = (range.start, range.len());
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                StateSlice::Absent => PieceState::Absent,
                StateSlice::F32(values) => PieceState::F32(values.range(start, len)),
                StateSlice::Bf16(values) => PieceState::Bf16(values.range(start, len)),
                StateSlice::Int8 { codes, steps, is_square } => PieceState::Int8 {
                    codes: codes.range(start, len),
                    steps: steps.range(block, num_blocks(len)),
                    is_square: *is_square,
                },
            }
        }
    }
}

pub(super) enum PieceState<'a> {
    Absent,
    F32(&'a mut [f32]),
    Bf16(&'a mut [Bf16]),
    Int8 { codes: &'a mut [u8], steps: &'a mut [f32], is_square: bool },
}

impl PieceState<'_> {
    /// Writes a block to f32s.
    pub(super) fn load(&self, features: CpuFeatures, block: usize, out: &mut [f32]) {
        let range = block * BLOCK_LEN..block * BLOCK_LEN + out.len();
        match self {
            PieceState::Absent => {}
            PieceState::F32(values) => out.copy_from_slice(&values[range]),
            PieceState::Bf16(values) => load_bf16(features, &values[range], out),
            PieceState::Int8 { codes, steps, is_square: true } => {
                load_roots(features, &codes[range], steps[block], out);
            }
            PieceState::Int8 { codes, steps, is_square: false } => {
                load_signed(features, &codes[range], steps[block], out);
            }
        }
    }

    /// Sets a block, which begins at `position` in its unit.
    pub(super) fn store(
        &mut self,
        features: CpuFeatures,
        block: usize,
        values: &[f32],
        noise: u32,
        position: usize,
    ) {
        let range = block * BLOCK_LEN..block * BLOCK_LEN + values.len();
        // The noise is a function of all bits of the position: the high ones, mostly 0, change the seed.
        let noise = noise ^ ((position as u64 >> 32) as u32).wrapping_mul(0x85eb_ca6b);
        let position = position as u32;
        match self {
            PieceState::Absent => {}
            PieceState::F32(kept) => kept[range].copy_from_slice(values),
            PieceState::Bf16(kept) => store_bf16(features, values, &mut kept[range], noise, position),
            PieceState::Int8 { codes, steps, is_square: true } => {
                steps[block] = store_roots(features, values, &mut codes[range], noise, position);
            }
            PieceState::Int8 { codes, steps, is_square: false } => {
                steps[block] = store_signed(features, values, &mut codes[range], noise, position);
            }
        }
    }
}

/// 32 random bits, a function of seed and position (constants: Wellons, "Prospecting for hash functions", 2018).
#[inline(always)]
fn random_bits(seed: u32, position: u32) -> u32 {
    let mut bits = position.wrapping_mul(0x9e37_79b1) ^ seed;
    bits = (bits ^ (bits >> 16)).wrapping_mul(0x7feb_352d);
    bits = (bits ^ (bits >> 15)).wrapping_mul(0x846c_a68b);
    bits ^ (bits >> 16)
}

/// Rounds a number from 0 to 255 up or down, and leaves whole numbers whole: twelve random bits and a half never make a tie.
///
/// No cast, for those that saturate are no SIMD code: added to 2^23, a number has its whole part in the low bits.
#[inline(always)]
fn round_at_random(value: f32, bits: u32) -> u8 {
    const WHOLE: f32 = 8_388_608.0;
    let shift = (bits >> 20) as f32 * (1.0 / 4096.0) + (0.5 / 4096.0 - 0.5);
    ((value + shift) + WHOLE).to_bits() as u8
}

/// The largest magnitude. As whole numbers, because a maximum of floats is no SIMD code.
#[inline(always)]
fn magnitude_max(values: &[f32]) -> f32 {
    let bits = values.iter().fold(0_u32, |most, value| most.max(value.to_bits() & 0x7fff_ffff));
    f32::from_bits(bits).min(LARGEST)
}

/// What a code stands for: `largest / levels`, rounded up to 16 bits of fraction, so that its multiples are exact; 0 where
/// it is too small.
#[inline(always)]
fn step_of(largest: f32, levels: f32) -> f32 {
    let step = largest / levels;
    if step < STEP_MIN { 0.0 } else { f32::from_bits((step.to_bits() + 0xff) & !0xff) }
}

for_each_simd_level! {
    fn load_bf16(values: &[Bf16], out: &mut [f32]) {
        out.iter_mut().zip(values).for_each(|(out, value)| *out = value.to_f32());
    }

    fn store_bf16(values: &[f32], kept: &mut [Bf16], noise: u32, position: u32) {
        for (index, (kept, value)) in kept.iter_mut().zip(values).enumerate() {
            let bits = random_bits(noise, position.wrapping_add(index as u32)) & 0xffff;
            *kept = Bf16::from_bits((value.to_bits().wrapping_add(bits) >> 16) as u16);
        }
    }

    fn load_signed(codes: &[u8], step: f32, out: &mut [f32]) {
        out.iter_mut().zip(codes).for_each(|(out, &code)| *out = (f32::from(code) - 128.0) * step);
    }

    fn store_signed(values: &[f32], codes: &mut [u8], noise: u32, position: u32) -> f32 {
        let step = step_of(magnitude_max(values), SIGNED_LEVELS);
        // Without a step all values count as nothing: infinity makes them so.
        let divisor = if step == 0.0 { f32::INFINITY } else { step };
        for (index, (code, value)) in codes.iter_mut().zip(values).enumerate() {
            let bits = random_bits(noise, position.wrapping_add(index as u32));
            let exact = value / divisor;
            let exact = if exact > SIGNED_LEVELS - SNAP { SIGNED_LEVELS } else { exact };
            let exact = if exact < SNAP - SIGNED_LEVELS { -SIGNED_LEVELS } else { exact };
            *code = round_at_random(exact + 128.0, bits);
        }
        step
    }

    fn load_roots(codes: &[u8], step: f32, out: &mut [f32]) {
        for (out, &code) in out.iter_mut().zip(codes) {
            let root = f32::from(code) * step;
            *out = root * root;
        }
    }

    fn store_roots(values: &[f32], codes: &mut [u8], noise: u32, position: u32) -> f32 {
        let step = step_of(magnitude_max(values).sqrt(), ROOT_LEVELS);
        let divisor = if step == 0.0 { f32::INFINITY } else { step };
        for (index, (code, value)) in codes.iter_mut().zip(values).enumerate() {
            let bits = random_bits(noise, position.wrapping_add(index as u32));
            let exact = value.sqrt() / divisor;
            let exact = if exact > ROOT_LEVELS - SNAP { ROOT_LEVELS } else { exact };
            // What is not zero does not become zero: updates are divided by it.
            let exact = if *value > 0.0 && exact < 1.0 { 1.0 } else { exact };
            *code = round_at_random(exact, bits);
        }
        step
    }
}
