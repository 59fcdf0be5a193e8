//! Decoding of results that no compressor has produced.

use super::*;
use proptest::prelude::*;
use trireme_base::Random;

/// Decodes `bytes` as the results of all rounds of a step, truncated or repeated to the right length. Returns the first
/// error.
fn feed(
    compression: &Compression,
    bucket: &Bucket,
    world_size: usize,
    bytes: &[u8],
) -> Result<(), CompressionError> {
    let mut world = World::new(compression, bucket, world_size);
    let compressor = &mut world.compressors[0];
    let mut gradient = gradients(bucket.len(), 1, 0).remove(0);
    for round in compressor.rounds().to_vec() {
        feed_round(compressor, round, world_size, &mut gradient, bytes)?;
    }
    let kept = compressor.state().all(|(_, values)| match values {
        StateValues::F32(values) => values.iter().all(|x| x.is_finite()),
        StateValues::U64(_) => true,
    });
    assert!(kept, "what is kept is finite");
    Ok(())
}

fn feed_round(
    compressor: &mut Compressor,
    round: Round,
    world_size: usize,
    gradient: &mut [f32],
    bytes: &[u8],
) -> Result<(), CompressionError> {
    let num_bytes = round.num_bytes();
    let num_messages = if matches!(round, Round::AllGather { .. }) { world_size } else { 1 };
    // Aligned for any dtype.
    let mut memory = vec![0_u32; (num_bytes * num_messages).div_ceil(4)];
    let memory: &mut [u8] = bytemuck::cast_slice_mut(&mut memory);
    compressor.encode(gradient, &mut memory[..num_bytes]);
    let result = &mut memory[..num_bytes * num_messages];
    result.iter_mut().zip(bytes.iter().cycle()).for_each(|(own, byte)| *own = *byte);
    compressor.decode(gradient, result)
}

proptest! {
    #[test]
    fn any_bytes_give_numbers_or_a_refusal(
        bytes in proptest::collection::vec(any::<u8>(), 1..600),
        codec in proptest::sample::select(&CodecName::ALL[..]),
        len in 0..400_usize,
        world_size in 2..5_usize,
    ) {
        let outcome = feed(&compression(codec), &Bucket::flat(len), world_size, &bytes);
        let may_refuse = codec == CodecName::TopK;
        prop_assert!(may_refuse || outcome.is_ok(), "{:?}", outcome);
    }
}

/// Random bytes with many equal bits, as in damaged messages, and small integers that are almost valid indices.
#[test]
fn random_messages_are_decoded_or_refused() {
    let mut random = Random::new(RandomKey::new(11, "hostile"), 0);
    let (mut num_refused, mut num_read) = (0, 0);
    for round in 0..20_000 {
        let codec = CodecName::ALL[random.below(11) as usize];
        let len = random.below(300) as usize;
        let mask = random.next_u32();
        let mut bytes: Vec<u8> =
            (0..1 + random.below(64)).flat_map(|_| (random.next_u32() & mask).to_le_bytes()).collect();
        if round % 2 == 0 {
            bytes.iter_mut().skip(1).step_by(4).for_each(|byte| *byte = 0);
            bytes.iter_mut().skip(2).step_by(4).for_each(|byte| *byte = 0);
            bytes.iter_mut().skip(3).step_by(4).for_each(|byte| *byte = 0);
        }
        match feed(&compression(codec), &Bucket::flat(len), 2, &bytes) {
            Ok(()) => num_read += 1,
            Err(CompressionError::Message { .. }) => num_refused += 1,
            Err(error) => panic!("{error}"),
        }
    }
    assert!(num_refused > 100 && num_read > 1000, "{num_refused} refused, {num_read} read");
}

#[test]
fn a_result_of_the_wrong_length_is_refused() {
    for (codec, expected) in [(CodecName::Int8, 2 * (100 + 2 * 4)), (CodecName::None, 400)] {
        let mut world = World::new(&compression(codec), &Bucket::flat(100), 2);
        let compressor = &mut world.compressors[0];
        let mut gradient = vec![1.0; 100];
        let refused = if codec == CodecName::None {
            compressor.encode(&mut gradient, bytemuck::cast_slice_mut(&mut [0.0_f32; 100]));
            compressor.decode(&mut gradient, bytemuck::cast_slice(&[0.0_f32; 99]))
        } else {
            compressor.encode(&mut gradient, bytemuck::cast_slice_mut(&mut [0_u32; 27]));
            compressor.decode(&mut gradient, bytemuck::cast_slice(&[0_u32; 27]))
        };
        let text = refused.unwrap_err().to_string();
        assert!(text.contains(&format!("instead of {expected}")), "{text}");
    }
}

#[test]
#[should_panic(expected = "before a result")]
fn a_decode_before_its_encode_panics() {
    let mut world = World::new(&Compression::none(), &Bucket::flat(1), 2);
    world.compressors[0].decode(&mut [0.0], bytemuck::bytes_of(&0.0_f32)).unwrap();
}

#[test]
#[should_panic(expected = "a message of AllGather")]
fn a_message_of_the_wrong_length_panics() {
    let mut world = World::new(&compression(CodecName::OneBit), &Bucket::flat(100), 2);
    world.compressors[0].encode(&mut [0.0; 100], bytemuck::cast_slice_mut(&mut [0.0_f32; 29]));
}
