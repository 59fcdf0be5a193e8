//! Validation of options, and the sizes of messages.

use super::*;

fn options(codec: CodecName) -> CompressionOptions {
    CompressionOptions { codec, ..CompressionOptions::default() }
}

#[test]
fn names_are_parsed_as_they_are_printed() {
    for codec in CodecName::ALL {
        assert_eq!(codec.to_string().parse(), Ok(codec));
        assert!(Compression::new(&options(codec)).is_ok(), "{codec} needs no options");
    }
    let refusal = "topk".parse::<CodecName>().unwrap_err().to_string();
    let known = "none, f16, bf16, fp8_e4m3, fp8_e5m2, int8, int4, one_bit, top_k, random_k, powersgd";
    assert_eq!(refusal, format!("expected one of {known}"));
}

#[test]
fn a_compression_is_printed_in_the_words_of_a_config() {
    assert_eq!(Compression::none().to_string(), "none");
    assert_eq!(Compression::new(&options(CodecName::None)), Ok(Compression::none()));
    for (codec, text) in [
        (CodecName::Bf16, "bf16 (warmup_steps = 0, error_feedback = false, normalize = false)"),
        (CodecName::Fp8E4m3, "fp8_e4m3 (warmup_steps = 0, error_feedback = true, normalize = false)"),
        (
            CodecName::Int4,
            "int4 (block_len = 256, warmup_steps = 0, error_feedback = false, normalize = false)",
        ),
        (
            CodecName::OneBit,
            "one_bit (block_len = 1024, warmup_steps = 0, error_feedback = true, normalize = false)",
        ),
        (
            CodecName::TopK,
            "top_k (ratio = 0.01, momentum = 0, warmup_steps = 0, error_feedback = true, normalize = false)",
        ),
        (
            CodecName::PowerSgd,
            "powersgd (rank = 4, warmup_steps = 0, error_feedback = true, normalize = false)",
        ),
    ] {
        assert_eq!(Compression::new(&options(codec)).unwrap().to_string(), text);
    }
}

#[test]
fn invalid_options_are_refused_with_the_allowed_values() {
    use CodecName::{Int4, Int8, None, OneBit, PowerSgd, RandomK, TopK};
    let base = |codec| options(codec);
    for (options, parts) in [
        (CompressionOptions { rank: Some(0), ..base(PowerSgd) }, ["powersgd", "rank is 0", "from 1 to 1024"]),
        (CompressionOptions { rank: Some(1025), ..base(PowerSgd) }, ["rank", "1025", "1024"]),
        (CompressionOptions { ratio: Some(0.0), ..base(TopK) }, ["top_k", "ratio is 0", "above 0"]),
        (CompressionOptions { ratio: Some(1.01), ..base(RandomK) }, ["random_k", "1.01", "at most 1"]),
        (CompressionOptions { ratio: Some(f64::NAN), ..base(TopK) }, ["top_k", "NaN", "at most 1"]),
        (CompressionOptions { block_len: Some(100), ..base(Int8) }, ["int8", "block_len is 100", "64"]),
        (CompressionOptions { block_len: Some(0), ..base(OneBit) }, ["one_bit", "block_len is 0", "64"]),
        (CompressionOptions { block_len: Some(1 << 21), ..base(Int8) }, ["int8", "2097152", "1048576"]),
        (CompressionOptions { momentum: Some(1.0), ..base(TopK) }, ["top_k", "momentum is 1", "below 1"]),
        (
            CompressionOptions { momentum: Some(0.9), error_feedback: Some(false), ..base(TopK) },
            ["top_k", "error_feedback is false", "momentum"],
        ),
        (
            CompressionOptions { normalize: Some(1.0), ..base(OneBit) },
            ["one_bit", "normalize is 1", "below 1"],
        ),
        (CompressionOptions { normalize: Some(0.9), ..base(None) }, ["none", "normalize", "powersgd"]),
        (CompressionOptions { rank: Some(4), ..base(TopK) }, ["top_k", "no option rank", "powersgd"]),
        (CompressionOptions { ratio: Some(0.1), ..base(PowerSgd) }, ["powersgd", "ratio", "top_k, random_k"]),
        (
            CompressionOptions { block_len: Some(64), ..base(TopK) },
            ["top_k", "block_len", "int8, int4, one_bit"],
        ),
        (CompressionOptions { momentum: Some(0.9), ..base(RandomK) }, ["random_k", "momentum", "top_k"]),
        (CompressionOptions { warmup_steps: Some(1), ..base(None) }, ["none", "warmup_steps", "f16"]),
        (
            CompressionOptions { warmup_codec: Some(Int8), ..base(TopK) },
            ["top_k", "warmup_codec", "int4, one_bit, powersgd"],
        ),
        (
            CompressionOptions { warmup_codec: Some(TopK), ..base(OneBit) },
            ["one_bit", "warmup_codec is top_k", "bf16, int8"],
        ),
        (
            CompressionOptions { warmup_codec: Some(Int4), ..base(Int4) },
            ["int4", "warmup_codec is int4", "with a codec other than int4"],
        ),
        (CompressionOptions { error_feedback: Some(true), ..base(None) }, ["none", "error_feedback", "f16"]),
    ] {
        let refusal = Compression::new(&options).unwrap_err().to_string();
        assert!(parts.iter().all(|part| refusal.contains(part)), "{refusal}");
    }
}

#[test]
fn matrices_must_lie_in_order_within_the_bucket() {
    let matrix = |offset, rows, cols| Matrix { offset, rows, cols };
    assert!(Bucket::with_matrices(20, vec![matrix(0, 2, 3), matrix(6, 2, 2), matrix(12, 4, 2)]).is_ok());
    for matrices in [
        vec![matrix(0, 2, 3), matrix(5, 2, 2)],
        vec![matrix(12, 4, 2), matrix(0, 2, 3)],
        vec![matrix(13, 4, 2)],
        vec![matrix(1, usize::MAX, 2)],
        vec![matrix(usize::MAX, 1, 1)],
    ] {
        let refusal = Bucket::with_matrices(20, matrices).unwrap_err().to_string();
        assert!(refusal.contains("20 elements"), "{refusal}");
    }
    assert_eq!(Bucket::flat(10).matrices(), [matrix(0, 3, 3)]);
    assert_eq!(Bucket::flat(0).matrices(), [matrix(0, 0, 0)]);
}

/// The formulas of `docs/compression.md`. They hold for buckets that are long enough.
fn documented_bytes(codec: CodecName, len: usize) -> usize {
    let blocks = len.div_ceil(64);
    let (rows, cols) = (len.isqrt(), len / len.isqrt());
    match codec {
        CodecName::None => 4 * len,
        CodecName::F16 | CodecName::Bf16 => 2 * len,
        CodecName::Fp8E4m3 | CodecName::Fp8E5m2 => len + 4,
        CodecName::Int8 => len + 4 * blocks,
        CodecName::Int4 => len.div_ceil(2) + 4 * blocks,
        CodecName::OneBit => len.div_ceil(8) + 8 * blocks,
        CodecName::TopK => 8 * (len as f64 / 10.0).round() as usize,
        CodecName::RandomK => 4 * (len as f64 / 10.0).round() as usize,
        CodecName::PowerSgd => 4 * (2 * (rows + cols) + len - rows * cols),
    }
}

#[test]
fn messages_have_the_bytes_of_the_formulas_and_all_are_written() {
    for codec in CodecName::ALL {
        for len in [100, 999, 1000, 4097] {
            let (compression, bucket) = (compression(codec), Bucket::flat(len));
            let gradients = gradients(len, 2, 0);
            let messages = [0, 0xff].map(|blank| {
                let mut world = World::new(&compression, &bucket, 2);
                world.initial_byte = blank;
                world.step(&gradients);
                world.messages
            });
            let num_bytes: usize = messages[0].iter().map(|messages| messages[0].len()).sum();
            assert_eq!(num_bytes, documented_bytes(codec, len), "{codec} of {len}");
            assert_eq!(num_bytes, compression.encoded_bytes(&bucket, 2, 0), "{codec} of {len}");
            assert!(messages[0] == messages[1], "{codec} of {len} leaves bytes as they were");
        }
    }
}

#[test]
fn matrices_of_a_bucket_are_factored_one_by_one() {
    let matrices = vec![
        Matrix { offset: 10, rows: 20, cols: 30 },
        // Too small to be factored with rank 2.
        Matrix { offset: 610, rows: 3, cols: 3 },
        Matrix { offset: 700, rows: 40, cols: 5 },
    ];
    let bucket = Bucket::with_matrices(1000, matrices).unwrap();
    let rounds = compression(CodecName::PowerSgd).rounds(&bucket, 4, 0);
    let plain = 1000 - 20 * 30 - 40 * 5;
    let f32s = |len| Round::AllReduce { dtype: DType::F32, len };
    assert_eq!(rounds, [f32s(2 * (20 + 40)), f32s(2 * (30 + 5) + plain)]);
}

#[test]
fn a_codec_that_saves_no_bytes_is_not_used_and_the_reason_is_given() {
    let reason = |codec, bucket: &Bucket, world_size| {
        let compression = compression(codec);
        let reason = compression.uncompressed_reason(bucket, world_size, 0);
        let rounds = compression.rounds(bucket, world_size, 0);
        assert_eq!(rounds == [Round::uncompressed(bucket.len())], reason.is_some());
        reason
    };
    let (gain, no_gain) = (None, Some(UncompressedReason::NoGain));
    for (codec, len, world_size, expected) in [
        (CodecName::None, 1000, 2, Some(UncompressedReason::NoCodec)),
        (CodecName::TopK, 1000, 1, Some(UncompressedReason::OneRank)),
        // 5 bytes (scale and code) are sent instead of 4.
        (CodecName::Fp8E4m3, 1, 2, no_gain),
        (CodecName::Fp8E4m3, 2, 2, gain),
        // Among 8 ranks, an all-gather of a quarter of the bytes sends no less than an all-reduce.
        (CodecName::Fp8E4m3, 10_000, 7, gain),
        (CodecName::Fp8E4m3, 10_000, 8, no_gain),
        (CodecName::RandomK, 1, 2, no_gain),
        (CodecName::RandomK, 2, 2, gain),
        (CodecName::RandomK, 1000, 1000, gain),
        (CodecName::PowerSgd, 16, 2, no_gain),
        (CodecName::PowerSgd, 25, 2, gain),
    ] {
        assert_eq!(reason(codec, &Bucket::flat(len), world_size), expected, "{codec}, {len}, {world_size}");
    }
    for codec in lossy() {
        assert_eq!(reason(codec, &Bucket::flat(0), 2), no_gain, "{codec}");
    }
    let vectors = Bucket::with_matrices(1000, Vec::new()).unwrap();
    assert_eq!(reason(CodecName::PowerSgd, &vectors, 2), no_gain);
}

#[test]
fn the_warm_up_compresses_less() {
    let bucket = Bucket::flat(1000);
    for codec in lossy() {
        let compression = compression_with(codec, |options| options.warmup_steps = Some(2));
        let mut world = World::new(&compression, &bucket, 2);
        let mut num_bytes = Vec::new();
        for step in 0..4 {
            let compressor = &world.compressors[0];
            assert_eq!(compressor.rounds(), compression.rounds(&bucket, 2, step), "{codec}");
            assert_eq!(
                compressor.uncompressed_reason(),
                compression.uncompressed_reason(&bucket, 2, step),
                "{codec}"
            );
            num_bytes.push(compression.encoded_bytes(&bucket, 2, step));
            world.step(&gradients(1000, 2, step));
        }
        let steady = documented_bytes(codec, 1000);
        let early = match codec {
            CodecName::TopK => 8 * 250,
            CodecName::RandomK => 4 * 250,
            _ => 4000,
        };
        assert_eq!(num_bytes, [early, early, steady, steady], "{codec}");
    }
}

#[test]
fn a_separate_codec_may_compress_the_warm_up() {
    let bucket = Bucket::flat(1000);
    for codec in lossy().filter(|codec| codec.options().contains(&"warmup_codec")) {
        for (warmup_codec, early) in [
            (CodecName::None, 4000),
            (CodecName::Bf16, documented_bytes(CodecName::Bf16, 1000)),
            // One f32 scale for each block of 256 elements.
            (CodecName::Int8, 1000 + 4 * 4),
        ] {
            let compression = compression_with(codec, |options| {
                (options.warmup_steps, options.warmup_codec) = (Some(2), Some(warmup_codec));
            });
            let mut world = World::new(&compression, &bucket, 2);
            let mut errors = Vec::new();
            for step in 0..4 {
                let expected = if step < 2 { early } else { documented_bytes(codec, 1000) };
                assert_eq!(compression.encoded_bytes(&bucket, 2, step), expected, "{codec}");
                let found: usize = world.compressors[0].rounds().iter().map(|round| round.num_bytes()).sum();
                assert_eq!(found, expected, "{codec}");
                world.step(&gradients(1000, 2, step));
                errors.push(world.compressors[0].statistics().error_norm);
            }
            let loses_little = errors[0] < errors[2] / 4.0 && (errors[0] == 0.0) == (early == 4000);
            assert!(loses_little, "{codec} after {warmup_codec}: {errors:?}");
        }
    }
    let text = compression_with(CodecName::OneBit, |options| options.warmup_codec = Some(CodecName::Int4));
    assert!(text.to_string().contains("warmup_steps = 0, warmup_codec = int4, error_feedback"), "{text}");
}

#[test]
fn statistics_count_bytes_and_errors() {
    let bucket = Bucket::flat(1000);
    let gradients = gradients(1000, 4, 0);
    for codec in CodecName::ALL {
        let compression = compression(codec);
        let mut world = World::new(&compression, &bucket, 4);
        world.step(&gradients);
        let statistics = world.compressors[1].statistics();
        assert_eq!(statistics.bytes_uncompressed, 6000);
        let is_gathered = matches!(world.compressors[1].rounds()[0], Round::AllGather { .. });
        let num_bytes = documented_bytes(codec, 1000) as u64;
        assert_eq!(
            statistics.bytes_sent,
            if is_gathered { 3 * num_bytes } else { num_bytes * 3 / 2 },
            "{codec}"
        );
        match world.residual(1) {
            Some(residual) => {
                let norm = residual.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
                assert!((f64::from(statistics.error_norm) - norm).abs() < 1e-4 * norm, "{codec}");
            }
            None => assert_eq!(statistics.error_norm == 0.0, codec == CodecName::None, "{codec}"),
        }
    }
}
