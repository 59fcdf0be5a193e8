//! Reads and writes a Hugging Face `config.json`. Its `model_type` selects the family.

use super::FAMILIES;
use crate::config::{ModelConfig, Reader, wrong};
use crate::error::{ModelError, Result};
use serde_json::Value;
use trireme_base::{json_text, parse_json};

impl ModelConfig {
    /// Parses a `config.json` whose `model_type` is an implemented [family](crate::config::Family).
    ///
    /// # Errors
    /// If the text is not JSON, or if a key is missing or has a value that is not implemented.
    pub fn from_json(text: &str) -> Result<Self> {
        let value = parse_json(text.as_bytes()).map_err(ModelError::NotJson)?;
        let Value::Object(map) = &value else { return Err(wrong("config.json", &value, "an object")) };
        let found = map.get("model_type").unwrap_or(&Value::Null);
        let known = FAMILIES.iter().find(|family| found.as_str() == Some(family.name()));
        let family = *known.ok_or_else(|| {
            let names: Vec<String> = FAMILIES.iter().map(|family| format!("\"{}\"", family.name())).collect();
            wrong("model_type", found, &names.join(" or "))
        })?;
        let reader = Reader { map, family: family.name() };
        family.supported_values.iter().try_for_each(|(key, accepted)| reader.require(key, accepted))?;
        let config = (family.read)(&reader)?;
        config.check()?;
        Ok(config)
    }

    /// Returns the keys of a `config.json` that ask for dropout, with their rates, as in `resid_pdrop = 0.1`. Training uses only the
    /// dropout that the user configures.
    pub fn dropout_keys(text: &str) -> Vec<String> {
        let value = parse_json(text.as_bytes()).unwrap_or_default();
        ["resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout"]
            .into_iter()
            .filter(|key| value[key].as_f64().is_some_and(|rate| rate > 0.0))
            .map(|key| format!("{key} = {}", value[key]))
            .collect()
    }

    /// Returns the `config.json` of this model, based on the `text` that it was originally read from. Keys that have not changed, or are
    /// not used here, stay as they are. A `quantization_config` is removed, because weights are floating-point numbers.
    ///
    /// # Errors
    /// If `text` does not describe a model.
    #[expect(clippy::missing_panics_doc, reason = "a text that describes a model is an object")]
    pub fn updated_json(&self, text: &str) -> Result<String> {
        let read = Self::from_json(text)?;
        let (Value::Object(own), Value::Object(before)) = (self.to_json(), read.to_json()) else {
            unreachable!("a model is written as an object");
        };
        let changed: Vec<_> = own.into_iter().filter(|(key, value)| before.get(key) != Some(value)).collect();
        let mut value = parse_json(text.as_bytes()).map_err(ModelError::NotJson)?;
        let map = value.as_object_mut().expect("a model is read from an object");
        if map.shift_remove("quantization_config").is_none() && changed.is_empty() {
            // Other programs reject a byte order mark.
            return Ok(text.trim_start_matches('\u{feff}').to_owned());
        }
        map.extend(changed);
        Ok(json_text(&value) + "\n")
    }

    /// Returns the `config.json` that reads back as this model.
    pub fn to_json(&self) -> Value {
        (self.family.write)(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Rope, RopeScaling};

    const GPT2: &str = r#"{"model_type":"gpt2","vocab_size":96,"n_positions":64,"n_embd":48,"n_layer":2,"n_head":4,
        "n_inner":null,"layer_norm_epsilon":1e-05,"resid_pdrop":0.1}"#;
    const LLAMA: &str = r#"{"model_type":"llama","vocab_size":96,"hidden_size":48,"intermediate_size":80,
        "num_hidden_layers":2,"num_attention_heads":6,"num_key_value_heads":2,"head_dim":8,"max_position_embeddings":64,
        "rope_parameters":{"rope_theta":5000.0,"rope_type":"default"}}"#;

    #[test]
    fn configs_read_back_as_written() {
        for text in [GPT2, LLAMA] {
            let config = ModelConfig::from_json(text).unwrap();
            assert_eq!(ModelConfig::from_json(&config.to_json().to_string()).unwrap(), config);
        }
        let llama = ModelConfig::from_json(LLAMA).unwrap();
        assert_eq!(
            (llama.rope.unwrap().theta, llama.num_kv_heads, llama.tie_word_embeddings),
            (5000.0, 2, false)
        );
        assert_eq!(ModelConfig::dropout_keys(GPT2), ["resid_pdrop = 0.1"]);
        assert!(ModelConfig::dropout_keys(LLAMA).is_empty());
    }

    #[test]
    fn unused_keys_are_preserved() {
        let config = ModelConfig::from_json(GPT2).unwrap();
        assert_eq!(config.updated_json(GPT2).unwrap(), GPT2);
        let changed = ModelConfig { vocab_size: 97, ..config };
        let written: Value = serde_json::from_str(&changed.updated_json(GPT2).unwrap()).unwrap();
        assert_eq!((&written["vocab_size"], &written["resid_pdrop"]), (&97.into(), &0.1.into()));
        assert!(changed.updated_json("{}").is_err());
    }

    #[test]
    fn infinity_and_a_byte_order_mark_are_accepted() {
        let text = GPT2.replace("null", "null,\"time_step_limit\":[0.0,Infinity]");
        let config = ModelConfig::from_json(&format!("\u{feff}{text}")).unwrap();
        assert_eq!(config, ModelConfig::from_json(GPT2).unwrap());
        assert_eq!(config.updated_json(&format!("\u{feff}{text}")).unwrap(), text);
        let changed = ModelConfig { vocab_size: 97, ..config };
        let written = changed.updated_json(&text).unwrap();
        assert!(written.contains("Infinity\n"), "{written}");
        assert_eq!(ModelConfig::from_json(&written).unwrap(), changed);
        let refused = ModelConfig::from_json(&text.replace("1e-05", "Infinity")).unwrap_err().to_string();
        assert!(refused.contains("'layer_norm_epsilon' is Infinity; expected"), "{refused}");
    }

    #[test]
    fn rotary_parameters_nested_by_layer_type_are_read_where_they_agree() {
        let flat = r#"{"rope_theta":5000.0,"rope_type":"default"}"#;
        let other = flat.replace("5000", "6000");
        let nested = |full: &str, sliding: &str| {
            format!(r#"{{"full_attention":{full},"sliding_attention":{sliding}}}"#)
        };
        let read = |parameters: &str| ModelConfig::from_json(&LLAMA.replace(flat, parameters));
        assert_eq!(read(&nested(flat, flat)).unwrap(), ModelConfig::from_json(LLAMA).unwrap());
        assert_eq!(read(&nested(&other, "null")).unwrap().rope.unwrap().theta, 6000.0);
        for (parameters, expected) in [
            (nested(flat, &other), "the same parameters for all types of layers"),
            (format!(r#"{{"local":{flat}}}"#), "those of full_attention and sliding_attention"),
            (
                flat.replace("}", r#","partial_rotary_factor":0.5}"#),
                "'partial_rotary_factor' is 0.5; expected 1",
            ),
        ] {
            let refused = read(&parameters).unwrap_err().to_string();
            assert!(refused.contains(expected), "{refused}");
        }
    }

    #[test]
    fn keys_that_are_not_implemented_are_refused_by_name() {
        for family in FAMILIES {
            for (key, accepted) in family.supported_values {
                let config = |value: &str| format!(r#"{{"model_type":"{}","{key}":{value}}}"#, family.name());
                let refusal = |value: &str| ModelConfig::from_json(&config(value)).unwrap_err().to_string();
                let refused = refusal("\"other\"");
                assert!(
                    refused.contains(&format!("'{key}' is \"other\"; expected {}", accepted[0])),
                    "{refused}"
                );
                for value in *accepted {
                    assert!(refusal(value).contains("lacks"), "{}", config(value));
                }
            }
        }
    }

    #[test]
    fn layers_that_slide_need_a_window() {
        let qwen2 = LLAMA.replace("llama", "qwen2");
        let read = |types: &str, more: &str| {
            let keys = format!("\"layer_types\":[\"full_attention\",\"{types}\"]{more},\"rope_parameters\"");
            ModelConfig::from_json(&qwen2.replace("\"rope_parameters\"", &keys))
        };
        let window = ",\"use_sliding_window\":true,\"sliding_window\":8";
        let sliding = read("sliding_attention", window).unwrap();
        assert_eq!((sliding.attention.window(0), sliding.attention.window(1)), (None, Some(8)));
        assert_eq!(read("full_attention", "").unwrap().attention.window(1), None);
        let refused = read("sliding_attention", ",\"sliding_window\":8").unwrap_err().to_string();
        assert!(refused.contains("'layer_types'") && refused.contains("use_sliding_window"), "{refused}");
    }

    #[test]
    fn keys_that_transformers_reads_first_take_precedence() {
        let flat = r#""rope_parameters":{"rope_theta":5000.0,"rope_type":"default"}"#;
        let both = LLAMA.replace(
            flat,
            &format!(r#"{flat},"rope_scaling":{{"type":"linear","factor":2.0}},"rope_theta":7.0"#),
        );
        let rope = ModelConfig::from_json(&both).unwrap().rope.unwrap();
        assert_eq!(rope, Rope { theta: 7.0, scaling: Some(RopeScaling::Linear { factor: 2.0 }) });
        let yarn = r#""rope_scaling":{"type":"yarn","factor":2.0,"original_max_position_embeddings":16}"#;
        let outside = LLAMA.replace(flat, &format!(r#"{yarn},"original_max_position_embeddings":32"#));
        match ModelConfig::from_json(&outside).unwrap().rope.unwrap().scaling {
            Some(RopeScaling::Yarn(scaling)) => assert_eq!(scaling.original_positions, 32),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_quantization_config_is_removed() {
        let text = GPT2.replace("null", "null,\"quantization_config\":{\"quant_method\":\"gptq\"}");
        let config = ModelConfig::from_json(&text).unwrap();
        let written: Value = serde_json::from_str(&config.updated_json(&text).unwrap()).unwrap();
        assert_eq!((written.get("quantization_config"), &written["resid_pdrop"]), (None, &0.1.into()));
    }

    #[test]
    fn errors_name_the_key_and_the_expected_value() {
        let refusals = [
            ("{", "not valid JSON"),
            (r#"{"model_type":"bert"}"#, "\"gpt2\" or \"llama\" or"),
            (r#"{"model_type":"gpt2"}"#, "lacks 'n_embd'"),
            (&GPT2.replace("48", "50"), "a divisor of n_embd 50"),
            (&GPT2.replace("48", "-1"), "whole number"),
            (&GPT2.replace("48", "99999999999"), "16777216"),
            (&GPT2.replace(r#""n_layer":2"#, r#""n_layer":5000"#), "at most 4096 layers"),
            (
                &LLAMA.replace("default", "longrope"),
                "\"default\", \"linear\", \"dynamic\", \"llama3\" or \"yarn\"",
            ),
            (&LLAMA.replace("default", "linear"), "lacks 'factor'"),
            (&LLAMA.replace("default", "llama3"), "lacks 'factor'"),
            (&LLAMA.replace("5000.0", "0.5"), "a number from 1"),
            (&GPT2.replace("1e-05", "1e-50"), "within the range of f32"),
            (
                &LLAMA.replace(r#""num_key_value_heads":2"#, r#""num_key_value_heads":4"#),
                "a divisor of 6 heads",
            ),
            (&LLAMA.replace(r#""head_dim":8"#, r#""head_dim":7"#), "even"),
        ];
        for (text, expected) in refusals {
            let message = ModelConfig::from_json(text).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
    }
}
