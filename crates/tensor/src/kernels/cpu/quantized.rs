//! Block-wise quantization to integers of few bits, for messages.
//!
//! A block consists of its scale, which is the value of code 1 (f32, little-endian), followed by its codes in two's complement. A code
//! takes a byte, or half a byte: the high half then belongs to the element half a block later, so that both halves are read and written in
//! full registers. A block with a value that is not finite becomes all NaN, so that checks for such values still find them.

use super::element::Element;
use super::simd::for_each_simd_level;
use super::{Cpu, SharedSlice};

/// Bits of the magnitude of an f32.
const MAGNITUDE_MASK: u32 = 0x7fff_ffff;
/// Magnitudes from here on are not finite.
const INFINITY: u32 = 0x7f80_0000;

/// A block whose largest magnitude is smaller is rounded to 0, because the reciprocal of its scale would overflow.
const MAGNITUDE_MIN: f32 = 1e-36;

/// Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
const ROUNDER: f32 = 12_582_912.0;

const SCALE_BYTES: usize = size_of::<f32>();

/// An integer format of messages. Each [`BLOCK_LEN`](IntegerFormat::BLOCK_LEN) elements share a scale that maps the largest magnitude to
/// the largest code; 0 stays 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IntegerFormat {
    /// Codes from -127 to 127. The error is at most 1/254 of the block's largest magnitude.
    Int8,
    /// Codes from -7 to 7. The error is at most 1/14 of the block's largest magnitude.
    Int4,
}

impl IntegerFormat {
    /// Number of elements per block. Shorter blocks are more accurate but send more scales. At this length, scales add 1.6 % to 8 bits and
    /// 3.1 % to 4 bits.
    pub const BLOCK_LEN: usize = 256;

    const fn code_bytes(self, num_codes: usize) -> usize {
        match self {
            IntegerFormat::Int8 => num_codes,
            IntegerFormat::Int4 => num_codes.div_ceil(2),
        }
    }

    /// Returns the bytes of a message of `num_elements` elements.
    pub const fn num_bytes(self, num_elements: usize) -> usize {
        num_elements.div_ceil(Self::BLOCK_LEN) * SCALE_BYTES + self.code_bytes(num_elements)
    }

    const fn code_max(self) -> f32 {
        match self {
            IntegerFormat::Int8 => 127.0,
            IntegerFormat::Int4 => 7.0,
        }
    }
}

/// Returns the scale and the codes of each block of a message.
#[inline(always)]
fn blocks(message: &[u8], format: IntegerFormat) -> impl Iterator<Item = (f32, &[u8])> {
    message.chunks(format.num_bytes(IntegerFormat::BLOCK_LEN)).map(|block| {
        let (scale, codes) = block.split_first_chunk::<SCALE_BYTES>().expect("a block has a unit");
        (f32::from_le_bytes(*scale), codes)
    })
}

/// Returns the scale of a block and its reciprocal, which maps values to codes.
#[inline(always)]
fn scales(x: &[f32], format: IntegerFormat) -> (f32, f32) {
    let largest = x.iter().fold(0, |largest: u32, x| largest.max(x.to_bits() & MAGNITUDE_MASK));
    let magnitude = f32::from_bits(largest);
    if largest >= INFINITY {
        (f32::NAN, 0.0)
    } else if magnitude < MAGNITUDE_MIN {
        (0.0, 0.0)
    } else {
        (magnitude / format.code_max(), format.code_max() / magnitude)
    }
}

#[inline(always)]
fn code(x: f32, inverse: f32) -> u8 {
    (x * inverse + ROUNDER).to_bits() as u8
}

/// Calls `write` with each element of `y` and its value in the message.
#[inline(always)]
fn for_each_value<T>(message: &[u8], format: IntegerFormat, y: &mut [T], write: impl Fn(&mut T, f32)) {
    for ((scale, codes), y) in blocks(message, format).zip(y.chunks_mut(IntegerFormat::BLOCK_LEN)) {
        match format {
            IntegerFormat::Int8 => {
                for (y, &code) in y.iter_mut().zip(codes) {
                    write(y, f32::from(code as i8) * scale);
                }
            }
            IntegerFormat::Int4 => {
                let (low, high) = y.split_at_mut(codes.len());
                for (y, &code) in low.iter_mut().zip(codes) {
                    write(y, f32::from((code << 4) as i8 >> 4) * scale);
                }
                for (y, &code) in high.iter_mut().zip(codes) {
                    write(y, f32::from(code as i8 >> 4) * scale);
                }
            }
        }
    }
}

for_each_simd_level! {
    fn quantize(x: &[f32], format: IntegerFormat, message: &mut [u8]) {
        let message = message.chunks_mut(format.num_bytes(IntegerFormat::BLOCK_LEN));
        for (x, block) in x.chunks(IntegerFormat::BLOCK_LEN).zip(message) {
            let (scale, inverse) = scales(x, format);
            let (unit_bytes, codes) = block.split_at_mut(SCALE_BYTES);
            unit_bytes.copy_from_slice(&scale.to_le_bytes());
            let (low, high) = x.split_at(codes.len());
            for (byte, &x) in codes.iter_mut().zip(low) {
                *byte = code(x, inverse);
            }
            if format == IntegerFormat::Int4 {
                codes.iter_mut().for_each(|byte| *byte &= 15);
                for (byte, &x) in codes.iter_mut().zip(high) {
                    *byte |= code(x, inverse) << 4;
                }
            }
        }
    }

    fn dequantize<T: Element>(message: &[u8], format: IntegerFormat, y: &mut [T]) {
        for_each_value(message, format, y, |y, value| *y = T::from_f32(value));
    }

    fn add_dequantized(message: &[u8], format: IntegerFormat, y: &mut [f32]) {
        for_each_value(message, format, y, |y, value| *y += value);
    }
}

impl Cpu {
    pub(crate) fn quantize(&self, x: &[f32], format: IntegerFormat, message: &mut [u8]) {
        assert_eq!(message.len(), format.num_bytes(x.len()), "a message of {} elements", x.len());
        let out = SharedSlice::new(message);
        self.for_message_blocks(x.len(), format, |(first, len), (first_byte, num_bytes)| {
            // SAFETY: blocks do not overlap.
            let message = unsafe { out.range(first_byte, num_bytes) };
            quantize(self.simd_level, &x[first..first + len], format, message);
        });
    }

    pub(crate) fn dequantize<T: Element>(&self, message: &[u8], format: IntegerFormat, y: &mut [T]) {
        self.read_message(message, format, y, |message, y| dequantize(self.simd_level, message, format, y));
    }

    pub(crate) fn add_dequantized(&self, message: &[u8], format: IntegerFormat, y: &mut [f32]) {
        self.read_message(message, format, y, |message, y| {
            add_dequantized(self.simd_level, message, format, y)
        });
    }

    fn read_message<T: Element>(
        &self,
        message: &[u8],
        format: IntegerFormat,
        y: &mut [T],
        read: impl Fn(&[u8], &mut [T]) + Sync,
    ) {
        assert_eq!(message.len(), format.num_bytes(y.len()), "a message of {} elements", y.len());
        let num_elements = y.len();
        let out = SharedSlice::new(y);
        self.for_message_blocks(num_elements, format, |(first, len), (first_byte, num_bytes)| {
            // SAFETY: blocks do not overlap.
            let y = unsafe { out.range(first, len) };
            read(&message[first_byte..first_byte + num_bytes], y);
        });
    }

    /// Splits a message into ranges of full blocks and runs `task((first element, number of elements), (first byte, number of bytes))` for
    /// each.
    fn for_message_blocks(
        &self,
        num_elements: usize,
        format: IntegerFormat,
        task: impl Fn((usize, usize), (usize, usize)) + Sync,
    ) {
        let block_len = IntegerFormat::BLOCK_LEN;
        self.for_row_blocks(num_elements.div_ceil(block_len), block_len, |block, num_blocks| {
            let first = block * block_len;
            let len = (num_blocks * block_len).min(num_elements - first);
            task((first, len), (format.num_bytes(first), format.num_bytes(len)));
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::simd::SimdLevel;
    use super::super::test_support::cases;
    use super::super::threads::ThreadPool;
    use super::*;
    use proptest::prelude::*;
    use trireme_base::{Bf16, F16};

    const FORMATS: [IntegerFormat; 2] = [IntegerFormat::Int8, IntegerFormat::Int4];

    fn cpus() -> impl Iterator<Item = Cpu> {
        let levels = SimdLevel::ALL.into_iter().filter(|&level| level <= SimdLevel::detect());
        levels.map(|simd_level| Cpu::new(ThreadPool::new(2).unwrap(), simd_level))
    }

    fn quantized(cpu: &Cpu, x: &[f32], format: IntegerFormat) -> Vec<u8> {
        let mut message = vec![0xa5; format.num_bytes(x.len())];
        cpu.quantize(x, format, &mut message);
        message
    }

    fn values<T: Element>(cpu: &Cpu, message: &[u8], len: usize, format: IntegerFormat) -> Vec<f32> {
        let mut y = vec![T::from_f32(1.5); len];
        cpu.dequantize(message, format, &mut y);
        y.into_iter().map(T::to_f32).collect()
    }

    /// Compares with f64 at every level. The error is half a code, plus four f32 roundings: of the scale, of its reciprocal, and of the
    /// products with each. A rounding changes a code by at most `code_max * f32::EPSILON / 2`.
    fn check(x: &[f32]) {
        for format in FORMATS {
            let mut first: Option<Vec<u8>> = None;
            for cpu in cpus() {
                let message = quantized(&cpu, x, format);
                assert_eq!(*first.get_or_insert_with(|| message.clone()), message, "{}", cpu.simd_level);
                let found = values::<f32>(&cpu, &message, x.len(), format);
                for (x, found) in
                    x.chunks(IntegerFormat::BLOCK_LEN).zip(found.chunks(IntegerFormat::BLOCK_LEN))
                {
                    let largest = x.iter().fold(0.0, |largest: f64, x| largest.max(f64::from(x.abs())));
                    let is_zero = largest < f64::from(MAGNITUDE_MIN);
                    let code_max = f64::from(format.code_max());
                    let bound = (0.5 + 2.0 * code_max * f64::from(f32::EPSILON)) * largest / code_max;
                    for (&x, &found) in x.iter().zip(found) {
                        let error = (f64::from(found) - f64::from(x)).abs();
                        let is_right = if is_zero { found == 0.0 } else { error <= bound };
                        assert!(is_right, "{format:?}, {}: {x:e} became {found:e}", cpu.simd_level);
                    }
                }
                check_readers(&cpu, x, &message, &found, format);
            }
        }
    }

    /// Checks that reading in other dtypes and adding give the same values.
    fn check_readers(cpu: &Cpu, x: &[f32], message: &[u8], found: &[f32], format: IntegerFormat) {
        let bf16 = values::<Bf16>(cpu, message, x.len(), format);
        let f16 = values::<F16>(cpu, message, x.len(), format);
        let mut sums = x.to_vec();
        cpu.add_dequantized(message, format, &mut sums);
        for index in 0..x.len() {
            assert_eq!(bf16[index].to_bits(), Bf16::from_f32(found[index]).to_f32().to_bits());
            assert_eq!(f16[index].to_bits(), F16::from_f32(found[index]).to_f32().to_bits());
            assert_eq!(sums[index].to_bits(), (x[index] + found[index]).to_bits());
        }
    }

    proptest! {
        #![proptest_config(cases(64))]

        #[test]
        fn values_are_off_by_half_a_code(
            x in proptest::collection::vec(-1.0_f32..1.0, 0..1500),
            exponent in -110_i32..120,
        ) {
            let scale = 2.0_f32.powi(exponent);
            check(&x.iter().map(|x| x * scale).collect::<Vec<_>>());
        }
    }

    #[test]
    fn zeros_and_tiny_values_become_zeros_and_the_largest_is_kept() {
        check(&[0.0; 300]);
        check(&[1e-37, -1e-40, 0.0]);
        check(&[f32::MAX / 2.0, -f32::MAX / 2.0, 1.0]);
        let x: Vec<f32> = (0..70_000).map(|index| (index % 601) as f32 - 300.0).collect();
        check(&x);
        for cpu in cpus() {
            for (format, codes) in [(IntegerFormat::Int8, -127..=127), (IntegerFormat::Int4, -7..=7)] {
                let codes: Vec<f32> = codes.map(|code: i32| code as f32 * 0.25).collect();
                let message = quantized(&cpu, &codes, format);
                assert_eq!(values::<f32>(&cpu, &message, codes.len(), format), codes, "codes are exact");
            }
        }
    }

    #[test]
    fn a_block_that_is_not_finite_is_nan_and_no_other_is() {
        for (format, odd) in FORMATS.into_iter().zip([f32::NAN, f32::INFINITY]) {
            for cpu in cpus() {
                let mut x = vec![1.0; 3 * IntegerFormat::BLOCK_LEN];
                x[IntegerFormat::BLOCK_LEN + 7] = odd;
                let found = values::<f32>(&cpu, &quantized(&cpu, &x, format), x.len(), format);
                for (index, found) in found.into_iter().enumerate() {
                    assert_eq!(found.is_nan(), index / IntegerFormat::BLOCK_LEN == 1, "{format:?}, {index}");
                }
            }
        }
    }
}
