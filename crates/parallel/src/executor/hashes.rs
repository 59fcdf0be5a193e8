//! Hashes of the bits of tensors, which do not depend on how ranks split the tensors.

use crate::error::Result;
use crate::layout::Placements;
use std::ops::Range;
use trireme_base::Rank;
use trireme_comm::Group;
use trireme_tensor::{Device, ParameterTable, View};

/// Number of elements that are copied to the host at a time.
const CHUNK_LEN: usize = 1 << 18;

/// Number of hashes that ranks exchange at a time: 64 KiB per rank.
const EXCHANGED_LEN: usize = 1 << 13;

/// Hashes of the gradients and parameters of one step: one for each parameter, in the order of the [`ParameterTable`].
///
/// The hash of a tensor is the sum of a hash of the position and bits of each element, so ranks that hold parts of a tensor sum their
/// hashes. Two different tensors have the same hash with a probability of about 2⁻⁶⁴.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepHashes {
    /// Number of the step in its schedule.
    pub step: u64,
    /// Hashes of the gradients that updates read: summed over all microbatches, with the loss scale of the step, before the mean and
    /// clipping. If momentum was exchanged, hashes of the momentum.
    pub gradients: Vec<u64>,
    /// Hashes of the parameters after the update, widened to f32.
    pub parameters: Vec<u64>,
}

/// Hashes of the steps of a program.
#[derive(Debug, Default)]
pub(crate) struct HashRecorder {
    /// Interval between recorded steps; 0 if none is recorded.
    interval: u64,
    steps: Vec<StepHashes>,
}

impl HashRecorder {
    /// Creates a recorder of every step whose number is a multiple of `interval`, or of no step if that is 0.
    pub(crate) fn new(interval: u64) -> Self {
        HashRecorder { interval, steps: Vec::new() }
    }

    /// Returns the hashes of `step` for a model with `num_parameters` parameters, initially zeros; `None` if the step is not recorded.
    pub(crate) fn of_step(&mut self, step: u64, num_parameters: usize) -> Option<&mut StepHashes> {
        if self.interval == 0 || !step.is_multiple_of(self.interval) {
            return None;
        }
        let index = self.steps.iter().position(|hashes| hashes.step == step).unwrap_or_else(|| {
            let zeros = vec![0; num_parameters];
            self.steps.push(StepHashes { step, gradients: zeros.clone(), parameters: zeros });
            self.steps.len() - 1
        });
        Some(&mut self.steps[index])
    }

    /// Removes and returns the recorded hashes, in step order.
    pub(crate) fn take(&mut self) -> Vec<StepHashes> {
        let mut steps = std::mem::take(&mut self.steps);
        steps.sort_by_key(|hashes| hashes.step);
        steps
    }
}

/// Hashes the elements of parameters that a rank stores. Of the ranks that store the same element, only the first one hashes it.
pub(crate) struct ParameterHasher<'a> {
    pub(crate) table: &'a ParameterTable,
    pub(crate) placements: &'a Placements,
    pub(crate) rank: Rank,
}

impl ParameterHasher<'_> {
    /// Adds the hashes of a unit's elements to `hashes`, which has one entry for each parameter. `values` are the elements `part` of the
    /// unit.
    pub(crate) fn add_unit(
        &self,
        hashes: &mut [u64],
        unit: usize,
        values: View<'_>,
        part: &Range<usize>,
        device: &Device,
    ) -> Result<()> {
        let ParameterHasher { table, placements, rank } = *self;
        for index in table.units()[unit].parameters.clone() {
            let info = &table.parameters()[index];
            let Some(held) = info.stored(part) else { continue };
            if !placements.tensors()[index].is_first_holder(placements.mesh(), rank) {
                continue;
            }
            for start in held.clone().step_by(CHUNK_LEN) {
                let chunk = start..held.end.min(start + CHUNK_LEN);
                let first = info.offset + chunk.start - part.start;
                let values = device.read_f32s(values.part(first, [chunk.len()].into()))?;
                let bits: &[u32] = bytemuck::cast_slice(&values);
                for (first, run) in info.runs(chunk.clone()) {
                    let sum = hash_run(first, &bits[run.start - chunk.start..run.end - chunk.start]);
                    hashes[index] = hashes[index].wrapping_add(sum);
                }
            }
        }
        Ok(())
    }
}

/// Sums the hashes over all ranks of a group. Collective.
pub(crate) fn sum_over_ranks(group: &Group, hashes: &mut [u64]) -> Result<()> {
    for own in hashes.chunks_mut(EXCHANGED_LEN) {
        let all = group.all_gather_bytes(bytemuck::cast_slice(own)).wait()?;
        own.fill(0);
        for of_rank in &all {
            let found = of_rank.chunks_exact(size_of::<u64>()).map(bytemuck::pod_read_unaligned::<u64>);
            own.iter_mut().zip(found).for_each(|(sum, found)| *sum = sum.wrapping_add(found));
        }
    }
    Ok(())
}

/// Returns the sum of the hashes of adjacent elements of a tensor, whose positions start at `first`.
fn hash_run(first: usize, bits: &[u32]) -> u64 {
    let places = first as u64..;
    bits.iter().zip(places).fold(0, |sum, (&bits, place)| sum.wrapping_add(hash_element(place, bits)))
}

/// Returns the hash of an element: SplitMix64's finalizer (Steele et al., "Fast splittable pseudorandom number generators", 2014) of its
/// position and its bits.
fn hash_element(place: u64, bits: u32) -> u64 {
    // Without the constant, the hash of zero bits at position 0 would be 0.
    let word = (place.rotate_left(32) ^ u64::from(bits)).wrapping_add(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_split_has_the_hash_of_the_whole(
            bits in prop::collection::vec(any::<u32>(), 1..200),
            mut ends in prop::collection::vec(0_usize..200, 0..6),
        ) {
            ends.push(bits.len());
            ends.iter_mut().for_each(|end| *end = (*end).min(bits.len()));
            ends.sort_unstable();
            // The last part comes first: order does not matter.
            let starts = std::iter::once(&0).chain(&ends);
            let parts: Vec<_> = starts.zip(&ends).map(|(&start, &end)| hash_run(start, &bits[start..end])).collect();
            let combined = parts.iter().rev().fold(0_u64, |sum, part| sum.wrapping_add(*part));
            prop_assert_eq!(combined, hash_run(0, &bits));
        }

        #[test]
        fn changed_bits_and_swapped_elements_change_the_hash(
            bits in prop::collection::vec(any::<u32>(), 2..50),
            place in any::<prop::sample::Index>(),
            bit in 0..32_u32,
        ) {
            let place = place.index(bits.len() - 1);
            let mut flipped = bits.clone();
            flipped[place] ^= 1_u32 << bit;
            prop_assert_ne!(hash_run(0, &flipped), hash_run(0, &bits));
            let mut exchanged = bits.clone();
            exchanged.swap(place, place + 1);
            prop_assert_eq!(hash_run(0, &exchanged) == hash_run(0, &bits), exchanged == bits);
        }
    }
}
