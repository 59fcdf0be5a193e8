//! Training that begins with a model from elsewhere, and exports for other programs.

use crate::common::{Fixture, assert_contains};
use serde_json::{Value, json};
use std::fs;

/// Creates a fixture with a model in `model` that has a trained tokenizer, and a config that starts from this model.
fn with_model() -> Fixture {
    let fixture = Fixture::new();
    fixture.run("train tiny.toml --set run.name=base --set data.train_bpe=300").succeeded();
    fixture.run("checkpoint export runs/base model").succeeded();
    let config = fixture.read("tiny.toml");
    let (_, sections) = config.split_once("[data]").unwrap();
    fixture.write("more.toml", format!("[model]\ninit_from = \"model\"\n[data]{sections}"));
    fixture
}

#[test]
fn a_model_is_trained_on_with_its_own_tokenizer() {
    let fixture = with_model();
    for (name, model) in [("more", "model"), ("run", "runs/base")] {
        let train = format!("train more.toml --set run.name={name} --set model.init_from={model}");
        fixture.run(&train).succeeded();
        let folder = format!("runs/{name}");
        assert_eq!(
            fixture.read(&format!("{folder}/data/tokenizer.json")),
            fixture.read("model/tokenizer.json")
        );
        let report: Value =
            serde_json::from_str(&fixture.read(&format!("{folder}/data/prepare.json"))).unwrap();
        let state = fixture.run(&format!("checkpoint inspect {folder} --json")).succeeded();
        let state: Value = serde_json::from_str(&state).unwrap();
        assert!(report["tokenizer_sha256"].is_string());
        assert_eq!(state["state"]["samples"]["tokenizer"], report["tokenizer_sha256"]);
    }
    for model in ["model", "runs/base"] {
        fixture
            .run(&format!("prepare text.txt --out by-hand-{} --tokenizer {model}", model.len()))
            .succeeded();
        assert_eq!(
            fixture.read(&format!("by-hand-{}/tokenizer.json", model.len())),
            fixture.read("model/tokenizer.json")
        );
        let train = format!(
            "train more.toml --set data.inputs=[] --set data.folder=by-hand-{} --set run.name=x-{}",
            model.len(),
            model.len()
        );
        fixture.run(&train).succeeded();
    }
}

#[test]
fn tokens_of_another_tokenizer_are_refused() {
    let fixture = with_model();
    fs::rename(fixture.path("model"), fixture.path("my model")).unwrap();
    let config = fixture.read("more.toml");
    fixture.write("more.toml", config.replace("\"model\"", "\"my model\""));
    fixture.run("prepare text.txt --out corpus").succeeded();
    let other = "--set data.inputs=[] --set data.folder=corpus";
    for (set, what) in [
        (other, "corpus"),
        ("--set data.tokenizer=bytes", "runs/more/data"),
        ("--set data.train_bpe=280", "runs/more/data"),
    ] {
        let refused = fixture.refused_without_changes(&format!("train more.toml {set}"));
        assert_contains(
            &refused,
            &[
                what,
                "does not have the tokenizer of the model in my model",
                "--tokenizer 'my model'",
                "allow_other_tokenizer",
            ],
        );
    }
    let allowed = format!("train more.toml {other} --set model.allow_other_tokenizer=true");
    fixture.run(&allowed).succeeded();
    assert!(fixture.path("runs/more/checkpoints/step-4/tokenizer.bytes.json").exists());
    let alone = fixture.refused_without_changes("train tiny.toml --set model.allow_other_tokenizer=true");
    assert_contains(&alone, &["only applies with `init_from`"]);
}

#[test]
fn a_model_without_its_tokenizer_or_with_a_foreign_one_is_refused() {
    let fixture = with_model();
    let mut tokenizer: Value = serde_json::from_str(&fixture.read("model/tokenizer.json")).unwrap();
    let vocabulary = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    let (a, b) = (vocabulary["a"].clone(), vocabulary["b"].clone());
    vocabulary.extend([("a".to_owned(), b), ("b".to_owned(), a)]);
    fixture.write("model/tokenizer.json", tokenizer.to_string());
    for command in ["train more.toml", "generate model --num-tokens 1"] {
        let refused = fixture.refused_without_changes(command);
        assert_contains(&refused, &["the tokenizer in model is not the one that the model was trained with"]);
    }
    fs::remove_file(fixture.path("model/tokenizer.json")).unwrap();
    let refused = fixture.refused_without_changes("train more.toml");
    assert_contains(&refused, &["the model in model has no tokenizer.json", "save_pretrained"]);
    assert_contains(
        &fixture.refused_without_changes("generate model"),
        &["model has no tokenizer; pass one with --tokenizer"],
    );
}

#[test]
fn an_export_after_no_step_is_what_was_imported() {
    let fixture = with_model();
    let mut config: Value = serde_json::from_str(&fixture.read("model/config.json")).unwrap();
    config["resid_pdrop"] = json!(0.1);
    config["pad_token_id"] = json!(3);
    config["task_specific_params"] = json!({ "text-generation": { "max_length": 50 } });
    fixture.write("model/config.json", format!("{config:#}"));
    fixture.write("model/generation_config.json", "{\"eos_token_id\": 0, \"top_k\": 5}");
    fixture
        .write("model/chat_template.jinja", "{% for message in messages %}{{ message.content }}{% endfor %}");
    fixture.write("model/special_tokens_map.json", "{}");
    fixture.run("train more.toml --set training.steps=0").succeeded();
    fixture.run("checkpoint export runs/more again").succeeded();
    let (names, again) = (fixture.names("model"), fixture.names("again"));
    assert_eq!(names, again);
    for name in names {
        let read = |folder: &str| fs::read(fixture.path(folder).join(&name)).unwrap();
        assert!(read("model") == read("again"), "{name} differs");
    }
}

#[test]
fn a_model_whose_template_is_not_valid_works_without_conversations() {
    let fixture = with_model();
    fixture.write("model/chat_template.jinja", "{% if %}");
    fixture.run("generate model --num-tokens 1").succeeded();
    fixture.run("eval model text.txt").succeeded();
    fixture.run("train more.toml --set training.steps=1").succeeded();
    assert_contains(
        &fixture.run("generate model --chat --prompt a").refused(),
        &["the chat template of model: syntax error"],
    );
}

/// A template is untrusted code.
#[test]
fn a_template_that_takes_too_much_memory_is_refused() {
    let fixture = with_model();
    let doubling = "{% set big = namespace(text='0123456789') %}{% for _ in range(28) %}\
        {% set big.text = big.text ~ big.text %}{% endfor %}{{ messages[0].content }}";
    fixture.write("model/chat_template.jinja", doubling);
    assert_contains(
        &fixture.run("generate model --chat --prompt a --num-tokens 1").refused(),
        &["the chat template of model", "it takes more than 1.00GiB of memory"],
    );
}

#[test]
fn a_model_of_bytes_is_exported_with_a_tokenizer_that_others_read() {
    let fixture = Fixture::with_corpus();
    fixture.run("train tiny.toml").succeeded();
    fixture.run("checkpoint export runs/tiny model").succeeded();
    assert_eq!(
        fixture.names("model"),
        ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    );
    let read = |name: &str| -> Value { serde_json::from_str(&fixture.read(name)).unwrap() };
    assert_eq!(read("model/tokenizer_config.json")["eos_token"], "<|endoftext|>");
    for key in ["bos_token_id", "eos_token_id"] {
        assert_eq!(read("model/config.json")[key], 256, "{key}");
    }
    // The exported model can be trained on with the corpus of bytes.
    let config = fixture.read("tiny.toml");
    let (_, sections) = config.split_once("[data]").unwrap();
    fixture.write("more.toml", format!("[model]\ninit_from = \"model\"\n[data]{sections}"));
    fixture.run("train more.toml").succeeded();
}
