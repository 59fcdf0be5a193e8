//! The codec `top_k`: the elements of largest magnitude, with their indices (Aji, Heafield: "Sparse communication for
//! distributed gradient descent", 2017). It has two extensions of deep gradient compression (Lin, Han, Mao, Wang,
//! Dally: "Deep gradient compression", 2018): the residual accumulates a velocity instead of the gradient (*momentum
//! correction*), and the velocity of an element is reset when the element is sent (*momentum factor masking*).
//!
//! A message consists of the indices (u32, ascending) and their values (f32). Among elements whose magnitude equals the threshold, those
//! with lower indices are sent. Infinity counts as larger than all numbers and NaN as larger than infinity, so they are selected before
//! numbers.

use super::error::Result;
use super::vector_ops::magnitude_bits;
use super::{Codec, CodecName, CompressionError, RoundContext};
use trireme_base::Rank;

const ENTRY_BYTES: usize = size_of::<u32>() + size_of::<f32>();

/// Number of elements that are skipped at once if all of them are below the threshold.
const CHUNK_LEN: usize = 16;

pub(super) const fn message_bytes(num_kept: usize) -> usize {
    num_kept * ENTRY_BYTES
}

#[derive(Debug)]
pub(super) struct TopK {
    momentum: f32,
    /// Empty without momentum.
    velocity: Vec<f32>,
}

impl TopK {
    pub(super) fn new(len: usize, momentum: f32) -> Self {
        TopK { momentum, velocity: if momentum > 0.0 { vec![0.0; len] } else { Vec::new() } }
    }
}

impl Codec for TopK {
    fn accumulate(&mut self, residual: &mut [f32], gradient: &[f32]) {
        if self.velocity.is_empty() {
            residual.iter_mut().zip(gradient).for_each(|(residual, gradient)| *residual += gradient);
            return;
        }
        for ((residual, gradient), velocity) in residual.iter_mut().zip(gradient).zip(&mut self.velocity) {
            let new_velocity = self.momentum * *velocity + gradient;
            *residual += new_velocity;
            // Values that are not finite are sent with the residual, and must not return in later steps.
            *velocity = if new_velocity.is_finite() { new_velocity } else { 0.0 };
        }
    }

    fn encode(&mut self, _context: &RoundContext, values: &mut [f32], message: &mut [u8]) {
        let num_kept = message.len() / ENTRY_BYTES;
        let threshold = Threshold::of(values, num_kept);
        let (indices, kept) = message.split_at_mut(num_kept * size_of::<u32>());
        let mut slots = indices.as_chunks_mut::<4>().0.iter_mut().zip(kept.as_chunks_mut::<4>().0);
        let mut num_equal = threshold.num_equal;
        for (chunk, values) in values.chunks_mut(CHUNK_LEN).enumerate() {
            let largest = values.iter().fold(0, |largest, &value| magnitude_bits(value).max(largest));
            if largest < threshold.bits {
                continue;
            }
            for (lane, value) in values.iter_mut().enumerate() {
                let bits = magnitude_bits(*value);
                if bits < threshold.bits || (bits == threshold.bits && num_equal == 0) {
                    continue;
                }
                num_equal -= usize::from(bits == threshold.bits);
                let index = chunk * CHUNK_LEN + lane;
                let (index_slot, value_slot) =
                    slots.next().expect("the limit leaves as many as there are slots");
                (*index_slot, *value_slot) = ((index as u32).to_le_bytes(), value.to_le_bytes());
                *value = 0.0;
                if let Some(velocity) = self.velocity.get_mut(index) {
                    *velocity = 0.0;
                }
            }
        }
    }

    fn decode(&mut self, context: &RoundContext, result: &[u8], gradient: &mut [f32]) -> Result<()> {
        let messages = result.chunks_exact(result.len() / context.world_size);
        for (rank, message) in messages.clone().enumerate() {
            check_indices(Rank(rank), message, gradient.len())?;
        }
        gradient.fill(0.0);
        for (index, value) in messages.flat_map(entries) {
            gradient[index] += value;
        }
        Ok(())
    }

    fn own_state(&self) -> Option<(&'static str, &[f32])> {
        (!self.velocity.is_empty()).then_some(("velocity", &self.velocity))
    }

    fn own_state_mut(&mut self) -> Option<(&'static str, &mut [f32])> {
        (!self.velocity.is_empty()).then_some(("velocity", &mut self.velocity))
    }

    fn rescale(&mut self, factor: f32) {
        self.velocity.iter_mut().for_each(|velocity| *velocity *= factor);
    }
}

fn entries(message: &[u8]) -> impl Iterator<Item = (usize, f32)> {
    let (indices, values) = message.split_at(message.len() / 2);
    let values = values.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
    indices.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes) as usize).zip(values)
}

fn check_indices(rank: Rank, message: &[u8], len: usize) -> Result<()> {
    let refused = |what| Err(CompressionError::Message { rank, codec: CodecName::TopK, what });
    let mut next = 0;
    for (index, _) in entries(message) {
        if index >= len {
            return refused(format!("index {index} in a bucket of {len} elements"));
        }
        if index < next {
            return refused(format!("index {index} after index {}", next - 1));
        }
        next = index + 1;
    }
    Ok(())
}

/// The selection threshold. All elements whose magnitude bits are above `bits` are sent, and the first `num_equal`
/// elements whose magnitude bits equal `bits`.
#[derive(Debug, PartialEq, Eq)]
struct Threshold {
    bits: u32,
    num_equal: usize,
}

impl Threshold {
    /// Finds the threshold that selects `num_kept` of the values by a radix selection over three digits of the
    /// magnitude bits, highest first.
    fn of(values: &[f32], num_kept: usize) -> Self {
        let mut threshold = Threshold { bits: 0, num_equal: num_kept };
        threshold.narrow::<20, 11>(values);
        threshold.narrow::<10, 10>(values);
        threshold.narrow::<0, 10>(values);
        threshold
    }

    /// Determines the `WIDTH` bits of the threshold from bit `SHIFT` on. Higher bits are known.
    fn narrow<const SHIFT: u32, const WIDTH: u32>(&mut self, values: &[f32]) {
        let mut counts = [0_usize; 1 << 11];
        for &value in values {
            let bits = magnitude_bits(value);
            if (bits ^ self.bits) >> (SHIFT + WIDTH) == 0 {
                counts[(bits >> SHIFT) as usize & ((1 << WIDTH) - 1)] += 1;
            }
        }
        let mut part = (1 << WIDTH) - 1;
        while counts[part] < self.num_equal {
            self.num_equal -= counts[part];
            part -= 1;
        }
        self.bits |= (part as u32) << SHIFT;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_threshold_matches_a_sort(
            mut values in proptest::collection::vec(
                prop_oneof![any::<f32>(), (-3..3_i32).prop_map(|x| x as f32), Just(f32::NAN), Just(0.0)],
                1..200,
            ),
            part in 0.0..1.0_f64,
        ) {
            let num_kept = 1 + ((values.len() - 1) as f64 * part) as usize;
            let threshold = Threshold::of(&values, num_kept);
            let mut message = vec![0; message_bytes(num_kept)];
            let original = values.clone();
            TopK::new(values.len(), 0.0).encode(&context(), &mut values, &mut message);
            let mut sorted: Vec<usize> = (0..values.len()).collect();
            sorted.sort_by_key(|&index| (std::cmp::Reverse(magnitude_bits(original[index])), index));
            prop_assert_eq!(threshold.bits, magnitude_bits(original[sorted[num_kept - 1]]));
            let mut expected = sorted[..num_kept].to_vec();
            expected.sort_unstable();
            let sent: Vec<usize> = entries(&message).map(|(index, _)| index).collect();
            prop_assert_eq!(&sent, &expected);
            for (index, value) in entries(&message) {
                prop_assert_eq!(value.to_bits(), original[index].to_bits());
                prop_assert_eq!(values[index], 0.0);
            }
            prop_assert!(check_indices(Rank(0), &message, values.len()).is_ok());
        }
    }

    fn context() -> RoundContext {
        RoundContext { step: 0, round: 0, rank: 0, world_size: 1, key: trireme_base::RandomKey::new(0, "") }
    }

    #[test]
    fn indices_out_of_range_or_order_are_refused() {
        let message = |indices: &[u32]| -> Vec<u8> {
            let values = indices.iter().flat_map(|_| 1.0_f32.to_le_bytes());
            indices.iter().flat_map(|index| index.to_le_bytes()).chain(values).collect()
        };
        for (indices, expected) in [
            (&[0, 3, 9][..], None),
            (&[], None),
            (&[0, 3, 10], Some("index 10 in a bucket of 10 elements")),
            (&[u32::MAX], Some("index 4294967295 in a bucket of 10 elements")),
            (&[3, 3], Some("index 3 after index 3")),
            (&[5, 2], Some("index 2 after index 5")),
        ] {
            let found = check_indices(Rank(1), &message(indices), 10);
            match expected {
                None => assert_eq!(found, Ok(())),
                Some(what) => {
                    let text = found.unwrap_err().to_string();
                    assert!(text.contains("rank 1") && text.contains(what), "{text}");
                }
            }
        }
    }

    #[test]
    fn the_velocity_of_a_sent_element_is_reset() {
        let mut codec = TopK::new(3, 0.5);
        let mut residual = [0.0; 3];
        let mut message = [0; message_bytes(1)];
        codec.accumulate(&mut residual, &[4.0, 1.0, f32::INFINITY]);
        assert_eq!((residual, &codec.velocity[..]), ([4.0, 1.0, f32::INFINITY], &[4.0, 1.0, 0.0][..]));
        residual[2] = 0.0;
        codec.encode(&context(), &mut residual, &mut message);
        assert_eq!((residual, &codec.velocity[..]), ([0.0, 1.0, 0.0], &[0.0, 1.0, 0.0][..]));
        codec.accumulate(&mut residual, &[1.0, 1.0, 1.0]);
        // The gradient, half of the velocity, and the residual: 1 + 0.5 + 1.
        assert_eq!((residual, &codec.velocity[..]), ([1.0, 2.5, 1.0], &[1.0, 1.5, 1.0][..]));
    }
}
