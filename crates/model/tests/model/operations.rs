//! Compares the counted operations of a model with the usual estimate (docs/performance.md).

use trireme_model::{Model, ModelConfig, ModelProfile, token_specs};
use trireme_tensor::{Device, DeviceOptions, Precision};

const GPT2: &str = r#"{"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12}"#;
const LLAMA: &str = r#"{"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 1024, "hidden_size": 768,
    "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4, "tie_word_embeddings": false}"#;

const TOKENS: usize = 2048;

/// Returns the model, and its counted operations per token in sequences of `seq_len` tokens.
fn operations_per_token(config: &ModelConfig, seq_len: usize) -> (Model, f64) {
    let options = DeviceOptions { num_threads: 1, ..DeviceOptions::default() };
    let build = |device: &Device| config.build(seq_len, device);
    let batch = token_specs(TOKENS / seq_len, seq_len);
    let profile = ModelProfile::of(build, options, Precision::F32, &batch).unwrap();
    let model = build(&Device::counting(options).unwrap()).unwrap();
    (model, profile.model_operations() as f64 / TOKENS as f64)
}

fn assert_close(found: f64, expected: f64) {
    assert!((found / expected - 1.0).abs() < 0.01, "{found:e} is not within 1 % of {expected:e}");
}

#[test]
fn counted_operations_are_those_of_the_usual_formula() {
    for text in [GPT2, LLAMA] {
        let config = ModelConfig::from_json(text).unwrap();
        let (model, long) = operations_per_token(&config, 1024);
        let (_, short) = operations_per_token(&config, 512);
        // N: all parameters, without the tables of tokens and positions, but with the output layer, which may be tied to the table of
        // tokens.
        let tables = ["wte.weight", "wpe.weight", "embed_tokens.weight"];
        let is_table = |name: &str| tables.iter().any(|table| name.ends_with(table));
        let parameters = model.table().parameters().iter().filter(|info| !is_table(&info.name));
        let num_parameters: usize = parameters.map(|info| info.shape.num_elements()).sum();
        let head = if config.tie_word_embeddings { config.vocab_size * config.hidden_size } else { 0 };
        let of_weights = 6.0 * (num_parameters + head) as f64;
        let width = config.num_layers * config.num_heads * config.head_dim;
        // On average, a token attends to (T + 1) / 2 positions.
        assert_close(long, of_weights + (6 * width * 1025) as f64);
        assert_close(short, of_weights + (6 * width * 513) as f64);
        // If each token attended to all T positions, this would be 6 N + 12 L d T.
        let for_each_position = (long - short) / 512.0;
        assert_eq!(for_each_position, (6 * width) as f64);
        let all_seen = long - for_each_position * 1025.0 + 2.0 * for_each_position * 1024.0;
        assert_close(all_seen, of_weights + (12 * width * 1024) as f64);
    }
}
