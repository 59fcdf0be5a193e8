//! The keys of `[comm]` that say how gradients are compressed.

use super::*;

/// Options of a run whose gradients may be compressed: SGD without momentum.
const COMPRESSIBLE: [&str; 3] = ["training.determinism=run", "optimizer.name=sgd", "optimizer.momentum=0"];

#[test]
fn compression_has_the_options_of_its_codec() {
    let compression = |options: &[&str]| {
        let config = good(SMALLEST, &[&COMPRESSIBLE, options].concat());
        (config.compression().to_string(), config.to_toml())
    };
    assert_eq!(compression(&[]).0, "none");
    assert!(!compression(&["comm.compression_rank=4"]).1.contains("compression_"));
    for (options, expected) in [
        (
            &["comm.compression=f16", "training.dtype=f16"][..],
            "f16 (warmup_steps = 0, error_feedback = false, normalize = false)",
        ),
        (
            &["comm.compression=int4"],
            "int4 (block_len = 256, warmup_steps = 0, error_feedback = false, normalize = false)",
        ),
        (
            &["comm.compression=one_bit", "comm.compression_block_len=64", "comm.compression_warmup_steps=9"],
            "one_bit (block_len = 64, warmup_steps = 9, error_feedback = true, normalize = false)",
        ),
        (
            &["comm.compression=powersgd", "comm.compression_warmup_codec=int8"],
            "powersgd (rank = 4, warmup_steps = 0, warmup_codec = int8, error_feedback = true, normalize = false)",
        ),
        (
            &["comm.compression=bf16", "comm.compression_normalize=true"],
            "bf16 (warmup_steps = 0, error_feedback = false, normalize = true)",
        ),
        (
            &["comm.compression=top_k", "comm.compression_ratio=0.5", "comm.compression_momentum=0.5"],
            "top_k (ratio = 0.5, momentum = 0.5, warmup_steps = 0, error_feedback = true, normalize = false)",
        ),
        (
            &[
                "comm.compression=powersgd",
                "comm.compression_error_feedback=false",
                "comm.compression_rank=1",
            ],
            "powersgd (rank = 1, warmup_steps = 0, error_feedback = false, normalize = false)",
        ),
    ] {
        let (text, written) = compression(options);
        assert_eq!(text, expected);
        let is_written = |option| written.contains(&format!("compression_{option} ="));
        assert_eq!(is_written("rank"), text.contains("rank"), "{written}");
        assert_eq!(is_written("momentum"), text.contains("momentum"), "{written}");
        assert!(is_written("warmup_steps"), "{written}");
    }
    let all = Config::explain(Some("comm")).unwrap();
    assert!(all.contains("\"random_k\" or \"powersgd\".\ncompression = \"none\"\n"), "{all}");
}

#[test]
fn contradictory_compression_is_refused() {
    let refused = |options: &[&str], part: &str| {
        let found = mistakes(SMALLEST, &[&COMPRESSIBLE, options].concat());
        assert!(found.len() == 1 && found[0].contains(part), "{options:?}: {found:?}");
        assert!(found[0].starts_with(&format!("--set {}: ", options[0])), "{options:?}: {found:?}");
    };
    for (options, part) in [
        (&["comm.compression=topk"][..], "or \"powersgd\"; did you mean \"top_k\"?"),
        (&["comm.compression=bf16", "training.determinism=layout"], "set determinism = \"run\""),
        (
            &["comm.compression=int8", "training.reduce_dtype=bf16"],
            "also be rounded to reduce_dtype; remove one",
        ),
        (&["comm.compression=f16"], "use \"bf16\", or set compression_error_feedback = true"),
        (&["comm.compression_rank=2"], "only applies with compression = \"powersgd\""),
        (
            &["comm.compression_rank=2", "comm.compression=top_k"],
            "only applies with compression = \"powersgd\"",
        ),
        (
            &["comm.compression_ratio=0.1", "comm.compression=int8"],
            "= \"top_k\" or \"random_k\"; set that, or remove",
        ),
        (&["comm.compression_block_len=64"], "= \"int8\", \"int4\" or \"one_bit\"; set that"),
        (
            &["comm.compression_momentum=0.9", "comm.compression=one_bit"],
            "only applies with compression = \"top_k\"",
        ),
        (&["comm.compression_warmup_steps=9"], "only applies with compression = \"f16\", \"bf16\""),
        (&["comm.compression_error_feedback=true"], "only applies with compression = \"f16\""),
        (
            &["comm.compression_block_len=65", "comm.compression=int8"],
            "expected a multiple of 64, from 64 to 1048576",
        ),
        (&["comm.compression_rank=0", "comm.compression=powersgd"], "expected a whole number from 1 to 1024"),
        (&["comm.compression_ratio=0", "comm.compression=top_k"], "expected a number above 0 and up to 1"),
        (&["comm.compression_momentum=1", "comm.compression=top_k"], "expected a number from 0 to below 1"),
        // Rounded to f32, this is 1.
        (&["comm.compression_momentum=0.9999999999", "comm.compression=top_k"], "expected from 0 to below 1"),
        (&["comm.compression_normalize=true"], "only applies with compression = \"f16\""),
        (
            &["comm.compression_warmup_codec=int8", "comm.compression=top_k"],
            "only applies with compression = \"int4\", \"one_bit\" or \"powersgd\"",
        ),
        (
            &["comm.compression_warmup_codec=powersgd", "comm.compression=one_bit"],
            "expected none, bf16, int8 or, with a codec other than int4, int4",
        ),
        (
            &[
                "comm.compression_error_feedback=false",
                "comm.compression=top_k",
                "comm.compression_momentum=0.5",
            ],
            "expected true with momentum",
        ),
        (
            &["comm.compression_momentum=0.5", "comm.compression=top_k", "optimizer.momentum=0.9"],
            "set name = \"sgd\" and momentum = 0 in [optimizer]",
        ),
        (
            &[
                "comm.compression_momentum=0.5",
                "comm.compression=top_k",
                "optimizer.name=adamw",
                "optimizer.momentum=0.9",
            ],
            "set name = \"sgd\" and momentum = 0 in [optimizer]",
        ),
    ] {
        refused(options, part);
    }
    // If determinism is not set, the mistake is reported at the key that is set.
    assert!(
        mistake_of("comm.compression=bf16").starts_with("--set comm.compression=bf16: sums of compressed")
    );
    // One mistake for each option of another codec.
    let options = [
        "comm.compression=f16",
        "training.dtype=f16",
        "comm.compression_rank=2",
        "comm.compression_ratio=0.1",
    ];
    assert_eq!(mistakes(SMALLEST, &[&COMPRESSIBLE[..], &options].concat()).len(), 2);
    good(
        SMALLEST,
        &["comm.compression=f16", "comm.compression_error_feedback=true", "training.determinism=run"],
    );
}
