//! Run-time selection of the SIMD level, and elementary functions for kernels.

use super::element::Element;
use super::matmul::amx;

trireme_base::named! {
    /// SIMD levels that kernels are compiled for, in ascending order.
    pub enum SimdLevel {
        /// The target's baseline (SSE2 on x86-64).
        Portable = "portable",
        /// 256-bit registers, fused multiply-add.
        Avx2 = "avx2",
        /// 512-bit registers.
        Avx512 = "avx512",
        /// AVX-512 with dot products of bf16 pairs (`vdpbf16ps`).
        Avx512Bf16 = "avx512_bf16",
        /// Also matmuls of bf16 tiles (AMX).
        AmxBf16 = "amx_bf16",
    }
}

impl SimdLevel {
    /// Returns the highest level that this machine supports.
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
            {
                return if !is_x86_feature_detected!("avx512bf16") {
                    SimdLevel::Avx512
                } else if amx::detect() {
                    SimdLevel::AmxBf16
                } else {
                    SimdLevel::Avx512Bf16
                };
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                return SimdLevel::Avx2;
            }
        }
        SimdLevel::Portable
    }
}

/// Compiles a function once per SIMD level. The generated function takes the level as its first argument.
///
/// The level must be at most [`SimdLevel::detect`].
macro_rules! for_each_simd_level {
    ($($(#[$meta:meta])* $vis:vis fn $name:ident$(<$($generic:ident: $bound:path),+>)?($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block)*) => {$(
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name$(<$($generic: $bound),+>)?(simd_level: $crate::kernels::cpu::simd::SimdLevel, $($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            #[allow(clippy::too_many_arguments)]
            fn portable$(<$($generic: $bound),+>)?($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq")]
            #[allow(clippy::too_many_arguments)]
            fn avx512$(<$($generic: $bound),+>)?($($arg: $ty),*) $(-> $ret)? { portable$(::<$($generic),+>)?($($arg),*) }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            fn avx2$(<$($generic: $bound),+>)?($($arg: $ty),*) $(-> $ret)? { portable$(::<$($generic),+>)?($($arg),*) }

            match simd_level {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: the level was detected on this machine.
                level if level >= $crate::kernels::cpu::simd::SimdLevel::Avx512 => unsafe {
                    avx512$(::<$($generic),+>)?($($arg),*)
                },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: the level was detected on this machine.
                $crate::kernels::cpu::simd::SimdLevel::Avx2 => unsafe {
                    avx2$(::<$($generic),+>)?($($arg),*)
                },
                _ => portable$(::<$($generic),+>)?($($arg),*),
            }
        }
    )*};
}
pub(crate) use for_each_simd_level;

/// Number of partial sums of a reduction over a row, for every register width.
pub(crate) const LANES: usize = 16;

/// `e^x`. The relative error is below 3e-7 where the result is normal. The result is 0 below -104, infinity above 88.8, and NaN for NaN.
///
/// Cody-Waite reduction to |r| <= ln(2)/2 and the polynomial of the Cephes library (`expf`). It has no branch, so that loops over it become
/// SIMD code. A fused multiply-add is one instruction on every level but the portable one.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    // Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
    const ROUNDER: f32 = 12_582_912.0;
    // Beyond these limits, the result is 0 or infinity. At the lower limit, both scale factors below are exactly 0, so that an argument of
    // negative infinity does not underflow, which would be slow.
    let clamped = if x < -176.0 { -176.0 } else { x };
    let clamped = if clamped > 89.0 { 89.0 } else { clamped };
    let shifted = clamped.mul_add(LOG2_E, ROUNDER);
    let n = shifted - ROUNDER;
    let r = n.mul_add(-LN_2_LOW, n.mul_add(-LN_2_HIGH, clamped));
    let p = 1.987_569_1e-4_f32
        .mul_add(r, 1.398_199_9e-3)
        .mul_add(r, 8.333_452e-3)
        .mul_add(r, 4.166_579_6e-2)
        .mul_add(r, 1.666_666_5e-1)
        .mul_add(r, 0.5);
    let mantissa = p.mul_add(r * r, r + 1.0);
    let exponent = shifted.to_bits().wrapping_sub(ROUNDER.to_bits());
    // Two factors, because 2^128 alone is infinite.
    let half = (exponent as i32) >> 1;
    let scale = |n: i32| f32::from_bits((n.wrapping_add(127) as u32) << 23);
    mantissa * scale(half) * scale((exponent as i32).wrapping_sub(half))
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// The hyperbolic tangent. The relative error is below 1e-6; it is largest just above 0.15.
#[inline(always)]
pub(crate) fn tanh(x: f32) -> f32 {
    // Below this magnitude, the Taylor polynomial of degree 7 is more accurate than the difference of two numbers near 1.
    const SMALL: f32 = 0.15;
    let square = x * x;
    let small = x + x * square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0)));
    let large = 2.0 * sigmoid(2.0 * x) - 1.0;
    if x.abs() < SMALL { small } else { large }
}

/// Sums the lanes in a fixed tree.
#[inline(always)]
pub(crate) fn sum_lanes(lanes: [f32; LANES]) -> f32 {
    fold_lanes(lanes, |a, b| a + b)
}

/// Returns the largest lane. Ignores NaN.
#[inline(always)]
fn max_lane(lanes: [f32; LANES]) -> f32 {
    fold_lanes(lanes, |a, b| if b > a { b } else { a })
}

#[inline(always)]
fn fold_lanes(lanes: [f32; LANES], fold: impl Fn(f32, f32) -> f32) -> f32 {
    // Hides the lanes from the compiler. Otherwise, it combines pairs of lanes in the loop that fills them, which then does not use full
    // registers.
    let mut lanes = std::hint::black_box(lanes);
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] = fold(lanes[i], lanes[i + width]);
        }
        width /= 2;
    }
    lanes[0]
}

/// Sums `term(x[i])` in [`LANES`] partial sums.
#[inline(always)]
pub(crate) fn sum_map(x: &[f32], term: impl Fn(f32) -> f32) -> f32 {
    sum_zip(x, x, x, |x, _, _| term(x))
}

/// Sums `term(x[i], y[i], z[i])` in [`LANES`] partial sums.
#[inline(always)]
pub(crate) fn sum_zip<X: Copy, Y: Copy, Z: Copy>(
    x: &[X],
    y: &[Y],
    z: &[Z],
    term: impl Fn(X, Y, Z) -> f32,
) -> f32 {
    let mut lanes = [0.0_f32; LANES];
    let (x_chunks, x_rest) = x.as_chunks::<LANES>();
    let (y_chunks, y_rest) = y.as_chunks::<LANES>();
    let (z_chunks, z_rest) = z.as_chunks::<LANES>();
    for ((x, y), z) in x_chunks.iter().zip(y_chunks).zip(z_chunks) {
        for lane in 0..LANES {
            lanes[lane] += term(x[lane], y[lane], z[lane]);
        }
    }
    for (((lane, &x), &y), &z) in lanes.iter_mut().zip(x_rest).zip(y_rest).zip(z_rest) {
        *lane += term(x, y, z);
    }
    sum_lanes(lanes)
}

/// Writes `map(x[i])` to `out[i]`. Returns the sum of the values before they are rounded, in [`LANES`] partial sums.
#[inline(always)]
pub(crate) fn sum_into<T: Element>(x: &[f32], out: &mut [T], map: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0_f32; LANES];
    let (x_chunks, x_rest) = x.as_chunks::<LANES>();
    let (out_chunks, out_rest) = out.as_chunks_mut::<LANES>();
    for (x, out) in x_chunks.iter().zip(out_chunks) {
        for lane in 0..LANES {
            let value = map(x[lane]);
            out[lane] = T::from_f32(value);
            lanes[lane] += value;
        }
    }
    for ((lane, &x), out) in lanes.iter_mut().zip(x_rest).zip(out_rest) {
        let value = map(x);
        *out = T::from_f32(value);
        *lane += value;
    }
    sum_lanes(lanes)
}

/// Returns the largest element; negative infinity if there is none. Ignores NaN.
#[inline(always)]
pub(crate) fn max_of(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] = if chunk[lane] > lanes[lane] { chunk[lane] } else { lanes[lane] };
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane = if x > *lane { x } else { *lane };
    }
    max_lane(lanes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_accurate_over_its_range() {
        let mut x = -87.0_f32;
        while x < 88.6 {
            let expected = f64::from(x).exp();
            let error = (f64::from(exp(x)) - expected).abs() / expected;
            assert!(error < 3e-7, "exp({x}): relative error {error}");
            x += 0.0137;
        }
    }

    #[test]
    fn exp_keeps_the_special_values() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert!((0..80).all(|step| exp(-104.5 - step as f32) == 0.0));
        assert!((exp(-100.0) / 3.8e-44 - 1.0).abs() < 0.05, "subnormal results lose digits only");
        assert_eq!(exp(89.0), f32::INFINITY);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
        assert!(sigmoid(f32::NAN).is_nan());
        assert_eq!(sigmoid(-200.0), 0.0);
        assert_eq!(sigmoid(200.0), 1.0);
    }

    #[test]
    fn small_tangents_are_as_exact_as_large_ones() {
        for exponent in -80..14 {
            let x = 1.37_f32.powi(exponent);
            let exact = f64::from(x).tanh();
            for sign in [1.0, -1.0] {
                let found = f64::from(tanh(sign * x)) * f64::from(sign);
                assert!((found - exact).abs() <= 6e-7 * exact, "{x}: {found} instead of {exact}");
            }
        }
    }

    #[test]
    fn lanes_cover_every_term() {
        for len in [0, 1, 15, 16, 17, 100] {
            let values: Vec<f32> = (1..=len).map(|i| i as f32).collect();
            assert_eq!(sum_map(&values, |x| x), (len * (len + 1) / 2) as f32);
            assert_eq!(sum_zip(&values, &values, &values, |x, y, _| x - y), 0.0);
            assert_eq!(max_of(&values), values.last().copied().unwrap_or(f32::NEG_INFINITY));
        }
    }
}
