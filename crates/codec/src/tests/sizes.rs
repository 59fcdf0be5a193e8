//! Computed sizes equal the sizes of real compressors.

use super::*;

fn compression_variant(codec: CodecName, variant: usize) -> Compression {
    let has = |option| codec.options().contains(&option);
    compression_with(codec, |options| match variant {
        0 => {}
        1 => options.warmup_steps = has("warmup_steps").then_some(5),
        2 => options.normalize = has("normalize").then_some(0.5),
        3 => options.error_feedback = has("error_feedback").then_some(true),
        4 => options.momentum = has("momentum").then_some(0.5),
        5 => {
            options.warmup_steps = has("warmup_steps").then_some(3);
            options.ratio = has("ratio").then_some(0.001);
            options.warmup_codec = has("warmup_codec").then_some(CodecName::Int8);
        }
        _ => unreachable!("there are six"),
    })
}

#[test]
fn computed_sizes_match_real_compressors() {
    for (codec, which) in CodecName::ALL.into_iter().flat_map(|codec| (0..6).map(move |which| (codec, which)))
    {
        for (len, world_size) in [(0, 2), (3, 2), (1000, 1), (1000, 2), (1000, 4), (1000, 7)] {
            let (compression, bucket) = (compression_variant(codec, which), Bucket::flat(len));
            let mut world = World::new(&compression, &bucket, world_size);
            let mut rounds = Vec::new();
            let mut is_compressed = false;
            for step in 0..7 {
                rounds.push(world.compressors[0].rounds().to_vec());
                is_compressed |= world.compressors[0].uncompressed_reason().is_none();
                world.step(&gradients(len, world_size, step));
            }
            rounds.dedup();
            let state_bytes = world.compressors[0].num_bytes();
            let found = compression.sizes(&bucket, world_size);
            let found = found.map(|sizes| (sizes.state_bytes, sizes.rounds));
            let expected = (is_compressed || state_bytes > 0).then_some((state_bytes, rounds));
            assert_eq!(found, expected, "{compression}, {len} elements, {world_size} ranks");
        }
    }
}

#[test]
fn scratch_memory_is_counted() {
    for codec in CodecName::ALL {
        // `powersgd` factors a matrix of 31 x 32 into two factors of two columns each. `random_k` uses one bit for each
        // element, in 64-bit words.
        let expected = match codec {
            CodecName::PowerSgd => 2 * 31 * 4,
            CodecName::RandomK => 16 * 8,
            _ => 0,
        };
        let sizes = compression(codec).sizes(&Bucket::flat(1000), 2);
        assert_eq!(sizes.map_or(0, |sizes| sizes.scratch_bytes), expected, "{codec}");
    }
}
