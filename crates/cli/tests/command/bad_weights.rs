//! Weights that do not belong to the model.

use crate::common::{Fixture, Weights, assert_contains};

/// Creates a fixture with a trained model that is exported to `model`.
fn fixture_with_model() -> Fixture {
    let fixture = Fixture::with_corpus();
    fixture.run("train tiny.toml --workers 1 --set training.steps=1").succeeded();
    fixture.run("checkpoint export runs/tiny model").succeeded();
    std::fs::remove_dir_all(fixture.path("runs")).unwrap();
    let config = fixture.read("tiny.toml");
    let (_, sections) = config.split_once("[data]").unwrap();
    fixture.write("from_model.toml", format!("[model]\ninit_from = \"model\"\n[data]{sections}"));
    fixture
}

/// Asserts that neither a run nor `generate` accepts the model, and that each says why.
fn assert_refused(fixture: &Fixture, facts: &[&str]) {
    for command in
        ["train from_model.toml --workers 1", "train from_model.toml --workers 2", "generate model"]
    {
        assert_contains(&fixture.run(command).refused(), facts);
        assert!(!fixture.path("runs/from_model/metrics.jsonl").exists());
        assert!(!fixture.path("runs/from_model/checkpoints").exists());
    }
}

#[test]
fn missing_extra_and_mis_shaped_tensors() {
    let fixture = fixture_with_model();
    let file = fixture.path("model/model.safetensors");
    let weights = || Weights::read(&file);
    let original = std::fs::read(&file).unwrap();
    let changed = [
        (
            weights().filtered(|name| !name.contains("ln_")),
            &[
                "missing: 'transformer.h.0.ln_1.weight' of shape [32]",
                "missing: 'transformer.h.0.ln_1.bias' of shape [32]",
                "missing: 'transformer.h.0.ln_2.weight' of shape [32]",
                "missing: 'transformer.h.0.ln_2.bias' of shape [32]",
                "missing: 'transformer.ln_f.weight' of shape [32]",
                "missing: 'transformer.ln_f.bias' of shape [32]",
            ] as &[&str],
        ),
        (weights().with("transformer.h.7.extra"), &["unexpected: 'transformer.h.7.extra' of shape [2]"]),
        (
            weights().transposed("transformer.h.0.attn.c_attn.weight"),
            &["'transformer.h.0.attn.c_attn.weight' has shape [96, 32], expected [32, 96]"],
        ),
    ];
    for (weights, facts) in changed {
        weights.write(&file);
        assert_refused(&fixture, facts);
    }
    std::fs::write(&file, original).unwrap();
    fixture.run("train from_model.toml").succeeded();
}

#[test]
fn a_file_of_weights_cut_off_or_gone() {
    let fixture = fixture_with_model();
    fixture.cut("model/model.safetensors", 1000);
    assert_refused(&fixture, &["model/model.safetensors is damaged", "86016 bytes"]);
    std::fs::remove_file(fixture.path("model/model.safetensors")).unwrap();
    assert_refused(
        &fixture,
        &["model contains no checkpoint and no model", "next to config.json", "[model] config"],
    );
}

#[test]
fn a_model_without_description_or_tokenizer() {
    let fixture = fixture_with_model();
    std::fs::remove_file(fixture.path("model/tokenizer.json")).unwrap();
    assert_contains(
        &fixture.refused_without_changes("generate model"),
        &["--tokenizer", "model has no tokenizer"],
    );
    fixture.run("generate model --tokenizer bytes --num-tokens 1").succeeded();
    fixture.write("model/config.json", "{\"model_type\": \"other\"}");
    assert_refused(&fixture, &["model/config.json", "other"]);
    std::fs::remove_file(fixture.path("model/config.json")).unwrap();
    assert_refused(&fixture, &["model", "config.json"]);
}

#[test]
fn weights_that_are_not_finite() {
    let fixture = fixture_with_model();
    let file = fixture.path("model/model.safetensors");
    let name = "transformer.h.0.attn.c_attn.weight";
    Weights::read(&file)
        .with_value(name, 2000, f32::NAN)
        .with_value(name, 40, f32::NEG_INFINITY)
        .write(&file);
    assert_refused(&fixture, &["weights of 'transformer.h.0.attn.c_attn.weight' in model", "not finite"]);
    assert_contains(
        &fixture.run("generate model").refused(),
        &["2 of 3072 weights", "the first is -inf, element 40"],
    );
    fixture.run("generate model --num-tokens 1 --allow-non-finite").succeeded();
    let train = "train from_model.toml --workers 1 --set model.allow_non_finite=true";
    assert_contains(&fixture.run(train).refused(), &["the loss is NaN"]);
}

#[test]
fn a_checkpoint_with_weights_that_are_not_finite() {
    let fixture = fixture_with_model();
    let file = fixture.path("model/model.safetensors");
    // The embedding of a position beyond all sequences of the run, so that the loss stays finite.
    Weights::read(&file).with_value("transformer.wpe.weight", 12 * 32, f32::INFINITY).write(&file);
    let train =
        "train from_model.toml --set training.seq_len=8 --set generate.num_tokens=0 --set training.steps";
    fixture.run(&format!("{train}=1 --set model.allow_non_finite=true")).succeeded();
    let facts = ["1 of 512 weights of 'transformer.wpe.weight'", "runs/from_model/checkpoints/step-1"];
    assert_contains(&fixture.run("generate runs/from_model").refused(), &facts);
    assert_contains(&fixture.run(&format!("{train}=2")).refused(), &["are not finite", "allow_non_finite"]);
    fixture.run(&format!("{train}=2 --set model.allow_non_finite=true")).succeeded();
}

#[test]
fn an_output_layer_that_differs_from_the_embedding_is_kept() {
    let fixture = fixture_with_model();
    let file = fixture.path("model/model.safetensors");
    let (embedding, output) = ("transformer.wte.weight", "lm_head.weight");
    let tied = fixture.run("generate model --num-tokens 4 --temperature 0").succeeded();
    Weights::read(&file).with_copy(embedding, output).write(&file);
    assert_eq!(fixture.run("generate model --num-tokens 4 --temperature 0").succeeded(), tied);
    Weights::read(&file).with_value(output, 40, 1.0).write(&file);
    let facts = ["'lm_head.weight' differs from 'transformer.wte.weight'", "model/config.json ties them"];
    for command in ["generate model --num-tokens 1", "train from_model.toml --set training.steps=0"] {
        let outcome = fixture.run(command);
        assert_eq!(outcome.code, Some(0), "{outcome:?}");
        assert_contains(&(outcome.stdout + &outcome.stderr), &facts);
    }
    fixture.run("checkpoint export runs/from_model again").succeeded();
    let exported = Weights::read(&fixture.path("again/model.safetensors"));
    assert!(exported.bytes(output) == Weights::read(&file).bytes(output));
    let config: serde_json::Value = serde_json::from_str(&fixture.read("again/config.json")).unwrap();
    assert_eq!(config["tie_word_embeddings"], false);
}

#[test]
fn an_index_may_name_an_output_layer_that_is_tied() {
    let fixture = fixture_with_model();
    let weights = Weights::read(&fixture.path("model/model.safetensors"));
    let names = weights.names().into_iter().chain(["lm_head.weight".to_owned()]);
    let map: serde_json::Map<_, _> =
        names.map(|name| (name, "model-00001-of-00001.safetensors".into())).collect();
    std::fs::rename(
        fixture.path("model/model.safetensors"),
        fixture.path("model/model-00001-of-00001.safetensors"),
    )
    .unwrap();
    let index = serde_json::json!({ "metadata": {}, "weight_map": map });
    fixture.write("model/model.safetensors.index.json", format!("\u{feff}{index}"));
    fixture.run("generate model --num-tokens 1").succeeded();
    fixture.run("train from_model.toml --set training.steps=1").succeeded();
    fixture.run("checkpoint export model again").succeeded();
    assert_eq!(Weights::read(&fixture.path("again/model.safetensors")).names(), weights.names());
    let index = index.to_string().replace("lm_head.weight", "transformer.h.1.extra");
    fixture.write("model/model.safetensors.index.json", index);
    for command in ["generate model", "checkpoint export model another"] {
        assert_contains(
            &fixture.run(command).refused(),
            &["lacks 'transformer.h.1.extra', which the index says"],
        );
    }
}

#[test]
fn quantized_weights_are_refused_and_the_key_is_not_passed_on() {
    let fixture = fixture_with_model();
    let mut config: serde_json::Value = serde_json::from_str(&fixture.read("model/config.json")).unwrap();
    config["quantization_config"] = serde_json::json!({ "quant_method": "gptq", "bits": 4 });
    fixture.write("model/config.json", config.to_string());
    let outcome = fixture.run("train from_model.toml --set training.steps=0");
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    assert_contains(
        &(outcome.stdout + &outcome.stderr),
        &["model/config.json has a quantization_config", "leave it out"],
    );
    for path in ["runs/from_model", "model"] {
        fixture.run(&format!("checkpoint export {path} again --force")).succeeded();
        let config: serde_json::Value = serde_json::from_str(&fixture.read("again/config.json")).unwrap();
        assert_eq!(config.get("quantization_config"), None, "{path}");
    }
    std::fs::remove_dir_all(fixture.path("runs")).unwrap();
    let file = fixture.path("model/model.safetensors");
    Weights::read(&file).with_dtype("transformer.h.0.mlp.c_fc.weight", "I32").write(&file);
    let facts = ["quantized", "quant_method \"gptq\"; 'transformer.h.0.mlp.c_fc.weight' is stored as I32"];
    assert_refused(&fixture, &facts);
    assert_contains(&fixture.run("checkpoint export model quantized").refused(), &facts);
}

#[test]
fn names_that_wrappers_of_pytorch_have_changed_are_read() {
    let fixture = fixture_with_model();
    let file = fixture.path("model/model.safetensors");
    let plain = fixture.run("generate model --num-tokens 4 --temperature 0").succeeded();
    Weights::read(&file).renamed(|name| format!("module._orig_mod.{name}")).write(&file);
    assert_eq!(fixture.run("generate model --num-tokens 4 --temperature 0").succeeded(), plain);
    fixture.run("train from_model.toml --set training.steps=1").succeeded();
    Weights::read(&file).renamed(|name| format!("net.{name}")).write(&file);
    assert_contains(&fixture.run("generate model").refused(), &["begin with 'net.module._orig_mod.'"]);
}

#[test]
fn a_config_as_python_writes_it() {
    let fixture = fixture_with_model();
    let config = fixture.read("model/config.json");
    let config =
        config.trim_end().strip_suffix('}').unwrap().to_owned() + ", \"time_step_limit\": [0.0, Infinity]}";
    fixture.write("model/config.json", format!("\u{feff}{config}"));
    fixture.run("train from_model.toml --set training.steps=1").succeeded();
    fixture.run("checkpoint export runs/from_model again --dtype bf16").succeeded();
    let written = fixture.read("again/config.json");
    assert!(written.contains("Infinity") && written.contains("\"dtype\": \"bfloat16\""), "{written}");
    fixture.run("generate again --num-tokens 1").succeeded();
    let export = fixture.run("checkpoint export again third --dtype int8");
    assert_contains(&export.stderr, &["expected one of f32, bf16, f16"]);
}
