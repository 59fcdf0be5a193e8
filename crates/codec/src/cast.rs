//! Codecs whose messages are the elements themselves, in f32 or rounded to 16 bits. The all-reduce sums the messages.

use super::error::Result;
use super::{Codec, RoundContext};
use std::marker::PhantomData;
use trireme_base::Float;

/// The codec `none`: f32 values, unchanged.
#[derive(Debug)]
pub(super) struct Uncompressed;

impl Codec for Uncompressed {
    fn encode(&mut self, _context: &RoundContext, values: &mut [f32], message: &mut [u8]) {
        bytemuck::cast_slice_mut(message).copy_from_slice(values);
        values.fill(0.0);
    }

    fn decode(&mut self, _context: &RoundContext, result: &[u8], gradient: &mut [f32]) -> Result<()> {
        gradient.copy_from_slice(bytemuck::cast_slice(result));
        Ok(())
    }
}

/// The codecs `f16` and `bf16`: values rounded to nearest, ties to even.
#[derive(Debug)]
pub(super) struct Rounded<T>(PhantomData<T>);

impl<T> Rounded<T> {
    pub(super) fn new() -> Self {
        Rounded(PhantomData)
    }
}

impl<T: Float> Codec for Rounded<T> {
    fn encode(&mut self, _context: &RoundContext, values: &mut [f32], message: &mut [u8]) {
        for (value, rounded) in values.iter_mut().zip(bytemuck::cast_slice_mut::<u8, T>(message)) {
            *rounded = T::from_f32(*value);
            *value -= rounded.to_f32();
        }
    }

    fn decode(&mut self, _context: &RoundContext, result: &[u8], gradient: &mut [f32]) -> Result<()> {
        for (gradient, sum) in gradient.iter_mut().zip(bytemuck::cast_slice::<u8, T>(result)) {
            *gradient = sum.to_f32();
        }
        Ok(())
    }
}
