//! Tests with all ranks of a world as compressors in one thread. Collectives are simulated by copies.

mod convergence;
mod hostile;
mod options;
mod results;
mod sizes;

use super::*;
use bytemuck::Pod;
use trireme_base::{Bf16, DType, F16, Rank};

/// The compressors of all ranks for one bucket.
struct World {
    compressors: Vec<Compressor>,
    /// The initial value of all bytes of a message, before it is written.
    initial_byte: u8,
    /// The messages of the last step, by round and then by rank.
    messages: Vec<Vec<Vec<u8>>>,
}

impl World {
    fn new(compression: &Compression, bucket: &Bucket, world_size: usize) -> Self {
        World::seeded(compression, bucket, world_size, 1)
    }

    fn seeded(compression: &Compression, bucket: &Bucket, world_size: usize, seed: u64) -> Self {
        let key = RandomKey::new(seed, "bucket");
        let compressor = |rank| {
            Compressor::new(compression, bucket, Rank(rank), world_size, key).expect("options are right")
        };
        World {
            compressors: (0..world_size).map(compressor).collect(),
            initial_byte: 0,
            messages: Vec::new(),
        }
    }

    /// Runs one step on all ranks, checks that they get the same bits, and returns the result.
    fn step(&mut self, gradients: &[Vec<f32>]) -> Vec<f32> {
        self.messages.clear();
        let mut gradients = gradients.to_vec();
        let rounds = self.compressors[0].rounds().to_vec();
        assert!(self.compressors.iter().all(|compressor| compressor.rounds() == rounds));
        for round in rounds {
            match round.message().0 {
                DType::F32 => self.exchange::<f32>(round, &mut gradients, |x, y| x + y),
                DType::F16 => self
                    .exchange(round, &mut gradients, |x: F16, y: F16| F16::from_f32(x.to_f32() + y.to_f32())),
                DType::Bf16 => self.exchange(round, &mut gradients, |x: Bf16, y: Bf16| {
                    Bf16::from_f32(x.to_f32() + y.to_f32())
                }),
                DType::U8 => {
                    self.exchange::<u8>(round, &mut gradients, |_, _| unreachable!("bytes are gathered"))
                }
                dtype => panic!("no round carries {dtype}"),
            }
        }
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        assert!(
            gradients.iter().all(|gradient| bits(gradient) == bits(&gradients[0])),
            "ranks have other bits"
        );
        gradients.swap_remove(0)
    }

    fn exchange<T: Pod>(&mut self, round: Round, gradients: &mut [Vec<f32>], sum: impl Fn(T, T) -> T) {
        let mut messages = Vec::new();
        for (compressor, gradient) in self.compressors.iter_mut().zip(gradients.iter_mut()) {
            let mut message = vec![T::zeroed(); round.message().1];
            bytemuck::cast_slice_mut(&mut message).fill(self.initial_byte);
            compressor.encode(gradient, bytemuck::cast_slice_mut(&mut message));
            messages.push(message);
        }
        self.messages.push(messages.iter().map(|message| bytemuck::cast_slice(message).to_vec()).collect());
        let result = match round {
            Round::AllReduce { .. } => messages.into_iter().reduce(|left, right| {
                left.into_iter().zip(right).map(|(left, right)| sum(left, right)).collect()
            }),
            Round::AllGather { .. } => Some(messages.concat()),
        };
        let result = result.expect("a world has ranks");
        for (compressor, gradient) in self.compressors.iter_mut().zip(gradients) {
            compressor.decode(gradient, bytemuck::cast_slice(&result)).expect("ranks understand each other");
        }
    }

    fn residual(&self, rank: usize) -> Option<&[f32]> {
        self.compressors[rank].state.residual.as_deref()
    }
}

/// Returns the compression of a codec with block lengths and ratios that suit short buckets.
fn compression(codec: CodecName) -> Compression {
    compression_with(codec, |_| {})
}

fn compression_with(codec: CodecName, change: impl FnOnce(&mut CompressionOptions)) -> Compression {
    let mut options = CompressionOptions { codec, ..CompressionOptions::default() };
    match codec {
        CodecName::Int8 | CodecName::Int4 | CodecName::OneBit => options.block_len = Some(64),
        CodecName::TopK | CodecName::RandomK => options.ratio = Some(0.1),
        CodecName::PowerSgd => options.rank = Some(2),
        _ => {}
    }
    change(&mut options);
    Compression::new(&options).expect("options are right")
}

/// Returns every codec except `none`.
fn lossy() -> impl Iterator<Item = CodecName> {
    CodecName::ALL.into_iter().filter(|&codec| codec != CodecName::None)
}

/// Returns random gradients of all ranks for a step.
fn gradients(len: usize, world_size: usize, step: u64) -> Vec<Vec<f32>> {
    let gradient = |rank: usize| {
        let mut values = vec![0.0; len];
        RandomKey::new(step, &format!("gradient of rank {rank}")).fill_normal(&mut values, 0.5);
        values
    };
    (0..world_size).map(gradient).collect()
}

/// Returns the sum over ranks, in f64.
fn sum(gradients: &[Vec<f32>]) -> Vec<f64> {
    let element = |index| gradients.iter().map(|gradient| f64::from(gradient[index])).sum();
    (0..gradients[0].len()).map(element).collect()
}
