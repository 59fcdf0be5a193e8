//! Conversion to 8-bit floats and back.

use super::Cpu;
use super::element::Element;
use super::simd::for_each_simd_level;
use std::sync::atomic::{AtomicU32, Ordering};
use trireme_base::{Bf16, Fp8Codes, Fp8Format, power_of_two};

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
            *y = Bf16::from_f32(F::value(*code) * reciprocal);
        }
    }
}

/// A format as a type, for which loops are compiled.
trait Format {
    /// Rounds to the nearest code. Values beyond the format's range saturate; NaN stays NaN.
    fn saturated(value: f32) -> u8;

    fn value(code: u8) -> f32;
}

impl<const FRACTION_BITS: u32> Format for Fp8Codes<FRACTION_BITS> {
    #[inline(always)]
    fn saturated(value: f32) -> u8 {
        Self::of(value.clamp(-Self::MAX, Self::MAX))
    }

    #[inline(always)]
    fn value(code: u8) -> f32 {
        Self::value(code)
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
            Fp8Format::E4m3 => quantize::<T, Fp8Codes<3>>,
            Fp8Format::E5m2 => quantize::<T, Fp8Codes<2>>,
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
            Fp8Format::E4m3 => dequantize::<Fp8Codes<3>>,
            Fp8Format::E5m2 => dequantize::<Fp8Codes<2>>,
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

    /// Decodes a code by its definition; `None` for infinity and NaN.
    fn decode(format: Fp8Format, code: u8) -> Option<f64> {
        let (fraction_bits, bias, has_infinity) = match format {
            Fp8Format::E4m3 => (3, 7, false),
            Fp8Format::E5m2 => (2, 15, true),
        };
        let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
        let (exponent, fraction) = ((code & 0x7f) >> fraction_bits, code & ((1 << fraction_bits) - 1));
        let is_special = if has_infinity { exponent == 31 } else { code & 0x7f == 0x7f };
        let fraction = f64::from(fraction) / f64::from(1 << fraction_bits);
        let magnitude = match exponent {
            0 => fraction * 2.0_f64.powi(1 - bias),
            _ => (1.0 + fraction) * 2.0_f64.powi(i32::from(exponent) - bias),
        };
        (!is_special).then_some(sign * magnitude)
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
    fn formats_are_those_of_the_paper() {
        let (e4m3, e5m2) = (Fp8Format::E4m3, Fp8Format::E5m2);
        for (format, code, value) in [
            (e4m3, 0x7e, 448.0),
            (e4m3, 0x08, 2.0_f64.powi(-6)),
            (e4m3, 0x07, 0.875 * 2.0_f64.powi(-6)),
            (e4m3, 0x81, -(2.0_f64.powi(-9))),
            (e5m2, 0x7b, 57_344.0),
            (e5m2, 0x04, 2.0_f64.powi(-14)),
            (e5m2, 0x03, 0.75 * 2.0_f64.powi(-14)),
            (e5m2, 0x81, -(2.0_f64.powi(-16))),
        ] {
            assert_eq!(decode(format, code), Some(value));
        }
        let largest = |format| (0..=u8::MAX).filter_map(|code| decode(format, code)).fold(0.0, f64::max);
        assert!(FORMATS.iter().all(|format| largest(*format) == f64::from(format.limits().2)));
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
