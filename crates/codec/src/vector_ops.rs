//! Loops over f32 slices that several codecs use, written so that the compiler vectorizes them. Sums are computed in
//! lanes, in a fixed order.

/// The bits of positive infinity. Bits of finite magnitudes are smaller, and bits of NaN are larger.
pub(super) const INFINITY_BITS: u32 = 0x7f80_0000;

const LANES: usize = 16;

/// Returns the bits of `|value|`. As integers they are ordered like the magnitudes, with infinity above all numbers and
/// NaN above infinity.
#[inline(always)]
pub(super) const fn magnitude_bits(value: f32) -> u32 {
    value.to_bits() & 0x7fff_ffff
}

/// Returns the largest of the [`magnitude_bits`], or 0 if there are no values.
pub(super) fn largest_magnitude_bits(values: &[f32]) -> u32 {
    largest_by(values, magnitude_bits)
}

/// Returns the largest finite magnitude, or 0 if there is none.
pub(super) fn largest_finite_magnitude(values: &[f32]) -> f32 {
    let finite_bits = |value| {
        let bits = magnitude_bits(value);
        if bits < INFINITY_BITS { bits } else { 0 }
    };
    f32::from_bits(largest_by(values, finite_bits))
}

#[inline(always)]
fn largest_by(values: &[f32], bits_of: impl Fn(f32) -> u32) -> u32 {
    let (chunks, rest) = values.as_chunks::<LANES>();
    let mut largest = [0; LANES];
    for chunk in chunks {
        for (largest, &value) in largest.iter_mut().zip(chunk) {
            *largest = bits_of(value).max(*largest);
        }
    }
    let rest = rest.iter().map(|&value| bits_of(value));
    largest.into_iter().chain(rest).max().unwrap_or(0)
}

/// Replaces values that are not finite by 0, and returns the Euclidean norm of the result.
pub(super) fn zero_non_finite(values: &mut [f32]) -> f32 {
    fn zeroed_square(value: &mut f32) -> f64 {
        *value = if magnitude_bits(*value) < INFINITY_BITS { *value } else { 0.0 };
        f64::from(*value) * f64::from(*value)
    }
    let (chunks, rest) = values.as_chunks_mut::<LANES>();
    let mut squares = [0.0; LANES];
    for chunk in chunks {
        for (square, value) in squares.iter_mut().zip(chunk) {
            *square += zeroed_square(value);
        }
    }
    let rest: f64 = rest.iter_mut().map(zeroed_square).sum();
    (squares.iter().sum::<f64>() + rest).sqrt() as f32
}

pub(super) fn dot(x: &[f32], y: &[f32]) -> f32 {
    let ((x_chunks, x_rest), (y_chunks, y_rest)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
    let mut sums = [0.0; LANES];
    for (x, y) in x_chunks.iter().zip(y_chunks) {
        for lane in 0..LANES {
            sums[lane] += x[lane] * y[lane];
        }
    }
    let rest: f32 = x_rest.iter().zip(y_rest).map(|(x, y)| x * y).sum();
    sums.iter().sum::<f32>() + rest
}

/// Computes `y += factor * x`.
pub(super) fn add_scaled(y: &mut [f32], factor: f32, x: &[f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += factor * x;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_magnitude_is_found_in_lanes_and_in_the_remainder() {
        for len in [1, 15, 16, 17, 40] {
            for place in 0..len {
                let mut values = vec![-0.5; len];
                values[place] = -3.0;
                assert_eq!(largest_magnitude_bits(&values), 3.0_f32.to_bits());
                assert_eq!(largest_finite_magnitude(&values), 3.0);
                values[place] = f32::NEG_INFINITY;
                assert_eq!(largest_magnitude_bits(&values), INFINITY_BITS);
                assert_eq!(largest_finite_magnitude(&values), if len == 1 { 0.0 } else { 0.5 });
                values[place] = -f32::NAN;
                assert!(largest_magnitude_bits(&values) > INFINITY_BITS);
                let norm = zero_non_finite(&mut values);
                assert!(values[place] == 0.0 && (norm - 0.5 * ((len - 1) as f32).sqrt()).abs() < 1e-6);
            }
        }
        assert_eq!((largest_magnitude_bits(&[]), zero_non_finite(&mut [])), (0, 0.0));
    }

    #[test]
    fn products_are_summed_to_the_last_element() {
        for len in [0, 1, 16, 17, 35] {
            let x: Vec<f32> = (0..len).map(|i| i as f32).collect();
            let mut y = vec![2.0; len];
            assert_eq!(dot(&x, &y), (len * len.saturating_sub(1)) as f32);
            add_scaled(&mut y, -2.0, &x);
            assert!(y.iter().enumerate().all(|(i, &y)| y == 2.0 - 2.0 * i as f32));
        }
    }
}
