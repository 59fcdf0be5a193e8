//! Conversion to 8-bit floats and back.

use super::Cpu;
use super::element::Element;
use super::simd::for_each_simd_level;
use std::sync::atomic::{AtomicU32, Ordering};
use trireme_base::{Bf16, E4m3Codes, E5m2Codes, Fp8Codes, Fp8Format, power_of_two};

for_each_simd_level! {
    /// Returns the bits of the largest finite magnitude. Bits of magnitudes are ordered like the values.
    fn quantize<T: Element, F: Format>(x: &[T], codes: &mut [u8], scale: f32) -> u32 {
        let mut amax = 0;
        for (code, x) in codes.iter_mut().zip(x) {
            let x = x.to_f32();
            let magnitude = x.to_bits() & 0x7fff_ffff;
            amax = amax.max(if magnitude < f32::INFINITY.to_bits() { magnitude } else { 0 });
            *code = F::saturated(x * scale);
        }
        amax
    }

    fn dequantize<F: Format>(codes: &[u8], reciprocal: f32, y: &mut [Bf16]) {
        for (y, code) in y.iter_mut().zip(codes) {
            *y = Bf16::from_f32(F::to_f32(*code) * reciprocal);
        }
    }
}

/// A format as a type, for which loops are compiled.
trait Format {
    /// Rounds to the nearest code. Values beyond the format's range saturate; NaN stays NaN.
    fn saturated(value: f32) -> u8;

    fn to_f32(code: u8) -> f32;
}

impl<const FRACTION_BITS: u32> Format for Fp8Codes<FRACTION_BITS> {
    #[inline(always)]
    fn saturated(value: f32) -> u8 {
        Self::from_f32(value.clamp(-Self::MAX, Self::MAX))
    }

    #[inline(always)]
    fn to_f32(code: u8) -> f32 {
        Self::to_f32(code)
    }
}

impl Cpu {
    /// Computes the codes of `x * 2^scale_exponent` elementwise, rounded to nearest even. Values beyond the format's range saturate; NaN
    /// stays NaN. Returns the largest finite `|x|`.
    pub(crate) fn quantize_fp8<T: Element>(
        &self,
        x: &[T],
        codes: &mut [u8],
        format: Fp8Format,
        scale_exponent: i32,
    ) -> f32 {
        assert_eq!(x.len(), codes.len());
        let (amax, scale) = (AtomicU32::new(0), power_of_two(scale_exponent));
        let quantize = match format {
            Fp8Format::E4m3 => quantize::<T, E4m3Codes>,
            Fp8Format::E5m2 => quantize::<T, E5m2Codes>,
        };
        self.for_each_block(codes, |first, codes| {
            let found = quantize(self.simd_level, &x[first..first + codes.len()], codes, scale);
            // The maximum does not depend on the order of blocks.
            amax.fetch_max(found, Ordering::Relaxed);
        });
        f32::from_bits(amax.into_inner())
    }

    /// Computes the values of codes times `reciprocal`, which are exact in bf16 as long as they are normal. [`crate::fp8`] ensures that.
    pub(crate) fn dequantize_fp8(&self, codes: &[u8], reciprocal: f32, format: Fp8Format, y: &mut [Bf16]) {
        assert_eq!(codes.len(), y.len());
        let dequantize = match format {
            Fp8Format::E4m3 => dequantize::<E4m3Codes>,
            Fp8Format::E5m2 => dequantize::<E5m2Codes>,
        };
        self.for_each_block(y, |first, y| {
            dequantize(self.simd_level, &codes[first..first + y.len()], reciprocal, y);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::simd::SimdLevel;
    use super::super::threads::ThreadPool;
    use super::*;
    use crate::fp8::SCALE_EXPONENT_MAX;
    use proptest::prelude::*;
    use trireme_base::F16;

    const FORMATS: [Fp8Format; 2] = [Fp8Format::E4m3, Fp8Format::E5m2];

    /// Returns the value of a code; `None` for infinity and NaN.
    fn decode(format: Fp8Format, code: u8) -> Option<f64> {
        let values = match format {
            Fp8Format::E4m3 => E4m3Codes::VALUES,
            Fp8Format::E5m2 => E5m2Codes::VALUES,
        };
        Some(f64::from(values[usize::from(code)])).filter(|value| value.is_finite())
    }

    /// Finds the value of the format that is nearest to `x` by searching all codes. If two are equally near, it is the one with the even
    /// code.
    fn nearest(format: Fp8Format, x: f64) -> f64 {
        if x.is_nan() {
            return x;
        }
        // The bound exceeds all values of the formats. For a much larger `x`, the distances to all values would round to the same f64.
        let x = x.clamp(-1e6, 1e6);
        let values = (0..=u8::MAX).filter_map(|code| Some((code, decode(format, code)?)));
        let of_sign = values.filter(|(code, _)| (code & 0x80 != 0) == x.is_sign_negative());
        let distance = |&(code, value): &(u8, f64)| ((value - x).abs(), code & 1);
        let best = of_sign.min_by(|a, b| distance(a).partial_cmp(&distance(b)).unwrap());
        best.expect("a format has values").1
    }

    fn levels() -> impl Iterator<Item = SimdLevel> {
        SimdLevel::ALL.into_iter().filter(|&level| level <= SimdLevel::detect())
    }

    fn quantized<T: Element>(
        simd_level: SimdLevel,
        threads: usize,
        x: &[T],
        format: Fp8Format,
        scale_exponent: i32,
    ) -> (Vec<f64>, f32) {
        let cpu = Cpu::new(ThreadPool::new(threads).unwrap(), simd_level);
        let (mut codes, mut y) = (vec![1; x.len()], vec![Bf16::from_f32(1.5); x.len()]);
        let amax = cpu.quantize_fp8(x, &mut codes, format, scale_exponent);
        cpu.dequantize_fp8(&codes, power_of_two(-scale_exponent), format, &mut y);
        (y.into_iter().map(|y| f64::from(y.to_f32())).collect(), amax)
    }

    /// Compares quantized values with the results of [`nearest`] at every SIMD level.
    fn check<T: Element>(x: &[T], format: Fp8Format, scale_exponent: i32) {
        let scale = 2.0_f64.powi(scale_exponent);
        for simd_level in levels() {
            let (found, _) = quantized(simd_level, 1, x, format, scale_exponent);
            for (x, found) in x.iter().map(|x| f64::from(x.to_f32())).zip(found) {
                let expected = nearest(format, x * scale) / scale;
                let is_same = found.to_bits() == expected.to_bits() || (found.is_nan() && x.is_nan());
                assert!(
                    is_same,
                    "{format:?}, 2^{scale_exponent}, {simd_level}: {x:e} became {found:e}, not {expected:e}"
                );
            }
        }
    }

    #[test]
    fn codes_and_values_between_them_round_to_nearest_even() {
        for format in FORMATS {
            let mut values: Vec<f64> = (0..=u8::MAX).filter_map(|code| decode(format, code)).collect();
            values.sort_by(f64::total_cmp);
            for scale_exponent in [0, 5, -SCALE_EXPONENT_MAX, SCALE_EXPONENT_MAX] {
                let scale = 2.0_f64.powi(-scale_exponent);
                let exact: Vec<f32> = values.iter().map(|value| (value * scale) as f32).collect();
                for simd_level in levels() {
                    let (found, amax) = quantized(simd_level, 1, &exact, format, scale_exponent);
                    let wide = exact.iter().map(|&x| f64::from(x).to_bits());
                    assert!(found.into_iter().map(f64::to_bits).eq(wide), "{format:?} at {simd_level}");
                    assert_eq!(amax, *exact.last().unwrap());
                }
                let halfway = values.windows(2).map(|pair| ((pair[0] + pair[1]) / 2.0 * scale) as f32);
                let around: Vec<f32> = halfway.flat_map(|x| [x.next_down(), x, x.next_up()]).collect();
                check(&around, format, scale_exponent);
            }
        }
    }

    #[test]
    fn large_values_saturate_and_nan_stays() {
        let values = [464.0, 480.0, 500.0, 61_439.0, 61_440.0, 65_536.0, 1e38, f32::MAX, f32::INFINITY];
        let values: Vec<f32> = values.iter().flat_map(|&x| [x, -x]).chain([f32::NAN, -f32::NAN]).collect();
        for format in FORMATS {
            for simd_level in levels() {
                let (found, amax) = quantized(simd_level, 1, &values, format, 0);
                assert!(found[18..].iter().all(|x| x.is_nan()) && found[..18].iter().all(|x| x.is_finite()));
                assert_eq!(found[16..18], [f64::from(format.limits().2), -f64::from(format.limits().2)]);
                assert_eq!(amax, f32::MAX, "infinity and NaN are passed over");
            }
            check(&values, format, 0);
            check(&values, format, -100);
        }
    }

    #[test]
    fn lengths_and_threads_change_nothing() {
        for len in [0, 1, 17, 16 * 1024 + 3, 100_000] {
            let mut x = vec![0.0; len];
            trireme_base::RandomKey::new(3, "fp8").fill_normal(&mut x, 1.0);
            for format in FORMATS {
                let one = quantized(SimdLevel::Portable, 1, &x, format, 4);
                assert_eq!(one.1, x.iter().fold(0.0, |amax, x| x.abs().max(amax)));
                for simd_level in levels() {
                    assert_eq!(quantized(simd_level, 3, &x, format, 4), one);
                }
            }
        }
    }

    proptest! {
        #[test]
        fn any_value_rounds_to_the_nearest_even(
            bits in proptest::collection::vec(any::<u32>(), 1..40),
            near in proptest::collection::vec((-20.0..20.0_f32, any::<bool>()), 1..40),
            scale_exponent in -SCALE_EXPONENT_MAX..=SCALE_EXPONENT_MAX,
        ) {
            // Values of any size, and values in the range of the format.
            let unscaled = |(log, negative): &(f32, bool)| {
                let magnitude = log.exp2() * power_of_two(-scale_exponent);
                if *negative { -magnitude } else { magnitude }
            };
            let values: Vec<f32> =
                bits.iter().map(|&bits| f32::from_bits(bits)).chain(near.iter().map(unscaled)).collect();
            let narrow: Vec<Bf16> = values.iter().map(|&x| Bf16::from_f32(x)).collect();
            let half: Vec<F16> = values.iter().map(|&x| F16::from_f32(x)).collect();
            for format in FORMATS {
                check(&values, format, scale_exponent);
                check(&narrow, format, scale_exponent);
                check(&half, format, scale_exponent);
            }
        }
    }
}
