//! Conversions of f16, bf16 and fp8.

/// Smallest positive f16.
const F16_MIN_POSITIVE: f32 = 1.0 / (1 << 24) as f32;

/// Returns the value of the bits of an f16.
pub(crate) fn widened(bits: u16) -> f32 {
    let (sign, exponent, fraction) =
        (u32::from(bits >> 15), u32::from(bits >> 10 & 31), u32::from(bits & 0x3ff));
    // The exponent bias is 15 in f16 and 127 in f32.
    let magnitude = match exponent {
        0 => (fraction as f32 * F16_MIN_POSITIVE).to_bits(),
        31 => (255 << 23) | (fraction << 13),
        exponent => ((exponent + 127 - 15) << 23) | (fraction << 13),
    };
    f32::from_bits((sign << 31) | magnitude)
}

/// Returns 2^`exponent`, for exponents from -126 to 127. Faster than `powi`.
fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

/// Returns the bits of the nearest f16: of a pair of neighbors, the one with an even fraction.
pub(crate) fn rounded(value: f32) -> u16 {
    let sign = if value.is_sign_negative() { 0x8000 } else { 0 };
    let magnitude = value.abs();
    if magnitude.is_nan() {
        return sign | 0x7e00;
    }
    // The distance of the neighbors.
    let exponent = (magnitude.to_bits() >> 23) as i32 - 127;
    let step = power_of_two(exponent.max(-14) - 10);
    let nearest = (magnitude / step).round_ties_even() * step;
    if nearest >= 65_520.0 {
        return sign | 0x7c00;
    }
    let exponent = ((nearest.to_bits() >> 23) as i32 - 127).max(-14);
    let fraction = (nearest / power_of_two(exponent - 10)) as u16;
    // The leading bit of a normal number adds 1 to the exponent.
    sign | ((((exponent + 14) as u16) << 10) + fraction)
}

/// Returns the value of the bits of an fp8 number in the format E4M3.
pub(crate) fn widened_e4m3(bits: u8) -> f32 {
    let (exponent, fraction) = (bits >> 3 & 15, f32::from(bits & 7));
    let magnitude = match exponent {
        _ if bits & 0x7f == 0x7f => f32::NAN,
        0 => fraction * power_of_two(-9),
        exponent => (8.0 + fraction) * power_of_two(i32::from(exponent) - 10),
    };
    if bits & 0x80 == 0 { magnitude } else { -magnitude }
}

/// Returns the value of the bits of a bf16.
pub(crate) fn widened_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Returns the bits of the nearest bf16: of a pair of neighbors, the one with an even fraction. NaN stays NaN.
pub(crate) fn rounded_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let nearest =
        if value.is_nan() { bits | 0x40_0000 } else { bits.wrapping_add(0x7fff + (bits >> 16 & 1)) };
    (nearest >> 16) as u16
}
